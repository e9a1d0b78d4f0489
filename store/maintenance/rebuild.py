"""Make a new catalog for a run whose own is lost or damaged.

    report = rebuild(layout)

A new catalog begins with the newest
sound backup, and the segment files that are newer than it are adopted. Without a backup the
segments alone tell which groups and trajectories there are. What the catalog learned after the
backup (claims, trained steps, metrics, events) is gone: the run goes on from the checkpoint of the
backup.

Nothing is deleted: the old catalog, what was shown of it, and files that cannot be used go to
quarantine/. The new catalog appears in one rename, so an interrupted rebuild is begun again.
Memory: about 1 KB per trajectory.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath

from store.atomic_write import PRIVATE, replace_atomically
from store.catalog.adopt import FoundFile, Recovered, recover
from store.catalog.catalog import Catalog
from store.catalog.connection import raise_if_interrupted
from store.catalog.ownership import check_owner, take_lock
from store.catalog.records import IMPORTED
from store.catalog.schema_check import LARGEST_COUNTER, SCHEMA
from store.catalog.transaction import Transaction
from store.clock import now_us
from store.errors import FormatError, StoreError, UnavailableError
from store.hashing import file_digest
from store.layout import RunLayout
from store.maintenance.backup import empty_database, read_backup
from store.maintenance.compact import WORKER as COMPACTED
from store.maintenance.database_bytes import bytes_of
from store.maintenance.fsck import NAMES, check
from store.maintenance.group_addresses import new_groups
from store.maintenance.repair import quarantine, repair
from store.maintenance.segment_rows import LARGEST_NUMBER, Played, open_rows, trajectories
from store.maintenance.shown_files import ShownFiles, shown_files
from store.reading.manifest import export
from store.run_names import RUN_JSON, SEGMENT_PATH
from store.segments import SegmentMeta
from store.shown_lsn import shown_lsn
from store.untrusted.file_access import (
    names,
    status,
)

COMPONENT = "rebuild"
EPOCHS_WITHOUT_TRACE = 1_000  # owners since the backup that committed nothing; their workers too
LSNS_WITHOUT_TRACE = 1_000_000  # transactions since the backup that readers may have been shown
LARGEST_COUNT = LARGEST_NUMBER + 1  # no run counts its groups or versions that far
WEIGHTS_NAME = re.compile(r"v(\d{6,18})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of a rebuild, in lines for people."""

    recovered: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The readable segment files, in order of preference, and their trajectories."""

    files: tuple[FoundFile, ...]
    shown: ShownFiles
    played: Mapping[str, tuple[Played, ...]]  # by segment id
    rejected: tuple[str, ...]  # one line for each file that was set aside
    unread: tuple[str, ...]  # segment ids of files that the backup knows, and that were not read


class _OtherRunError(StoreError):
    """A segment is of another run."""

    def __init__(self, path: str, run_id: str) -> None:
        super().__init__(f"{path} was written for run {run_id}")
        self.run_id = run_id


def rebuild(layout: RunLayout, *, is_brought: bool = False) -> Report:
    """Replace the catalog. Raises LockedError while a process owns it.

    `is_brought`: from a storage to here, where the directory goes if that fails. Then no file is
    read that the backup knows with its size, which would be all that the run ever wrote, and
    nothing is written into the storage. UnavailableError says that a file cannot be reached now.
    The old catalog is where it was then; damaged segments may be in quarantine/.
    """
    lock = take_lock(layout)
    try:
        check_owner(layout)
        connection, lost, has_backup = _base(layout)
        with closing(connection):
            contents = _scan(layout, known=_known_sizes(connection) if is_brought else {})
            recovered = _recover(connection, layout, contents=contents)
            # On a volume that is gone by now nothing was found, and the next owner would remove the
            # files that the new catalog does not name.
            layout.check_primary()
            if not has_backup:  # the next clean close would replace it
                lost += _set_backup_aside(layout)
            _replace_catalog(layout, memoryview(bytes_of(connection)))
    except sqlite3.Error as error:
        raise_if_interrupted(error)
        raise
    finally:
        os.close(lock)
    lost += contents.rejected
    if not has_backup and recovered.imported:
        lost.append(
            f"{recovered.imported} groups count as imported: those of datasets, extra episodes, "
            "and any whose number was not found"
        )
    if recovered.strangers:
        lost.append(f"{recovered.strangers} trajectories are no member of a known group")
    with Catalog.open(layout) as catalog:
        export(catalog, layout)  # else the check misses it
        lost += repair(catalog, layout, findings=check(layout, level=NAMES))  # files that are gone
        report = Report(recovered=_lines(catalog, recovered), lost=tuple(lost))
        for what, lines in (("recovered", report.recovered), ("lost", report.lost)):
            for line in lines:
                catalog.log(component=COMPONENT, what=what, detail=line)
        export(catalog, layout)
    return report


def _base(layout: RunLayout) -> tuple[sqlite3.Connection, list[str], bool]:
    """Return the backup, or an empty catalog, what is lost, and whether it is the backup."""
    try:
        connection = read_backup(layout)
    except UnavailableError:
        raise
    except StoreError as error:
        connection = empty_database()
        connection.executescript(SCHEMA)
        query = "INSERT INTO meta (id, run_id, epoch, lsn) VALUES (1, ?, 0, 0)"
        connection.execute(query, (layout.info.run_id,))
        gone = "claims, trained steps, versions, checkpoints, metrics and events are gone"
        return connection, [f"there is no backup to begin with ({error}): {gone}"], False
    row = connection.execute("SELECT max(learner_step) FROM checkpoint WHERE live = 1").fetchone()
    point = "the start" if row[0] is None else f"the checkpoint of learner step {row[0]}"
    return connection, [f"what came after the newest backup; training goes on from {point}"], True


def _set_backup_aside(layout: RunLayout) -> list[str]:
    """Move a backup that is not sound to quarantine/. Return a line that says so."""
    name = layout.relative(layout.backup)
    if status(layout.backup, root=layout.root) is None and not layout.storage.exists(name):
        return []
    return [f"{name}: moved to {quarantine(layout, name)}"]


def _known_sizes(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the bytes of each segment of the backup, by path."""
    return dict(connection.execute("SELECT path, n_bytes FROM segment").fetchall())


