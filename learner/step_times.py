"""Measure where the seconds of a learner step go.

In the learner's loop:

    clock = StepClock()
    with clock.timed("publish_s"): ...
    times = clock.end_step()        # times.publish_s, times.step_s
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class LoadTimes:
    """Seconds that the preparing thread spent on a batch."""

    read_s: float = 0.0  # and to ask a teacher behind a server
    values_s: float = 0.0  # for the critic's forward passes; 0 without a critic
    advantages_s: float = 0.0  # including the wait for a core
    advantages_cpu_s: float = 0.0  # in `compute_advantages`, without the wait
    filter_s: float = 0.0  # to find filtered groups, and the rows to train on
    pack_s: float = 0.0  # to cut the rows into updates and micro-batches


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """Seconds that the loop spent in a learner step, which ends when its weights are announced.

    A checkpoint is copied after that, so its time is in the next step. The preparing thread's
    seconds are in LoadTimes; those of the writing thread are in none.
    """

    checkpoint_s: float = 0.0  # to copy that of the step before, if one was due
    groups_wait_s: float = 0.0  # until workers had committed the groups
    batch_wait_s: float = 0.0  # for reading, advantages and packing after that
    publish_s: float = 0.0  # until the coordinator knew of the weights
    step_s: float = 0.0  # the whole step


@contextmanager
def timed(times: LoadTimes | StepTimes, name: str) -> Iterator[None]:
    """Add the seconds until the end of the block to a field of `times`, `read_s` for example."""
    began_s = time.monotonic()
    yield
    setattr(times, name, getattr(times, name) + time.monotonic() - began_s)


class StepClock:
    """Measure learner steps one after the other, so that every second is in exactly one."""

    def __init__(self) -> None:
        self._began_at_s = time.monotonic()
        self._times = StepTimes()

    def waited_for_batch(self, *, since_s: float, groups_at_s: float) -> None:
        """Split a wait that ends now into the time before and after the groups were complete."""
        waited_s = time.monotonic() - since_s
        self._times.groups_wait_s = min(max(0.0, groups_at_s - since_s), waited_s)
        self._times.batch_wait_s = waited_s - self._times.groups_wait_s

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Measure a part of the step: `publish_s` or `checkpoint_s`."""
        return timed(self._times, name)

    def end_step(self) -> StepTimes:
        """Return the times of the step that ends now, and begin the next."""
        now_s, ended = time.monotonic(), self._times
        ended.step_s = now_s - self._began_at_s
        self._began_at_s, self._times = now_s, StepTimes()
        return ended
