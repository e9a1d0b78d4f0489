"""A learner's loop that is killed while it writes behind a learner step, each time in another gap.

    python -c "from tests.support.killed_learner import main; main()" '[["/tmp/run", "visible", 1]]'

A case is a run, a gap and its staleness.

Each run is made and killed in a process of its own, forked from this one, which imports once.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from learner import Learner, LearnerSetup
from learner.data.micro_batch import MicroBatch
from learner.files.atomic_directory import visible_whole
from learner.training.step_metrics import UpdateStats
from tests.support.learner_loop import (
    WEIGHTS_FILE,
    Handle,
    StandIn,
    good,
    make_config,
    open_coordinator,
    patch_learner,
    play_all,
)

KILLED_AT, STEPS, CHECKPOINT_EVERY = 4, 6, 2  # learner steps
DEADLINE_S = 60.0
# In the order in which the threads come to them, each with the learner step that a restart goes on
# from.
GAPS = {
    "announced": 2,
    "half the weights": 2,
    "weights visible": 2,
    "weights written": 2,
    "checkpoint copied": 2,
    "half the checkpoint": 2,
    "checkpoint visible": 2,
    "checkpoint recorded": 4,
}


class Gap:
    """Kill this process in one gap, once the loop trains the next learner step."""

    def __init__(self, wanted: str) -> None:
        self.wanted, self.trains_next = wanted, threading.Event()

    def reached(self, gap: str) -> None:
        if gap == self.wanted:
            assert self.trains_next.wait(DEADLINE_S)
            os.kill(os.getpid(), signal.SIGKILL)


class Ranks(StandIn):
    gap: Gap

    def write_weights(self, directory: Path) -> None:
        if directory.name != f"v{KILLED_AT:06d}":
            super().write_weights(directory)
            return
        self.gap.reached("announced")
        with visible_whole(directory) as unfinished:
            (unfinished / WEIGHTS_FILE).write_text("")
            self.gap.reached("half the weights")
            (unfinished / WEIGHTS_FILE).write_text(self.weights)

    def write_checkpoint(self, directory: Path) -> None:
        if self.point.learner_step == KILLED_AT:
            self.gap.reached("checkpoint copied")
            unfinished = directory.with_name(directory.name + ".tmp")
            unfinished.mkdir()
            (unfinished / "point.json").write_text("{")
            self.gap.reached("half the checkpoint")
        super().write_checkpoint(directory)


class Watched(Handle):
    gap: Gap

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        is_weights = name == "written" and given[0] == KILLED_AT
        is_checkpoint = name == "checkpoint" and given[0].learner_step == KILLED_AT
        if is_weights or is_checkpoint:
            self.gap.reached("weights visible" if is_weights else "checkpoint visible")
        answer = super().call(name, *given, **named)
        if is_weights or is_checkpoint:
            self.gap.reached("weights written" if is_weights else "checkpoint recorded")
        return answer


def train_until_killed(run: Path, gap_name: str, max_staleness: int) -> None:
    config = make_config(
        run, max_staleness=max_staleness, steps=STEPS, checkpoint_every=CHECKPOINT_EVERY
    )
    gap, steps = Gap(gap_name), 0
    handle = Watched(open_coordinator(config))
    handle.gap = gap

    def train(ranks: StandIn, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        nonlocal steps
        steps += 1
        if steps > KILLED_AT:
            with handle.one_call:
                play_all(handle.coordinator)  # on weights that were sent, and not written yet
            gap.trains_next.set()
            threading.Event().wait(DEADLINE_S)  # the kill comes before this step ends
        return good(updates)

    monkeypatch = pytest.MonkeyPatch()
    patch_learner(monkeypatch, train)
    ranks = type("RankGroup", (Ranks,), {"stats": train, "gap": gap})
    monkeypatch.setattr("learner.learner.RankGroup", ranks)
    setup = LearnerSetup(run_id="unused", config=config, model_path="unused")
    Learner(setup, handle, stopping=threading.Event()).run()


def main() -> None:
    gc.freeze()  # a collection would copy the memory that all children share
    gc.enable()
    for run, gap_name, max_staleness in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            try:
                train_until_killed(Path(run), gap_name, max_staleness)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise SystemExit(f"{gap_name}: not killed, but status {status}")
