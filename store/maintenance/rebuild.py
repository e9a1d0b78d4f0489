"""`gigpo rebuild`: a new catalog for a run whose own is lost, from its segments and its
exported tables.

Nothing is deleted: the old catalog and files that cannot be used go to quarantine/. The new catalog
appears in one rename, so that a rebuild that is interrupted is begun again. Memory: about 1 KB per
trajectory.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath

from store.atomic_write import TEMPORARY_SUFFIX
from store.catalog.catalog import Catalog
from store.catalog.database import check_owner, take_lock
from store.catalog.imports import IMPORTED
from store.catalog.rebuild_rows import COMPONENT, Found, FoundSegment, Restored, restore
from store.clock import now_us
from store.errors import StoreError, UnavailableError
from store.hashing import file_digest, uid
from store.layout import SEGMENT_PATH, RunLayout
from store.maintenance.compact import WORKER as COMPACTED
from store.maintenance.rebuild_groups import as_exported, new_groups
from store.maintenance.repair import quarantine
from store.maintenance.segment_rows import Played, open_rows, trajectories
from store.reading.exported import Exported, read_exported
from store.reading.manifest import export
from store.segments import SegmentMeta
from store.storage import StoredFile
from store.untrusted.file_access import names, remove, rename, status

EPOCHS_WITHOUT_TRACE = 1000  # owners that committed nothing; their workers must stay fenced too
WEIGHTS_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """In plain lines, for people."""

    recovered: tuple[str, ...]
    lost: tuple[str, ...]  # or may be: what nobody can know any more


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A readable segment file."""

    stored: StoredFile
    worker: str
    epoch: int
    played: tuple[Played, ...]


def rebuild(layout: RunLayout) -> Report:
    """Replaces the catalog. LockedError while somebody owns it; StoreError if the run is not what
    it seems.

    UnavailableError if any of its files cannot be reached now: nothing has been touched then.
    """
    lock = take_lock(layout)
    try:
        check_owner(layout)
        exported = read_exported(layout)
        files, rejected = _scan(layout)
        found, unknown = _put_together(layout, exported, files)
        restored = _write(layout, found)
    # columns or values that no export has
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoreError(
            f"the exported tables hold what no run exports ({error!r:.200}); move {layout.exports} "
            "and "
            f"{layout.manifest.name} away, then rebuild from the segments alone"
        ) from error
    finally:
        os.close(lock)
    report = _report(
        exported, files, found, restored, lost=[*exported.unreadable, *rejected, *unknown]
    )
    with Catalog.open(layout) as catalog:
        for what, lines in (("recovered", report.recovered), ("lost", report.lost)):
            for line in lines:
                catalog.log(component=COMPONENT, what=what, detail=line)
        if status(layout.manifest, root=layout.root) is not None:
            quarantine(layout, layout.relative(layout.manifest))
        export(catalog, layout)
    return report


def _scan(layout: RunLayout) -> tuple[list[_File], list[str]]:
    """Every file beneath segments/ that is what its name says; the others are set aside, one line
    each.
    """
    files, rejected = [], {}
    for stored in list(layout.storage.files(layout.relative(layout.segments))):
        path = stored.path
        if not SEGMENT_PATH.fullmatch(path):
            continue
        try:
            data = layout.storage.read(path)
            digest = file_digest(data)
            if digest != PurePosixPath(path).stem:
                raise StoreError(f"{path} has digest {digest}, its name is that of another content")
            rows = open_rows(data, path=layout.root / path)
            if not layout.info.wrote(rows.run_id):
                raise StoreError(f"{path} was written for run {rows.run_id}")
        except UnavailableError:
            raise
        except StoreError as error:
            rejected[path] = error
            continue
        files.append(
            _File(stored=stored, worker=rows.worker, epoch=rows.epoch, played=trajectories(rows))
        )
    return files, [
        f"{error}: moved to {quarantine(layout, path)}" for path, error in rejected.items()
    ]


