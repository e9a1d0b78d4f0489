"""Show progress on the screen: a live table in a terminal, some lines elsewhere, and notices.

While processes start or stop there are no figures; `said_while` shows what is waited for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis import duration, speed_limit, success_metric
from configs import Config
from coordinator import Status
from driver.health import STARVING_S
from driver.screen import Screen
from learner import LEARNER_STEP
from printable import printable

LINE_EVERY_S = 10.0  # where there is no terminal
FIRST_LINE_S = 3.0  # a shorter wait needs no line
LOOKS_COUNTED = 60  # half a minute: the share of the workers that wait is a mean over them
NOTICE_CHARACTERS = 300  # of a notice; the events in the store have all of it


class Progress:
    """Show the status of a run: `with Progress(config, title=..., screen=...) as progress`."""

    def __init__(self, config: Config, *, title: str, screen: Screen) -> None:
        self.config, self.title, self.screen = config, title, screen
        self.console = console = screen.console
        self.waiting: deque[float] = deque(maxlen=LOOKS_COUNTED)  # share of the workers, per look
        is_live = console.is_terminal and not console.quiet
        self.live = Live(console=console, auto_refresh=False, transient=True) if is_live else None
        self.started_s = time.monotonic()
        self.first_step: int | None = None  # None: nothing was shown yet
        self.shown_at_s = float("-inf")  # of the last line
        self.heldout_groups = 0  # of the round that is shown; each is one episode
        self.last_notice = 0  # number of the last notice shown

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, status: Status) -> None:
        """Show the figures of training."""
        if self.first_step is None:
            self.first_step = status.learner_step
        self._count_waiting(status)
        self._show(status, self._figures(status))

    def show_evaluation(self, status: Status) -> None:
        """Show the figures of an evaluation, while nothing else is done."""
        if not self.heldout_groups:
            self.heldout_groups, self.title = status.heldout_open, "evaluating"
            self.started_s = time.monotonic()
            self.shown_at_s = float("-inf")  # its begin is shown at once
        self._show(status, self._evaluation_figures(status))

    def _show(self, status: Status, figures: list[tuple[str, str]]) -> None:
        """Show the figures: in the table of a terminal, else in a line every LINE_EVERY_S."""
        self._show_notices(status)
        if self.live:
            self.live.update(self._table(status, figures), refresh=True)
        elif time.monotonic() - self.shown_at_s >= LINE_EVERY_S:
            self.shown_at_s = time.monotonic()
            line = "  ".join(f"{name} {value}" for name, value in figures)
            self.console.print(f"{self.title}  {line}")

    def _show_notices(self, status: Status) -> None:
        """Show each notice once, in a line of its own; in a terminal above the table."""
        for number, text in sorted(status.notices.items()):
            if number > self.last_notice:
                if len(text) > NOTICE_CHARACTERS:
                    text = f"{text[:NOTICE_CHARACTERS]} ..."
                self.screen.warn(text)
                self.last_notice = number

    def _table(self, status: Status, figures: list[tuple[str, str]]) -> Table:
        table = Table(title=f"{self.title}  {self.config.run_dir}", show_header=False, min_width=60)
        for name, value in figures:
            table.add_row(name, value)
        for name, component in status.components.items():
            if component.waiting_on == LEARNER_STEP:
                if component.waits_s > STARVING_S:
                    doing = f"one learner step, {component.waits_s:.0f} s"
                    table.add_row(f"{name} is at", doing, style="dim")
            elif component.waiting_on is not None:
                # Text, because it may name a task: a plain string could hold markup.
                text = Text(printable(f"{component.waiting_on}, {component.waits_s:.0f} s"))
                table.add_row(f"{name} waits for", text, style="dim")
        return table

    def _figures(self, status: Status) -> list[tuple[str, str]]:
        metrics, counts = status.metrics, status.counts
        return [
            ("step", f"{status.learner_step}/{self.config.learner.steps}"),
            ("elapsed", duration(time.monotonic() - self.started_s)),
            ("left", self._time_left(status)),
            ("version", str(status.version)),
            ("success", _metric(metrics, success_metric(self.config), form="{:.2f}")),
            ("held-out", _metric(metrics, "heldout/success", form="{:.2f}")),
            ("staleness", _metric(metrics, "staleness/max", form="{:.0f}")),
            ("queue", f"{counts.complete} ready, {counts.open} playing"),
            ("trajectories", str(counts.trajectories)),
            ("generated", _metric(metrics, "tokens/generated_per_s", form="{:.0f} tok/s")),
            ("trained", _metric(metrics, "tokens/trained_per_s", form="{:.0f} tok/s")),
            ("learner idle", _metric(metrics, "learner/idle_fraction", form="{:.0%}")),
            ("learner step", _metric(metrics, "time/step_s", form="{:.2f} s")),
            ("limited by", self._limit(metrics)),
        ]

    def _count_waiting(self, status: Status) -> None:
        """Count the workers that wait for the learner: admission is closed to them."""
        workers = [each for name, each in status.components.items() if name.startswith("worker-")]
        if workers:
            n_waiting = sum(worker.waiting_on == "admission" for worker in workers)
            self.waiting.append(n_waiting / len(workers))

    def _limit(self, metrics: Mapping[str, float]) -> str:
        """Return which side limits the speed."""
        idle = metrics.get("learner/idle_fraction")
        if idle is None or not self.waiting:  # before the first step, or without workers
            return "-"
        workers_wait = sum(self.waiting) / len(self.waiting)
        return speed_limit(learner_waits=idle, workers_wait=workers_wait)

    def _evaluation_figures(self, status: Status) -> list[tuple[str, str]]:
        done = self.heldout_groups - status.heldout_open
        elapsed_s = time.monotonic() - self.started_s
        endpoint = self.config.endpoint
        return [
            ("held-out episodes", f"{done}/{self.heldout_groups} played"),
            ("elapsed", duration(elapsed_s)),
            ("left", duration(elapsed_s / done * status.heldout_open) if done else "?"),
            ("model", endpoint.model) if endpoint.url else ("version", str(status.version)),
        ]

    def _time_left(self, status: Status) -> str:
        """Return the time left at the rate since this start, "?" before the first step."""
        # A learner that died goes on from its checkpoint, which may lie before this start.
        done = status.learner_step - (self.first_step or 0)
        if done <= 0:
            return "?"
        step_s = (time.monotonic() - self.started_s) / done
        return duration(step_s * (self.config.learner.steps - status.learner_step))


@contextmanager
def said_while(
    line: Callable[[], str], say: Callable[[str], None], *, spinner: Console | None = None
) -> Iterator[None]:
    """Say `line()` and the seconds so far, after FIRST_LINE_S and then every LINE_EVERY_S.

    A terminal given as `spinner` also shows the first line beside a spinner.
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


def said_with_spinner(doing: str, console: Console) -> AbstractContextManager[None]:
    """Show what is done, beside a spinner in a terminal."""
    return said_while(lambda: doing, console.print, spinner=console)


def _metric(metrics: Mapping[str, float], name: str, *, form: str) -> str:
    """Return a metric as text, "-" if it has no value yet."""
    return form.format(metrics[name]) if name in metrics else "-"
