"""gigpo evaluate: what it refuses, and what it shows of the rounds in a store. Whole evaluations
are in test_run.py.
"""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import configs
import store
from analysis import evaluation_stats as evaluation
from analysis.evaluation_stats import (
    TaskResult,
    interval,
    mean_score,
    newest_round,
    sign_flip_p,
    success,
    wilson_interval,
)
from cli.__main__ import main
from configs import Config, ConfigError
from coordinator import Coordinator
from driver import evaluate_run, resume, run_lock
from driver.evaluate_run import (
    is_evaluated,
    model_as_version_zero,
    new_run_settings,
    own_run_settings,
)
from driver.preflight import check_run_dir, check_same_run
from store import Catalog, RunLayout, StoreError, write_open_sql
from tests.coordinator.test_coordinator import make_config, play, publish
from tests.support.fault_runs import ROOT, SCRIPTED, untrained_model
from tests.support.neighbours import Neighbour


def task(won: int, played: int) -> TaskResult:
    return TaskResult(task_id="t", won=won, played=played, score=None, steps=3.0)


def test_one_episode_a_task_has_wilsons_interval() -> None:
    tasks = [task(1, 1)] * 30 + [task(0, 1)] * 10
    assert success(tasks) == 0.75
    low, high = interval(tasks)
    assert (low, high) == pytest.approx(wilson_interval(30, 40), abs=0.005)


def test_episodes_that_are_all_alike_count_as_one_a_task() -> None:
    tasks = [task(4, 4)] * 30 + [task(0, 4)] * 10
    assert interval(tasks) == pytest.approx(wilson_interval(30, 40), abs=0.005)


def test_episodes_that_differ_within_each_task_count_one_by_one() -> None:
    """Every task won half of the time: the tasks' means do not vary at all, so all 80 episodes
    count at most.
    """
    # no variance: as many as there are tasks
    assert interval([task(2, 4)] * 20) == pytest.approx(wilson_interval(10, 20))
    rng = np.random.default_rng(0)
    tasks = [task(int(rng.binomial(4, 0.5)), 4) for _ in range(500)]
    low, high = interval(tasks)
    expected_low, expected_high = wilson_interval(success(tasks) * 2000, 2000)
    assert high - low == pytest.approx(expected_high - expected_low, rel=0.1)


def test_always_won_is_not_certain() -> None:
    low, high = interval([task(3, 3)] * 10)
    assert high == pytest.approx(1.0) and low == pytest.approx(wilson_interval(10, 10)[0])


