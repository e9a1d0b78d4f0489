"""A directory in memory, for tests that are not about the disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")  # the store syncs every transaction, which takes long on a disk


@contextmanager
def fast_directory() -> Iterator[Path]:
    """Yield an empty directory and remove it at the end."""
    with tempfile.TemporaryDirectory(
        prefix="gigpo-test-", dir=MEMORY if MEMORY.is_dir() else None
    ) as name:
        yield Path(name)
