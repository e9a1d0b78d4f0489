"""See who may enter a directory while files are written into it."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from store import atomic_write


def modes_at_each_write(
    directories: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return a list that gets the modes of those `directories` that exist at each file's begin."""
    modes: list[int] = []
    new_file = atomic_write._new_file

    def watched(name: str, directory: int, *, mode: int) -> int:
        modes.extend(stat.S_IMODE(each.stat().st_mode) for each in directories() if each.exists())
        return new_file(name, directory, mode=mode)

    monkeypatch.setattr(atomic_write, "_new_file", watched)
    return modes
