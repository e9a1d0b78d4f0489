"""`gigpo study`: it resumes, its intervals are right, and its pages show the stored results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.studies import NAMES, index, page, runner
from benchmarks.studies import study as studies
from benchmarks.studies.event_training import Group, Simulation, TimedStep
from benchmarks.studies.intervals import bootstrap, paired, ratio
from benchmarks.studies.small_world import LOST, WON, Choice, World, wins_of
from benchmarks.studies.study import Arm, Result, Study, load
from cli.__main__ import main
from configs import Config, LearnerConfig
from coordinator.leases import MAX_REQUEUES
from envs import Observation
from printable import UserError

ARMS = (Arm(name="a", settings={"x": 1.0}), Arm(name="b", settings={"x": 2.0}))


class Stopped(Exception):
    """The study ended here, as by a kill."""


def study_of(runs: list[tuple[str, int]], *, stops_after: int = 10**9) -> Study:
    """A study whose measure is x + seed. It notes its runs, and is stopped after some."""

    def run(arms: Sequence[Arm], seed: int, work: Path) -> Iterator[Result]:
        for arm in arms:
            if len(runs) == stops_after:
                raise Stopped
            runs.append((arm.name, seed))
            yield arm, {"value": float(arm.settings["x"]) + seed}, [0.0, 1.0]

    return Study(
        name="example",
        title="An example",
        question="Is b above a?",
        prediction="Yes, by 1.",
        setup="Addition.",
        arms=ARMS,
        seeds=3,
        measures={"value": "x + seed"},
        comparisons=(("b", "a"),),
        curve="from 0 to 1",
        reading="b is {b[value]}, above a by {b - a[value]}, {b / a[value]} times.",
        run_cpu_s=1.0,
        run=run,
    )


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of examples do not go into the checkout."""
    monkeypatch.setattr(studies, "ROOT", tmp_path)


def test_a_stopped_study_goes_on_where_it_was() -> None:
    before: list[tuple[str, int]] = []
    with pytest.raises(Stopped):
        runner.run_missing(study_of(before, stops_after=3), seeds=3, jobs=1)
    study = study_of(after := [])
    with study.results.open("a") as file:
        file.write('{"arm": "b", "se')  # killed while it wrote
    assert [row.arm for row in runner.read(study)] == ["a", "b", "a"]
    runner.run_missing(study, seeds=3, jobs=1)
    assert before == [("a", 0), ("b", 0), ("a", 1)]
    assert after == [("b", 1), ("a", 2), ("b", 2)]
    assert {(row.arm, row.seed): row.measures["value"] for row in runner.read(study)} == {
        (arm.name, seed): arm.settings["x"] + seed for arm in ARMS for seed in range(3)
    }
    assert runner.missing(study, seeds=3) == []
    assert runner.missing(study, seeds=4) == [(3, list(ARMS))]


def test_runs_with_other_settings_are_not_mixed() -> None:
    study = study_of([])
    runner.run_missing(study, seeds=1, jobs=1)
    changed = replace(study, arms=(ARMS[0], Arm(name="b", settings={"x": 3.0})))
    with pytest.raises(UserError, match="seed 0 of 'b' was run with"):
        runner.read(changed)


def test_the_page_shows_means_and_paired_differences() -> None:
    study = study_of([])
    runner.run_missing(study, seeds=3, jobs=1)
    text = page.page_text(study, runner.read(study))
    assert "| a | 3 | 2.000 [1.000, 3.000] |" in text
    assert "| b − a | 3 | +1.000 |" in text, "equal differences have no interval"
    assert "b is 3.000 [2.000, 4.000], above a by +1.000, 1.611 [1.333, 2.000] times." in text
    picture = page.picture(study, runner.read(study))
    assert picture.count("<polygon") == 2 and "An example" in picture


def test_intervals_are_those_of_resampled_seeds() -> None:
    assert bootstrap([2.0]).low == bootstrap([2.0]).high == 2.0
    one = bootstrap([0.0, 1.0])  # a mean of two draws is 0, 1/2 or 1
    assert (one.mean, one.low, one.high) == (0.5, 0.0, 1.0)
    rng = np.random.default_rng(1)
    many = bootstrap(rng.normal(size=400).tolist())
    assert many.high - many.mean == pytest.approx(1.96 / 20, rel=0.15)
    found = paired([{0: 0.9, 1: 0.8, 2: 0.1}, {0: 0.7, 1: 0.7, 3: 0.5}])
    assert found is not None and found.n == 2 and found.mean == pytest.approx(0.15)
    grown = paired([{0: 0.9}, {0: 0.5}, {0: 0.8}, {0: 0.7}])  # 0.4 - 0.1
    assert grown is not None and grown.mean == pytest.approx(0.3)
    assert paired([{0: 1.0}, {1: 1.0}]) is None