def _put_together(
    layout: RunLayout, exported: Exported, files: Sequence[_File]
) -> tuple[Found, list[str]]:
    played = [trajectory for file in files for trajectory in file.played]
    known = {row["group_uid"]: int(row["size"]) for row in exported.tables["groups"]}
    groups = {
        group.group_uid: group
        for group in new_groups(layout.info.run_id, exported, played, known=known)
    }
    derived = dict(as_exported(groups, exported, played))
    tables = {**exported.tables, "groups": [*exported.tables["groups"], *derived.values()]}
    sizes = known | {group_uid: group.size for group_uid, group in groups.items()}
    imported = {row["group_uid"] for row in tables["groups"] if row["split"] == IMPORTED}
    imported |= {group.group_uid for group in groups.values() if group.split == IMPORTED}
    segments, strangers = _segments(files, exported, sizes=sizes)
    epochs = [file.epoch for file in files] + [
        int(row["epoch"]) for row in exported.tables["versions"]
    ]
    found = Found(
        run_id=layout.info.run_id,
        epoch=max(epochs, default=0) + EPOCHS_WITHOUT_TRACE,
        lsn=max(exported.lsn, 1),
        tables=tables,
        groups=tuple(group for group in groups.values() if group.group_uid not in derived),
        segments=segments,
        versions=_new_versions(
            layout,
            exported,
            [one for one in played if one.meta.group_uid in sizes.keys() - imported],
        ),
    )
    missing = [
        path for path in exported.segments or () if path not in {file.stored.path for file in files}
    ]
    lost = [
        f"{path} was live at the last export and is not there or not readable" for path in missing
    ]
    if derived:
        lost.append(
            f"{len(derived)} groups are in no readable export: they are put together from rows, "
            "ledger and lineage"
        )
    nameless = {
        row["group_uid"] for name in ("ledger", "lineage") for row in tables[name]
    } - sizes.keys()
    if nameless:
        lost.append(
            f"{len(nameless)} groups are in no readable export and no file: their ledger and "
            "lineage are left out"
        )
    if strangers:
        lost.append(
            f"{strangers} trajectories are no members of any group that could be recovered; their "
            "rows are left out"
        )
    return found, lost


def _segments(
    files: Sequence[_File], exported: Exported, *, sizes: Mapping[bytes, int]
) -> tuple[list[FoundSegment], int]:
    """Each file with the trajectories that are read from it, and how many trajectories are no
    member of any known group.
    """
    excluded = {(row["path"], row["traj_uid"]) for row in exported.tables["excluded"]}
    order = {path: number for number, path in enumerate(exported.segments or ())}
    segments, strangers, counted = [], 0, set()

    # what readers saw, then what was merged, then the larger
    def preference(file: _File) -> tuple[int, bool, int, str]:
        return (
            order.get(file.stored.path, len(order)),
            file.worker != COMPACTED,
            -file.stored.n_bytes,
            file.stored.path,
        )

    for file in sorted(files, key=preference):
        metas, others = [], []
        for meta in (played.meta for played in file.played):
            belongs = meta.traj_uid == uid(meta.group_uid, meta.member) and meta.member < sizes.get(
                meta.group_uid, 0
            )
            strangers += not belongs
            if (
                belongs
                and meta.traj_uid not in counted
                and (file.stored.path, meta.traj_uid) not in excluded
            ):
                counted.add(meta.traj_uid)
                metas.append(meta)
            else:
                others.append(meta.traj_uid)
        segment = SegmentMeta(
            segment_id=PurePosixPath(file.stored.path).stem,
            path=file.stored.path,
            digest=PurePosixPath(file.stored.path).stem,
            n_steps=sum(played.meta.n_steps for played in file.played),
            n_bytes=file.stored.n_bytes,
            worker=file.worker,
            trajectories=tuple(metas),
        )
        segments.append(
            FoundSegment(
                meta=segment,
                epoch=file.epoch,
                level=int(file.worker == COMPACTED),
                excluded=tuple(others) if metas else (),
                written_us=file.stored.modified_us,
            )
        )
    return segments, strangers


