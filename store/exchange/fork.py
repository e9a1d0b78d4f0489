"""Make a new run that begins at a checkpoint of another one, as if that had ended there.

    layout = fork(RunLayout.open("runs/a"), Path("runs/b"), learner_step=40, config_yaml=text)

Its catalog is a copy of the other one, cut at the checkpoint: later groups, versions and numbers
are not in it. Versions and ordinals go on from there, and the staleness of each group is as it was
then. Segments, the checkpoint and its weights are hard links. They are copies if others can write
into them, and where links are impossible: if the files of either run are in a storage, for one. The
other run is only read, and may be training.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing, suppress
from dataclasses import dataclass
from os import link as link_file  # a test stands in for it, as for a file system without hard links
from pathlib import Path

from store.atomic_write import PRIVATE, make_directory, sync_directory
from store.catalog.connection import (
    check_pages,
    is_damage,
    opened_read_only,
    raise_if_interrupted,
)
from store.errors import FormatError, StoreError
from store.exchange.catalog_cut import copy_until, find_checkpoint, lsn_of, unreadable
from store.exchange.run_making import making_alone, removable
from store.file_rights import (
    OWNER_MAY,
    bound_rights,
    copy_with_rights,
    give_rights,
    remove_access_lists,
)
from store.layout import RunLayout
from store.maintenance.backup import empty_database, write_backup
from store.reading.pins import Pin
from store.remote_directory import copy_directory, has_directory, publish_directory
from store.run_names import (
    BASE_POLICY,
    FORK_MARKER,
    SEGMENT_PATH,
    checked_name,
    stored_fork_marker,
)
from store.storage_claim import release
from store.untrusted.file_access import (
    is_directory,
    is_file,
    open_file,
    opened_parent,
    remove,
    remove_tree,
    walk,
)
from store.untrusted.own_directory import check_own_directory

UNFINISHED = ".unfinished"
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """The wanted fork, as the arguments of `fork` say it."""

    source: RunLayout
    learner_step: int
    config_yaml: str
    storage_uri: str | None
    private: bool

    @property
    def forked_from(self) -> str:
        """Return the run and the step, as run.json of the fork has them."""
        return f"{self.source.info.run_id}@{self.learner_step}"


def fork(
    source: RunLayout,
    root: Path,
    *,
    learner_step: int,
    config_yaml: str,
    storage_uri: str | None = None,
    private: bool = False,
) -> RunLayout:
    """Make the new run at `root`, where nothing may be, with its files at `storage_uri` if given.

    If `private`, nobody else may enter its directory, from the first file in it.
    It has the weights of the checkpoint's version only if the other run still has them. Raises
    StoreError if it cannot be made, naming the checkpoints that there are, and LockedError while
    another process makes a run at `root`.
    """
    _check_is_here(source)
    # What another process makes at this moment looks like what a killed fork left.
    with making_alone(root):
        return _fork(
            _Request(
                source=source,
                learner_step=learner_step,
                config_yaml=config_yaml,
                storage_uri=storage_uri,
                private=private,
            ),
            root,
        )


def _fork(request: _Request, root: Path) -> RunLayout:
    if root.exists():
        raise StoreError(f"{root} exists; choose another directory for the new run")
    unfinished = root.with_name(root.name + UNFINISHED)
    if os.path.lexists(unfinished):
        if unfinished.is_symlink() or not unfinished.is_dir():
            raise _in_the_way(unfinished)
        check_own_directory(unfinished)
        if _is_complete(unfinished, request):
            _put_in_place(unfinished, root)
            return RunLayout.open(root)
        _remove_leftover(unfinished)
    try:
        _fill(unfinished, request)
        _put_in_place(unfinished, root)
    except BaseException as error:
        with suppress(OSError, StoreError):
            check_own_directory(unfinished)
            _remove(unfinished)
        raise_if_interrupted(error)
        if isinstance(error, sqlite3.Error) and is_damage(error):
            raise unreadable(request.source, error) from error
        if isinstance(error, (OSError, sqlite3.Error)) and not isinstance(error, StoreError):
            raise StoreError(
                f"cannot make the fork {root}: {error}; "
                "free space or fix the permissions, then retry"
            ) from error
        raise
    return RunLayout.open(root)


def _fill(unfinished: Path, request: _Request) -> None:
    """Make the new run in the directory `unfinished`. It is on disk at the end."""
    source, learner_step = request.source, request.learner_step
    check_own_directory(unfinished, is_made=False)
    make_directory(unfinished.parent, beneath=unfinished.parent)
    # Nobody else may enter until what is in it has its rights.
    with suppress(FileExistsError):  # if somebody else made it meanwhile, the next line refuses it
        unfinished.mkdir(mode=OWNER_MAY)
    check_own_directory(unfinished)
    remove_access_lists(unfinished)
    # Until the marker is removed, RunLayout.open refuses this directory. It is made before
    # run.json, and synced with the directories that `create` makes.
    (unfinished / FORK_MARKER).touch()
    layout = RunLayout.create(
        unfinished,
        config_yaml=request.config_yaml,
        storage_uri=request.storage_uri,
        forked_from=request.forked_from,
        ancestors=(*source.info.ancestors, source.info.run_id),
    )
    # The pin keeps the files that the catalog's copy names.
    with closing(Pin(source, lsn_of(source))):
        version = copy_until(source, layout, learner_step=learner_step)
        _link_files(source, layout, learner_step=learner_step, version=version)
    # Without a backup a rebuild, or whoever brings the fork, would have no checkpoint, and could
    # not tell the groups of the other run from imported ones.
    if request.storage_uri is None:
        _back_up(layout, source=source)
    for directory, _, files in os.walk(unfinished):
        for name in (".", *files):
            _bound_rights(Path(directory, name), source=source, layout=layout)
        # Of a link only its name is new: its bytes are on disk.
        sync_directory(Path(directory), beneath=unfinished)
    if not request.private:
        give_rights(unfinished, source=source.root, owner=OWNER_MAY)
    if request.storage_uri is not None:  # last: whoever finds it there may bring the fork
        _back_up(layout, source=source)
        layout.check_primary()  # else a volume is gone by now, with what was written
        layout.storage.remove(stored_fork_marker(layout.info.run_id))
    (unfinished / FORK_MARKER).unlink()
    sync_directory(unfinished, beneath=unfinished)


def _back_up(layout: RunLayout, *, source: RunLayout) -> None:
    """Write the fork's backup. Raises StoreError for a catalog that fsck would call wrong."""
    with (
        closing(sqlite3.connect(layout.catalog)) as catalog,
        closing(empty_database()) as copy,
    ):
        catalog.backup(copy)
        try:
            write_backup(copy, layout)
        except FormatError as error:
            why = str(error).partition("; see gigpo fsck")[0]
            raise StoreError(
                f"the fork would not be sound: {why}; look at its run: gigpo fsck {source.root}"
            ) from error


