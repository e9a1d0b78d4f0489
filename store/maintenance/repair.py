"""Repair what fsck found: damaged files are set aside, and lost trajectories are played again.

    with Catalog.open(layout) as catalog:
        lines = repair(catalog, layout, findings=check(layout, level=CONTENTS))

Nothing is deleted. Findings without a safe repair are left alone; their remedy says what to do.
Each repair is one transaction and one event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc

from store.atomic_write import READ_ONLY, make_directory, sync_directory, write_atomically
from store.catalog.catalog import Catalog
from store.catalog.repairs import COMPONENT
from store.clock import now_us
from store.errors import FormatError, StoreError, UnavailableError, UnsafePathError
from store.hashing import file_digest
from store.layout import RunLayout
from store.maintenance.finding import Finding
from store.maintenance.segment_rows import malformed, open_rows, trajectories
from store.reading import open_sql
from store.reading.manifest import export
from store.records import uid_text
from store.segment_encoding import decode
from store.segments import SegmentMeta, write_rows
from store.untrusted.file_access import (
    MAX_TEXT_BYTES,
    is_directory,
    is_file,
    read_bytes,
    rename,
    status,
)

WORKER = "repair"  # the directory of files that were put together from others
MANIFEST_CODES = frozenset(
    {"manifest_missing", "manifest_damaged", "manifest_foreign", "manifest_segment"}
    | {"export_missing", "export_damaged"}
)
BYTES_ARE_GONE = frozenset({"segment_missing", "segment_damaged", "segment_unreadable"})
ROWS_ARE_WRONG = frozenset(
    {"segment_foreign", "step_index", "episode_steps", "state_hash", "missing_rows"}
)
ONLY_HISTORY = frozenset({"retired_missing", "retired_damaged"})
OPEN_SQL_CODES = frozenset({"open_sql_missing", "open_sql_changed"})
REPAIRED_WARNINGS = ONLY_HISTORY | {"open_sql_changed"}  # leftovers that a repair puts right
QUARANTINE_CODES = BYTES_ARE_GONE | ROWS_ARE_WRONG | ONLY_HISTORY


def repair(catalog: Catalog, layout: RunLayout, *, findings: Sequence[Finding]) -> list[str]:
    """Repair what can be repaired; return one line for each repair.

    `findings` are those of a check while `catalog` was owned. Raises UnavailableError if the volume
    of the storage is gone by now: it found no file there.
    """
    layout.check_primary()

    def subjects(what: str) -> list[str]:
        return list(dict.fromkeys(one.subject for one in findings if one.what == what))

    damaged: dict[str, Finding] = {}
    for finding in findings:
        if finding.what in QUARANTINE_CODES:
            damaged.setdefault(finding.subject, finding)
    done = [
        _set_aside(catalog, layout, path=path, finding=finding) for path, finding in damaged.items()
    ]
    done += [_take_back(catalog, layout, path=path) for path in subjects("segment_returned")]
    done += [_correct(catalog, layout, path=path) for path in subjects("segment_row")]
    for path in subjects("uncounted_rows"):
        if path not in damaged:
            done.append(_exclude(catalog, layout, path=path))
    for subject in subjects("group_sums"):
        catalog.correct_group(bytes.fromhex(subject.removeprefix("group ").replace("-", "")))
        done.append(f"{subject}: its figures are those of its trajectories again")
    is_shown_anew = _set_exports_aside(catalog, layout, findings=findings)
    if any(finding.what in OPEN_SQL_CODES for finding in findings):
        done.append(_write_open_sql(catalog, layout))
    for path in subjects("backup_damaged"):
        quarantined = quarantine(layout, path)
        catalog.log(component=COMPONENT, what="backup", detail=f"{path} moved to {quarantined}")
        done.append(f"{path}: moved to {quarantined}; another is made when the repair ends")
    if done or is_shown_anew:
        lsn = export(catalog, layout)
        done += [f"the manifest was written anew, at lsn {lsn}"] if is_shown_anew else []
    return done


def _exclude(catalog: Catalog, layout: RunLayout, *, path: str) -> str:
    held = open_rows(layout.storage.read(path), path=layout.root / path)
    n = catalog.exclude(path, traj_uids=[one.meta.traj_uid for one in trajectories(held.table)])
    return f"{path}: {n} trajectories in it are no longer seen"


def _set_exports_aside(catalog: Catalog, layout: RunLayout, *, findings: Sequence[Finding]) -> bool:
    """Set damaged exports and a damaged manifest aside. Return whether there are any."""
    shown: dict[str, Finding] = {}
    for finding in findings:
        if finding.what in MANIFEST_CODES:
            is_manifest = finding.what.startswith("manifest")
            path = layout.relative(layout.manifest) if is_manifest else finding.subject
            shown[path] = finding
    for path, finding in shown.items():
        if status(layout.root / path, root=layout.root) is not None or layout.storage.exists(path):
            detail = f"{path}: {finding.detail}; moved to {quarantine(layout, path)}"
            catalog.log(component=COMPONENT, what="manifest", detail=detail)
    return bool(shown)


def _write_open_sql(catalog: Catalog, layout: RunLayout) -> str:
    if is_directory(layout.open_sql, root=layout.root):
        quarantine(layout, layout.open_sql.name)
    elif is_file(layout.open_sql, root=layout.root):
        left = read_bytes(layout.open_sql, root=layout.root, at_most=MAX_TEXT_BYTES)
        aside = _free_name(layout, layout.open_sql.name)
        write_atomically(aside, left, mode=READ_ONLY, beneath=layout.root)
    line = "open.sql has the views of this code again; the run's macros stay as they were"
    if not open_sql.restore_views(layout):
        line = "open.sql was written again; the next start of the run adds advantages(...)"
    catalog.log(component=COMPONENT, what="open_sql", detail=line)
    return line


def _free_name(layout: RunLayout, path: str) -> Path:
    """Return where a file goes in quarantine/, which is made if it is not there."""
    make_directory(layout.quarantine, beneath=layout.root)
    plain = PurePosixPath(path)
    target, number = layout.quarantine / plain.name, 0
    while status(target, root=layout.root) is not None:
        number += 1
        target = layout.quarantine / f"{plain.stem}.{number}{plain.suffix}"
    return target


def quarantine(layout: RunLayout, path: str) -> str:
    """Move a file to quarantine/ under a name of its own, and return its path in the run.

    While a run is brought to this directory, which goes if that fails, a file in a storage is
    copied: the storage keeps it until the run's owner sweeps what no row names.
    """
    source, target = layout.root / path, _free_name(layout, path)
    try:
        if layout.info.storage_uri is None or not layout.storage.exists(path):
            rename(source, target, root=layout.root)
            sync_directory(target.parent, beneath=layout.root)
        else:  # the file in the other storage is damaged, not a copy fetched for reading
            data = memoryview(layout.storage.read(path))
            write_atomically(target, data, mode=READ_ONLY, beneath=layout.root)
            if not layout.is_being_brought:
                layout.storage.remove(path)
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot move {source} to {target}: {error.strerror}; fix the permissions, then retry"
        ) from error
    return layout.relative(target)


def _set_aside(catalog: Catalog, layout: RunLayout, *, path: str, finding: Finding) -> str:
    """Move a file to quarantine/ and let it count no longer.

    The file moves first: after a crash in between, a changed catalog would let it be swept.
    """
    (meta,) = catalog.segment_metas([PurePosixPath(path).stem])
    rescued = _rescue(catalog, layout, meta=meta) if finding.what in BYTES_ARE_GONE else None
    is_missing = finding.what in ("segment_missing", "retired_missing")
    quarantined = None if is_missing else quarantine(layout, path)
    _write_note(layout, quarantined, meta=meta, finding=finding)
    result = catalog.set_aside(path, why=f"{finding.what}: {finding.detail}", rescued=rescued)
    counts = f"{result.rescued} trajectories rescued, {len(result.lost)} lost"
    line = f"{path}: moved to {quarantined or 'nowhere'}; {counts}"
    line += f", {len(result.reopened)} groups are played again"
    return line + "".join(f", batch {batch_id} was rolled back" for batch_id in result.released)


def _correct(catalog: Catalog, layout: RunLayout, *, path: str) -> str:
    """Set a segment's row to what its file says. The file has the digest it is named by."""
    data = _sound_bytes(layout, path)
    if data is None:
        raise StoreError(f"{path} has changed since it was checked; run fsck again")
    held = open_rows(data, path=layout.root / path)
    catalog.correct_segment(
        path,
        digest=PurePosixPath(path).stem,
        n_bytes=data.size,
        n_steps=held.table.num_rows,
        worker=held.worker,
        epoch=held.epoch,
    )
    return f"{path}: its row in the catalog is that of its file again; the file stays where it is"


