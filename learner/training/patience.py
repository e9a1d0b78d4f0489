"""How long the learner waits for a batch before it ends the run."""

from __future__ import annotations

import time

LOOKS = 4  # at the held-out episodes within one timeout


class Patience:
    """How long the learner waits for a batch: `starvation_timeout_s`, counted anew while held-out
    episodes end.

    Those are played before training groups. An evaluation may take longer than any wait for a batch
    should.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._heldout_open = 0
        self._deadline_s = time.monotonic() + timeout_s
        self._look_at_s = time.monotonic() + timeout_s / LOOKS

    def look_is_due(self) -> bool:
        return time.monotonic() > self._look_at_s

    def has_ended(self, heldout_open: int) -> bool:
        """Return whether the time is up, now that `heldout_open` held-out episodes are still to be
        played.
        """
        now_s = time.monotonic()
        self._look_at_s = now_s + self.timeout_s / LOOKS
        if heldout_open != self._heldout_open:
            self._heldout_open, self._deadline_s = heldout_open, now_s + self.timeout_s
        return now_s > self._deadline_s