def test_flipped_signs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four differences of one sign: of the 16 patterns of signs two are as far from 0."""
    assert sign_flip_p(np.ones(4)) == pytest.approx(2 / 16, abs=0.02)
    assert sign_flip_p(np.zeros(4)) == 1.0
    assert sign_flip_p(np.array([1.0, -1.0, 0.5])) > 0.5
    some = np.random.default_rng(1).normal(0.1, 1.0, size=300)
    flipped = sign_flip_p(some)
    with monkeypatch.context() as patch:
        patch.setattr("analysis.evaluation_stats.MOST_FLIPPED", 299)
        assert sign_flip_p(some) == pytest.approx(flipped, abs=0.02)
        patch.setattr("analysis.evaluation_stats.MOST_FLIPPED", 3)
        assert sign_flip_p(np.zeros(4)) == 1.0


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """A run with two evaluation rounds of its 20 held-out tasks."""
    run = tmp_path / "run"
    config = make_config(run, max_staleness=0)
    layout = RunLayout.create(run, config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=0)
    coordinator = Coordinator(config, learns=False)
    for version in (0, 1):
        publish(coordinator, version, version)
        coordinator.evaluate(version, 2)
        while (lease := coordinator.lease("w")) is not None:
            play(coordinator, lease)
    coordinator.close()
    return run


def test_the_newest_round_is_shown_task_by_task(played: Path) -> None:
    with store.open_run(played) as reader:
        tasks = newest_round(reader)
    assert len(tasks) == 20 and {one.played for one in tasks} == {2}
    console = Console(width=100, record=True)
    evaluation.show_evaluation(played, console)
    assert "all   20     40" in console.export_text()


def test_a_group_that_was_abandoned_is_named_below_the_table(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", max_staleness=0)
    layout = RunLayout.create(tmp_path / "run", config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=0)
    coordinator = Coordinator(config, learns=False)
    publish(coordinator, 0, 0)
    coordinator.evaluate(0, 2)
    lease = coordinator.lease("w")
    assert lease is not None
    coordinator.abandon("w", lease.group.group_uid, why="it is [bold]broken")
    while (other := coordinator.lease("w")) is not None:
        play(coordinator, other)
    coordinator.close()
    console = Console(width=100, record=True)
    evaluation.show_evaluation(tmp_path / "run", console)
    text = console.export_text()
    assert "all   20     39" in text
    assert "groups that were abandoned, and count for nothing: 1" in text
    assert f"  {lease.group.task_id}: it is [bold]broken" in text


def test_an_evaluated_run_is_shown_and_nothing_is_started(
    played: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("driver.evaluate_run.ray_cluster")
    twice = configs.from_yaml(RunLayout.open(played).info.config_yaml)
    twice = replace(twice, evaluation=replace(twice.evaluation, final_episodes_per_task=2))
    thrice = replace(twice, evaluation=replace(twice.evaluation, final_episodes_per_task=3))
    assert is_evaluated(twice) and not is_evaluated(thrice)
    assert not is_evaluated(replace(twice, run_dir=str(played.parent / "new")))
    resume.remember(twice)
    assert main(["evaluate", str(played)]) == 0
    assert "all   20     40" in capsys.readouterr().out

    coordinator = Coordinator(twice, learns=False)
    publish(coordinator, 2, 2)
    coordinator.close()
    assert not is_evaluated(twice), "newer weights"


def graded_round(tmp_path: Path, *, graded_task: int | None) -> Path:
    """Play 20 held-out tasks twice. The first episode of task number `graded_task` scores 0.5;
    nothing else is graded.
    """
    run = tmp_path / "run"
    config = make_config(run, max_staleness=0)
    write_open_sql(
        RunLayout.create(run, config_yaml=configs.as_yaml(config)), macros=[], max_staleness=0
    )
    coordinator = Coordinator(config, learns=False)
    publish(coordinator, 0, 0)
    coordinator.evaluate(0, 2)
    number = 0
    while (lease := coordinator.lease("w")) is not None:
        play(coordinator, lease, task_scores=(0.5 if number == graded_task else None, None))
        number += 1
    coordinator.close()
    return run


def test_an_episode_without_a_grade_scores_zero_in_a_graded_round(tmp_path: Path) -> None:
    """One of 40 episodes buys something, for 0.5: the mean is 0.5 / 40, not 0.5. In SQL as the docs
    ask it, too.
    """
    run = graded_round(tmp_path, graded_task=3)
    documented = (ROOT / "docs" / "sql.md").read_text().split("```sql\n")
    (query,) = (
        part.partition("```")[0] for part in documented if "task_score" in part.partition("```")[0]
    )
    with store.open_run(run) as reader:
        tasks = newest_round(reader)
        assert reader.sql(query).to_pylist() == [{"version": 0, "score": 0.5 / 40, "episodes": 40}]
    assert sorted(task.score for task in tasks if task.score is not None) == [0.0] * 19 + [0.25]
    assert mean_score(tasks) == 0.5 / 40
    console = Console(width=100, record=True)
    evaluation.show_evaluation(run, console)
    assert "0.013" in console.export_text()


def test_a_round_without_any_grade_has_no_score(tmp_path: Path) -> None:
    run = graded_round(tmp_path, graded_task=None)
    with store.open_run(run) as reader:
        tasks = newest_round(reader)
    assert {task.score for task in tasks} == {None}
    assert mean_score(tasks) is None


def test_a_task_counts_as_often_in_the_score_as_it_was_played() -> None:
    often = TaskResult(task_id="a", won=0, played=3, score=1.0, steps=1.0)
    once = TaskResult(task_id="b", won=0, played=1, score=0.0, steps=1.0)
    assert mean_score([often, once]) == 0.75


def test_a_run_compared_with_itself_does_not_differ(played: Path) -> None:
    console = Console(width=1000, record=True)
    evaluation.show_evaluation_comparison(played, played, console=console)
    text = console.export_text()
    assert "20 tasks in common" in text and "p = 1.0000" in text and "0 tasks differ" in text


def test_nothing_played_yet_is_one_line(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", max_staleness=0)
    layout = RunLayout.create(tmp_path / "run", config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=0)
    Coordinator(config, learns=False).close()
    with pytest.raises(StoreError, match="nothing was played on held-out tasks yet"):
        evaluation.show_evaluation(tmp_path / "run", Console())


@pytest.mark.parametrize(
    ("weights", "overrides", "words"),
    [
        ("runs/a", ["seed=1"], "needs a directory of its own: run_dir=NEW"),
        ("runs/a@last", ["run_dir=b"], "one of its checkpoints' learner steps, e.g. runs/a@40"),
        ("runs/a", ["run_dir=b", "model.path=m"], "model.path= beside runs/a"),
        (
            str(ROOT / "configs/key_room.yaml"),
            ["run_dir=b"],
            "has no model.path; give the model to evaluate",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    weights: str, overrides: list[str], words: str
) -> None:
    with pytest.raises((ConfigError, StoreError), match=words):
        new_run_settings(weights, overrides)


def test_a_run_that_trains_is_named_by_its_driver_with_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog's lock names the coordinator instead, which is no process of the user's."""
    monkeypatch.setattr(run_lock, "_writes", lambda pid, path: True)  # as if it had the file open
    run, other = tmp_path / "run", os.getppid()
    config = replace(configs.load(ROOT / "configs/key_room.yaml"), run_dir=str(run))
    ticks = run_lock.started_ticks(other)
    assert ticks is not None
    layout = RunLayout.create(run, config_yaml=configs.as_yaml(config))
    driver = run_lock.Driver(
        pid=other, started_ticks=ticks, host=socket.gethostname(), run=str(run)
    )
    (run / "driver.json").write_text(json.dumps(asdict(driver)))
    with Catalog.open(layout):
        assert main(["evaluate", str(run)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: process {other} drives {run}; evaluate its newest weights beside it: "
        )
        assert f"gigpo evaluate {run} run_dir=NEW, or stop it: gigpo stop {run}" in error
        with pytest.raises(
            StoreError, match=f"process {other} drives .*; choose another run_dir, or stop it"
        ):
            check_same_run(config)


@pytest.mark.parametrize("weights", ["runs/a@40", "configs/key_room.yaml"])
def test_without_a_directory_only_a_run_is_evaluated(weights: str) -> None:
    with pytest.raises(ConfigError, match="in a store of its own; give its directory"):
        own_run_settings(weights)


def test_settings_of_the_run_that_is_evaluated_are_kept(played: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    config = new_run_settings(f"{played}@3", [f"run_dir={new}", "evaluation.temperature=0"])
    run_id = RunLayout.open(played).info.run_id
    assert config.run_dir == str(new) and config.model.path == str(new / f"{run_id}-step000003")
    assert config.evaluation.temperature == 0.0
    assert config.algorithm == configs.from_yaml(RunLayout.open(played).info.config_yaml).algorithm
    assert math.isclose(config.env.win_reward, 10.0)


def test_an_evaluation_does_not_take_the_storage_of_its_run(tmp_path: Path) -> None:
    """It was refused when all weights had been copied, and then its own command as well."""
    run, new = tmp_path / "run", tmp_path / "new"
    config = make_config(run, max_staleness=0)
    config = replace(config, store=replace(config.store, uri=(tmp_path / "shared").as_uri()))
    text = configs.as_yaml(config)
    layout = RunLayout.create(run, config_yaml=text, storage_uri=config.store.uri)
    asked = new_run_settings(f"{run}@3", [f"run_dir={new}"])
    assert asked.store.uri == ""
    own = (tmp_path / "own").as_uri()
    given = new_run_settings(f"{run}@3", [f"run_dir={new}", f"store.uri={own}"])
    assert given.store.uri == own
    (new / f"{layout.info.run_id}-step000003").mkdir(parents=True)
    check_run_dir(asked)  # killed when the weights were copied
    (new / "mine").touch()
    with pytest.raises(ConfigError, match=r"has other things in it \(mine\)"):
        check_run_dir(asked)


def test_other_weights_are_not_taken_for_those_that_were_evaluated(
    played: Path, tmp_path: Path
) -> None:
    def asked(step: int) -> Config:
        return new_run_settings(f"{played}@{step}", [f"run_dir={tmp_path / 'new'}"])

    RunLayout.create(tmp_path / "new", config_yaml=configs.as_yaml(asked(3)))
    check_same_run(asked(3))
    with pytest.raises(
        ConfigError,
        match=r"was made by another config \(model.path: .*step000003' -> .*step000004'",
    ):
        check_same_run(asked(4))


@pytest.mark.parametrize("place", ["private", "another user's"])
def test_where_the_weights_are_copied_to_is_this_users_before(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacks: the weights and a log with a key were read while the evaluation began, and an
    evaluation in /tmp/new/run was led by links to other files of the user's.
    """
    new = tmp_path / "new"
    if place == "another user's":
        tmp_path.chmod(0o1777)
        new.mkdir()
        Neighbour(monkeypatch).gets(new)
        monkeypatch.setattr("store.untrusted.trust.is_trusted", lambda _: False)
        # An evaluation of theirs, which came after run_dir was checked, was shown as this one.
        monkeypatch.setattr(evaluate_run, "is_evaluated", lambda _: True)
    modes: list[int] = []

    def copy(*_: object, model: Path) -> None:
        modes.append(stat.S_IMODE(model.parent.stat().st_mode))
        raise StoreError("far enough")

    monkeypatch.setattr(evaluate_run, "_copy_weights", copy)
    config = Config(run_dir=str(new / "run"))
    config = replace(
        config,
        env=replace(config.env, options={"api_key": "hunter2"}),
        model=replace(config.model, path=str(new / "run" / "model")),
    )
    with pytest.raises(StoreError) as refused:
        evaluate_run._evaluate_in_new_run(config, "a@1", console=Console())
    if place == "private":
        assert modes == [0o700] and str(refused.value) == "far enough"
    else:
        assert modes == [] and "new belongs to another user (uid 65534)" in str(refused.value)


def test_weights_inside_the_directory_are_linked_so_that_it_can_be_moved(
    played: Path, tmp_path: Path
) -> None:
    layout = RunLayout.open(played)
    (played / "model").mkdir()
    (played / "model" / "model.safetensors").write_bytes(b"weights")
    record = model_as_version_zero(layout, played / "model")
    assert model_as_version_zero(layout, played / "model") == record
    moved = played.rename(tmp_path / "moved")
    assert (moved / record.path / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.run
def test_any_model_is_evaluated_in_a_store_of_its_own_and_never_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Played by the scripted policy, so that no engine has to start; all else is as ever."""
    new = tmp_path / "new"
    given = [
        f"run_dir={new}",
        f"model.path={untrained_model(tmp_path / 'model')}",
        *SCRIPTED,
        "learner.keep_versions=3002",
    ]
    command = [
        sys.executable,
        "-m",
        "cli",
        "evaluate",
        "configs/key_room.yaml",
        *given,
        "evaluation.final_episodes_per_task=2",
    ]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "all   20     40" in done.stdout
    with store.open_run(new) as reader:
        assert reader.sql(
            "SELECT count(*) AS n, max(version) AS version FROM versions"
        ).to_pylist() == [{"n": 1, "version": 0}]
        assert reader.sql("SELECT count(*) AS n FROM trajectories").to_pylist() == [{"n": 40}]
    assert main(["evaluate", f"{new}@7", f"run_dir={tmp_path / 'other'}"]) == 2
    assert "has no checkpoint of learner step 7" in capsys.readouterr().err
