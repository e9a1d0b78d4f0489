"""The pulse of a component: beats from a thread of its own, for as long as the loop it speaks for
keeps its promises.

    heart = Heartbeat(lambda waiting_on, waits_s: coordinator.heartbeat.remote("learner", waiting_on, waits_s))
    heart.promise("groups", waits_s=3.0, within_s=15.0)  # waits for groups, since 3 s; heard of again within 15 s
    heart.promise(None, waits_s=0.0, within_s=1800.0)    # it works, and may be silent for longer
    heart.close()

The loop says how long each wait has lasted: two waits for the same thing have the same reason, so
the reason alone does not tell where one ends and the next begins.

A thread, so that a long computation is not taken for a dead process; promises, so that a loop that
hangs is not taken for a living one. A process that is killed or stopped beats no more, whatever was
promised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    waiting_on: str | None
    since_s: float  # time.monotonic() when this wait began
    due_at_s: float  # time.monotonic() until which the loop need not promise again


class Heartbeat:
    """Consume promises, produce heartbeats.

    `send(waiting_on, waits_s)` is called about twice a second, and at once when the reason changes.
    """

    def __init__(self, send: Callable[[str | None, float], object]) -> None:
        self._send = send
        self._promise = _Promise(
            waiting_on="its own start", since_s=time.monotonic(), due_at_s=float("inf")
        )
        self._changed, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def promise(self, waiting_on: str | None, *, waits_s: float, within_s: float) -> None:
        """Say that the loop is alive, and calls again within `within_s`.

        `waiting_on` is what it waits for (None: it works), `waits_s` how long this wait has lasted.
        """
        now_s, before = time.monotonic(), self._promise
        self._promise = _Promise(
            waiting_on=waiting_on, since_s=now_s - waits_s, due_at_s=now_s + within_s
        )
        if waiting_on != before.waiting_on:
            self._changed.set()

    def close(self) -> None:
        """No beat after this. Idempotent."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def beat(self) -> None:
        """Send a heartbeat now, unless the last promise is broken."""
        # one record: never one wait's reason with another's time
        now_s, promise = time.monotonic(), self._promise
        if now_s < promise.due_at_s:
            self._send(promise.waiting_on, max(0.0, now_s - promise.since_s))

    def _run(self) -> None:
        while not self._closed:
            self.beat()
            self._changed.wait(EVERY_S)
            self._changed.clear()
