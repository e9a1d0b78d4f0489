"""Count the requests that vLLM puts back because its cache is full, and computes again later.

    preemptions = PreemptionCounter()
    preemptions.watch_scheduler()    # in the scheduler's process, before its first step
    n = preemptions.take()

An engine of several processes has its scheduler in one that loads none of our code. There vLLM's
statistics have each answer tell what happened to its request, at a cost of CPU for every token:

    with preemptions.leave_out(): ...    # weights change
    preemptions.add(output.events)       # of each answer
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreEvent

# An answer tells its events late: so many changes of weights ago.
CHANGES_KEPT = 64


class PreemptionCounter:
    def __init__(self) -> None:
        self._n = 0
        self._left_out: deque[list[float]] = deque(maxlen=CHANGES_KEPT)  # first and last moment

    def take(self) -> int:
        """Return the count since the last call."""
        n, self._n = self._n, 0
        return n

    def watch_scheduler(self) -> None:
        """Count in the scheduler of this process.

        A change of weights puts all running requests back too, with `drop_stale_output`. It says
        nothing about the cache, so it does not count.
        """
        from vllm.v1.core.sched.scheduler import Scheduler

        preempt = Scheduler._preempt_request

        def preempt_and_count(
            scheduler: Any, request: Any, timestamp: float, drop_stale_output: bool = False
        ) -> None:
            self._n += not drop_stale_output
            preempt(scheduler, request, timestamp, drop_stale_output)

        Scheduler._preempt_request = preempt_and_count

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leave out what happens within this block, for the reason given in `watch_scheduler`."""
        span = [time.monotonic(), math.inf]
        self._left_out.append(span)
        try:
            yield
        finally:
            span[1] = time.monotonic()

    def add(self, events: Sequence[EngineCoreEvent] | None) -> None:
        """Count the preemptions among the events of an output of the engine.

        Their times are of the clock that all processes of a machine have.
        """
        from vllm.v1.engine import EngineCoreEventType

        for event in events or ():
            if event.type == EngineCoreEventType.PREEMPTED and not any(
                first <= event.timestamp <= last for first, last in self._left_out
            ):
                self._n += 1


class StatisticsOn:
    """Have vLLM keep statistics, as one of its loggers (StatLoggerBase) that logs nothing."""

    def record(self, *figures: object, **others: object) -> None: ...

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