def _scan(layout: RunLayout, *, known: Mapping[str, int]) -> Contents:
    """Read the files beneath segments/ but those of a `known` size.

    Move those whose content is not what their name says.
    """
    unread: list[str] = []
    files: list[FoundFile] = []
    played: dict[str, tuple[Played, ...]] = {}
    rejected: dict[str, StoreError] = {}
    of_others: set[str] = set()  # run ids
    n_own = 0  # a fork has segments of the runs before it, too
    for stored in list(layout.storage.files(layout.relative(layout.segments))):
        path = stored.path
        if not SEGMENT_PATH.fullmatch(path):
            continue
        if known.get(path) == stored.n_bytes:
            unread.append(PurePosixPath(path).stem)
            continue
        try:
            file, held, is_own = _read_segment(layout, path)
        except UnavailableError:
            raise
        except _OtherRunError as error:
            rejected[path] = error
            of_others.add(error.run_id)
            continue
        except StoreError as error:
            rejected[path] = error
            continue
        files.append(file)
        played[file.meta.segment_id] = held
        n_own += is_own
    if of_others and not n_own and not unread:
        # Nothing is moved: it is run.json that is not of this run.
        name = layout.storage.locate(RUN_JSON)
        raise FormatError(
            f"{name} says run {layout.info.run_id}, and its segments are of run "
            f"{', '.join(sorted(of_others))}; put the right {RUN_JSON} back, with that run_id"
        )
    # Readers were shown committed files, in the order of their commits. A merged file replaced
    # others. What an earlier owner had not committed counted for no later one. A larger file holds
    # more that no other does.
    shown = shown_files(layout)
    files.sort(
        key=lambda file: (
            file.meta.path not in shown.commit_order,
            -file.level,
            shown.commit_order.get(file.meta.path, len(shown.commit_order)),
            -file.epoch,
            -file.meta.n_bytes,
            file.meta.path,
        )
    )
    lines = [f"{error}: moved to {quarantine(layout, path)}" for path, error in rejected.items()]
    return Contents(
        files=tuple(files),
        shown=shown,
        played=played,
        rejected=tuple(lines),
        unread=tuple(unread),
    )