def _take_back(catalog: Catalog, layout: RunLayout, *, path: str) -> str:
    """Let a file that was put back by hand count again, if it is what was committed."""
    data = _sound_bytes(layout, path)
    try:
        held = None if data is None else open_rows(data, path=layout.root / path)
    except FormatError:  # as committed, but no segment: it was set aside for that before
        held = None
    if held is None or not layout.info.wrote(held.run_id) or malformed(held.table):
        quarantined = quarantine(layout, path)
        return f"{path}: what was put back is not what was committed; moved to {quarantined}"
    n = catalog.take_back(path, held=[one.meta for one in trajectories(held.table)])
    return f"{path}: it counts again; {n} trajectories that were lost are here again"


def _write_note(
    layout: RunLayout, quarantined: str | None, *, meta: SegmentMeta, finding: Finding
) -> None:
    path = layout.quarantine / f"{meta.segment_id}.json"
    if quarantined is not None:
        path = (layout.root / quarantined).with_suffix(".json")
    if status(path, root=layout.root) is not None:
        return  # a crash came between this and the catalog; the first note knows why
    held = [
        {
            "traj_uid": uid_text(trajectory.traj_uid),
            "group_uid": uid_text(trajectory.group_uid),
            "member": trajectory.member,
        }
        for trajectory in meta.trajectories
    ]
    note = {"was": meta.path, "what": finding.what, "why": finding.detail}
    data = json.dumps({**note, "set_aside_us": now_us(), "held": held}, indent=1).encode()
    make_directory(layout.quarantine, beneath=layout.root)
    write_atomically(path, data, mode=READ_ONLY, beneath=layout.root)


