"""Kill a learner while it writes a version or a checkpoint behind the next learner step.

What the threads had not finished was never published: the run goes on from the checkpoint before,
under a new version, and nothing is lost, doubled or trained on too late.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from driver.evaluate_run import check_written
from store import RunLayout, StoreError, files_digest
from store.maintenance.fsck import CONTENTS, check
from tests.support.fast_directory import fast_directory
from tests.support.killed_learner import CHECKPOINT_EVERY, GAPS, KILLED_AT, STEPS
from tests.support.learner_loop import (
    GROUPS_PER_STEP,
    WEIGHTS_FILE,
    Handle,
    good,
    make_config,
    make_learner,
    open_coordinator,
)
from tests.support.run_views import connect

# Without staleness only the versions differ: two gaps of each kind.
CASES = [(gap, 1) for gap in GAPS] + [("announced", 0), ("checkpoint copied", 0)]
PATIENCE_S = 120.0
# without a look for garbage, of which imports make none
IMPORTING = "import gc; gc.disable(); from tests.support.killed_learner import main; main()"


@pytest.fixture(scope="module")
def killed() -> Iterator[dict[tuple[str, int], Path]]:
    """Runs that were killed, by gap and max_staleness."""
    with fast_directory() as directory:
        runs = {case: directory / f"run{number}" for number, case in enumerate(CASES)}
        wanted = [[str(run), *case] for case, run in runs.items()]
        subprocess.run(
            [sys.executable, "-c", IMPORTING, json.dumps(wanted)],
            cwd=Path(__file__).resolve().parents[2],
            timeout=PATIENCE_S,
            check=True,
        )
        yield runs


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    """Ask the catalog itself, whatever state the kill left it in."""
    with closing(sqlite3.connect(run / "catalog.sqlite")) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.parametrize(("gap", "max_staleness"), CASES)
def test_a_learner_killed_while_it_writes_goes_on_as_if_it_had_not_published(
    killed: dict[tuple[str, int], Path],
    monkeypatch: pytest.MonkeyPatch,
    gap: str,
    max_staleness: int,
) -> None:
    run = killed[gap, max_staleness]
    trajectories = {*rows(run, "SELECT traj_uid FROM trajectory")}
    versions = rows(run, "SELECT version, digest, learner_step FROM version ORDER BY 1")
    assert [version for version, _, _ in versions] == [*range(KILLED_AT + 1)], "5 was not announced"
    assert rows(run, "SELECT max(version_max) FROM trajectory") == [(KILLED_AT,)]
    goes_on_at, is_recorded = GAPS[gap], gap == "checkpoint recorded"

    config = make_config(
        run, max_staleness=max_staleness, steps=STEPS, checkpoint_every=CHECKPOINT_EVERY
    )
    coordinator = open_coordinator(config)
    assert not coordinator.is_written(KILLED_AT), "nobody knows yet whether it is whole"
    assert coordinator.lease("late", serves=KILLED_AT - 1) is None
    if gap in ("announced", "half the weights"):
        with pytest.raises(StoreError, match="version 4 of .* ended before the files were written"):
            check_written(coordinator.layout, KILLED_AT)
    else:
        check_written(coordinator.layout, KILLED_AT)
    handle = Handle(coordinator)
    learner = make_learner(monkeypatch, config, handle, lambda ranks, updates: good(updates))
    first = KILLED_AT if is_recorded else KILLED_AT + 1
    assert f"continues at learner step {goes_on_at} as version {first}" in learner.restored
    learner.publishing.wait()
    assert coordinator.is_written(first)
    restored = blake3(str(learner.ranks.n_updates).encode()).hexdigest()  # type: ignore[attr-defined]
    assert rows(run, f"SELECT digest, learner_step FROM version WHERE version = {first}") == [
        (restored, goes_on_at)
    ]
    assert learner.run() == STEPS
    learner.close()
    coordinator.close()

    layout = RunLayout.open(run)
    assert trajectories <= {*rows(run, "SELECT traj_uid FROM trajectory")}
    after = rows(run, "SELECT version, digest, learner_step FROM version ORDER BY 1")
    assert after[: len(versions)] == versions, "what was announced stays in the lineage"
    assert [version for version, _, _ in after] == [*range(first + STEPS - goes_on_at + 1)]
    for version, digest, _ in after[-config.learner.keep_versions :]:
        assert files_digest([layout.weights_dir(version) / WEIGHTS_FILE]) == digest
    left = [*layout.weights.iterdir(), *layout.checkpoints.iterdir()]
    assert [path for path in left if path.name.endswith((".tmp", ".old"))] == []
    with connect(layout) as connection:
        steps = connection.execute(
            """SELECT learner_step, count(*), count(DISTINCT group_uid) FROM lineage
               WHERE live AND batch_state = 'trained' GROUP BY 1 ORDER BY 1"""
        ).fetchall()
        doubled = connection.execute(
            """SELECT group_uid FROM lineage WHERE live AND batch_state = 'trained'
               GROUP BY 1 HAVING count(*) > 1"""
        ).fetchall()
        violations = connection.execute("SELECT * FROM staleness_violations").fetchall()
        saved = connection.execute(
            "SELECT learner_step FROM checkpoints WHERE live ORDER BY 1"
        ).fetchall()
    assert steps == [(step, GROUPS_PER_STEP, GROUPS_PER_STEP) for step in range(1, STEPS + 1)]
    assert (doubled, violations) == ([], [])
    assert saved == [(step,) for step in range(CHECKPOINT_EVERY, STEPS + 1, CHECKPOINT_EVERY)]
    assert [f for f in check(layout, level=CONTENTS) if f.severity == "error"] == []
