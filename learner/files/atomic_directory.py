"""Directories that appear whole or not at all: published weights, checkpoints, adapters, exports.

    with atomic_directory(Path("checkpoints/step000008")) as unfinished:     # safe from a power cut when it is left
        (unfinished / "model.safetensors").write_bytes(data)
    behind = BackgroundFsync()
    with behind.visible_whole(Path("weights/v000008")) as unfinished: ...  # whole for all who read it; safe after the next line
    behind.wait()
    prune_oldest(Path("weights"), keep=4, kept=frozenset())

Needs the standard library only: the tests of power cuts load this file by itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED_SUFFIX, REPLACED_SUFFIX = ".tmp", ".old"


@contextmanager
def atomic_directory(dest: Path) -> Iterator[Path]:
    """A directory to fill; it gets its name, by one rename, only when all in it is on disk.

    What is there under that name already is replaced: only a process that died between the rename
    and the announcement in the catalog leaves one, so nobody reads it. (An announced number is
    never used again.) Raises OSError, naming `dest`, if the disk does not take it all; what was
    written of it is removed, as it may be what fills the disk.
    """
    with _removed_on_failure(dest):
        unfinished = _empty(dest)
        yield unfinished
        _sync_files(unfinished)
        _show(unfinished, dest)
        _sync_name(dest)
        _remove_replaced(dest)


@contextmanager
def names_the_disk(dest: Path) -> Iterator[None]:
    """Give an OSError of the body that names no file, as a failed write does not, the name `dest`
    and a remedy.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        text = f"cannot write {dest}: {error.strerror}; free space or fix the permissions, then start the run again"
        raise OSError(error.errno, text) from error


@contextmanager
def _removed_on_failure(dest: Path) -> Iterator[None]:
    with names_the_disk(dest):
        try:
            yield
        except OSError:
            shutil.rmtree(_unfinished(dest), ignore_errors=True)
            raise


class BackgroundFsync:
    """Directories that have their names before they are on disk; a thread sees to the disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._syncing: list[tuple[Path, Future[None]]] = []

    @contextmanager
    def visible_whole(self, dest: Path) -> Iterator[Path]:
        """As `atomic_directory`, but a power cut before `wait` returned may leave the name with files
        that are empty or torn.
        """
        with _removed_on_failure(dest):
            unfinished = _empty(dest)
            yield unfinished
            _show(unfinished, dest)
            _remove_replaced(dest)
        self._syncing.append((dest, self._thread.submit(_sync_whole, dest)))

    def wait(self) -> None:
        """Returns when all of them are on disk, or were removed. Raises OSError naming one that the
        disk failed to take.
        """
        while self._syncing:
            dest, syncing = self._syncing.pop(0)
            try:
                syncing.result()
            except OSError as error:
                text = f"{dest} may be lost at a power cut ({error.strerror}); look at the disk, then start the run again"
                raise OSError(error.errno, text) from error


def prune_oldest(parent: Path, *, keep: int, kept: frozenset[str]) -> list[str]:
    """Removes all directories but `kept` and the last `keep` by name, and what dead writers left;
    the names removed.
    """
    if keep < 1:
        raise ValueError(
            f"keep={keep} would remove the newest directory of {parent} too; keep at least 1"
        )
    names = sorted(path.name for path in parent.iterdir() if path.is_dir())
    unfinished = [name for name in names if name.endswith((UNFINISHED_SUFFIX, REPLACED_SUFFIX))]
    old = [name for name in names if name not in unfinished][:-keep]
    removed = unfinished + [name for name in old if name not in kept]
    for name in removed:
        if (parent / name).is_symlink():
            (parent / name).unlink()
        else:
            shutil.rmtree(parent / name)
    return removed


def _empty(dest: Path) -> Path:
    unfinished = _unfinished(dest)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    _remove_replaced(dest)
    unfinished.mkdir(parents=True)
    return unfinished


def _unfinished(dest: Path) -> Path:
    return dest.with_name(dest.name + UNFINISHED_SUFFIX)


def _show(unfinished: Path, dest: Path) -> None:
    if dest.exists():
        dest.rename(dest.with_name(dest.name + REPLACED_SUFFIX))
    unfinished.rename(dest)


def _remove_replaced(dest: Path) -> None:
    replaced = dest.with_name(dest.name + REPLACED_SUFFIX)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync_whole(directory: Path) -> None:
    with suppress(FileNotFoundError):  # pruned: nobody needs it any more
        _sync_files(directory)
        _sync_name(directory)


def _sync_name(dest: Path) -> None:
    """A directory's name is on disk when the one it is in is."""
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
