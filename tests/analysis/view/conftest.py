"""A small real run with everything in it, and a client of its viewer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from analysis.view.page import Page
from analysis.view.server import make_app
from configs import Config
from gigpo import AdvantageSettings, advantages_macro
from store import Catalog, RunLayout, export, open_run, write_open_sql
from tests.support.store_runs import make_run
from tests.support.store_samples import open_task_group, open_train_group, play

TOKEN = "the-token"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\u2066 \u200b'\"&amp;$x{{7*7}}"
METRICS = {
    "train/success": 0.5,
    "heldout/success": 0.25,
    "heldout/episodes": 4.0,
    "learner/idle_fraction": 0.625,
    "time/step_s": 4.0,
    "time/batch_wait_s": 0.1,
    "time/publish_s": 0.1,
    "time/checkpoint_s": 0.0,
    "tokens/generated_per_s": 100.0,
    "tokens/trained_per_s": 1000.0,
    "alarm/entropy": 1.0,
}


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A run whose name, tasks and events are hostile. Tests do not change it."""
    layout = make_run(tmp_path_factory.mktemp("runs") / "run<b>&\u202e")
    write_open_sql(
        layout, macros=[advantages_macro(AdvantageSettings.of(Config().algorithm))], max_staleness=4
    )
    with Catalog.open(layout) as catalog:
        catalog.record_metrics(learner_step=1, policy_version=2, values=METRICS)
        catalog.log(component="worker-0", what=HOSTILE, detail=HOSTILE * 20_000)
        group = open_task_group(catalog, HOSTILE, size=2)
        play(layout, catalog, group, version=2)
        export(catalog, layout)
    return layout


@pytest.fixture(scope="session")
def client(layout: RunLayout) -> Iterator[TestClient]:
    app = make_app([layout.root], token=TOKEN)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def example_addresses(page: Page, run: Path) -> list[str]:
    """The start of a page, and the page of its example."""
    found = [page.path] if page.is_start else []
    if page.example is not None:
        with open_run(run) as reader:
            for row in reader.rows(page.example)[:1]:
                found.append(f"{page.path}?{urlencode(row)}")
    return found


def play_one_more(root: Path) -> None:
    layout = RunLayout.open(root)
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, None), version=2)
        export(catalog, layout)
