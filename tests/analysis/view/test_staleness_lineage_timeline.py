"""Staleness map, lineage and timeline show what was worked out by hand, and one valid trace."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bokeh.models import PlainText
from starlette.testclient import TestClient

from analysis.view.charts import new_figure
from analysis.view.pages.timeline import _label_lanes
from analysis.view.server import make_app
from store import (
    Catalog,
    CheckpointRecord,
    Group,
    RunLayout,
    Trajectory,
    VersionRecord,
    export,
    open_run,
    write_open_sql,
    write_segment,
)
from tests.analysis.view.conftest import HOSTILE, TOKEN
from tests.support.store_samples import make_step, make_trajectory

OWN = {"sec-fetch-site": "same-origin"}
SECOND_US = 1_000_000


def trajectory(group: Group, member: int, *, version: int, begin_us: int) -> Trajectory:
    """Two steps of two seconds: one second of generation, then one in the environment."""
    return replace(
        make_trajectory(group, member),
        won=member == 0,
        task_score=None,
        final_observation=None,
        steps=tuple(
            make_step(
                index,
                n_steps=2,
                version=version,
                version_max=version,
                t_start_us=begin_us + 2 * index * SECOND_US,
                gen_us=SECOND_US,
                env_us=SECOND_US,
            )
            for index in range(2)
        ),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Two learner steps of two groups. All four were played by version 0, so the second step's
    are one version behind. Group 5 becomes stale at version 2; group 3, of version 1, still waits.
    """
    layout = RunLayout.create(tmp_path_factory.mktemp("runs") / "run", config_yaml="")
    write_open_sql(layout, macros=(), max_staleness=1)
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d0", learner_step=None)
        )
        for ordinal, version in enumerate((0, 0, 0, 1, 0, 0)):
            if ordinal == 3:
                consume(catalog, step=1, n_groups=2)
            task = HOSTILE if ordinal == 3 else f"task-{ordinal}"
            group = catalog.open_group(
                ordinal=ordinal, task_id=task, split="train", size=2, evaluated_version=None
            )
            begin_us = opened_us(catalog, layout, group)
            played = [
                trajectory(group, member, version=version, begin_us=begin_us) for member in (0, 1)
            ]
            catalog.commit(
                write_segment(layout, played, worker="w0", epoch=catalog.epoch),
                epoch=catalog.epoch,
            )
        consume(catalog, step=2, n_groups=2)
        assert catalog.claim(n_groups=2, current_version=2, max_staleness=1) is None
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=2, path="checkpoints/step000002", version=2)
        )
        catalog.log(component="worker-0", what=HOSTILE, detail=HOSTILE)
        export(catalog, layout)
    return layout


def opened_us(catalog: Catalog, layout: RunLayout, group: Group) -> int:
    export(catalog, layout)
    with open_run(layout.root) as reader:
        (row,) = reader.rows("SELECT max(epoch_us(opened_at)) AS at_us FROM groups")
    return int(row["at_us"])


def consume(catalog: Catalog, *, step: int, n_groups: int) -> None:
    batch = catalog.claim(n_groups=n_groups, current_version=step - 1, max_staleness=1)
    assert batch is not None
    catalog.record_version(
        VersionRecord(version=step, path=f"weights/v{step}", digest=f"d{step}", learner_step=step)
    )
    catalog.settle(batch.batch_id, learner_step=step, filtered={}, version_in=step - 1)


@pytest.fixture(scope="module")
def client(run: RunLayout) -> Iterator[TestClient]:
    app = make_app([run.root], token=TOKEN)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def csv_of(client: TestClient, address: str, panel: str) -> list[list[str]]:
    mark = "&" if "?" in address else "?"
    answer = client.get(f"{address}{mark}panel={panel}&download=csv", headers=OWN)
    assert answer.status_code == 200, answer.text
    return [line.replace('"', "").split(",") for line in answer.text.splitlines()[1:]]


def test_the_shares_of_staleness(client: TestClient) -> None:
    # Groups 0 and 1 were consumed at version 0, groups 2 and 4 at version 1; each has 4 steps.
    shares = csv_of(client, "/staleness", "share-of-steps-by-staleness")
    assert [(row[0], float(row[1])) for row in shares] == [("0", 0.5), ("1", 0.5)]


def test_what_was_dropped_is_a_mark_with_its_reason(client: TestClient) -> None:
    marks = csv_of(client, "/staleness", "map")
    assert sorted((row[0], row[1], row[4]) for row in marks) == [
        ("1", "0", "trained"),
        ("1", "0", "trained"),
        ("2", "0", "trained"),
        ("2", "0", "trained"),
        ("3", "0", "stale"),
    ]
    (stale,) = [row for row in marks if row[4] == "stale"]
    assert stale[3] == "2" and "oldest version 0 is more than 1 behind" in stale[7]
    page = client.get("/staleness").text
    assert "no group was trained on more than 1 version behind" in page