def _new_versions(
    layout: RunLayout, exported: Exported, played: Sequence[Played]
) -> dict[int, str]:
    """Versions that left a trace and are not exported: their numbers must not be used again."""
    known = {row["version"] for row in exported.tables["versions"]}
    seen = {trajectory.meta.version_max for trajectory in played} if known else set()
    for name in names(layout.weights, root=layout.root):
        match = WEIGHTS_NAME.fullmatch(name)
        if match is not None:
            seen.add(int(match[1]))
    return {
        version: layout.relative(layout.weights_dir(version)) for version in sorted(seen - known)
    }


def _write(layout: RunLayout, found: Found) -> Restored:
    """The new catalog beside the old one, then in its place."""
    new = layout.catalog.with_name(f".{layout.catalog.name}{TEMPORARY_SUFFIX}")
    for name in names(layout.root, root=layout.root):
        if name.startswith(new.name):
            remove(layout.root / name, root=layout.root)
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            connection.create_function("now_us", 0, now_us)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            restored = restore(connection, found)
    except sqlite3.IntegrityError as error:
        raise StoreError(
            f"the exported tables contradict each other ({error}); move {layout.exports} and "
            f"{layout.manifest.name} away, "
            "then rebuild from the segments alone"
        ) from error
    except sqlite3.Error as error:
        raise StoreError(f"cannot write {new}: {error}; free space, then rebuild again") from error
    # the logs first: they belong to no other catalog
    for suffix in ("-wal", "-shm", "-journal", ""):
        old = layout.catalog.with_name(layout.catalog.name + suffix)
        if status(old, root=layout.root) is not None:
            quarantine(layout, layout.relative(old))
    rename(new, layout.catalog, root=layout.root)
    return restored


def _report(
    exported: Exported,
    files: Sequence[_File],
    found: Found,
    restored: Restored,
    *,
    lost: Sequence[str],
) -> Report:
    tables = exported.tables
    live = [segment.meta for segment in found.segments if segment.meta.trajectories]
    n_trajectories = sum(len(meta.trajectories) for meta in live)
    n_steps = sum(trajectory.n_steps for meta in live for trajectory in meta.trajectories)
    recovered = [
        f"{n_trajectories} trajectories with {n_steps} steps in {len(live)} files",
        f"{len(tables['groups']) + len(found.groups)} groups, {len(found.groups)} of them not "
        "exported yet",
        f"{len({row['batch_id'] for row in tables['lineage']})} batches, {len(tables['versions'])} "
        "versions, "
        f"{len(tables['checkpoints'])} checkpoints, {len(tables['metrics'])} metrics, "
        f"{len(tables['events'])} events, "
        f"{len(tables['unfinished'])} unfinished episodes",
        f"the epoch is {found.epoch}: workers of every owner before are fenced",
    ]
    if len(live) < len(files):
        recovered.append(
            f"{len(files) - len(live)} files hold only what another file holds too; they are swept "
            "later"
        )
    if restored.completed:
        recovered.append(f"{restored.completed} groups are complete since the last export")
    if restored.released:
        recovered.append(f"the batches {list(restored.released)} were claimed and are rolled back")
    gone = list(lost)
    if restored.reopened:
        gone.append(
            f"{restored.reopened} groups lack trajectories that were committed; they are played "
            "again"
        )
    if restored.gone:
        gone.append(
            f"{restored.gone} trajectories of consumed groups are in no file: expired before, or "
            "lost"
        )
    imported = sum(group.split == IMPORTED for group in found.groups)
    if imported:
        gone.append(
            f"{imported} groups are none that this run would have opened; they are taken for "
            "imported ones"
        )
    for version in found.versions:
        gone.append(
            f"version {version} was published after the last export: its digest and learner step "
            "are not known"
        )
    gone.append(
        f"whatever left no trace after the last export (lsn {exported.lsn}): groups dispatched "
        "without a committed trajectory, "
        "claims, settlements, checkpoints, metrics, events and unfinished episodes of the last "
        "second"
    )
    return Report(recovered=tuple(recovered), lost=tuple(gone))