def _segment_of(tx: Transaction, contents: Contents, *, known: Collection[str]) -> dict[bytes, str]:
    """Return the segment that each trajectory is taken from: two attempts have the same uid.

    The backup knows which rows of its files, the `known` ones, count. Then come the new files, in
    their order. Rows that readers were told not to count are taken only if there are no others.
    """
    excluded = contents.shown.excluded
    segment_of: dict[bytes, str] = {}
    excluded_of: dict[bytes, str] = {}

    def take(traj_uid: bytes, path: str, segment_id: str) -> None:
        takes = excluded_of if (path, traj_uid) in excluded else segment_of
        takes.setdefault(traj_uid, segment_id)

    on_disk = {*contents.unread, *(file.meta.segment_id for file in contents.files)}
    query = "SELECT traj_uid, path, segment_id FROM trajectory JOIN segment USING (segment_id)"
    for row in tx.rows(query):
        if row["segment_id"] in on_disk:
            take(**row)
    for meta in (file.meta for file in contents.files if file.meta.segment_id not in known):
        for one in meta.trajectories:
            take(one.traj_uid, meta.path, meta.segment_id)
    return excluded_of | segment_of


def _read_segment(layout: RunLayout, path: str) -> tuple[FoundFile, tuple[Played, ...], bool]:
    """Return a segment file, its trajectories, and whether this run itself wrote it.

    Raises StoreError unless its content is the one that its name says, and of this run.
    """
    data = layout.storage.read(path)
    digest = file_digest(data)
    if digest != PurePosixPath(path).stem:
        raise StoreError(f"{path} has digest {digest}, its name is that of another content")
    rows = open_rows(data, path=layout.root / path)
    if not layout.info.wrote(rows.run_id):
        raise _OtherRunError(path, rows.run_id)
    held = trajectories(rows.table)
    largest = max((one.meta.version_max for one in held), default=0)
    if largest >= LARGEST_COUNT:
        raise StoreError(f"{path} counts to version {largest}, as no run does")
    meta = SegmentMeta.of_file(
        path=path,
        n_bytes=data.size,
        n_steps=rows.table.num_rows,
        worker=rows.worker,
        trajectories=[trajectory.meta for trajectory in held],
    )
    found = FoundFile(meta=meta, epoch=rows.epoch, level=int(rows.worker == COMPACTED))
    return found, held, rows.run_id == layout.info.run_id


def _recover(connection: sqlite3.Connection, layout: RunLayout, *, contents: Contents) -> Recovered:
    """Adopt what the backup does not know, and leave all older owners and readers behind."""
    epoch, lsn = connection.execute("SELECT epoch, lsn FROM meta").fetchone()
    epoch = max([epoch, *(file.epoch for file in contents.files)]) + EPOCHS_WITHOUT_TRACE
    lsn = max(lsn, shown_lsn(layout, by_others=True) or lsn + LSNS_WITHOUT_TRACE) + 1
    if max(epoch, lsn) >= LARGEST_COUNTER:
        raise StoreError(
            f"{layout.root} counts to epoch {epoch} and lsn {lsn}, as no run does; "
            f"remove {layout.manifest.name} and the files that say so, then rebuild again"
        )
    _check_numbers(connection, layout)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE meta SET epoch = ?, lsn = ?, horizon_lsn = ?", (epoch, lsn - 1, lsn))
    tx = Transaction(connection, run_id=layout.info.run_id, epoch=epoch, lsn=lsn, now_us=now_us())
    # Of files that it knows, the backup knows what counts. A fork may have rows in them that the
    # other run played later.
    known = {row["segment_id"] for row in tx.rows("SELECT segment_id FROM segment")}
    played = [one for name, held in contents.played.items() if name not in known for one in held]
    groups = new_groups(tx, played)
    query = "SELECT group_uid FROM grp WHERE split = :split"
    foreign = {row["group_uid"] for row in tx.rows(query, split=IMPORTED)}
    foreign |= {group.group_uid for group in groups if group.split == IMPORTED}
    ours = [one for one in played if one.meta.group_uid not in foreign]
    versions = _new_versions(tx, layout, played=ours)
    recovered = recover(
        tx,
        groups=groups,
        files=contents.files,
        segment_of=_segment_of(tx, contents, known=known),
        unread=contents.unread,
        versions=versions,
    )
    tx.change_all()
    connection.execute("COMMIT")
    return recovered


