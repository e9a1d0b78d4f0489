"""What is being waited for, and for how long: so that who hangs can be named before its time is
up.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from envs.base import Task

MAX_ACTION_CHARACTERS = 80


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
