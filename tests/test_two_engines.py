"""A run with two engines that nobody touches; beside it one whose engine is killed, and one that goes on with others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fault_runs import NAMED_WITHIN_S, ROOT, FaultRun, check_nothing_lost, processes_of, seen_now

pytestmark = pytest.mark.faults
Start = Callable[..., FaultRun]

SETTINGS = ("actors.workers=2", "learner.steps=40", "evaluation.every=0", "evaluation.final_episodes_per_task=10")
KILL_AFTER_STEPS = (5, 15, 25)
LONGEST_S = 1800.0
NOISE = 0.2  # two runs of 40 learner steps with different seeds of their threads differ by this much on 100 held-out episodes


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts runs, and ends those that are left."""
    runs: list[FaultRun] = []

    def start(run: Path, *overrides: str) -> FaultRun:
        output = run.parent / f"{run.name}.out"
        command = [sys.executable, "train.py", "configs/key_room.yaml", f"run_dir={run}", *SETTINGS, *overrides]
        with output.open("a") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                text=True,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        runs.append(FaultRun(run=run, process=process, fault=run.parent / "none", output=output))
        return runs[-1]

    yield start
    for run in runs:
        for left in [*processes_of(run.run), run.process]:
            with contextlib.suppress(psutil.Error):
                left.kill()
        run.process.wait()


def heldout_success(run: FaultRun) -> float:
    ((success,),) = run.sql("SELECT value FROM metrics WHERE name = 'heldout/success' ORDER BY learner_step DESC LIMIT 1")
    return float(success)


def wait_for_step(run: FaultRun, step: int) -> None:
    run.wait(
        lambda: (run.run / "open.sql").exists() and run.learner_step() >= step,
        what=f"learner step {step}",
        within_s=LONGEST_S,
    )


@pytest.fixture(scope="module")
def alone(start: Start, tmp_path_factory: pytest.TempPathFactory) -> FaultRun:
    """Nobody touches it."""
    run = start(tmp_path_factory.mktemp("two_engines") / "alone")
    assert run.ended(within_s=LONGEST_S)[0] == 0, run.said()
    return run


def base_of(run: FaultRun) -> str:
    return f"model.path={run.run / 'base' / 'policy'}"


def check_ended_as_well(run: FaultRun, alone: FaultRun, *, seen: set[object], how: str) -> None:
    code, _ = run.ended(within_s=LONGEST_S)
    assert code == 0, run.said()
    assert processes_of(run.run) == []
    check_nothing_lost(run, seen)
    left_alone, disturbed = heldout_success(alone), heldout_success(run)
    print(f"held-out success: {left_alone:.2f} left alone, {disturbed:.2f} {how}")
    assert disturbed > left_alone - NOISE
    assert disturbed > 0.5


def test_killed_three_times_it_ends_as_well_as_left_alone(start: Start, tmp_path: Path, alone: FaultRun) -> None:
    killed = start(tmp_path / "killed", base_of(alone), "learner.transfer=broadcast")
    for step in KILL_AFTER_STEPS:
        wait_for_step(killed, step)
        before = len(killed.events("started again"))
        killed.wait(lambda: killed.find("worker-1 engine") is not None, what="an engine", within_s=LONGEST_S)
        killed.part("worker-1 engine").send_signal(signal.SIGKILL)
        killed.wait(
            lambda before=before: len(killed.events("started again")) > before,  # type: ignore[misc]
            what="the restart",
            within_s=NAMED_WITHIN_S,
        )
        seen = seen_now(killed)
    check_ended_as_well(killed, alone, seen=seen, how="with an engine killed three times")
    workers = "SELECT count(DISTINCT component) FROM events WHERE what = 'weights loaded'"
    assert killed.sql(workers) == [(2,)]
    received = "SELECT count(DISTINCT component) FROM events WHERE what = 'weights loaded' AND (detail ->> 'received')::BOOLEAN"
    assert killed.sql(received) == [(2,)], "also the engines that came later were sent weights"


def test_resumed_with_one_worker_and_two_ranks_it_ends_as_well_as_left_alone(
    start: Start, tmp_path: Path, alone: FaultRun
) -> None:
    first = start(tmp_path / "run", base_of(alone))
    wait_for_step(first, 15)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    seen = seen_now(first)
    again = start(tmp_path / "run", base_of(alone), "actors.workers=1", "learner.ranks=2")
    again.wait(lambda: "continues at learner step" in again.said(), what="the resume", within_s=LONGEST_S)
    check_ended_as_well(again, alone, seen=seen, how="resumed with 1 worker instead of 2 and 2 ranks instead of 1")
