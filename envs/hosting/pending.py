"""What is being waited for, and for how long: so that who hangs can be named before its time is
up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from envs.base import Task

MAX_ACTION_CHARACTERS = 80

T = TypeVar("T")


class PendingOperations:
    """Unanswered requests in the order they were made, each by a key of its owner's."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, tuple[str, float]] = {}

    def begin(self, key: Hashable, what: str) -> None:
        self._waits[key] = (what, time.monotonic())

    def end(self, key: Hashable) -> None:
        """Nothing, if it has ended."""
        self._waits.pop(key, None)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """It is waited for as long as the `with` block lasts."""
        key = object()
        self.begin(key, what)
        try:
            yield
        finally:
            self.end(key)

    def oldest(self) -> tuple[str, float] | None:
        """What has been waited for longest, and for how many seconds; None: nothing is."""
        what, since_s = next(iter(self._waits.values()), ("", 0.0))
        return (what, time.monotonic() - since_s) if what else None


def request_name(method: str, argument: object) -> str:
    """ "reset of task 'a task'", "step 'an action'"."""
    if isinstance(argument, Task):
        return f"{method} of task {argument.id!r}"
    shown = repr(argument)
    return f"{method} {shown if len(shown) <= MAX_ACTION_CHARACTERS else shown[:MAX_ACTION_CHARACTERS] + '...'}"


def run_in_thread(work: Callable[[], T], *, name: str, timeout_s: float | None) -> T:
    """Return `work()`, done in a thread of its own. Raises TimeoutError after `timeout_s`.

    Late work goes on until this process ends, and Ctrl-C does not wait for it. The caller may be
    on an event loop, on which `work` could not start another.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done.result(timeout=timeout_s)
