"""Open files beneath one directory without following a link, so that no path leads out of a run.

    with opened_parent(layout.manifest, root=layout.root) as (directory, name): ...
    data = read_bytes(layout.run_json, root=layout.root, at_most=MAX_TEXT_BYTES)
    remove_tree(layout.quarantine, root=layout.root)

The root itself may be given through links: `runs` may be a link to a larger disk. Beneath it every
directory is opened by its name in the directory above, with O_NOFOLLOW. Files must be regular
files: a FIFO would block, and a device would never end. All functions raise UnsafePathError for a
path that leads elsewhere, and OSError as the system calls do.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from store.errors import UnsafePathError
from store.hashing import HASH_BYTES

# Bound of run.json, config.yaml and driver.json. A run has some kilobytes. Decoded JSON takes 30
# times its size.
MAX_TEXT_BYTES = 4 << 20
# A manifest names every file of a run: 200,000 of them. DuckDB reads no larger JSON object. Decoded
# it takes 25 times its size.
MAX_MANIFEST_BYTES = 16 << 20
MAX_OPEN_SQL_BYTES = 1 << 20  # the views, and the macros of a run
# Levels below a directory that is walked. A run has three; a user's files in logs/ may have more.
MAX_DEPTH = 16
PIECE_BYTES = 1 << 20  # of a file are read at once
BLOCK_BYTES = 4096  # of most file systems: what is written of a block takes all of it
_ZEROS = bytes(BLOCK_BYTES)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WITHOUT_WAITING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_directory(path: Path, *, root: Path) -> int:
    """Open a directory: `root`, or one beneath it. The caller closes the descriptor."""
    _names(path, root)
    opened = os.open(root, _DIRECTORY)
    try:
        return open_directory_below(opened, path, root=root)
    finally:
        os.close(opened)


def open_directory_below(opened: int, path: Path, *, root: Path) -> int:
    """Do as `open_directory` below `opened`, the descriptor of `root`."""
    names = _names(path, root)
    descriptor = os.dup(opened)
    try:
        for name in names:
            below = open_directory_in(descriptor, name, path=path)
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened_parent(path: Path, *, root: Path) -> Iterator[tuple[int, str]]:
    """Give the descriptor of the directory that holds `path`, and the name in it."""
    parent, name = _parent_and_name(path, root)
    descriptor = open_directory(parent, root=root)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)


@contextmanager
def opened_parent_below(opened: int, path: Path, *, root: Path) -> Iterator[tuple[int, str]]:
    """Do as `opened_parent` below `opened`, the descriptor of `root`."""
    parent, name = _parent_and_name(path, root)
    descriptor = open_directory_below(opened, parent, root=root)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)


def open_file(path: Path, *, root: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file. The caller closes the descriptor."""
    with opened_parent(path, root=root) as (directory, name):
        return open_file_in(directory, name, path=path, flags=flags, mode=mode)


