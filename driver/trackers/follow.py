"""Follow a run's metrics, and give each row once to everyone that shows them.

    with follow_metrics(config, layout, say=say, consumers=[webhook]) as metrics:
        supervisor.train(metrics.after(progress.show))

Consumes  the catalog's metrics, at every look of the supervisor
Produces  rows for TensorBoard, the trackers, the webhook and the lines of JSON
Waits for nothing while the run goes on. At its end a tracker gets START_S and CLOSE_S
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from configs import Config
from coordinator import Status
from driver.progress import said_while
from driver.tensorboard_writer import TensorBoardFiles
from driver.trackers.tracker import TrackerProcess, check_trackers
from printable import one_line
from store import Metric, RunLayout, metrics_since

TENSORBOARD = "tensorboard"
Show = Callable[[Status], None]


class Consumer(Protocol):
    """Consume the metrics of a run."""

    def wants(self) -> bool:
        """Return whether metrics can be given now. Otherwise they are given later."""

    def take(self, rows: Sequence[Metric], *, has_all_rows: bool) -> None:
        """Take rows, ordered by learner step: the new ones.

        `has_all_rows`: all rows that the run has now. They are given first, and after a roll-back.
        """

    def close(self) -> None:
        """Close. No more rows follow."""


class Metrics:
    """Give the metrics of one run to its consumers."""

    def __init__(self, layout: RunLayout, consumers: Sequence[Consumer]) -> None:
        self._layout = layout
        self._lsn = dict.fromkeys(consumers, 0)  # of the catalog: metrics up to here were given
        self.follows = False  # the catalog was read once, so its owner has opened it

    def follow(self) -> None:
        """Give the new rows. Raises StoreError if they cannot be read."""
        self.follows = True
        for consumer, lsn in self._lsn.items():
            if consumer.wants():
                changes = metrics_since(self._layout, lsn)
                if changes.rows or changes.has_all_rows:
                    consumer.take(changes.rows, has_all_rows=changes.has_all_rows)
                self._lsn[consumer] = changes.lsn

    def after(self, show: Show) -> Show:
        """Return a `show` that also follows the metrics."""

        def show_and_follow(status: Status) -> None:
            show(status)
            self.follow()

        return show_and_follow


@contextmanager
def follow_metrics(
    config: Config,
    layout: RunLayout,
    *,
    say: Callable[[str], None],
    tell: Callable[[str], None] | None = None,
    consumers: Sequence[Consumer] = (),
) -> Iterator[Metrics]:
    """Yield the metrics of a run, followed by its trackers and by the `consumers`.

    `say` shows what failed, `tell` (by default the same) what is waited for. At the end, give them
    the rows that the processes recorded while they stopped.
    """
    check_trackers(config)
    with ExitStack() as stack:
        trackers: list[TrackerProcess] = []
        tell = tell or say
        stack.enter_context(_closed_at_the_end(trackers, tell))
        followers = list(consumers)
        for name in config.trackers:
            if name == TENSORBOARD:
                followers.append(TensorBoardFiles(layout, say))
            else:
                trackers.append(TrackerProcess(name, config=config, layout=layout, say=say))
        for follower in followers:
            stack.callback(follower.close)
        metrics = Metrics(layout, [*trackers, *followers])
        try:
            yield metrics
        finally:
            _follow_a_last_time(metrics, trackers, say=say, tell=tell)


@contextmanager
def _closed_at_the_end(
    trackers: Sequence[TrackerProcess], tell: Callable[[str], None]
) -> Iterator[None]:
    try:
        yield
    finally:
        with ExitStack() as each, said_while(lambda: "sending the last metrics to trackers", tell):
            for tracker in trackers:
                each.callback(tracker.close)


def _follow_a_last_time(
    metrics: Metrics,
    trackers: Sequence[TrackerProcess],
    *,
    say: Callable[[str], None],
    tell: Callable[[str], None],
) -> None:
    """Give the last rows. An error that ends the run is never replaced by another."""
    if not metrics.follows:
        return
    try:
        with said_while(lambda: "waiting for the trackers", tell):
            for tracker in trackers:
                tracker.wait_until_ready()
        metrics.follow()
    # Nothing may take the place of the error in flight.
    except Exception as error:  # noqa: BLE001
        say(f"trackers lack the last metrics: {one_line(error)}")
