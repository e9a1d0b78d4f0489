"""Say how much a shortened test does: a part in `make test`, all of it in `make test-slow`.

A test that uses this carries the mark `shortened`, by which `make test-slow` finds it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

IN_FULL = os.environ.get("TESTS_IN_FULL") == "1"


def some(cases: Sequence[T], *, every: int) -> list[T]:
    """Return every n-th case, beginning with the first; in full, all of them."""
    return list(cases) if IN_FULL else list(cases[::every])


def examples(short: int, *, full: int) -> int:
    """Return how many examples to try."""
    return full if IN_FULL else short
