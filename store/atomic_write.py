"""Write files that are either absent or whole after a crash. No file is written through a link."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from store.errors import StoreError, UnsafePathError
from store.untrusted.file_access import is_directory, open_directory, opened_parent

READ_ONLY = 0o444  # file modes
READ_WRITE = 0o644  # for the owner alone to write
PRIVATE = 0o600  # for the owner alone
TEMPORARY_SUFFIX = ".tmp"  # of unfinished files, also those of dead writers
_SAFE_DIRECTORIES: set[Path] = set()  # directories whose names this process has synced
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Takes a name, the new name, and the descriptor of the directory that holds both.
Show = Callable[[str, str, int], None]


def write_atomically(path: Path, data: bytes | memoryview, *, mode: int, beneath: Path) -> None:
    """Write `data` aside, then rename it to `path`, replacing any file of that name.

    The file is synced before the rename, and its directory after it. Without the first sync a power
    cut can leave a name without bytes, without the second one no name at all. Raises
    UnsafePathError if `path` leads out of `beneath`.
    """
    _write_aside(path, data, mode=mode, beneath=beneath, show=_replace)


def replace_atomically(
    path: Path, data: bytes | memoryview, *, mode: int, beneath: Path, first: Callable[[], None]
) -> None:
    """Do as `write_atomically`. Call `first` when the data is on disk, before it gets its name."""

    def replace(aside: str, final: str, directory: int) -> None:
        first()
        _replace(aside, final, directory)

    _write_aside(path, data, mode=mode, beneath=beneath, show=replace)


def write_atomically_in(
    directory: int, name: str, data: bytes | memoryview, *, mode: int, path: Path
) -> None:
    """Do as `write_atomically` in an open directory. Errors name `path`."""
    with _named(path), written_aside(directory, name, mode=mode) as file:
        file.write(data)


def write_once(path: Path, data: bytes | memoryview, *, mode: int, beneath: Path) -> None:
    """Write `data` aside, then link it to `path`. Raises FileExistsError if the name is taken.

    Sync and check the path as `write_atomically` does.
    """
    _write_aside(path, data, mode=mode, beneath=beneath, show=_link_then_unlink)


def _replace(aside: str, final: str, directory: int) -> None:
    os.replace(aside, final, src_dir_fd=directory, dst_dir_fd=directory)


def _link_then_unlink(aside: str, final: str, directory: int) -> None:
    # Unlike a rename, a link fails if the name is taken.
    os.link(aside, final, src_dir_fd=directory, dst_dir_fd=directory)
    os.unlink(aside, dir_fd=directory)


def _write_aside(
    path: Path, data: bytes | memoryview, *, mode: int, beneath: Path, show: Show
) -> None:
    with (
        _named(path),
        opened_parent(path, root=beneath) as (directory, name),
        written_aside(directory, name, mode=mode, show=show) as file,
    ):
        file.write(data)


@contextmanager
def written_aside(
    directory: int, name: str, *, mode: int, show: Show = _replace
) -> Iterator[BinaryIO]:
    """Give a new file of an open directory, which takes its name once the body has filled it.

    If the body raises, nothing is left of it. Raises OSError.
    """
    # Nobody knows the name before. The dot and the suffix hide it from *.parquet globs.
    aside = f".{name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    synced = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:  # a descriptor of O_PATH cannot be synced
        with open(os.open(aside, _NEW, mode, dir_fd=synced), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        show(aside, name, synced)
        _sync(synced)
    except BaseException:
        # Where nothing can be written, nothing can be removed either.
        with suppress(OSError):
            os.unlink(aside, dir_fd=synced)
        raise
    finally:
        os.close(synced)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make a StoreError that names `path` of an error of the system."""
    try:
        yield
    except (FileExistsError, UnsafePathError):
        raise
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free space or fix the permissions, then retry"
        ) from error


def make_directory(directory: Path, *, beneath: Path) -> None:
    """Make `directory` and its parents, and sync their names.

    An existing directory is synced too: the process that made it may have been killed before it
    synced the name. Only the directory `beneath` may be reached through links. Raises
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
        if not is_root:  # the name may be that of a link or a file
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
    """Sync a directory, so that its names survive a power cut."""
    descriptor = open_directory(directory, root=beneath)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(directory: int) -> None:
    os.fsync(directory)
