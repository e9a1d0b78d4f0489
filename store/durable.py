"""Files that are either absent or whole, whatever is killed and whenever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from store.errors import StoreError

READ_ONLY = 0o444
READ_WRITE = 0o644


def write_atomically(path: Path, data: bytes | memoryview, *, mode: int) -> None:
    """Write `data` aside, then show it under `path` in one step, replacing what was there.

    The file is synced before the rename and the directory after it: without the first a power cut can leave a name
    with no bytes, without the second no name at all.
    """
    _write_aside(path, data, mode=mode, show=os.replace)


def write_once(path: Path, data: bytes | memoryview, *, mode: int) -> None:
    """Like write_atomically, but raises FileExistsError instead of replacing what is there."""

    def link_then_forget(aside: Path, final: Path) -> None:
        os.link(aside, final)  # fails if the name is taken, which a rename would not
        os.unlink(aside)

    _write_aside(path, data, mode=mode, show=link_then_forget)


def _write_aside(path: Path, data: bytes | memoryview, *, mode: int, show: Callable[[Path, Path], None]) -> None:
    # The dot and the suffix keep *.parquet globs from seeing it; the pid keeps two writers apart.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        show(aside, path)
        sync_directory(path.parent)
    except FileExistsError:
        aside.unlink(missing_ok=True)
        raise
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}; free space or fix the permissions, then retry") from error


def make_directory(directory: Path) -> None:
    """Make `directory` inside an existing one, so that its name survives a power cut."""
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