def _check_numbers(connection: sqlite3.Connection, layout: RunLayout) -> None:
    """Raise StoreError if the backup counts groups or versions as no run does."""
    for table, column in (
        ("grp", "ordinal"),
        ("grp", "evaluated_version"),
        ("version", "version"),
    ):
        query = f"SELECT coalesce(max({column}), 0) FROM {table}"
        (largest,) = connection.execute(query).fetchone()
        if largest >= LARGEST_COUNT:
            raise StoreError(
                f"{layout.backup} counts to {column} {largest}, as no run does; remove it, then "
                "rebuild again from the segments alone"
            )


def _new_versions(
    tx: Transaction, layout: RunLayout, *, played: Sequence[Played]
) -> dict[int, str]:
    """Return versions that left a trace after the backup: no number may be used again."""
    known = {row["version"] for row in tx.rows("SELECT version FROM version")}
    there = set(names(layout.weights, root=layout.root))
    if layout.info.storage_uri is not None:
        stored = layout.storage.files(layout.relative(layout.weights))
        there |= {PurePosixPath(file.path).parent.name for file in stored}
    found = {int(match[1]) for match in map(WEIGHTS_NAME.fullmatch, there) if match is not None}
    seen = {version for version in found if version < LARGEST_COUNT}
    if known or seen:  # else the run publishes no weights through the store
        seen.update(one.meta.version_min for one in played)
        seen.update(one.meta.version_max for one in played)
    return {number: layout.relative(layout.weights_dir(number)) for number in sorted(seen - known)}


def _replace_catalog(layout: RunLayout, data: memoryview) -> None:
    replace_atomically(
        layout.catalog,
        data,
        mode=PRIVATE,
        beneath=layout.root,
        first=lambda: _set_catalog_aside(layout),
    )


def _set_catalog_aside(layout: RunLayout) -> None:
    # The catalog goes first: a start in between would read it without its log, or, without the
    # manifest, not see that it is an older copy. The logs go before the new one is written, because
    # they belong to no other. So does the manifest: its owner would add to what the old one showed.
    catalog = layout.catalog
    logs = [catalog.with_name(catalog.name + suffix) for suffix in ("-wal", "-shm", "-journal")]
    for old in (catalog, *logs, layout.manifest):
        if status(old, root=layout.root) is not None:
            quarantine(layout, layout.relative(old))


def _lines(catalog: Catalog, recovered: Recovered) -> tuple[str, ...]:
    """Return a line for each kind of thing that was recovered."""
    live = catalog.live_segments()
    n_steps = sum(segment.n_steps for segment in live)
    lines = [
        f"{len(live)} files with {n_steps} steps",
        f"{recovered.adopted} trajectories that are newer than the backup; "
        f"{recovered.completed} groups are complete with them",
        f"the epoch is {catalog.epoch}: workers of every owner before are fenced",
    ]
    if recovered.moved:
        lines.append(f"{recovered.moved} trajectories are read from a file that replaced theirs")
    return tuple(lines)
