"""Wait for other people's code: with a name for the oldest pending operation, or in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from envs.base import Task
from envs.hosting.answers import StepFrom

MAX_ACTION_CHARACTERS = 80

T = TypeVar("T")


class PendingOperations:
    """Operations that have begun and not ended, oldest first, each under a key of the caller's."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, tuple[str, float]] = {}

    def begin(self, key: Hashable, description: str) -> None:
        self._pending[key] = (description, time.monotonic())

    def end(self, key: Hashable) -> None:
        """Forget an operation. Does nothing if it has ended already."""
        self._pending.pop(key, None)

    @contextmanager
    def on(self, description: str) -> Iterator[None]:
        """Count an operation as pending for as long as the `with` block lasts."""
        key = object()
        self.begin(key, description)
        try:
            yield
        finally:
            self.end(key)

    def oldest(self) -> tuple[str, float] | None:
        """Return the oldest operation and for how many seconds it is pending; None if none is."""
        for description, begun_at in self._pending.values():
            return description, time.monotonic() - begun_at
        return None


def request_name(method: str, argument: object) -> str:
    """Return "reset of task 'a task'" or "step 'an action'"."""
    if isinstance(argument, Task):
        return f"{method} of task {argument.id!r}"
    shown = repr(argument.action if isinstance(argument, StepFrom) else argument)
    if len(shown) > MAX_ACTION_CHARACTERS:
        shown = shown[:MAX_ACTION_CHARACTERS] + "..."
    return f"{method} {shown}"


def request_of_task(method: str, argument: object, task: Task) -> str:
    """Return "reset of task train/7" or "step 'go' of task train/7"."""
    request = method if isinstance(argument, Task) else request_name(method, argument)
    return f"{request} of task {task.split}/{task.id}"


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
