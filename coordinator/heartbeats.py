"""Send heartbeats from a component (`Heartbeat`), and keep them (`HeartbeatTracker`).

    heartbeat = Heartbeat(coordinator.heartbeat, every_s=heartbeat_every_s(config))
    # It has waited for groups for 3 s, and reports again within 15 s.
    heartbeat.report("groups", waits_s=3.0, within_s=15.0)
    # It works, and reports again within 30 minutes.
    heartbeat.report(None, waits_s=0.0, within_s=1800.0)
    heartbeat.close()

A thread sends the heartbeats, so that a long computation does not look like a lost process. Each
report sets the deadline of the next one. The thread sends nothing while the deadline is over, so
that a loop that hangs is found. The loop states how long each wait has lasted: two waits in a row
may have the same reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from configs import Config, most_workers

GONE = "gone"  # shown by the view `components` for a removed component
SEND_EVERY_S = 0.5  # at least, unless there are many workers
# Limit of the heartbeats of all workers together: with many workers each sends fewer. The limit
# gives way where a worker would send fewer than HEARTBEATS_BEFORE_SILENT within silent_s.
HEARTBEATS_PER_S = 500.0
HEARTBEATS_BEFORE_SILENT = 3
WRITE_EVERY_S = 1.0  # one transaction writes the heartbeats of all components
# Between two writes pass at least WRITE_PAUSE times the last one's duration, because no call is
# answered during a write.
WRITE_PAUSE = 20.0
LONGEST_WRITE_PAUSE_S = 10.0


def heartbeat_every_s(config: Config) -> float:
    """Return the seconds between two heartbeats of one component."""
    longest_s = config.supervision.silent_s / HEARTBEATS_BEFORE_SILENT
    return max(SEND_EVERY_S, min(most_workers(config.actors) / HEARTBEATS_PER_S, longest_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """The state of the driver, a worker or the learner, by its newest heartbeat."""

    waiting_on: str | None  # None: it works
    waits_s: float  # how long it has waited for that
    silent_s: float  # since its newest heartbeat or call


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    waiting_on: str | None
    since_s: float  # time.monotonic() when this wait began
    deadline_s: float  # time.monotonic() of the next report at the latest


class Heartbeat:
    """Call `send(waiting_on, waits_s)` every `every_s`, and at once when the reason changes."""

    def __init__(self, send: Callable[[str | None, float], object], *, every_s: float) -> None:
        self._send, self._every_s = send, every_s
        self._newest = _Report(
            waiting_on="its own start", since_s=time.monotonic(), deadline_s=float("inf")
        )
        self._changed, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def report(self, waiting_on: str | None, *, waits_s: float, within_s: float) -> None:
        """State what the loop waits for, for how long, and that it reports again `within_s`."""
        now_s, before = time.monotonic(), self._newest
        self._newest = _Report(
            waiting_on=waiting_on, since_s=now_s - waits_s, deadline_s=now_s + within_s
        )
        if waiting_on != before.waiting_on:
            self._changed.set()

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def send(self) -> None:
        """Send a heartbeat, unless the loop's next report is overdue."""
        now_s, newest = time.monotonic(), self._newest  # read once: the loop replaces it
        if now_s < newest.deadline_s:
            self._send(newest.waiting_on, max(0.0, now_s - newest.since_s))

    def _run(self) -> None:
        while not self._closed:
            self.send()
            self._changed.wait(self._every_s)
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
        self._taken_at_s = 0.0  # for the last write
        self._write_due_s = 0.0
        self._unrenewed: set[str] = set()  # sent something since their leases were renewed
        self._renewed_at_s = float("-inf")

    def record(self, name: str, waiting_on: str | None, *, waits_s: float) -> None:
        """Record a heartbeat: `name` has waited for `waiting_on` for `waits_s`."""
        now_s = time.monotonic()
        self._newest[name] = _Received(waiting_on=waiting_on, since_s=now_s - waits_s, at_s=now_s)
        self._unwritten[name] = waiting_on
        self._unrenewed.add(name)

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
        self._unrenewed.discard(name)
        self._unwritten[name] = GONE

    def take_unwritten(self) -> Mapping[str, str | None]:
        """Return the components with a heartbeat since the last write, if another write is due."""
        now_s = time.monotonic()
        if now_s < self._write_due_s:
            return {}
        self._taken_at_s, self._write_due_s = now_s, now_s + WRITE_EVERY_S
        due, self._unwritten = dict(sorted(self._unwritten.items())), {}
        return due

    def written(self) -> None:
        """Note that a write is done. The next one is due after a pause in proportion to it."""
        now_s = time.monotonic()
        pause_s = min(WRITE_PAUSE * (now_s - self._taken_at_s), LONGEST_WRITE_PAUSE_S)
        self._write_due_s = max(self._write_due_s, now_s + pause_s)

    def take_unrenewed(self, *, every_s: float) -> Collection[str]:
        """Return, once in `every_s`, the components that sent something since the last time."""
        now_s = time.monotonic()
        if now_s - self._renewed_at_s < every_s:
            return ()
        self._renewed_at_s = now_s
        due, self._unrenewed = self._unrenewed, set()
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
