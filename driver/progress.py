"""Shows a run to a person: a live table in a terminal, a line now and then elsewhere, and notices.

While processes start or stop there are no figures: `said_while` says then what is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis import duration
from configs import Config, is_offline
from coordinator import Status
from driver.health import STARVING_S
from learner import LEARNER_STEP
from printable import printable

# between two lines where the output is not a terminal, or nothing else is shown
LINE_EVERY_S = 10.0
FIRST_LINE_S = 3.0  # what takes less needs no line
NOTICE_CHARACTERS = 300  # of a notice; the events in the store have all of it


class Progress:
    """with Progress(config, title) as progress: progress.show(status)"""

    def __init__(self, config: Config, title: str, console: Console) -> None:
        self.config, self.title, self.console = config, title, console
        self.live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )
        self.started = time.monotonic()
        self.first_step: int | None = None
        self.lined_at = -1.0
        self.heldout_groups = 0  # of the round that is shown
        self.noticed = 0  # number of the last notice shown

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self.live.stop()

    def show(self, status: Status) -> None:
        """While it trains."""
        if self.first_step is None:
            self.first_step = status.learner_step
        self._show(status, self.figures(status))

    def show_evaluation(self, status: Status) -> None:
        """While held-out tasks are played and nothing else is done."""
        if not self.heldout_groups:
            self.heldout_groups, self.started, self.title = (
                status.heldout_open,
                time.monotonic(),
                "evaluating",
            )
            self.lined_at = -1.0  # what begins is said at once
        self._show(status, self.evaluation_figures(status))

    def _show(self, status: Status, figures: list[tuple[str, str]]) -> None:
        """Show the figures: in the table of a terminal, else in a line every LINE_EVERY_S."""
        self.show_notices(status)
        if self.live:
            self.live.update(self.table(status, figures), refresh=True)
        elif time.monotonic() - self.lined_at >= LINE_EVERY_S or self.lined_at < 0:
            self.lined_at = time.monotonic()
            line = "  ".join(f"{name} {value}" for name, value in figures)
            self.console.print(f"{self.title}  {line}", markup=False)

    def show_notices(self, status: Status) -> None:
        """Each notice once, as a line of its own that stays; in a terminal it appears above the
        table.
        """
        for number, text in sorted(status.notices.items()):
            if number > self.noticed:
                short = (
                    text if len(text) <= NOTICE_CHARACTERS else f"{text[:NOTICE_CHARACTERS]} ..."
                )
                self.console.print(printable(short), style="yellow", markup=False)
                self.noticed = number

    def table(self, status: Status, figures: list[tuple[str, str]]) -> Table:
        table = Table(title=f"{self.title}  {self.config.run_dir}", show_header=False, min_width=60)
        for name, value in figures:
            table.add_row(name, value)
        for name, component in status.components.items():
            if component.waiting_on == LEARNER_STEP:
                if component.waits_s > STARVING_S:
                    table.add_row(
                        f"{name} is at", f"one learner step, {component.waits_s:.0f} s", style="dim"
                    )
            elif component.waiting_on is not None:
                # Text, as it may name a task: a plain string could hold markup
                text = Text(printable(f"{component.waiting_on}, {component.waits_s:.0f} s"))
                table.add_row(f"{name} waits for", text, style="dim")
        return table

    def figures(self, status: Status) -> list[tuple[str, str]]:
        metrics, counts = status.metrics, status.counts
        rows = [
            ("step", f"{status.learner_step}/{self.config.learner.steps}"),
            ("elapsed", duration(time.monotonic() - self.started)),
            ("left", self.time_left(status)),
            ("version", str(status.version)),
            (
                "success",
                shown(
                    metrics,
                    "offline/success" if is_offline(self.config) else "train/success",
                    "{:.2f}",
                ),
            ),
            ("held-out", shown(metrics, "heldout/success", "{:.2f}")),
            ("staleness", shown(metrics, "staleness/max", "{:.0f}")),
            ("queue", f"{counts.complete} ready, {counts.open} playing"),
            ("trajectories", str(counts.trajectories)),
            ("generated", shown(metrics, "tokens/generated_per_s", "{:.0f} tok/s")),
            ("trained", shown(metrics, "tokens/trained_per_s", "{:.0f} tok/s")),
            ("learner idle", shown(metrics, "learner/idle_fraction", "{:.0%}")),
            ("learner step", shown(metrics, "time/step_s", "{:.2f} s")),
        ]
        return rows

    def evaluation_figures(self, status: Status) -> list[tuple[str, str]]:
        done = self.heldout_groups - status.heldout_open
        elapsed_s = time.monotonic() - self.started
        return [
            ("held-out tasks", f"{done}/{self.heldout_groups} played"),
            ("elapsed", duration(elapsed_s)),
            ("left", duration(elapsed_s / done * status.heldout_open) if done else "?"),
            ("model", self.config.endpoint.model)
            if self.config.endpoint.url
            else ("version", str(status.version)),
            ("episodes of each", str(self.config.evaluation.final_episodes_per_task)),
        ]

    def time_left(self, status: Status) -> str:
        """At the rate of this start, "?" until there is one; a learner that died may be behind
        where this start began.
        """
        done = status.learner_step - (self.first_step or 0)
        if done <= 0:
            return "?"
        left_s = (
            (time.monotonic() - self.started)
            / done
            * (self.config.learner.steps - status.learner_step)
        )
        return duration(left_s)


@contextmanager
def said_while(
    line: Callable[[], str], say: Callable[[str], None], *, spinner: Console | None = None
) -> Iterator[None]:
    """Say `line()` and the seconds so far, after FIRST_LINE_S and then every LINE_EVERY_S, until
    the block ends.

    With a console as `spinner`, a terminal also shows the first line beside a spinner.
    """
    started, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        pause_s = FIRST_LINE_S
        while not ended.wait(pause_s):
            say(f"{line()}: {time.monotonic() - started:.0f} s so far")
            pause_s = LINE_EVERY_S

    teller = threading.Thread(target=tell, name="said_while", daemon=True)
    teller.start()
    try:
        # Text: rich would read markup and emoji in a plain string
        with spinner.status(Text(printable(line()))) if spinner else nullcontext():
            yield
    finally:
        ended.set()
        teller.join()


def said_with_spinner(what: str, console: Console) -> AbstractContextManager[None]:
    """Say on the console what is waited for, beside a spinner in a terminal."""
    return said_while(lambda: what, partial(console.print, markup=False), spinner=console)


def shown(metrics: object, name: str, form: str) -> str:
    value = dict(metrics).get(name)  # type: ignore[call-overload]
    return "-" if value is None else form.format(value)
