"""`fsck --repair`: what is damaged is set aside, never deleted, and what was lost with it is played
again.

    with Catalog.open(layout) as catalog:
        repair(catalog, layout, check(layout, level=CONTENTS))

Findings without a safe repair are left alone; their remedy says what to do. Each repair is one
transaction and one event.
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
from store.maintenance.fsck_manifest import CODES as MANIFEST_CODES
from store.maintenance.segment_rows import malformed, open_rows, trajectories
from store.reading import open_sql
from store.reading.manifest import export
from store.records import uid_text
from store.segments import SegmentMeta, decode, write_rows
from store.untrusted.file_access import (
    MAX_TEXT_BYTES,
    is_directory,
    is_file,
    read_bytes,
    rename,
    status,
)

WORKER = "repair"  # the directory of files that were put together from others
BYTES_ARE_GONE = frozenset({"segment_missing", "segment_damaged", "segment_unreadable"})
ROWS_ARE_WRONG = frozenset(
    {"segment_foreign", "step_index", "episode_steps", "state_hash", "missing_rows"}
)
ONLY_HISTORY = frozenset({"retired_missing", "retired_damaged"})
OPEN_SQL_CODES = frozenset({"open_sql_missing", "open_sql_changed"})
REPAIRED_WARNINGS = ONLY_HISTORY | {"open_sql_changed"}  # leftovers that a repair puts right
QUARANTINE_CODES = BYTES_ARE_GONE | ROWS_ARE_WRONG | ONLY_HISTORY


def repair(catalog: Catalog, layout: RunLayout, findings: Sequence[Finding]) -> list[str]:
    """Mends what can be mended; one line for each repair. `findings` are those of a check while
    `catalog` was owned.
    """
    done = []
    damaged: dict[str, Finding] = {}
    for finding in findings:
        if finding.what in QUARANTINE_CODES:
            damaged.setdefault(finding.subject, finding)
    for path, finding in damaged.items():
        done.append(_set_aside(catalog, layout, path, finding))
    for finding in findings:
        if finding.what == "segment_returned":
            done.append(_take_back(catalog, layout, finding.subject))
    for path in dict.fromkeys(
        finding.subject for finding in findings if finding.what == "segment_row"
    ):
        done.append(_correct(catalog, layout, path))
    for path in dict.fromkeys(
        finding.subject for finding in findings if finding.what == "uncounted_rows"
    ):
        if path not in damaged:
            held = trajectories(open_rows(layout.storage.read(path), path=layout.root / path))
            n = catalog.exclude(path, [trajectory.meta.traj_uid for trajectory in held])
            done.append(f"{path}: {n} trajectories in it are no longer seen")
    for finding in findings:
        if finding.what == "group_sums":
            catalog.correct_group(
                bytes.fromhex(finding.subject.removeprefix("group ").replace("-", ""))
            )
            done.append(f"{finding.subject}: its figures are those of its trajectories again")
    shown = {
        layout.relative(layout.manifest)
        if finding.what.startswith("manifest")
        else finding.subject: finding
        for finding in findings
        if finding.what in MANIFEST_CODES
    }
    for path, finding in shown.items():
        if status(layout.root / path, root=layout.root) is not None or layout.storage.exists(path):
            place = quarantine(layout, path)
            catalog.log(
                component=COMPONENT,
                what="manifest",
                detail=f"{path}: {finding.detail}; moved to {place}",
            )
    if any(finding.what in OPEN_SQL_CODES for finding in findings):
        done.append(_write_open_sql(catalog, layout))
    if done or shown:
        lsn = export(catalog, layout)
        done += [f"the manifest was written anew, at lsn {lsn}"] if shown else []
    return done


def _write_open_sql(catalog: Catalog, layout: RunLayout) -> str:
    if is_directory(layout.open_sql, root=layout.root):
        quarantine(layout, layout.open_sql.name)
    elif is_file(layout.open_sql, root=layout.root):
        left = read_bytes(layout.open_sql, root=layout.root, at_most=MAX_TEXT_BYTES)
        make_directory(layout.quarantine, beneath=layout.root)
        write_atomically(
            layout.quarantine / layout.open_sql.name, left, mode=READ_ONLY, beneath=layout.root
        )
    if open_sql.restore_views(layout):
        catalog.log(component=COMPONENT, what="open_sql", detail="its views were written again")
        return "open.sql has the views of this code again; the run's macros stay as they were"
    catalog.log(component=COMPONENT, what="open_sql", detail="it was written again")
    return (
        "open.sql was written again, with the views; the next start of the run adds advantages(...)"
    )


def quarantine(layout: RunLayout, path: str) -> str:
    """Moves a file to quarantine/, under a name of its own; that name, relative to the run's
    root.
    """
    make_directory(layout.quarantine, beneath=layout.root)
    plain = PurePosixPath(path)
    target, number = layout.quarantine / plain.name, 0
    while status(target, root=layout.root) is not None:
        number += 1
        target = layout.quarantine / f"{plain.stem}.{number}{plain.suffix}"
    source = layout.root / path
    try:
        if layout.info.storage_uri is None or not layout.storage.exists(path):
            rename(source, target, root=layout.root)
            sync_directory(target.parent, beneath=layout.root)
        # stored elsewhere; a copy of it that was fetched for reading here is not what is damaged
        else:
            write_atomically(
                target, memoryview(layout.storage.read(path)), mode=READ_ONLY, beneath=layout.root
            )
            layout.storage.remove(path)
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot move {source} to {target}: {error.strerror}; fix the permissions, then retry"
        ) from error
    return layout.relative(target)


def _set_aside(catalog: Catalog, layout: RunLayout, path: str, finding: Finding) -> str:
    """The order matters: were the catalog changed first, a crash would leave the file as an orphan,
    to be swept.
    """
    (meta,) = catalog.segment_metas([PurePosixPath(path).stem])
    rescued = _rescue(catalog, layout, meta) if finding.what in BYTES_ARE_GONE else None
    place = (
        "nowhere"
        if finding.what in ("segment_missing", "retired_missing")
        else quarantine(layout, path)
    )
    _write_note(layout, place, meta, finding)
    result = catalog.set_aside(path, why=f"{finding.what}: {finding.detail}", rescued=rescued)
    line = (
        f"{path}: moved to {place}; {result.rescued} trajectories rescued, {len(result.lost)} lost"
    )
    line += f", {len(result.reopened)} groups are played again"
    return line + "".join(f", batch {batch_id} was rolled back" for batch_id in result.released)


def _correct(catalog: Catalog, layout: RunLayout, path: str) -> str:
    """Set a segment's row to what its file says, which has the digest it is named by."""
    data = _whole(layout, path)
    if data is None:
        raise StoreError(f"{path} has changed since it was checked; run fsck again")
    held = open_rows(data, path=layout.root / path)
    figures = {
        "digest": PurePosixPath(path).stem,
        "n_bytes": data.size,
        "n_steps": held.table.num_rows,
    }
    catalog.correct_segment(path, **figures, worker=held.worker, epoch=held.epoch)
    return f"{path}: its row in the catalog is that of its file again; the file stays where it is"


