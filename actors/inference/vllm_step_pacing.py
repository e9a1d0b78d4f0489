"""Make the steps of a CPU engine fewer and fuller: a step waits for requests that may soon come.

A step is one forward pass and one new token for each request. With a small model most of it is
Python, which costs the same for one request as for ten. Episodes whose environments answer at
different times would spread their tokens over many small steps.

    paced_step = paced(step, max_requests=64)
    paced_step(engine)    # perhaps waits and takes in what arrived, then calls step(engine)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# From the begin of a step to the begin of the next, at the most. A model that needs longer never
# waits.
STEP_EVERY_S = 0.008
# Fraction of the requests that an engine may have. With so many a step begins at once, so that a
# wait costs no more than that fraction of the time of an episode.
ENOUGH = 0.25
# Factor on the number of expected requests, at each step. It halves in seven steps: the last
# requests of an evaluation should not wait for others that have ended.
FORGET = 0.9

Step = Callable[[Any], bool]  # of vLLM's EngineCoreProc; returns whether the model was executed


class StepPacer:
    """Say how long the next step waits. One engine has one."""

    def __init__(self, *, max_requests: int) -> None:
        self._enough = ENOUGH * max_requests
        self._expected = 0.0  # requests: as many as there were lately
        self._began_s = float("-inf")  # the last step

    def wait_s(self, n_requests: int, *, now_s: float) -> float:
        """Return the seconds that a step with `n_requests` should wait for more.

        There are 0 requests while new weights are loaded, which should not wait.
        """
        if 0 < n_requests < min(self._expected, self._enough):
            return max(0.0, self._began_s + STEP_EVERY_S - now_s)
        return 0.0

    def note_step(self, n_requests: int, *, began_s: float) -> None:
        self._expected = max(float(n_requests), FORGET * self._expected)
        self._began_s = began_s


def paced(step: Step, *, max_requests: int) -> Step:
    """Return `step` with a wait before it."""
    pacer = StepPacer(max_requests=max_requests)

    def paced_step(engine: Any) -> bool:
        count = engine.scheduler.get_num_unfinished_requests
        if wait_s := pacer.wait_s(count(), now_s=time.monotonic()):
            time.sleep(wait_s)
            engine._process_input_queue()  # does not wait: there are requests
        n_requests, began_s = count(), time.monotonic()
        is_executed = step(engine)
        if is_executed:
            pacer.note_step(n_requests, began_s=began_s)
        return is_executed

    return paced_step


def pace_engine(*, max_requests: int) -> None:
    """Pace the steps of the engine in this process. Call it before the engine's loop begins."""
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc._process_engine_step = paced(
        EngineCoreProc._process_engine_step, max_requests=max_requests
    )
