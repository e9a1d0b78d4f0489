"""Prepare the next batch in a thread while the current one trains.

    with closing(Prefetch(loader)) as prefetch:
        prefetch.start(version=7, learner_step=8)          # the version it will be trained at
        while (batch := prefetch.take(timeout_s=0.05)) is None: ...
        prefetch.start(version=8, learner_step=9)          # see "Staleness"
        train(batch)                                       # publishes version 8

The thread consumes complete groups, produces one PreparedBatch, and waits for "groups", which
workers unblock by committing. `close` ends it. Two batches are claimed at a time: A, which trains
at version v, and B after it. The guarantees of a run still hold:

Staleness
    A learner step publishes exactly one version, also if it skips its updates. So B trains at v + 1
    and is claimed for v + 1: groups too old for v + 1 become stale at once. The loop asserts the
    version. Groups sampled by v have staleness 1 in B, so max_staleness=0 allows no prefetching
    unless all groups are offline, which have no staleness. With a critic nothing is prefetched: its
    values of B follow its update by A.
Admission
    It bounds open, complete and claimed groups together. A claim moves groups from complete to
    claimed, so workers get neither more nor fewer leases. B needs only groups already leased, and
    settling A makes room for the next, so nothing deadlocks.
    A batch that is refilled gives up groups that teach nothing, and they are outstanding no more.
    So workers get leases for others in their place, also with max_staleness=0.
Order
    One thread settles batches in the order of their claims, so learner steps are consecutive. A
    group completed while A trains comes one batch later than without prefetching.
Crash
    The next start releases every claim that was not settled (`Coordinator.resume`). Groups that
    became stale for v + 1 stay stale, even if the run restarts from v.
Stop
    `close` may leave one claimed batch. The loop gives it back (`Coordinator.release_claims`).
Memory
    Rows and tensors of two batches are in main memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from learner.data.batch_loader import BatchLoader, PreparedBatch, n_wanted, prepare_batch
from store import Batch

# Between two claims while there are too few groups: POLL_SHARE of the wait so far, within these
# limits: the wait grows by 2 % at most, and by half a second. A claim costs the coordinator and the
# learner about a millisecond of CPU each.
POLL_S, LONGEST_POLL_S = 0.05, 0.5
POLL_SHARE = 0.02

_log = logging.getLogger(__name__)


class Prefetch:
    """Prepare one batch at a time: call `start`, then `take` until it returns the batch.

    `take` raises the thread's error. If nobody takes the batch, `close` logs the error instead: the
    run ends for another reason, and its next start claims the same groups again.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self.loader = loader
        self.has_groups = False  # the batch under way has all that it asked for, and is being read
        self.n_claims = 0  # claims and refills so far that got groups
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._coming: Future[PreparedBatch | None] | None = None

    @property
    def under_way(self) -> bool:
        """Return whether a batch was started and not taken."""
        return self._coming is not None

    def start(self, *, version: int, learner_step: int) -> None:
        """Begin to prepare the batch of `learner_step`, to train at `version`. Return at once."""
        assert self._coming is None, "take the batch under way first"
        self.has_groups = False
        self._coming = self._thread.submit(self._next_batch, version, learner_step)

    def take(self, *, timeout_s: float) -> PreparedBatch | None:
        """Return the batch that was started, or None if it is not ready within `timeout_s`."""
        assert self._coming is not None, "start a batch first"
        # Not result(timeout): it could not tell this time-out from the thread's own TimeoutError.
        if not wait([self._coming], timeout=timeout_s).done:
            return None
        coming, self._coming = self._coming, None
        return coming.result()

    def close(self) -> None:
        """End the thread after its current read. A batch that nobody took stays claimed."""
        self._stop.set()
        self._thread.shutdown(wait=True)
        error = self._coming.exception() if self._coming is not None else None
        if error is not None:
            _log.error("the next batch could not be prepared: %s", error, exc_info=error)

    def _next_batch(self, version: int, learner_step: int) -> PreparedBatch | None:
        batch = self._wait_for_groups(partial(self.loader.claim, version))
        if batch is None:
            return None

        def more(batch: Batch, filtered: Mapping[bytes, str]) -> Batch | None:
            n_groups = n_wanted(self.loader, batch, filtered)
            if not n_groups:
                return None
            return self._wait_for_groups(
                partial(
                    self.loader.refill,
                    batch.batch_id,
                    filtered=list(filtered),
                    n_groups=n_groups,
                    current_version=version,
                )
            )

        return prepare_batch(
            self.loader, batch, version=version, learner_step=learner_step, more=more
        )

    def _wait_for_groups(self, ask: Callable[[], Batch | None]) -> Batch | None:
        """Ask until the coordinator has groups. Return None after `close`."""
        began_s, self.has_groups = time.monotonic(), False
        while not self._stop.is_set():
            batch = ask()
            if batch is not None:
                self.n_claims += 1
                self.has_groups = True
                return batch
            waited_s = time.monotonic() - began_s
            self._stop.wait(min(max(POLL_S, POLL_SHARE * waited_s), LONGEST_POLL_S))
        return None
