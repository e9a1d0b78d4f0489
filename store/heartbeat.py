"""The pulse of a component: beats from a thread of its own, for as long as the loop it speaks for keeps its promises.

    heart = Heartbeat(lambda waiting_on: coordinator.heartbeat.remote("learner", waiting_on))
    heart.promise("groups", within_s=15.0)      # the loop waits for groups and will be heard of again within 15 s
    heart.promise(None, within_s=1800.0)        # it works, and may be silent for longer
    heart.close()

A thread, so that a long computation is not taken for a dead process; promises, so that a loop that hangs is not taken for a
living one. A process that is killed or stopped beats no more, whatever was promised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY_S = 0.5


class Heartbeat:
    """Consumes promises, produces beats: `send(waiting_on)`, about twice a second and at once when the reason changes."""

    def __init__(self, send: Callable[[str | None], object]) -> None:
        self._send = send
        self._waiting_on: str | None = "the start"
        self._due_at_s = float("inf")
        self._changed, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def promise(self, waiting_on: str | None, *, within_s: float) -> None:
        """The loop is alive, waits for this (None: it works), and calls again within so many seconds."""
        changed = waiting_on != self._waiting_on
        self._waiting_on, self._due_at_s = waiting_on, time.monotonic() + within_s
        if changed:
            self._changed.set()

    def close(self) -> None:
        """No beat after this. Idempotent."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closed:
            if time.monotonic() < self._due_at_s:
                self._send(self._waiting_on)
            self._changed.wait(EVERY_S)
            self._changed.clear()
