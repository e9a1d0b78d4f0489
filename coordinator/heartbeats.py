"""Who was heard of when, and what everybody waits for: what the supervisor looks at. Pure, but for
the clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from store import Counts

# what the view `components` shows of one that left, or was lost, until it beats again
GONE = "gone"
WRITE_EVERY_S = 1.0  # beats of all components together are one transaction


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Of a worker or the learner, at its newest beat."""

    waiting_on: str | None  # None: it works
    waits_s: float  # for how long it has waited for that
    silent_s: float  # for how long nothing was heard of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What the terminal shows."""

    counts: Counts
    version: int
    learner_step: int
    metrics: Mapping[str, float]  # newest value of each name
    components: Mapping[str, Component]  # by name: what each waits for, and when it was heard of
    heldout_open: int  # held-out groups still to be played
    # the newest ones of the learner, numbered from 1: alarms and the like
    notices: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Beat:
    waiting_on: str | None
    since_s: float
    at_s: float


class HeartbeatTracker:
    """Consumes beats. `components()` is what they say by now; `to_be_written()` those the catalog
    has to be told of.
    """

    def __init__(self) -> None:
        self._beats: dict[str, _Beat] = {}
        self._unwritten: dict[str, _Beat] = {}
        self._written_at_s = 0.0
        self._is_closed = False

    def close(self) -> None:
        """The catalog is closed: beats of who has not ended yet are still heard, and nobody has to
        be told of them.
        """
        self._is_closed = True

    def beat(self, name: str, waiting_on: str | None, *, waits_s: float) -> None:
        """Note a heartbeat: `name` has waited for `waiting_on` (None: it works) for `waits_s`."""
        now_s = time.monotonic()
        beat = _Beat(waiting_on=waiting_on, since_s=now_s - waits_s, at_s=now_s)
        self._beats[name] = self._unwritten[name] = beat

    def heard(self, name: str) -> None:
        """Note that a component asked something, so it is alive. What it waits for, and since when,
        stays.
        """
        last = self._beats.get(name)
        if last is None:
            self.beat(name, None, waits_s=0.0)
        else:
            self.beat(name, last.waiting_on, waits_s=time.monotonic() - last.since_s)

    def forget(self, name: str) -> None:
        now_s = time.monotonic()
        self._beats.pop(name, None)
        self._unwritten[name] = _Beat(waiting_on=GONE, since_s=now_s, at_s=now_s)

    def to_be_written(self) -> Mapping[str, _Beat]:
        """Those heard of, or forgotten, since the last time, once a second; else nothing, as once
        it is closed.
        """
        now_s = time.monotonic()
        if self._is_closed or now_s - self._written_at_s < WRITE_EVERY_S:
            return {}
        self._written_at_s = now_s
        due, self._unwritten = dict(sorted(self._unwritten.items())), {}
        return due

    def components(self) -> Mapping[str, Component]:
        now_s = time.monotonic()
        return {
            name: Component(
                waiting_on=beat.waiting_on, waits_s=now_s - beat.since_s, silent_s=now_s - beat.at_s
            )
            for name, beat in sorted(self._beats.items())
        }
