"""What a component waits for, and since when, so that a long wait has a name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager


class Waits:
    """The waits that are going on in one event loop.

    with waits.on("the disk"):
        await ...
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._since_s: dict[int, tuple[float, str]] = {}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        number = next(self._numbers)
        self._since_s[number] = (asyncio.get_running_loop().time(), what)
        try:
            yield
        finally:
            del self._since_s[number]

    def longest(self, *, over_s: float) -> str | None:
        """What has been waited for the longest, if that is for more than `over_s`."""
        since_s, what = min(self._since_s.values(), default=(float("inf"), ""))
        return what if asyncio.get_running_loop().time() - since_s > over_s else None
