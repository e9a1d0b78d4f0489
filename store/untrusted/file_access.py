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
from dataclasses import dataclass
from pathlib import Path

from store.errors import StoreError, UnsafePathError
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
MAX_LINKS = 40  # on the way to a directory; Linux follows as many
# Systems that do not have O_PATH open no link, so none is followed there.
_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WITHOUT_WAITING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A directory, or a link, through which a path leads."""

    path: Path
    is_link: bool
    owner: int
    is_in_one_for_all: bool  # everybody may make files in the directory that has it

    @property
    def is_another_users(self) -> bool:
        """Return whether its owner is neither this user nor root.

        For root it is False: what a container mounts has owners outside of it.
        """
        me = os.geteuid()
        return me != 0 and self.owner not in (me, 0)


def check_own_directory(
    path: Path,
    *,
    may_be_anothers: bool = False,
    is_made: bool = True,
    instead: str = "give a directory of your own",
) -> None:
    """Raise StoreError for a directory of another user, or one behind a link of theirs.

    They could exchange what is in it, and links would lead what is written and removed there to
    other files. In a directory for all with a sticky bit, such as /tmp, nobody else can exchange
    one of ours, so what lies there on the way must be ours: /tmp/ours of /tmp/ours/run. The
    directory itself may be another user's if the caller says so, as of a run that this user trusts,
    unless it lies in a directory for all: there they could put a link in its place.

    Call it after the directory was made: somebody else may have made it just before. From then on
    nobody else can exchange it. If not `is_made`, it may be absent, and only what is on the way is
    looked at; the next call must come before anything is written or removed there. Root's
    directories pass. So does everything for root.
    """
    entries, descriptor = _walk_to(path)
    if descriptor is not None:
        os.close(descriptor)
    for entry in entries:
        is_it = descriptor is not None and entry is entries[-1]
        must_be_ours = entry.is_link or entry.is_in_one_for_all or (is_it and not may_be_anothers)
        if must_be_ours and entry.is_another_users:
            raise StoreError(
                f"{entry.path} belongs to another user (uid {entry.owner}), who could exchange "
                f"what a run keeps there; {instead}"
            )
    if is_made and descriptor is None:
        # Not passed over: another user's may be there a moment later.
        raise StoreError(f"{path} is not there (any more), or no directory; {instead}")


@contextmanager
def opened_by_own_links(path: Path) -> Iterator[tuple[int, Path]]:
    """Give the descriptor of a directory, and its path without links.

    Raises UnsafePathError for a link of another user, anywhere on the way: they could lead it
    elsewhere between two looks. Root's links pass. So does everything for root.
    """
    entries, descriptor = _walk_to(path)
    if descriptor is None:
        raise FileNotFoundError(errno.ENOENT, "no directory is there", str(path))
    try:
        for entry in entries:
            if entry.is_link and entry.is_another_users:
                text = f"{entry.path} is a link of another user (uid {entry.owner})"
                raise UnsafePathError(
                    errno.ELOOP, f"{text}, who can lead it elsewhere; give the path behind it"
                )
        yield descriptor, entries[-1].path
    finally:
        os.close(descriptor)


def _walk_to(path: Path) -> tuple[list[_Entry], int | None]:
    """Go to a directory one name after the other, as the system does.

    Return what lies on the way, the directory itself at the end, and a descriptor of it, which the
    caller closes; None if no directory is there. Each name is looked up in the very directory that
    was looked at before, so nobody can exchange one meanwhile.
    """
    with suppress(OSError):
        os.stat(path)  # mounts what is mounted at its first use, which O_PATH does not
    entries: list[_Entry] = []
    names, n_links = list(reversed(path.absolute().parts)), 0
    place, here = Path("/"), os.open("/", _ON_THE_WAY)
    try:
        while names:
            name = names.pop()
            below = os.open(name, _ON_THE_WAY | os.O_NOFOLLOW, dir_fd=here)
            try:
                if name == "..":
                    its_path, above = place.parent, os.stat("..", dir_fd=below)
                else:
                    its_path, above = place / name, os.fstat(here)
                entry = _entry_of(below, its_path, above=above)
                target = os.readlink("", dir_fd=below) if entry.is_link else ""
            except BaseException:
                os.close(below)
                raise
            if name != "/":  # where the path, or the target of a link, begins
                entries.append(entry)
            if entry.is_link:
                names += reversed(Path(target).parts)
                n_links += 1
                os.close(below)
            else:
                os.close(here)
                place, here = entry.path, below
            if n_links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not stat.S_ISDIR(os.fstat(here).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if not entries or entries[-1].is_link:  # "/", or a link to "." or "/"
            entries.append(_entry_of(here, place, above=os.stat("..", dir_fd=here)))
    except (FileNotFoundError, NotADirectoryError):  # it is to be made, or a link leads nowhere
        os.close(here)
        return entries, None
    except BaseException:
        os.close(here)
        raise
    return entries, here


def _entry_of(descriptor: int, path: Path, *, above: os.stat_result) -> _Entry:
    """Describe what was opened. `above` is the status of the directory that has it."""
    found = os.fstat(descriptor)
    return _Entry(
        path=path,
        is_link=stat.S_ISLNK(found.st_mode),
        owner=found.st_uid,
        is_in_one_for_all=bool(above.st_mode & stat.S_IWOTH),
    )


def open_directory(path: Path, *, root: Path) -> int:
    """Open a directory: `root`, or one beneath it. The caller closes the descriptor."""
    names = _names(path, root)
    descriptor = os.open(root, _DIRECTORY)
    try:
        for name in names:
            below = _open_directory_in(descriptor, name, path=path)
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened_parent(path: Path, *, root: Path) -> Iterator[tuple[int, str]]:
    """Give the descriptor of the directory that holds `path`, and the name in it."""
    names = _names(path, root)
    if not names:
        text = f"{path} is the directory {root} itself; name a file in it"
        raise UnsafePathError(errno.EINVAL, text)
    descriptor = open_directory(root.joinpath(*names[:-1]), root=root)
    try:
        yield descriptor, names[-1]
    finally:
        os.close(descriptor)


def open_file(path: Path, *, root: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file. The caller closes the descriptor."""
    with opened_parent(path, root=root) as (directory, name):
        return open_file_in(directory, name, path=path, flags=flags, mode=mode)


def open_file_in(
    directory: int, name: str, *, path: Path, flags: int = os.O_RDONLY, mode: int = 0o666
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
        _check_size(file.fileno(), path, at_most=at_most)
        return file.read()


def digest(path: Path, *, root: Path, at_most: int) -> str:
    """Return the digest of a regular file that may be larger than memory."""
    with open(open_file(path, root=root), "rb") as file:
        _check_size(file.fileno(), path, at_most=at_most)
        hashed = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=HASH_BYTES))
        return hashed.hexdigest()


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
                    directory = _open_directory_in(descriptor, entry.name, path=below)
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


def _open_directory_in(directory: int, name: str, *, path: Path) -> int:
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


def _check_size(descriptor: int, path: Path, *, at_most: int) -> None:
    n_bytes = os.fstat(descriptor).st_size
    if n_bytes > at_most:
        text = f"{path} has {n_bytes:,} bytes, more than {at_most:,}: no run wrote it"
        raise UnsafePathError(errno.EFBIG, f"{text}; restore it from a backup")


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
