"""Write files in a thread, behind the next learner step.

    behind = WriteBehind()
    with behind.finishing():
        behind.wait()             # until everything that was started before is written
        behind.start(write_files)
    # from here on all is written

Work runs in the order in which it was started. After a failure nothing more runs, and all methods
but `close` raise its error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

Work = Callable[[], None]


class WriteBehind:
    """A thread that does one piece of work after the other. One other thread calls the methods."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._unfinished: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def start(self, work: Work) -> Future[None]:
        """Run `work` after what was started before. The result raises its error, or the first."""
        self.check()
        started = self._thread.submit(self._run, work)
        self._unfinished.append(started)
        return started

    def check(self) -> None:
        """Raise the error of work that failed. Waits for nothing."""
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft()
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Return when everything that was started is done. Raises the first error."""
        for work in self._unfinished:
            work.result()
        self.check()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Leave the block when everything that was started is done.

        An error in the block is raised after it, rather than one of the work. What was copied
        before the error is sound, and is written.
        """
        try:
            yield
        except BaseException:
            wait(self._unfinished)
            raise
        self.wait()

    def close(self) -> None:
        """Wait for what was started, and end the thread. Raises nothing."""
        self._thread.shutdown()

    def _run(self, work: Work) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            work()
        except BaseException as error:
            self._failure = error
            raise