def _bound_rights(made: Path, *, source: RunLayout, layout: RunLayout) -> None:
    """Take from a part of the fork every right that this part of the source does not give."""
    there = source.root / layout.relative(made)
    with suppress(FileNotFoundError):  # a part of a remote run may be in its storage only
        if not made.samefile(there):  # a hard link
            bound_rights(made, source=there)


def check_fork(source: RunLayout, root: Path, *, learner_step: int) -> None:
    """Raise StoreError if `fork` would find no such checkpoint. Nothing is made."""
    if os.path.lexists(root.with_name(root.name + UNFINISHED)):
        return  # a killed fork may be whole already, and needs the checkpoint no more
    _check_is_here(source)
    try:
        with opened_read_only(source) as catalog:
            check_pages(catalog, source)
            catalog.row_factory = sqlite3.Row
            find_checkpoint(source, catalog, learner_step=learner_step)
    except sqlite3.Error as error:
        raise_if_interrupted(error)
        raise unreadable(source, error) from error


def _check_is_here(source: RunLayout) -> None:
    if not is_file(source.catalog, root=source.root):
        raise StoreError(
            f"{source.catalog} is missing: the run has not begun, or gigpo rebuild {source.root}"
        )


def _is_complete(unfinished: Path, request: _Request) -> bool:
    """Return whether a killed fork of the same run and settings made all of this directory.

    It was killed after it removed the marker, and before it renamed the directory.
    """
    try:
        layout = RunLayout.open(unfinished)
    except StoreError:
        return False
    made = (layout.info.forked_from, layout.info.config_yaml)
    is_same = made == (request.forked_from, request.config_yaml)
    has_catalog = is_file(layout.catalog, root=unfinished)
    return is_same and has_catalog and layout.is_made_by_this_user()


def _put_in_place(unfinished: Path, root: Path) -> None:
    unfinished.rename(root)
    sync_directory(root.parent, beneath=root.parent)