def _take_back(catalog: Catalog, layout: RunLayout, path: str) -> str:
    """A file that was set aside, put back by hand: if it is what was committed, it counts again."""
    data = _whole(layout, path)
    held = None if data is None else open_rows(data, path=layout.root / path)
    if held is None or not layout.info.wrote(held.run_id) or malformed(held):
        return f"{path}: what was put back is not what was committed; moved to {quarantine(layout, path)}"
    n = catalog.take_back(path, [trajectory.meta for trajectory in trajectories(held)])
    return f"{path}: it counts again; {n} trajectories that were lost are here again"


def _write_note(layout: RunLayout, place: str, meta: SegmentMeta, finding: Finding) -> None:
    note = {
        "was": meta.path,
        "what": finding.what,
        "why": finding.detail,
        "set_aside_us": now_us(),
        "held": [
            {
                "traj_uid": uid_text(trajectory.traj_uid),
                "group_uid": uid_text(trajectory.group_uid),
                "member": trajectory.member,
            }
            for trajectory in meta.trajectories
        ],
    }
    make_directory(layout.quarantine, beneath=layout.root)
    name = (
        layout.root / place
        if place != "nowhere"
        else layout.quarantine / f"{meta.segment_id}.parquet"
    )
    path = name.with_suffix(".json")
    # a crash came between this and the catalog; the first note knows why
    if status(path, root=layout.root) is None:
        write_atomically(
            path, json.dumps(note, indent=1).encode(), mode=READ_ONLY, beneath=layout.root
        )


def _rescue(catalog: Catalog, layout: RunLayout, meta: SegmentMeta) -> SegmentMeta | None:
    """A new file of the trajectories that files from before a compaction still hold, as far as they
    are intact.
    """
    wanted = {trajectory.traj_uid: trajectory for trajectory in meta.trajectories}
    tables: list[pa.Table] = []
    found = []
    for path, excluded in catalog.replaced_files().items() if wanted else ():
        table = _intact(layout, path)
        held = (
            wanted.keys() & (set(table["traj_uid"].to_pylist()) - excluded)
            if table is not None
            else set()
        )
        if table is not None and held:
            uids = pa.array(sorted(held), table.schema.field("traj_uid").type)
            tables.append(table.filter(pc.is_in(table["traj_uid"], value_set=uids)))
            found += [wanted.pop(traj_uid) for traj_uid in sorted(held)]
    if not tables:
        return None
    return write_rows(
        layout,
        pa.concat_tables(tables),
        trajectories=tuple(found),
        worker=WORKER,
        epoch=catalog.epoch,
    )


def _intact(layout: RunLayout, path: str) -> pa.Table | None:
    data = _whole(layout, path)
    try:
        return None if data is None else decode(data, path=Path(path))
    except FormatError:
        return None


def _whole(layout: RunLayout, path: str) -> pa.Buffer | None:
    """The bytes of a file if they are those it is named after."""
    try:
        data = layout.storage.read(path)
        return data if file_digest(data) == PurePosixPath(path).stem else None
    # what it holds may be all that is left: nothing is given up for an outage
    except UnavailableError:
        raise
    except StoreError:  # this one is damaged too
        return None
