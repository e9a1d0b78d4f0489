"""Two engines on one machine, one of them killed three times: the run ends as well as one that nobody touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_runs import NAMED_WITHIN_S, ROOT, FaultRun, check_nothing_lost, processes_of, seen_now

pytestmark = pytest.mark.faults

SETTINGS = ("actors.workers=2", "learner.steps=40", "evaluation.every=0", "evaluation.final_episodes_per_task=10")
KILL_AFTER_STEPS = (5, 15, 25)
LONGEST_S = 1800.0
NOISE = 0.2  # two runs of 40 learner steps with different seeds of their threads differ by this much on 100 held-out episodes


def start(run: Path, *overrides: str) -> FaultRun:
    run.parent.mkdir(parents=True, exist_ok=True)
    output = run.parent / f"{run.name}.out"
    command = [sys.executable, "train.py", "configs/key_room.yaml", f"run_dir={run}", *SETTINGS, *overrides]
    with output.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return FaultRun(run=run, process=process, fault=run.parent / "none", output=output)


def heldout_success(run: FaultRun) -> float:
    ((success,),) = run.sql("SELECT value FROM metrics WHERE name = 'heldout/success' ORDER BY learner_step DESC LIMIT 1")
    return float(success)


def test_killed_three_times_it_ends_as_well_as_left_alone(tmp_path: Path) -> None:
    alone = start(tmp_path / "alone")
    assert alone.ended(within_s=LONGEST_S)[0] == 0, alone.said()
    base = f"model.path={alone.run / 'base' / 'policy'}"

    killed = start(tmp_path / "killed", base)
    for step in KILL_AFTER_STEPS:
        killed.wait(
            lambda step=step: (killed.run / "open.sql").exists() and killed.learner_step() >= step,  # type: ignore[misc]
            what=f"learner step {step}",
            within_s=LONGEST_S,
        )
        before = len(killed.events("started again"))
        killed.part("worker-1 engine").send_signal(signal.SIGKILL)
        killed.wait(
            lambda before=before: len(killed.events("started again")) > before,  # type: ignore[misc]
            what="the restart",
            within_s=NAMED_WITHIN_S,
        )
        seen = seen_now(killed)
    code, _ = killed.ended(within_s=LONGEST_S)
    assert code == 0, killed.said()
    assert processes_of(killed.run) == []
    check_nothing_lost(killed, seen)
    assert killed.sql(
        "SELECT count(DISTINCT worker) FROM (SELECT component AS worker FROM events WHERE what = 'weights loaded')"
    ) == [(2,)]
    left_alone, disturbed = heldout_success(alone), heldout_success(killed)
    print(f"held-out success: {left_alone:.2f} left alone, {disturbed:.2f} with an engine killed three times")
    assert disturbed > left_alone - NOISE
    assert disturbed > 0.5
