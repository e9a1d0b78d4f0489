"""Make a new run that begins at a checkpoint of another one, as if that had ended there.

    layout = fork(RunLayout.open("runs/a"), Path("runs/b"), learner_step=40, config_yaml=text)

Its catalog is a copy of the other one, cut at the checkpoint: later groups, versions and numbers
are not in it. Versions and ordinals go on from there, and the staleness of each group is as it was
then. Segments, the checkpoint and its weights are hard links, or copies where links are impossible:
if the files of either run are in a storage, for one. The other run is only read, and may be
training.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Sequence
from contextlib import closing, suppress
from os import link as link_file  # a test stands in for it, as for a file system without hard links
from pathlib import Path

from store import primary_directory
from store.atomic_write import PRIVATE, make_directory, sync_directory
from store.catalog.catalog_files import make_catalog_file
from store.catalog.connection import (
    check_pages,
    is_damage,
    opened_read_only,
    raise_if_interrupted,
)
from store.catalog.groups import recompute
from store.catalog.schema_check import SCHEMA
from store.catalog.transaction import Transaction
from store.clock import now_us
from store.errors import FormatError, StoreError
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
from store.run_json import parse_run_json
from store.run_names import (
    BASE_POLICY,
    CHECKPOINT_PATH,
    GIVEN_UP,
    PRIMARY,
    RUN_JSON,
    SEGMENT_PATH,
    UNFINISHED_FORK,
    UNFINISHED_FORKS,
    checked_name,
    unfinished_fork,
    without_other_runs,
)
from store.storage import open_storage
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
from store.untrusted.signatures import signed_texts

UNFINISHED = ".unfinished"
# Go back to the lsn :cut. The order matters: files outlive their rows.
CUT = (
    """INSERT OR IGNORE INTO duplicate (segment_id, traj_uid)
           SELECT segment_id, traj_uid FROM trajectory WHERE lsn > :cut""",
    "DELETE FROM trajectory WHERE lsn > :cut",
    "DELETE FROM critic_value WHERE lsn > :cut",
    """DELETE FROM batch_group
           WHERE batch_id IN (SELECT batch_id FROM batch WHERE claimed_lsn > :cut)""",
    "DELETE FROM batch WHERE claimed_lsn > :cut",
    """UPDATE batch_group SET live = 0, outcome = 'claimed'
           WHERE batch_id IN (SELECT batch_id FROM batch
                              WHERE trained_lsn IS NULL OR trained_lsn > :cut)""",
    """UPDATE batch SET state = 'rolled_back', learner_step = NULL, version_in = NULL,
                        trained_us = NULL, trained_lsn = NULL,
                        rolled_back_lsn = min(:cut, coalesce(rolled_back_lsn, :cut))
           WHERE trained_lsn IS NULL OR trained_lsn > :cut""",
    "DELETE FROM group_state WHERE lsn > :cut",
    "DELETE FROM unfinished WHERE lsn > :cut",
    """DELETE FROM lost_trajectory
           WHERE group_uid IN (SELECT group_uid FROM grp WHERE opened_lsn > :cut)""",
    "DELETE FROM grp WHERE opened_lsn > :cut",
    "UPDATE grp SET completed_lsn = NULL, completed_us = NULL WHERE completed_lsn > :cut",
    "UPDATE grp SET lease_worker = NULL, lease_until_us = NULL",
    """UPDATE grp SET (state, reason) = (
               SELECT state, reason FROM group_state s
               WHERE s.group_uid = grp.group_uid ORDER BY seq DESC LIMIT 1)
           WHERE state <> (SELECT state FROM group_state s
                           WHERE s.group_uid = grp.group_uid ORDER BY seq DESC LIMIT 1)""",
    "DELETE FROM version WHERE lsn > :cut",
    "DELETE FROM checkpoint WHERE lsn > :cut",
    "UPDATE checkpoint SET live = 0 WHERE lsn <> :cut",
    "DELETE FROM metric WHERE lsn > :cut",
    "DELETE FROM event WHERE lsn > :cut",
    "DELETE FROM component",
    """DELETE FROM segment WHERE lsn > :cut
           AND segment_id NOT IN (SELECT segment_id FROM trajectory)
           AND segment_id NOT IN (SELECT segment_id FROM lost_trajectory)""",
    """UPDATE segment SET removed_us = :now_us
           WHERE retired_lsn IS NOT NULL AND removed_us IS NULL""",
    """DELETE FROM duplicate
           WHERE segment_id NOT IN (SELECT segment_id FROM segment WHERE retired_lsn IS NULL)""",
    "UPDATE meta SET run_id = :run_id, horizon_lsn = lsn + 1",
)


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
            source,
            root,
            learner_step=learner_step,
            config_yaml=config_yaml,
            storage_uri=storage_uri,
            private=private,
        )


def _fork(
    source: RunLayout,
    root: Path,
    *,
    learner_step: int,
    config_yaml: str,
    storage_uri: str | None,
    private: bool,
) -> RunLayout:
    if root.exists():
        raise StoreError(f"{root} exists; choose another directory for the new run")
    unfinished = root.with_name(root.name + UNFINISHED)
    if os.path.lexists(unfinished):
        if unfinished.is_symlink() or not unfinished.is_dir():
            raise _in_the_way(unfinished)
        check_own_directory(unfinished)
        forked_from = f"{source.info.run_id}@{learner_step}"
        if _is_complete(unfinished, forked_from=forked_from, config_yaml=config_yaml):
            _put_in_place(unfinished, root)
            return RunLayout.open(root)
        _remove_leftover(unfinished)
    try:
        _fill(
            unfinished,
            source,
            learner_step=learner_step,
            config_yaml=config_yaml,
            storage_uri=storage_uri,
            private=private,
        )
        _put_in_place(unfinished, root)
    except BaseException as error:
        with suppress(OSError, StoreError):
            check_own_directory(unfinished)
            _remove(unfinished)
        raise_if_interrupted(error)
        if isinstance(error, sqlite3.Error) and is_damage(error):
            raise _unreadable(source, error) from error
        if isinstance(error, (OSError, sqlite3.Error)) and not isinstance(error, StoreError):
            raise StoreError(
                f"cannot make the fork {root}: {error}; "
                "free space or fix the permissions, then retry"
            ) from error
        raise
    return RunLayout.open(root)


def _fill(
    unfinished: Path,
    source: RunLayout,
    *,
    learner_step: int,
    config_yaml: str,
    storage_uri: str | None,
    private: bool,
) -> None:
    """Make the new run in the directory `unfinished`. It is on disk at the end."""
    check_own_directory(unfinished, is_made=False)
    make_directory(unfinished.parent, beneath=unfinished.parent)
    # Nobody else may enter until what is in it has its rights.
    with suppress(FileExistsError):  # if somebody else made it meanwhile, the next line refuses it
        unfinished.mkdir(mode=OWNER_MAY)
    check_own_directory(unfinished)
    remove_access_lists(unfinished)
    # Until the marker is removed, RunLayout.open refuses this directory. It is made before
    # run.json, and synced with the directories that `create` makes.
    (unfinished / UNFINISHED_FORK).touch()
    layout = RunLayout.create(
        unfinished,
        config_yaml=config_yaml,
        storage_uri=storage_uri,
        forked_from=f"{source.info.run_id}@{learner_step}",
        ancestors=(*source.info.ancestors, source.info.run_id),
    )
    # The pin keeps the files that the catalog's copy names.
    with closing(Pin(source, _lsn(source))):
        version = _copy_catalog(source, layout, learner_step=learner_step)
        _link_files(source, layout, learner_step=learner_step, version=version)
    for directory, _, files in os.walk(unfinished):
        for name in (".", *files):
            _bound_rights(Path(directory, name), source=source, layout=layout)
        # Of a link only its name is new: its bytes are on disk.
        sync_directory(Path(directory), beneath=unfinished)
    if not private:
        give_rights(unfinished, source=source.root, owner=OWNER_MAY)
    if storage_uri is not None:
        _back_up(layout)  # without it whoever brings the fork would have no checkpoint
        layout.storage.remove(unfinished_fork(layout.info.run_id))
    (unfinished / UNFINISHED_FORK).unlink()
    sync_directory(unfinished, beneath=unfinished)


def _back_up(layout: RunLayout) -> None:
    with (
        closing(sqlite3.connect(layout.catalog)) as catalog,
        closing(empty_database()) as copy,
    ):
        catalog.backup(copy)
        write_backup(copy, layout)


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
            _checkpoint(source, catalog, learner_step=learner_step)
    except sqlite3.Error as error:
        raise_if_interrupted(error)
        raise _unreadable(source, error) from error


def _check_is_here(source: RunLayout) -> None:
    if not is_file(source.catalog, root=source.root):
        raise StoreError(
            f"{source.catalog} is missing: the run has not begun, or gigpo rebuild {source.root}"
        )


def _unreadable(source: RunLayout, error: sqlite3.Error) -> FormatError:
    return FormatError(
        f"{source.catalog} cannot be read ({error}); restore it from a backup, or "
        f"gigpo rebuild {source.root}"
    )


def _is_complete(unfinished: Path, *, forked_from: str, config_yaml: str) -> bool:
    """Return whether a killed fork with the same arguments made all of this directory.

    It was killed after it removed the marker, and before it renamed the directory.
    """
    try:
        layout = RunLayout.open(unfinished)
    except StoreError:
        return False
    is_same = (layout.info.forked_from, layout.info.config_yaml) == (forked_from, config_yaml)
    has_catalog = is_file(layout.catalog, root=unfinished)
    return is_same and has_catalog and layout.is_made_by_this_user()


def _put_in_place(unfinished: Path, root: Path) -> None:
    unfinished.rename(root)
    sync_directory(root.parent, beneath=root.parent)


def _remove_leftover(unfinished: Path) -> None:
    """Remove the directory of a killed fork. Raises StoreError for any other directory."""
    try:
        is_ours = (unfinished / UNFINISHED_FORK).is_file() or not any(unfinished.iterdir())
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
    (unfinished / UNFINISHED_FORK).touch()
    _remove_stored(unfinished)
    for name in removable(unfinished):
        if name != UNFINISHED_FORK:
            remove_tree(unfinished / name, root=unfinished)
    remove(unfinished / UNFINISHED_FORK, root=unfinished)
    unfinished.rmdir()


def _remove_stored(unfinished: Path) -> None:
    """Remove what an unfinished fork has in its storage, if that is not another run's by now."""
    texts = signed_texts(unfinished)
    if texts is None:
        return
    data = texts.run_json
    try:
        info = parse_run_json(data, name=str(unfinished / RUN_JSON))
    except FormatError:  # of another version
        return
    if info.storage_uri is None:
        return
    storage = open_storage(info.storage_uri)
    # It may have been brought to another directory, where it goes on.
    if not primary_directory.is_primary(unfinished, storage):
        return
    if storage.exists(RUN_JSON) and storage.read(RUN_JSON).to_pybytes() == data:
        # With the marker nobody brings it. If the fork was whole it is gone, and somebody may be
        # bringing it.
        marker = unfinished_fork(info.run_id)
        storage.write(marker, info.run_id.encode())
        if not primary_directory.is_primary(unfinished, storage):
            storage.remove(marker)
            return
        paths = without_other_runs(file.path for file in storage.files(""))
        last = (RUN_JSON, marker)
        # PRIMARY may be another directory's at any moment, so it is never removed. The others are
        # of other starts, which may be late.
        kept = (PRIMARY, GIVEN_UP, UNFINISHED_FORKS)
        ours = [path for path in paths if path.partition("/")[0] not in kept and path not in last]
        for path in (*ours, *last):
            # Without files it counts as unused, and another run may be made there.
            if not primary_directory.is_primary(unfinished, storage):
                raise StoreError(
                    f"the storage {storage.locate('')} of the fork was taken by another directory; "
                    "give the command again"
                )
            storage.remove(path)
        primary_directory.give_up(unfinished, storage)


