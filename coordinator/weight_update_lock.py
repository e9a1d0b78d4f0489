"""Let workers load the files of new weights in turns. The lock is in memory only."""

from __future__ import annotations

import time

WORKERS_PER_UPDATE = 10  # of which one may update its weights
WEIGHT_UPDATE_S = 60.0  # longest time that a worker holds the lock on weight updates


class WeightUpdateLock:
    """Let a few workers at a time load the files of new weights: generation never stops everywhere.

    One in WORKERS_PER_UPDATE may, and at least one. With thousands of workers the last one would
    otherwise get its weights hours after the first.
    """

    def __init__(self, n_workers: int) -> None:
        self._n_holders = max(1, n_workers // WORKERS_PER_UPDATE)
        self._until_s: dict[str, float] = {}  # by holder, the longest one first

    def acquire(self, worker: str) -> bool:
        """Return whether `worker` holds the lock now, for up to WEIGHT_UPDATE_S."""
        now_s = time.monotonic()
        self._until_s.pop(worker, None)
        if len(self._until_s) >= self._n_holders:
            longest, until_s = next(iter(self._until_s.items()))
            if now_s < until_s:
                return False
            del self._until_s[longest]
        self._until_s[worker] = now_s + WEIGHT_UPDATE_S
        return True

    def release(self, worker: str) -> None:
        """Release the lock, if `worker` holds it."""
        self._until_s.pop(worker, None)
