"""Choose what a command shows: all of it, only what matters, or lines of JSON.

    screen = Screen.quiet()
    screen.console.print("cloning ...")      # what is done: nothing is shown
    screen.warn("worker-0 died ...")         # is shown

With lines of JSON, standard output has one object per learner step and per event, and nothing else.
Everything else goes to standard error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from driver.trackers.delivered import by_step
from printable import plain_console, printable
from store import Metric

HELDOUT = "heldout/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """The outputs of a command: its lines, and its warnings and report."""

    console: Console  # what is done
    end: Console  # warnings, and the report at the end
    lines: JsonLines | None = None

    @classmethod
    def full(cls) -> Screen:
        """Show everything. In a terminal lines are broken at its width, elsewhere not."""
        return shown_in(plain_console(soft_wrap=not sys.stdout.isatty()))

    @classmethod
    def quiet(cls) -> Screen:
        """Show warnings and the report only."""
        end = plain_console(soft_wrap=not sys.stdout.isatty())
        nothing = plain_console(soft_wrap=True)
        nothing.quiet = True
        return cls(console=nothing, end=end)

    @classmethod
    def json(cls) -> Screen:
        """Write lines of JSON on standard output, and everything else on standard error."""
        console = plain_console(soft_wrap=not sys.stderr.isatty(), stderr=True)
        return cls(console=console, end=console, lines=JsonLines())

    def warn(self, text: str) -> None:
        """Show a warning, as an event too."""
        self.end.print(printable(text), style="yellow")
        self.event("warning", text=text)

    def event(self, event: str, **values: object) -> None:
        """Write a line of JSON, if lines of JSON are wanted."""
        if self.lines is not None:
            self.lines.write(event, **values)


def shown_in(console: Console) -> Screen:
    """Return a screen that shows everything in one console."""
    return Screen(console=console, end=console)


class JsonLines:
    """Write one line of JSON per learner step and per evaluation. A consumer of the metrics."""

    def __init__(self) -> None:
        self._newest: dict[str, int] | None = None  # learner step of each name; None: nothing yet

    def wants(self) -> bool:
        return True

    def take(self, rows: Sequence[Metric], *, has_all_rows: bool) -> None:
        """Write the new rows. Those of earlier starts are not written.

        After a roll-back say so, and write the steps that are trained again.
        """
        newest = {row.name: row.learner_step for row in rows}
        before = newest if self._newest is None else self._newest
        if has_all_rows and (step := _last_trained(newest)) < _last_trained(before):
            self.write("rolled back", learner_step=step)
        new = [row for row in rows if row.learner_step > before.get(row.name, -1)]
        for learner_step, values in by_step(new):
            heldout = {name: each for name, each in values.items() if name.startswith(HELDOUT)}
            trained = {name: each for name, each in values.items() if name not in heldout}
            for event, some in (("step", trained), ("evaluation", heldout)):
                if some:
                    self.write(event, learner_step=learner_step, metrics=some)
        self._newest = newest if has_all_rows else {**before, **newest}

    def close(self) -> None: ...

    def write(self, event: str, **values: object) -> None:
        """Write an event. A number that is not finite is null, as JSON has none."""
        print(json.dumps(_finite({"event": event, **values})), flush=True)


def _last_trained(newest: dict[str, int]) -> int:
    return max((step for name, step in newest.items() if not name.startswith(HELDOUT)), default=0)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