def test_a_group_is_followed_to_its_checkpoint_and_back(client: TestClient, run: RunLayout) -> None:
    with open_run(run.root) as reader:
        (row,) = reader.rows(
            "SELECT group_uid FROM lineage WHERE learner_step = 2 ORDER BY group_uid LIMIT 1"
        )
    page = client.get(f"/lineage?group={row['group_uid']}").text
    for link in ("version=0", "learner_step=2", "version=2", "checkpoint=checkpoints"):
        assert f"/lineage?{link}" in page
    digests = {path.stem for path in Path(run.root).glob("segments/w0/*.parquet")}
    shown = set(re.findall(r'class="mono" title="([0-9a-f]{32})"', page))
    assert shown and shown <= digests
    back = client.get("/lineage?checkpoint=checkpoints/step000002").text
    assert row["group_uid"] in back
    groups = csv_of(client, "/lineage?checkpoint=2", "all-groups-that-made-it")
    assert len(groups) == 4
    past = csv_of(client, "/lineage?version=2", "its-whole-past")
    assert past[0][:5] == ["2", "4", "4", "8", "16"]


def test_an_episode_has_its_own_lineage(client: TestClient, run: RunLayout) -> None:
    with open_run(run.root) as reader:
        (row,) = reader.rows("SELECT traj_uid FROM steps ORDER BY traj_uid LIMIT 1")
    rows = csv_of(client, f"/lineage?traj={row['traj_uid']}", "rows-and-files")
    assert len(rows) == 1 and rows[0][1:3] == [row["traj_uid"], "2"]
    assert Path(run.root, rows[0][6]).stem == rows[0][5]


def test_the_overlap_is_that_of_the_view(client: TestClient, run: RunLayout) -> None:
    with open_run(run.root) as reader:
        expected = {
            str(row["learner_step"]): row["fraction"]
            for row in reader.rows("FROM generation_overlap")
        }
    found = csv_of(client, "/timeline", "overlap")
    assert {row[0]: float(row[3]) for row in found} == pytest.approx(expected)


def test_the_trace_is_valid(client: TestClient, run: RunLayout) -> None:
    page = client.get("/timeline").text
    (address,) = re.findall(r'class="download" href="([^"]+)"', page)
    answer = client.get(address.replace("&amp;", "&"), headers=OWN)
    events = json.loads(answer.content)["traceEvents"]
    for event in events:
        assert event.keys() >= {"name", "ph", "ts", "dur", "pid", "tid"}
        assert event["dur"] >= 0 and all(type(event[each]) is int for each in ("ts", "pid", "tid"))
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    generated = [event for event in events if event["name"] == "generates"]
    # The last window begins before the first group and ends a second after the last change.
    assert generated and {event["dur"] for event in generated} == {SECOND_US}
    assert "\x1b" not in answer.text and "\u202e" not in answer.text
    # Slices of one thread follow one another.
    ends: dict[int, int] = {}
    for event in events:
        if event["name"] in ("generates", "environment"):
            assert event["ts"] >= ends.get(event["tid"], 0)
            ends[event["tid"]] = event["ts"] + event["dur"]


@pytest.mark.parametrize("path", ["/staleness", "/timeline?seconds=3600", "/lineage"])
def test_hostile_texts_are_shown_as_text(path: str, client: TestClient) -> None:
    page = client.get(path).text
    assert 'class="error"' not in page
    assert "<script>alert" not in page and "\u202e" not in page and "\x1b" not in page


@pytest.mark.parametrize(
    "address",
    [
        "/staleness?from_step=x",
        "/staleness?from_step=9&to_step=2",
        "/lineage?traj=7",
        "/lineage?group=no",
        "/lineage?version=x",
        "/lineage?learner_step=-1",
        "/lineage?version=1&learner_step=1",
        "/lineage?of=all&name=1",
        "/timeline?seconds=0",
        "/timeline?seconds=99999",
        "/timeline?until=yesterday",
        "/timeline?learner_step=99",
        "/timeline?until=0001-01-01",
        "/timeline?until=9999-12-31T23:59:59.9&seconds=2",
        "/timeline?until=9999-12-31T23:59:58&seconds=2",
    ],
)
def test_a_bad_address_is_explained_in_a_line(address: str, client: TestClient) -> None:
    answer = client.get(address)
    assert answer.status_code == 400
    (error,) = re.findall(r'class="error">([^<]*)<', answer.text)
    assert "\n" not in error


@pytest.mark.parametrize(
    "named",
    ["version=99", "learner_step=99", "checkpoint=none", f"group={'0' * 32}", f"traj={'0' * 32}"],
)
def test_what_is_not_there_is_said(named: str, client: TestClient) -> None:
    assert "The run has no such" in client.get(f"/lineage?{named}").text


def test_a_name_on_an_axis_is_no_formula() -> None:
    """The attack: a column or a worker named $$...$$ was drawn as TeX."""
    name = r"$$\frac{a}$$"
    drawn = new_figure(x=name, height=100)
    assert isinstance(drawn.xaxis[0].axis_label, PlainText)
    assert drawn.xaxis[0].axis_label.text == name
    _label_lanes(drawn, [name])
    (label,) = drawn.yaxis[0].major_label_overrides.values()
    assert isinstance(label, PlainText) and label.text == name