def _rescue(catalog: Catalog, layout: RunLayout, *, meta: SegmentMeta) -> SegmentMeta | None:
    """Write a file of the lost trajectories that intact files from before a merge hold."""
    wanted = {trajectory.traj_uid: trajectory for trajectory in meta.trajectories}
    tables: list[pa.Table] = []
    found = []
    for path, excluded in catalog.replaced_files().items() if wanted else ():
        table = _intact(layout, path)
        if table is None:
            continue
        held = wanted.keys() & (set(table["traj_uid"].to_pylist()) - excluded)
        if held:
            uids = pa.array(sorted(held), table.schema.field("traj_uid").type)
            tables.append(table.filter(pc.is_in(table["traj_uid"], value_set=uids)))
            found += [wanted.pop(traj_uid) for traj_uid in sorted(held)]
    if not tables:
        return None
    table = pa.concat_tables(tables)
    return write_rows(layout, table, trajectories=tuple(found), worker=WORKER, epoch=catalog.epoch)


def _intact(layout: RunLayout, path: str) -> pa.Table | None:
    data = _sound_bytes(layout, path)
    try:
        return None if data is None else decode(data, path=path)
    except FormatError:
        return None


def _sound_bytes(layout: RunLayout, path: str) -> pa.Buffer | None:
    """Return the bytes of a file if they have the digest it is named by, None if it is damaged.

    Raises UnavailableError: what the file holds may be all that is left.
    """
    try:
        data = layout.storage.read(path)
        return data if file_digest(data) == PurePosixPath(path).stem else None
    except UnavailableError:
        raise
    except StoreError:
        return None