def _lsn(source: RunLayout) -> int:
    """Return the catalog's lsn. Raises FormatError if there is none."""
    with opened_read_only(source) as catalog:
        row = catalog.execute("SELECT lsn FROM meta").fetchone()
    if row is None or not isinstance(row[0], int):
        raise FormatError(
            f"{source.catalog} does not say at which lsn it is; restore it from a backup, "
            f"or gigpo rebuild {source.root}"
        )
    return row[0]


def _copy_catalog(source: RunLayout, layout: RunLayout, *, learner_step: int) -> int:
    """Copy the catalog as it was at the checkpoint. Return the checkpoint's version."""
    make_catalog_file(layout)
    with (
        opened_read_only(source) as original,
        closing(sqlite3.connect(layout.catalog, isolation_level=None)) as copy,
    ):
        check_pages(original, source)
        original.backup(copy)
        copy.row_factory = sqlite3.Row
        copy.create_function("now_us", 0, now_us)
        checkpoint = _checkpoint(source, copy, learner_step=learner_step)
        changed_groups = _cut(copy, lsn=checkpoint["lsn"], run_id=layout.info.run_id)
        copy.executescript(SCHEMA)  # the triggers again
        where = f"of {source.root} at learner step {learner_step}"
        copy.execute("BEGIN IMMEDIATE")
        lsn, epoch = copy.execute("SELECT lsn + 1, epoch FROM meta").fetchone()
        tx = Transaction(copy, run_id=layout.info.run_id, epoch=epoch, lsn=lsn, now_us=now_us())
        _recompute(tx, changed_groups, reason=f"fork {where}")
        detail = f"{where}, run {source.info.run_id}, version {checkpoint['version']}"
        _record_fork(tx, detail=detail)
        copy.execute("COMMIT")
    return int(checkpoint["version"])


