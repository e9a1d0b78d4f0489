"""Write directories that appear whole or not at all: weights, checkpoints, adapters, exports.

    with atomic_directory(Path("checkpoints/step000008")) as unfinished:
        (unfinished / "model.safetensors").write_bytes(data)
    # from here on it survives a power cut

    with new_directory(Path("my-model")) as unfinished: ...
    # the same in a place that a person chose: it removes nothing that it did not make

    with visible_whole(Path("weights/v000008")) as unfinished: ...
    # from here on it is whole for every reader
    sync_whole(Path("weights/v000008"))    # from here on it survives a power cut

    prune_oldest(Path("weights"), keep=4)

Imports the standard library only: the tests of power cuts load this file by itself.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store import UnsafePathError

UNFINISHED_SUFFIX, REPLACED_SUFFIX = ".tmp", ".old"
WHOLE = re.compile(r"(?:v|step)([0-9]+)")  # names of weights and checkpoints
UNFINISHED = re.compile(r"\.?(?:v|step)[0-9]+(?:\..*)?\.(?:tmp|old)")


@contextmanager
def atomic_directory(dest: Path) -> Iterator[Path]:
    """Yield a directory to fill. One rename gives it its name after all its files are on disk.

    An existing directory of that name is replaced. Only a process that died between the rename and
    the announcement in the catalog leaves one, so nobody reads it: announced numbers are never used
    again. Raises OSError, naming `dest`, if the disk fails. The unfinished directory is then
    removed, as it may be what fills the disk.
    """
    with _unfinished(dest) as unfinished:
        yield unfinished
        _sync_files(unfinished)
        _show(unfinished, dest)
        _sync_name(dest)
        _remove_replaced(dest)


@contextmanager
def new_directory(dest: Path) -> Iterator[Path]:
    """Yield a directory to fill. One rename gives it its name after all its files are on disk.

    Nothing beside it is replaced or removed: the unfinished directory has a name of its own, and is
    removed on every failure. Nobody else may enter it before it is whole: its digest may show that
    a private file got into it. Raises FileExistsError if `dest` exists, and OSError naming `dest`
    if the disk fails.
    """
    unique = f"{os.getpid()}-{secrets.token_hex(8)}"
    unfinished = dest.with_name(f".{dest.name}.{unique}{UNFINISHED_SUFFIX}")
    with names_the_disk(dest):
        dest.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir(mode=0o700)
        try:
            mode = _usual_mode(unfinished)
            yield unfinished
            unfinished.chmod(mode)
            _sync_files(unfinished)
            if os.path.lexists(dest):
                reason = "it exists; choose another directory, or remove it"
                raise FileExistsError(errno.EEXIST, reason, str(dest))
            unfinished.rename(dest)
            _sync_name(dest)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _usual_mode(directory: Path) -> int:
    """Return the mode of a new directory, which the umask and the directory above it decide."""
    # A default ACL of that directory takes the place of the umask.
    probe = directory / "mode"
    probe.mkdir()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.rmdir()
    return mode


@contextmanager
def names_the_disk(dest: Path) -> Iterator[None]:
    """Add `dest` and a remedy to an OSError that names no file, as a failed write raises it."""
    try:
        yield
    except UnsafePathError:  # about what is read
        raise
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        text = (
            f"cannot write {dest}: {error.strerror}; free space or fix the permissions, then start "
            "the run again"
        )
        raise OSError(error.errno, text) from error


@contextmanager
def _unfinished(dest: Path) -> Iterator[Path]:
    """Yield an empty directory beside `dest`, and remove it if the disk fails."""
    unfinished = dest.with_name(dest.name + UNFINISHED_SUFFIX)
    with names_the_disk(dest):
        try:
            _clear(unfinished)
            _remove_replaced(dest)
            unfinished.mkdir(parents=True)
            yield unfinished
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


@contextmanager
def visible_whole(dest: Path) -> Iterator[Path]:
    """Yield a directory to fill. One rename makes it visible, whole for every reader.

    Unlike with `atomic_directory`, a power cut before `sync_whole` may leave empty or torn files.
    """
    with _unfinished(dest) as unfinished:
        yield unfinished
        _show(unfinished, dest)
        _remove_replaced(dest)


def sync_whole(dest: Path) -> None:
    """Return when a visible directory is on disk. Raises OSError naming it if the disk fails."""
    try:
        _sync_files(dest)
        _sync_name(dest)
    except OSError as error:
        text = (
            f"{dest} may be lost at a power cut ({error.strerror}); look at the disk, then start "
            "the run again"
        )
        raise OSError(error.errno, text) from error


def prune_oldest(parent: Path, *, keep: int) -> None:
    """Remove all directories but the `keep` with the largest numbers.

    Unfinished directories of dead writers are removed too.
    """
    if keep < 1:
        raise ValueError(
            f"keep={keep} would remove the newest directory of {parent} too; keep at least 1"
        )
    names = names_of_ours(parent)
    numbers = {name: int(found[1]) for name in names if (found := WHOLE.fullmatch(name))}
    unfinished = [name for name in names if name not in numbers]
    for name in (*unfinished, *sorted(numbers, key=lambda name: numbers[name])[:-keep]):
        remove_directory(parent / name)


def names_of_ours(parent: Path) -> list[str]:
    """Return the names of weights and checkpoints in a directory, whole and unfinished ones.

    Others are left alone: NFS keeps a removed file that somebody reads under a name of its own, and
    `v000008.best` is a copy of the user.
    """
    directories = [path.name for path in parent.iterdir() if path.is_dir()]
    return [name for name in directories if WHOLE.fullmatch(name) or UNFINISHED.fullmatch(name)]


def remove_directory(path: Path) -> None:
    """Remove a directory, or a link in its place. What NFS keeps of it goes the next time."""
    if path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise


def _show(unfinished: Path, dest: Path) -> None:
    if dest.exists():
        dest.rename(dest.with_name(dest.name + REPLACED_SUFFIX))
    unfinished.rename(dest)


def _remove_replaced(dest: Path) -> None:
    _clear(dest.with_name(dest.name + REPLACED_SUFFIX))


def _clear(path: Path) -> None:
    """Remove what is at a path. What NFS keeps of it gets another name, for a later prune."""
    if path.exists():
        remove_directory(path)
    if path.exists():
        path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{REPLACED_SUFFIX}"))


def _sync_name(dest: Path) -> None:
    """fsync the parent directory, so that the rename survives a power cut."""
    _fsync(dest.parent)


def _sync_files(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
