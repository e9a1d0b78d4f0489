"""notebooks/explore.py opens a run and draws its three plots, without a browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gigpo import PUBLISHED_SETTINGS, advantages_macro
from store import Catalog, RunLayout, VersionRecord, export, write_open_sql
from tests.support.store_samples import open_train_group, play

marimo = pytest.importorskip(
    "marimo", reason='the notebook needs marimo: pip install -e ".[notebook]"'
)
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks/explore.py"
TIMEOUT_S = 120.0  # only for what hangs
N_GROUPS = 6
PLOTS = {"success.svg", "staleness.svg", "advantages.svg"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = RunLayout.create(tmp_path_factory.mktemp("run") / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        macro = advantages_macro(PUBLISHED_SETTINGS)
        write_open_sql(layout, macros=[macro], max_staleness=4)
        for version in range(2):
            catalog.record_version(
                VersionRecord(
                    version=version,
                    path=f"weights/v{version}",
                    digest=f"d{version}",
                    learner_step=None,
                )
            )
        for ordinal in range(N_GROUPS):
            play(layout, catalog, open_train_group(catalog, ordinal), version=ordinal % 2)
        batch = catalog.claim(n_groups=4, current_version=2, max_staleness=4)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=2)
        export(catalog, layout)
    return layout.root


def test_as_a_script_it_says_a_line_for_each_plot(run: Path, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, NOTEBOOK, "--run", run, "--save", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0] == f"success: 2 versions, {2 * N_GROUPS} episodes"
    assert lines[1] == "staleness: 4 groups that were trained on"
    assert lines[2].startswith("step advantages: ")
    assert {path.name for path in tmp_path.glob("*.svg")} == PLOTS


def test_a_plot_is_written_through_no_link(run: Path, tmp_path: Path) -> None:
    """The attack: a link of another user in a shared folder had a plot replace another file."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    shared = tmp_path / "shared"
    shared.mkdir()
    for plot in PLOTS:
        (shared / plot).symlink_to(mine)
    subprocess.run(
        [sys.executable, NOTEBOOK, "--run", run, "--save", shared],
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert mine.read_text() == "precious"
    assert not any((shared / plot).is_symlink() for plot in PLOTS)


def test_a_run_that_is_none_is_named(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, NOTEBOOK, "--run", tmp_path / "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert answer.returncode != 0
    assert "nothing" in answer.stderr.splitlines()[-1]


def test_plots_are_pictures_whatever_a_run_says_and_also_when_it_has_said_nothing() -> None:
    definitions: dict = {"__file__": str(NOTEBOOK), "__name__": "explore"}
    exec(compile(NOTEBOOK.read_text(), str(NOTEBOOK), "exec"), definitions)
    hostile = {"state": "<script>&\x1b[2J", "action": '"go"', "steps": 12, "mean": -0.5}
    for name, rows in {
        "plot_success": [{"version": 0, "success": 0.5, "episodes": 1}],
        "plot_staleness": [{"staleness": 1, "groups": 3}],
        "plot_advantages": [hostile, {**hostile, "mean": 1.0}],
    }.items():
        for each in (rows, []):
            picture = ElementTree.fromstring(definitions[name](each))
            assert picture.tag.endswith("svg")
            assert "script" not in {element.tag.rpartition("}")[2] for element in picture.iter()}
