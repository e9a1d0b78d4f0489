"""See who may enter a directory while files are written into it."""

from __future__ import annotations

import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from store import atomic_write


def modes_at_each_write(
    directories: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return a list that gets the modes of those `directories` that exist at each file's begin."""
    modes: list[int] = []
    written_aside = atomic_write.written_aside

    def watched(*place: Any, **options: Any) -> AbstractContextManager[BinaryIO]:
        modes.extend(stat.S_IMODE(each.stat().st_mode) for each in directories() if each.exists())
        return written_aside(*place, **options)

    monkeypatch.setattr(atomic_write, "written_aside", watched)
    return modes
