"""Count the requests that vLLM puts back because its cache is full, and computes again later.

    preemptions = PreemptionCounter()
    preemptions.watch_scheduler()    # in the scheduler's process, before its first step
    n = preemptions.take()

An engine of several GPUs has its scheduler in a process that loads none of our code. There the
counter is one of vLLM's statistics loggers, which cost CPU for every token.
"""

from __future__ import annotations

from typing import Any


class PreemptionCounter:
    def __init__(self) -> None:
        self._n = 0

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

    # as vLLM's StatLoggerBase

    def record(self, scheduler_stats: object, iteration_stats: Any, **others: object) -> None:
        if iteration_stats is not None:
            self._n += iteration_stats.num_preempted_reqs

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