def open_file_in(
    directory: int,
    name: str,
    *,
    path: Path,
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
) -> int:
    """Open a regular file of an open directory, which errors name `path`.

    The caller closes the descriptor.
    """
    _check_no_null(name)
    try:
        descriptor = os.open(name, flags | _WITHOUT_WAITING, mode, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _a_link(path) from error
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a FIFO that nobody reads
            raise _no_file(path) from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _no_file(path)


def read_bytes(path: Path, *, root: Path, at_most: int) -> bytes:
    """Return the content of a regular file. Raises UnsafePathError beyond `at_most` bytes."""
    with opened_parent(path, root=root) as (directory, name):
        return read_bytes_in(directory, name, path=path, at_most=at_most)


def read_bytes_in(directory: int, name: str, *, path: Path, at_most: int) -> bytes:
    """Return the content of a regular file of an open directory, which errors name `path`."""
    with open(open_file_in(directory, name, path=path), "rb") as file:
        return read_opened(file, path, at_most=at_most)


def read_opened(file: BinaryIO, path: Path, *, at_most: int) -> bytes:
    """Return the content of an open file. Raises UnsafePathError beyond `at_most` bytes."""
    # Its owner may make it longer meanwhile.
    return file.read(_checked_size(file.fileno(), path, at_most=at_most))


def digest_in(directory: int, name: str, *, path: Path, at_most: int) -> str:
    """Return the digest of a regular file of an open directory. It may be larger than memory."""
    with open(open_file_in(directory, name, path=path), "rb") as file:
        left = _checked_size(file.fileno(), path, at_most=at_most)
        hashed = hashlib.blake2b(digest_size=HASH_BYTES)
        while piece := file.read(min(left, PIECE_BYTES)):
            hashed.update(piece)
            left -= len(piece)
        return hashed.hexdigest()


def copy_first(source: int, copy: BinaryIO, *, n_bytes: int) -> None:
    """Copy the first `n_bytes` of a file, whose owner may make it longer or shorter meanwhile.

    Holes are passed over, and blocks of zeros become some: a file may stand for many more bytes
    than it has.
    """
    at = 0
    while at < n_bytes:
        try:
            at = min(n_bytes, os.lseek(source, at, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            at = min(n_bytes, os.fstat(source).st_size)  # there is nothing but a hole
        copy.seek(at)
        piece = os.pread(source, min(n_bytes - at, PIECE_BYTES), at)
        if not piece:
            break
        step = BLOCK_BYTES if _ZEROS in piece else PIECE_BYTES
        for begin in range(0, len(piece), step):
            block = piece[begin : begin + step]
            if block == _ZEROS:
                copy.seek(BLOCK_BYTES, os.SEEK_CUR)
            else:
                copy.write(block)
        at += len(piece)
    copy.truncate(at)


def read_text(path: Path, *, root: Path, errors: str = "strict") -> str:
    """Return the content of a small text file."""
    return read_bytes(path, root=root, at_most=MAX_TEXT_BYTES).decode(errors=errors)


def status(path: Path, *, root: Path) -> os.stat_result | None:
    """Return the status of a file, a directory or a link, None if nothing is there."""
    try:
        if not _names(path, root):
            return os.stat(root)
        with opened_parent(path, root=root) as (directory, name):
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # no file has such a name
            return None
        raise


def is_file(path: Path, *, root: Path) -> bool:
    """Return whether a regular file is there. False for one behind a link."""
    return _has_kind(path, root=root, is_kind=stat.S_ISREG)


def is_directory(path: Path, *, root: Path) -> bool:
    """Return whether a directory is there. False for one behind a link."""
    return _has_kind(path, root=root, is_kind=stat.S_ISDIR)


def remove(path: Path, *, root: Path) -> None:
    """Remove a file or a link. Do nothing if it is not there."""
    with suppress(FileNotFoundError), opened_parent(path, root=root) as (directory, name):
        os.unlink(name, dir_fd=directory)


def remove_tree(path: Path, *, root: Path) -> None:
    """Remove a directory with its content, or a link. Do nothing if it is not there.

    Raises UnsafePathError, before anything is removed, for a tree deeper than MAX_DEPTH.
    """
    with suppress(FileNotFoundError), opened_parent(path, root=root) as (directory, name):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            for _ in walk(path, root=root):  # checks the depth, because rmtree is recursive
                pass
            shutil.rmtree(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)


def rename(path: Path, target: Path, *, root: Path) -> None:
    """Rename a file or directory beneath the same root, replacing a file of the new name."""
    with (
        opened_parent(path, root=root) as (source, name),
        opened_parent(target, root=root) as (dest, new),
    ):
        os.replace(name, new, src_dir_fd=source, dst_dir_fd=dest)


def names(path: Path, *, root: Path) -> list[str]:
    """Return the names in a directory, sorted. Return none if it is not there."""
    try:
        descriptor = open_directory(path, root=root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)


def walk(path: Path, *, root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Give every file and link beneath a directory, with its status. Links are not followed.

    Raises UnsafePathError naming a directory that is more than MAX_DEPTH levels below `path`.
    """
    try:
        descriptor = open_directory(path, root=root)
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from _walk(descriptor, path, n_levels=MAX_DEPTH)


def _walk(descriptor: int, path: Path, *, n_levels: int) -> Iterator[tuple[Path, os.stat_result]]:
    """Give the files beneath an open directory, and close it. Each level has one descriptor."""
    try:
        with os.scandir(descriptor) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            below = path / entry.name
            is_dir = entry.is_dir(follow_symlinks=False)
            if is_dir and n_levels == 0:
                text = f"{below} lies too deep: no run has directories in so many others; remove it"
                raise UnsafePathError(errno.ENAMETOOLONG, text)
            try:
                if is_dir:
                    directory = open_directory_in(descriptor, entry.name, path=below)
                else:
                    seen = entry.stat(follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):  # removed or replaced since
                continue
            if is_dir:
                yield from _walk(directory, below, n_levels=n_levels - 1)
            else:
                yield below, seen
    finally:
        os.close(descriptor)


def open_directory_in(directory: int, name: str, *, path: Path) -> int:
    """Open a directory of an open directory. `path` is its name in errors."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        if error.errno == errno.ENOTDIR:  # Linux says this for a link too
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
        if is_link:
            raise _a_link(path) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _checked_size(descriptor: int, path: Path, *, at_most: int) -> int:
    n_bytes = os.fstat(descriptor).st_size
    if n_bytes > at_most:
        text = f"{path} has {n_bytes:,} bytes, more than {at_most:,}: no run wrote it"
        raise UnsafePathError(errno.EFBIG, f"{text}; restore it from a backup")
    return n_bytes


def _names(path: Path, root: Path) -> tuple[str, ...]:
    """Return the names from `root` down to `path`. Raises UnsafePathError if it is elsewhere."""
    _check_no_null(str(path))
    try:
        names = path.relative_to(root).parts
    except ValueError:
        names = ("..",)
    if ".." in names:
        text = f"{path} is not beneath {root}; a run names only files of its own"
        raise UnsafePathError(errno.EXDEV, text)
    return names


def _parent_and_name(path: Path, root: Path) -> tuple[Path, str]:
    names = _names(path, root)
    if not names:
        text = f"{path} is the directory {root} itself; name a file in it"
        raise UnsafePathError(errno.EINVAL, text)
    return root.joinpath(*names[:-1]), names[-1]


def _check_no_null(name: str) -> None:
    if "\0" in name:
        text = f"{name!r} has a null byte in it; no run names such a file"
        raise UnsafePathError(errno.EINVAL, text)


def _has_kind(path: Path, *, root: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        found = status(path, root=root)
    except UnsafePathError:
        return False
    return found is not None and is_kind(found.st_mode)


def _a_link(path: Path) -> UnsafePathError:
    text = f"{path} is or lies behind a symbolic link, and a run has none; remove the link"
    return UnsafePathError(errno.ELOOP, text)


def _no_file(path: Path) -> UnsafePathError:
    text = f"{path} is no regular file but a FIFO, a socket or a device; remove it"
    return UnsafePathError(errno.EINVAL, text)