def _cut(catalog: sqlite3.Connection, *, lsn: int, run_id: str) -> tuple[bytes, ...]:
    """Take the catalog back to `lsn`, as the run `run_id`. Its triggers are dropped.

    Return the groups that lost trajectories: their sums are not those of their members.
    """
    catalog.execute("BEGIN IMMEDIATE")
    query = "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
    for (trigger,) in catalog.execute(query).fetchall():
        catalog.execute(f"DROP TRIGGER {trigger}")  # they keep a ledger from being cut
    query = "SELECT DISTINCT group_uid FROM trajectory WHERE lsn > ?"
    changed_groups = tuple(row[0] for row in catalog.execute(query, (lsn,)))
    values = {"cut": lsn, "run_id": run_id, "now_us": now_us()}
    for statement in CUT:
        catalog.execute(statement, values)
    catalog.execute("COMMIT")
    return changed_groups


def _recompute(tx: Transaction, group_uids: Sequence[bytes], *, reason: str) -> None:
    """Correct the sums of these groups, and make every claimed group available."""
    for group_uid in group_uids:
        recompute(tx, group_uid)
    tx.run(
        "UPDATE grp SET state = 'complete', reason = :reason WHERE state = 'claimed'",
        reason=reason,
    )


def _record_fork(tx: Transaction, *, detail: str) -> None:
    """Log the fork as the catalog's newest lsn, at which every table changed."""
    tx.log(component="fork", what="forked", detail=detail)
    for name in tx.touched:
        tx.run("INSERT OR IGNORE INTO changed (name, lsn) VALUES (:name, 0)", name=name)
    tx.run("UPDATE changed SET lsn = :lsn", lsn=tx.lsn)
    tx.run("UPDATE meta SET lsn = :lsn", lsn=tx.lsn)


