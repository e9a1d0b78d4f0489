"""Check how far `gigpo status` says that a run is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from analysis.run_status import duration, progress_lines
from store import Catalog, Reader, RunLayout, VersionRecord, export, write_open_sql
from tests.support.run_views import connect
from tests.support.store_samples import open_train_group, play

CONFIG = "{learner: {steps: 10}}"
CLONING = "{learner: {steps: 10}, loss: {policy: behaviour_cloning}}"


class Run:
    """A run with a clock of its own."""

    def __init__(self, root: Path, *, config_yaml: str) -> None:
        self.now_us = 1_700_000_000_000_000
        self.layout = RunLayout.create(root, config_yaml=config_yaml)
        write_open_sql(self.layout, macros=(), max_staleness=9)
        self.catalog = Catalog.open(self.layout)
        self.catalog.heartbeats({"learner": "groups"})
        self.step = 0

    def publish_base(self) -> None:
        self.catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d", learner_step=None)
        )

    def train(self, *, step_s: float, success: float) -> None:
        self.now_us += round(step_s * 1e6)
        self.step += 1
        with mock.patch("store.catalog.database.now_us", return_value=self.now_us):
            play(self.layout, self.catalog, open_train_group(self.catalog, None))
            batch = self.catalog.claim(n_groups=1, current_version=self.step - 1, max_staleness=99)
            assert batch is not None
            self.catalog.record_version(
                VersionRecord(
                    version=self.step,
                    path=f"weights/v{self.step}",
                    digest="d",
                    learner_step=self.step,
                )
            )
            self.catalog.settle(
                batch.batch_id, learner_step=self.step, filtered={}, version_in=self.step - 1
            )
        self.catalog.record_metrics(
            learner_step=self.step, policy_version=self.step - 1, values={"train/success": success}
        )

    def evaluate(self, tasks: list[str], *, n_played: int) -> None:
        self.catalog.open_round(tasks, episodes_per_task=1, version=self.step)
        for _ in range(n_played):
            group = self.catalog.lease_open_group(worker="w0", lease_s=60.0, split="heldout")
            assert group is not None
            play(self.layout, self.catalog, group)
        for done in self.catalog.finished_evaluations():
            self.catalog.record_metrics(
                learner_step=done.learner_step, policy_version=done.version, values=done.metrics()
            )

    def lines(self, *, is_driven: bool) -> list[str]:
        export(self.catalog, self.layout)
        # in this process: a reader's child takes longer to start than the test
        with connect(self.layout) as connection:
            reader = SimpleNamespace(
                rows=lambda query: connection.sql(query).to_arrow_table().to_pylist()
            )
            reader.records = partial(Reader.records, reader)
            return progress_lines(self.layout.root, reader, is_driven=is_driven)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run", config_yaml=CONFIG)
    yield made
    made.catalog.close()


def test_it_says_the_step_of_how_many_the_success_and_the_time_left(run: Run) -> None:
    assert (
        run.lines(is_driven=True)[0]
        == "starting: there are no weights yet, so no learner step of 10"
    )
    run.publish_base()
    assert run.lines(is_driven=True) == [
        "training: learner step 0 of 10, newest version 0; time left: not known yet",
        "success: not known before the first learner step",
    ]
    run.evaluate(["a"], n_played=1)
    for success in (0.0, 0.2, 0.3, 0.4, 0.5, 0.6):
        run.train(step_s=60.0, success=success)
    assert run.lines(is_driven=True) == [
        "training: learner step 6 of 10, newest version 6; time left: about 4 min",
        "success: 0.40 on training tasks (mean of the last 5 learner steps), "
        "1.00 on held-out tasks (learner step 0, 1 episodes)",
    ]
    run.train(step_s=36_000.0, success=0.6)  # the run was stopped for ten hours
    run.train(step_s=60.0, success=0.6)
    assert (
        "time left: about 2 min" in run.lines(is_driven=True)[0]
        or "about 120 s" in run.lines(is_driven=True)[0]
    )
    assert run.lines(is_driven=False)[0] == "stopped: learner step 8 of 10, newest version 8"


def test_a_run_that_is_trained_is_evaluated_and_then_finished(run: Run) -> None:
    for _ in range(10):
        run.train(step_s=2.0, success=0.5)
    at = "learner step 10 of 10, newest version 10"
    assert run.lines(is_driven=True)[0] == f"evaluating: {at}; the held-out tasks are next"
    assert run.lines(is_driven=False)[0] == f"trained, not evaluated: {at}"
    run.evaluate(["a", "b"], n_played=1)
    assert run.lines(is_driven=True)[0] == f"evaluating: {at}; 1 of 2 held-out episodes played"
    group = run.catalog.lease_open_group(worker="w0", lease_s=60.0)
    assert group is not None
    play(run.layout, run.catalog, group)
    run.evaluate([], n_played=0)
    for is_driven in (True, False):
        where, success = run.lines(is_driven=is_driven)
        assert where == f"finished: {at}"
        assert "1.00 on held-out tasks (learner step 10, 2 episodes)" in success


def test_a_base_policy_is_cloned_and_has_no_evaluation(tmp_path: Path) -> None:
    run = Run(tmp_path / "base", config_yaml=CLONING)
    run.train(step_s=1.0, success=0.2)
    run.train(step_s=1.0, success=0.2)
    assert run.lines(is_driven=True) == [
        "cloning: learner step 2 of 10, newest version 2; time left: about 8 s",
        "success: 0.20 of the episodes that are cloned (mean of the last 5 learner steps)",
    ]
    for _ in range(8):
        run.train(step_s=1.0, success=0.2)
    assert run.lines(is_driven=True)[0].startswith("finished: ")
    run.catalog.close()


def test_a_run_of_older_code_still_has_its_learner_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", config_yaml="{a_key_that_is_gone: 1}")
    run.train(step_s=1.0, success=0.2)
    step, why = run.lines(is_driven=True)
    assert step == "learner step 1, newest version 1"
    assert "a_key_that_is_gone" in why
    run.catalog.close()


def test_the_settings_are_those_of_the_newest_start(run: Run) -> None:
    (run.layout.root / "config.yaml").write_text("{learner: {steps: 40}}")
    run.train(step_s=1.0, success=0.2)
    assert "learner step 1 of 40" in run.lines(is_driven=True)[0]


def test_a_run_that_only_evaluates_has_no_learner_steps(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", config_yaml=CONFIG)
    run.catalog.heartbeats({"learner": "gone"})
    with run.catalog._database.transaction() as tx:
        tx.run("DELETE FROM component")
        tx.touch("component")
    run.publish_base()
    run.evaluate(["a", "b"], n_played=1)
    assert run.lines(is_driven=True)[0] == "evaluation: 1 of 2 held-out episodes played"
    run.catalog.close()


def test_durations_are_rounded_to_what_matters() -> None:
    assert [duration(seconds) for seconds in (0.4, 90.0, 600.0, 11_100.0)] == [
        "0 s",
        "90 s",
        "10 min",
        "3 h 5 min",
    ]