def _remove_leftover(unfinished: Path) -> None:
    """Remove the directory of a killed fork. Raises StoreError for any other directory."""
    try:
        is_ours = (unfinished / FORK_MARKER).is_file() or not any(unfinished.iterdir())
        if is_ours:
            _remove(unfinished)
    except OSError as error:
        raise StoreError(
            f"cannot remove {unfinished}, which a killed fork left: {error.strerror}; "
            "remove it, then retry"
        ) from error
    if not is_ours:
        raise _in_the_way(unfinished)


def _in_the_way(unfinished: Path) -> StoreError:
    return StoreError(
        f"{unfinished} is in the way, and no unfinished fork; "
        "move it, or choose another directory for the new run"
    )


def _remove(unfinished: Path) -> None:
    """Remove an unfinished fork. The marker goes last: a killed removal leaves an unfinished fork.

    So it is made again if it is gone, because the fork could not be renamed once it was whole.
    Raises OSError, StoreError.
    """
    (unfinished / FORK_MARKER).touch()
    release(unfinished)
    for name in removable(unfinished):
        if name != FORK_MARKER:
            remove_tree(unfinished / name, root=unfinished)
    remove(unfinished / FORK_MARKER, root=unfinished)
    unfinished.rmdir()


def _link_files(source: RunLayout, layout: RunLayout, *, learner_step: int, version: int) -> None:
    with closing(sqlite3.connect(layout.catalog)) as catalog:
        paths = catalog.execute("SELECT path FROM segment WHERE retired_lsn IS NULL").fetchall()
    for (path,) in paths:
        _link(
            checked_name(path, SEGMENT_PATH, where=str(source.catalog)),
            source=source,
            layout=layout,
        )
    directories = [
        source.checkpoint_dir(learner_step),
        source.weights_dir(version),
        source.root / BASE_POLICY,
    ]
    for directory in directories:
        path = source.relative(directory)
        if not is_directory(directory, root=source.root):
            if has_directory(source, path):
                copy_directory(source, layout, path)
                publish_directory(layout, layout.root / path)
            continue
        for file, found in walk(directory, root=source.root):
            if stat.S_ISREG(found.st_mode):
                _link_file(source.relative(file), source=source, layout=layout)
        publish_directory(layout, layout.root / path)


def _link(path: str, *, source: RunLayout, layout: RunLayout) -> None:
    """Take a segment into the new run."""
    if source.info.storage_uri is None and layout.info.storage_uri is None:
        _link_file(path, source=source, layout=layout)
    else:
        layout.storage.write(path, source.storage.read(path))


def _link_file(path: str, *, source: RunLayout, layout: RunLayout) -> None:
    """Make a hard link to the file `path` of `source` in the new run, or a copy of it."""
    file, dest = source.root / path, layout.root / path
    make_directory(dest.parent, beneath=layout.root)
    try:
        with (
            opened_parent(file, root=source.root) as (theirs, name),
            opened_parent(dest, root=layout.root) as (ours, new),
        ):
            # Opened first: `link` would take a symbolic link as it is.
            os.close(open_file(file, root=source.root))
            try:
                link_file(name, new, src_dir_fd=theirs, dst_dir_fd=ours, follow_symlinks=False)
                # Looked at here, where nobody else can exchange it.
                is_linked = _is_only_ours(os.stat(new, dir_fd=ours, follow_symlinks=False))
                if not is_linked:
                    os.unlink(new, dir_fd=ours)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                is_linked = False
            if not is_linked:
                _copy(path, source=source, layout=layout)
    except FileNotFoundError:
        raise StoreError(f"{file} was removed while it was taken over; try again") from None


def _is_only_ours(found: os.stat_result) -> bool:
    """Return whether nobody else can write into a file, so that the new run may share its bytes."""
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS_MAY_WRITE


def _new_file(layout: RunLayout, path: str) -> int:
    """Make a file that nobody else can read before it is whole."""
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return open_file(layout.root / path, root=layout.root, flags=new, mode=PRIVATE)


def _copy(path: str, *, source: RunLayout, layout: RunLayout) -> None:
    with (
        open(open_file(source.root / path, root=source.root), "rb") as original,
        open(_new_file(layout, path), "wb") as copy,
    ):
        copy_with_rights(original.fileno(), copy, owner=0)
        copy.flush()
        os.fsync(copy.fileno())
