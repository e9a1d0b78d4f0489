"""Files that are either absent or whole, whatever is killed and whenever; none is written through a
link.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from store.errors import StoreError, UnsafePathError
from store.untrusted.file_access import is_directory, open_directory, opened_parent

READ_ONLY = 0o444
READ_WRITE = 0o644
TEMPORARY_SUFFIX = ".tmp"  # of files being written; what dead writers left has it too
_SAFE_DIRECTORIES: set[Path] = set()  # those whose names this process has synced
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
Show = Callable[[str, str, int], None]  # a name, the new name, and the directory that both are in


def write_atomically(path: Path, data: bytes | memoryview, *, mode: int, beneath: Path) -> None:
    """Write `data` aside, then show it under `path` in one step, replacing what was there.

    The file is synced before the rename and the directory after it: without the first a power cut
    can leave a name with no bytes, without the second no name at all. Raises UnsafePathError if
    `path` leads out of `beneath`.
    """
    _write_aside(path, data, mode=mode, beneath=beneath, show=_replace)


def write_once(path: Path, data: bytes | memoryview, *, mode: int, beneath: Path) -> None:
    """Like write_atomically, but raises FileExistsError instead of replacing what is there."""
    _write_aside(path, data, mode=mode, beneath=beneath, show=_link_then_forget)


def _replace(aside: str, final: str, directory: int) -> None:
    os.replace(aside, final, src_dir_fd=directory, dst_dir_fd=directory)


def _link_then_forget(aside: str, final: str, directory: int) -> None:
    # Fails if the name is taken, which a rename would not.
    os.link(aside, final, src_dir_fd=directory, dst_dir_fd=directory)
    os.unlink(aside, dir_fd=directory)


def _write_aside(
    path: Path, data: bytes | memoryview, *, mode: int, beneath: Path, show: Show
) -> None:
    try:
        with opened_parent(path, root=beneath) as (directory, name):
            # The dot and the suffix keep *.parquet globs from seeing it; the ids keep two writers
            # apart.
            aside = f".{name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}"
            try:
                with open(_new_file(aside, directory), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fchmod(file.fileno(), mode)
                    os.fsync(file.fileno())
                show(aside, name, directory)
                _sync(directory)
            except BaseException:
                # where nothing can be written, nothing can be removed either
                with suppress(OSError):
                    os.unlink(aside, dir_fd=directory)
                raise
    except (FileExistsError, UnsafePathError):
        raise
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free space or fix the permissions, then retry"
        ) from error


def _new_file(name: str, directory: int) -> int:
    try:
        return os.open(name, _NEW, READ_WRITE, dir_fd=directory)
    except FileExistsError:  # of a dead process with this one's ids, or a link that was planted
        os.unlink(name, dir_fd=directory)
        return os.open(name, _NEW, READ_WRITE, dir_fd=directory)


def make_directory(directory: Path, *, beneath: Path) -> None:
    """Make `directory`, and what it is in, so that their names survive a power cut.

    One that is there already may have been made by a process that was killed before it synced the
    name. The directory `beneath` may be reached through links, nothing below it may. Raises
    UnsafePathError, StoreError.
    """
    is_root = directory == beneath or directory in beneath.parents
    is_there = directory.is_dir() if is_root else is_directory(directory, root=beneath)
    if directory in _SAFE_DIRECTORIES and is_there:
        return
    parent = directory.parent
    try:
        if not is_there and not parent.is_dir():
            make_directory(parent, beneath=beneath)
        opened = os.open(parent, os.O_RDONLY) if is_root else open_directory(parent, root=beneath)
        try:
            if not is_there:
                with suppress(FileExistsError):
                    os.mkdir(directory.name, dir_fd=opened)
            _sync(opened)
        finally:
            os.close(opened)
        if not is_root:  # what has the name may be a link or a file
            os.close(open_directory(directory, root=beneath))
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot make {directory}: {error.strerror}; free space or fix the permissions, then "
            "retry"
        ) from error
    _SAFE_DIRECTORIES.add(directory)


def sync_directory(directory: Path, *, beneath: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    descriptor = open_directory(directory, root=beneath)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(directory: int) -> None:
    os.fsync(directory)
