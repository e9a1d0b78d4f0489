"""Send heartbeats from a component (`Heartbeat`), and keep them (`HeartbeatTracker`).

    heart = Heartbeat(coordinator.heartbeat)
    # It has waited for groups for 3 s, and calls again within 15 s.
    heart.promise("groups", waits_s=3.0, within_s=15.0)
    # It works, and calls again within 30 minutes.
    heart.promise(None, waits_s=0.0, within_s=1800.0)
    heart.close()

A thread sends the heartbeats, so that a long computation does not look like a dead process. The
thread stops while the last promise is broken, so that a loop that hangs looks dead. The loop states
how long each wait has lasted: two waits in a row may have the same reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

GONE = "gone"  # shown by the view `components` for a removed component
SEND_EVERY_S = 0.5
WRITE_EVERY_S = 1.0  # one transaction writes the heartbeats of all components


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Hold the state of the driver, a worker or the learner, by its newest heartbeat."""

    waiting_on: str | None  # None: it works
    waits_s: float  # how long it has waited for that
    silent_s: float  # since the coordinator last heard of it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    waiting_on: str | None
    since_s: float  # time.monotonic() when this wait began
    due_at_s: float  # time.monotonic() by which the loop promises again


class Heartbeat:
    """Call `send(waiting_on, waits_s)` twice a second, and at once when the reason changes."""

    def __init__(self, send: Callable[[str | None, float], object]) -> None:
        self._send = send
        self._promise = _Promise(
            waiting_on="its own start", since_s=time.monotonic(), due_at_s=float("inf")
        )
        self._changed, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def promise(self, waiting_on: str | None, *, waits_s: float, within_s: float) -> None:
        """State what the loop waits for, since when, and that it calls again `within_s`."""
        now_s, before = time.monotonic(), self._promise
        self._promise = _Promise(
            waiting_on=waiting_on, since_s=now_s - waits_s, due_at_s=now_s + within_s
        )
        if waiting_on != before.waiting_on:
            self._changed.set()

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def send(self) -> None:
        """Send a heartbeat, unless the last promise is broken."""
        now_s, promise = time.monotonic(), self._promise  # read once: the loop replaces it
        if now_s < promise.due_at_s:
            self._send(promise.waiting_on, max(0.0, now_s - promise.since_s))

    def _run(self) -> None:
        while not self._closed:
            self.send()
            self._changed.wait(SEND_EVERY_S)
            self._changed.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Received:
    waiting_on: str | None
    since_s: float
    at_s: float


class HeartbeatTracker:
    """Keep the newest heartbeat of every component, by name."""

    def __init__(self) -> None:
        self._newest: dict[str, _Received] = {}
        self._unwritten: dict[str, str | None] = {}  # what each waits for
        self._written_at_s = 0.0

    def record(self, name: str, waiting_on: str | None, *, waits_s: float) -> None:
        """Record a heartbeat: `name` has waited for `waiting_on` for `waits_s`."""
        now_s = time.monotonic()
        self._newest[name] = _Received(waiting_on=waiting_on, since_s=now_s - waits_s, at_s=now_s)
        self._unwritten[name] = waiting_on

    def touch(self, name: str) -> None:
        """Record that a component made a call. Its reason to wait stays."""
        last = self._newest.get(name)
        if last is None:
            self.record(name, None, waits_s=0.0)
        else:
            self.record(name, last.waiting_on, waits_s=time.monotonic() - last.since_s)

    def remove(self, name: str) -> None:
        """Remove a component that left or was lost."""
        self._newest.pop(name, None)
        self._unwritten[name] = GONE

    def take_unwritten(self) -> Mapping[str, str | None]:
        """Return, once a second, the components with news since the last time."""
        now_s = time.monotonic()
        if now_s - self._written_at_s < WRITE_EVERY_S:
            return {}
        self._written_at_s = now_s
        due, self._unwritten = dict(sorted(self._unwritten.items())), {}
        return due

    def components(self) -> Mapping[str, Component]:
        """Return the state of every component, sorted by name."""
        now_s = time.monotonic()
        return {
            name: Component(
                waiting_on=newest.waiting_on,
                waits_s=now_s - newest.since_s,
                silent_s=now_s - newest.at_s,
            )
            for name, newest in sorted(self._newest.items())
        }
