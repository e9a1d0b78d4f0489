"""Check the weights that an engine is to load, and record what their change cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from store import WeightFileError

TIED_OUTPUT_LAYER = "lm_head.weight"
RECEIVED = "(received)"  # in place of a path: weights that the learner sent directly


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLoad:
    """One change of weights. Generation pauses from `pause_ms` to `resume_ms`.

    An adapter is added in `update_ms`, between two forward passes; the other four are 0.
    """

    version: int
    file_digest: str  # of the bytes as the engine read or received them
    received: bool  # sent by the learner; no file was read
    check_ms: float  # comparison of names and shapes with the model
    # The engine reads the files for their digest, or has received them; generation goes on.
    verify_ms: float
    pause_ms: float
    start_ms: float
    update_ms: float
    finish_ms: float
    resume_ms: float


class PhaseClock:
    """Measure consecutive phases: `lap` ends the current one and names it."""

    def __init__(self) -> None:
        self.laps_ms: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.laps_ms[f"{phase}_ms"] = (now_s - self._last_s) * 1e3
        self._last_s = now_s


def check_shapes(
    shapes: Mapping[str, list[int]], *, expected: Mapping[str, list[int]], source: str
) -> None:
    """Check that every name and shape agrees. Raises WeightFileError, which names `source`.

    vLLM would keep the old values of a missing tensor without an error.
    """
    found = dict(shapes)
    if TIED_OUTPUT_LAYER not in expected:
        found.pop(TIED_OUTPUT_LAYER, None)  # some writers store it a second time; vLLM skips it
    names = found.keys() | expected.keys()
    wrong = sorted(name for name in names if found.get(name) != expected.get(name))
    if wrong:
        name = wrong[0]
        raise WeightFileError(
            f"{source} does not fit the model being served: {len(wrong)} tensors differ, the first "
            f"is {name}, of shape {found.get(name, 'missing')} here and "
            f"{expected.get(name, 'missing')} there. Publish all tensors of the base model under "
            "their names"
        )
