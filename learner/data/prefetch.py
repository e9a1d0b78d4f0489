"""The next batch, made ready in a thread while the current one trains.

    with Prefetch(source) as batches:
        batches.start(version=7, learner_step=8)           # the version it will be trained at
        while (ready := batches.take(timeout_s=0.05)) is None: ...
        batches.start(version=8, learner_step=9)           # unless max_staleness is 0 and something is played
        train(ready)                                       # publishes version 8

The thread consumes complete groups, produces one PreparedBatch, waits for "groups" (the workers
unblock it by committing), ended by `close`. While it works two batches are claimed: A, which trains
at version v, and B. Why that changes no promise:

Staleness. A learner step publishes exactly one version, also where it learns nothing and where an
update is skipped. So the
    batch after A trains at v + 1, and B is claimed with v + 1: what would be too old then is stale now, and cannot be in B.
    `PreparedBatch.version` says so, and the loop refuses to train at another. What was sampled by v itself has staleness 1 in
    B, so at max_staleness 0 there is nothing that could be prefetched, and the loop does not try. Stored groups have no
    staleness: where nothing is played it always does.
Admission. It bounds open + complete + claimed. Claiming moves groups from complete to claimed, so
workers are handed out
    neither more nor less: B is made of groups that would have waited, complete, until A was settled. Nor can that stop the
    run: B needs no group that is not handed out already, and settling A makes room for the batch after B.
Order. Batches are settled in the order of their claims, by one thread, the loop's, so learner steps
stay consecutive. Within
    a claim the oldest groups come first, as ever; a group that completes while A trains is not in B but in the one after,
    where it is one version older. Batches that close earlier is what prefetching costs.
Crash. A claim that was not settled, A's and B's alike, also one whose answer never arrived, is
released when the learner
    starts again (`Coordinator.resume`): its groups are complete again, as if never asked. What became stale for v + 1
    stays stale, although the run may go on from a checkpoint at v: too early by one version, seen in the store, and rare.
Stop. `close` ends the thread and leaves at most one claimed batch that nobody will train on; the
loop then gives it back
    (`Coordinator.release_claims`), which is the same release without a crash.
Memory. Rows and tensors of two batches are held at once, in main memory.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from learner.data.batch_loader import BatchLoader, PreparedBatch, ready_batch

POLL_S = 0.05  # between two claims while there are too few groups

_log = logging.getLogger(__name__)


class Prefetch:
    """One batch at a time: `start`, then `take` until it is there.

    What the thread raises, `take` raises. Where nobody takes any more `close` logs it: the run ends
    for a reason of its own, with a checkpoint, and the next start claims the same groups and meets
    the same error.
    """

    def __init__(self, source: BatchLoader) -> None:
        self.source = source
        self.has_groups = False  # of the batch under way: claimed, and now read and packed
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._coming: Future[PreparedBatch | None] | None = None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def under_way(self) -> bool:
        """Whether a batch was started and not taken."""
        return self._coming is not None

    def start(self, *, version: int, learner_step: int) -> None:
        """Waits for the groups of `learner_step`, which will train at `version`, and makes them
        ready; returns at once.
        """
        assert self._coming is None, "take the batch under way first"
        self.has_groups = False
        self._coming = self._thread.submit(self._next_batch, version, learner_step)

    def take(self, *, timeout_s: float) -> PreparedBatch | None:
        """The batch that was started, or None if it is not ready within `timeout_s`."""
        assert self._coming is not None, "start a batch first"
        # not result(timeout): the thread's own time-outs are errors
        if not wait([self._coming], timeout=timeout_s).done:
            return None
        coming, self._coming = self._coming, None
        return coming.result()

    def close(self) -> None:
        """Ends the thread, waiting for what it may be reading. Idempotent; what it claimed and
        nobody took stays claimed.
        """
        self._stop.set()
        self._thread.shutdown(wait=True)
        error = self._coming.exception() if self._coming is not None else None
        if error is not None:
            _log.error(
                "the batch after the last one could not be made ready: %s", error, exc_info=error
            )

    def _next_batch(self, version: int, learner_step: int) -> PreparedBatch | None:
        while not self._stop.is_set():
            batch = self.source.claim(version)
            if batch is not None:
                self.has_groups = True
                return ready_batch(self.source, batch, version=version, learner_step=learner_step)
            self._stop.wait(POLL_S)
        return None
