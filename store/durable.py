"""Files that are either absent or whole, whatever is killed and whenever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from store.errors import StoreError

READ_ONLY = 0o444
READ_WRITE = 0o644
TEMPORARY_SUFFIX = ".tmp"  # of files being written; what dead writers left has it too
_SAFE_DIRECTORIES: set[Path] = set()  # those whose names this process has synced


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
    # The dot and the suffix keep *.parquet globs from seeing it; the ids keep two writers apart.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}")
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
        with suppress(OSError):  # where nothing can be written, nothing can be removed either
            aside.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}; free space or fix the permissions, then retry") from error


def make_directory(directory: Path) -> None:
    """Make `directory`, and what it is in, so that their names survive a power cut.

    One that is there already may have been made by a process that was killed before it synced the name.
    """
    if directory in _SAFE_DIRECTORIES and directory.is_dir():
        return
    if not directory.is_dir():
        if not directory.parent.is_dir():
            make_directory(directory.parent)
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot make {directory}: {error.strerror}; free space or fix the permissions, then retry"
            ) from error
    sync_directory(directory.parent)
    _SAFE_DIRECTORIES.add(directory)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