def _checkpoint(
    source: RunLayout, catalog: sqlite3.Connection, *, learner_step: int
) -> sqlite3.Row:
    rows = catalog.execute(
        "SELECT lsn, learner_step, path, version FROM checkpoint WHERE live = 1 ORDER BY lsn"
    ).fetchall()
    there: dict[int, sqlite3.Row] = {}
    for row in rows:
        _check_numbers(source, row, ("lsn", "learner_step", "version"))
        name = checked_name(row["path"], CHECKPOINT_PATH, where=str(source.catalog))
        if has_directory(source, name):
            there[row["learner_step"]] = row
    if learner_step not in there:
        before = max((step for step in there if step < learner_step), default=None)
        nearest = f"; the nearest before it is that of step {before}" if before is not None else ""
        steps = ", ".join(map(str, sorted(there))) or "none"
        raise StoreError(
            f"{source.root} has no checkpoint of learner step {learner_step}: "
            f"there are those of {steps}{nearest}. learner.keep_every keeps more of them"
        )
    row = there[learner_step]
    query = "SELECT lsn FROM version WHERE version = ?"
    published = catalog.execute(query, (row["version"],)).fetchone()
    if published is not None:
        _check_numbers(source, published, ("lsn",))
    if published is None or published["lsn"] > row["lsn"]:
        raise StoreError(
            f"{source.root} was rebuilt after learner step {learner_step}, "
            "and the order of its events is lost; use a later checkpoint"
        )
    return row


def _check_numbers(source: RunLayout, row: sqlite3.Row, columns: Sequence[str]) -> None:
    """Raise FormatError for a cell that a STRICT table would refuse: the file was edited."""
    wrong = [name for name in columns if not isinstance(row[name], int)]
    if wrong:
        raise _unreadable(
            source, sqlite3.DatabaseError(f"malformed row: its {wrong[0]} is no whole number")
        )


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
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                _copy(path, source=source, layout=layout)
    except FileNotFoundError:
        raise StoreError(f"{file} was removed while it was taken over; try again") from None


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
