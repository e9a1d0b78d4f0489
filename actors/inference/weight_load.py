"""What one change of weights cost."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLoad:
    """What one change of weights cost; generation stands still from pause to resume."""

    version: int
    # of the files as the engine read or received them (`store.files_digest`), equal to the
    # published one
    file_digest: str
    received: bool  # the learner sent them, and no file was read
    check_ms: float  # headers of the new files against the model
    # the engine reads the files for their digest, or has them; until here generation goes on
    verify_ms: float
    pause_ms: float
    start_ms: float
    update_ms: float
    finish_ms: float
    resume_ms: float


class PhaseClock:
    def __init__(self) -> None:
        self.laps_ms: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.laps_ms[f"{phase}_ms"] = (now_s - self._last_s) * 1e3
        self._last_s = now_s