def test_ratios_are_paired_by_seed() -> None:
    found = ratio({0: 0.9, 1: 0.5, 2: 7.0}, {0: 0.6, 1: 1.0})
    assert found is not None and (found.n, found.mean) == (2, pytest.approx(1.0))
    assert (found.low, found.high) == (0.5, pytest.approx(1.5))
    assert ratio({0: 1.0}, {1: 1.0}) is None
    assert ratio({0: 1.0}, {0: 0.0}) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_page_shows_the_committed_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    study = load(name)
    rows, written = runner.read(study), page.EVIDENCE / f"{name}.md"
    assert written.read_text() == page.page_text(study, rows), f"gigpo study {name} --page"
    if rows:
        assert written.with_suffix(".svg").read_text() == page.picture(study, rows)


def test_the_committed_index_shows_the_committed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (page.EVIDENCE / "index.md").read_text() == index.index_text()


def test_the_command_says_what_a_study_would_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    assert main(["study", "horizon", "--dry-run", "--seeds", "1000"]) == 0
    said = capsys.readouterr().out
    n_runs = len(runner.read(load("horizon")))
    assert f"21 arms x 1000 seeds, {21_000 - n_runs} runs missing" in said
    assert "gigpo/8: estimator=gigpo, distance=8" in said
    assert main(["study", "horizont"]) == 2
    assert "did you mean 'horizon'?" in capsys.readouterr().err


def test_every_row_names_a_commit() -> None:
    for path in (Path(page.__file__).parent / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert json.loads(line)["commit"].rstrip("+")


SLOW = 3  # this task takes 100 times as long as the others


class TimedOnly(Simulation):
    """A simulation whose episodes have four steps each, and which trains nothing."""

    def task_success(self) -> np.ndarray:
        return np.zeros(4)

    def _rows(self, group: Group, *, seed: tuple[int, ...]) -> pa.Table:
        size = self.config.algorithm.group_size
        return pa.table({"traj_uid": np.repeat(np.arange(size), 4)})

    def _learn(self, batch: Sequence[Group]) -> None:
        assert len(batch) == self.config.learner.groups_per_step


def simulated(max_staleness: int, stragglers: str) -> tuple[TimedOnly, list[TimedStep]]:
    """Return a run in which a group of any task but the slow one takes one learner step."""
    config = Config(
        max_staleness=max_staleness,
        stragglers=stragglers,
        learner=LearnerConfig(steps=30, groups_per_step=4),
    )
    world: Any = SimpleNamespace(tasks=("a", "b", "c", "slow"), starts=(0, 0, 0, 0))
    simulation = TimedOnly(
        engine=cast(Any, None),
        world=world,
        config=config,
        task_step_s=[1.0, 1.0, 1.0, 100.0],
        noise=0.01,
        slots=4,
        learn_s=4.0,
    )
    return simulation, list(simulation.steps())


def test_simulated_runs_leave_out_or_wait_for_what_takes_too_long() -> None:
    dropping, dropped_steps = simulated(1, "drop")
    slow = Counter(group.ordinal for group in dropping.attempts if group.task == SLOW)
    n_trained = sum(group.task == SLOW for step in dropped_steps for group in step.groups)
    assert n_trained < 25 and dropping.n_stale, "an even share would be 30"
    assert 1 < max(slow.values()) <= 1 + MAX_REQUEUES, "they are played again first"
    for max_staleness in (0, 1, 3):
        waiting, steps = simulated(max_staleness, "wait")
        n_trained = sum(group.task == SLOW for step in steps for group in step.groups)
        assert n_trained >= 29 and not waiting.n_stale
        assert all(step.staleness <= max_staleness for step in steps)
    synchronous, _ = simulated(0, "drop")
    assert len(synchronous.attempts) == 120, "no group is begun while the learner trains"


def test_a_lost_episode_is_worth_nothing() -> None:
    def choice(situation: int, leads_to: int) -> Choice:
        return Choice(
            situation=situation,
            command="walk",
            prompt_ids=(1,),
            answer_ids=(2,),
            leads_to=leads_to,
        )

    world = World(
        tasks=(),
        starts=(0,),
        observations=(Observation(text="a", objective=""), Observation(text="b", objective="")),
        choices=(choice(0, 1), choice(0, LOST), choice(1, WON)),
        form=cast(Any, None),
        max_steps=2,
    )
    worth_LS = wins_of(world, np.array([0.25, 0.75, 1.0]))
    assert worth_LS.tolist() == [[0.0, 0.0], [0.0, 1.0], [0.25, 1.0]]
