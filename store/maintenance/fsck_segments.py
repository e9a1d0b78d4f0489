"""Check the segments: every file that counts holds what was committed, and no other is there."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa

from store.catalog.segment_states import NEEDED, WANTED_BACK
from store.clock import US_PER_S, now_us
from store.errors import FormatError, StoreError, UnavailableError
from store.hashing import CANONICALISER_VERSION, file_digest
from store.layout import RunLayout
from store.maintenance import segment_rows
from store.maintenance.finding import SWEPT, Finding, found
from store.maintenance.fsck_catalog import open_catalog
from store.records import uid_text
from store.run_names import SEGMENT_PATH
from store.segments import SEGMENT_COLUMNS, SegmentMeta, TrajectoryMeta
from store.storage import StoredFile

GRACE_S = 600.0  # a younger file may be one that a worker is about to commit
ATTEMPTS = 5  # live -> retired -> removed: the owner cannot change one file more often
RELATIVE_ERROR = 1e-9  # of a return: the order of a sum is not fixed
RETURNED = f"SELECT path, retired_why FROM segment WHERE {WANTED_BACK}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """One file, from the rows of the catalog."""

    meta: SegmentMeta
    epoch: int
    retired_why: str | None
    excluded: frozenset[bytes]  # trajectories in the file that do not count


def check_segments(layout: RunLayout, *, contents: bool) -> list[Finding]:
    """Check live and retired files; with `contents` also what is in them."""
    listed = _listed(layout)
    suspects = []
    with open_catalog(layout) as connection:
        query = f"SELECT segment_id FROM segment WHERE {NEEDED}"
        for (segment_id,) in connection.execute(query).fetchall():
            committed = _committed(connection, segment_id)
            if committed is None:
                continue
            if _check(layout, committed, file=listed.get(committed.meta.path), contents=contents):
                suspects.append(segment_id)
    findings = _check_again(layout, suspects, contents=contents)
    # A new connection: files may have been committed since the listing.
    with open_catalog(layout) as connection:
        query = f"SELECT path FROM segment WHERE {NEEDED}"
        known = {path for (path,) in connection.execute(query)}
        returned = dict(connection.execute(RETURNED).fetchall())
        for path in sorted(listed.keys() & returned.keys()):
            if layout.storage.exists(path):  # else it was set aside while we looked
                detail = (
                    f"it was {returned[path]} and removed, and is there again; "
                    "only it may hold what was lost with it"
                )
                findings.append(found("segment_returned", path, detail))
        for path in sorted(listed.keys() - known - returned.keys()):
            if listed[path].modified_us < now_us() - GRACE_S * US_PER_S:
                findings.append(_stray(connection, layout, path=path, contents=contents))
    return findings


def _listed(layout: RunLayout) -> dict[str, StoredFile]:
    return {file.path: file for file in layout.storage.files(layout.relative(layout.segments))}


def _check_again(layout: RunLayout, segment_ids: list[str], *, contents: bool) -> list[Finding]:
    """Check each file until the catalog says the same of it before and after.

    All are checked with one listing: one for each would take the square of their number.
    """
    settled: list[Finding] = []
    unsettled: dict[str, list[Finding]] = {segment_id: [] for segment_id in segment_ids}
    for _ in range(ATTEMPTS):
        if not unsettled:
            break
        before = _all_committed(layout, unsettled)
        listed = _listed(layout)
        checked = {
            segment_id: _check(
                layout, committed, file=listed.get(committed.meta.path), contents=contents
            )
            for segment_id, committed in before.items()
        }
        after = _all_committed(layout, before)
        unsettled = {}
        for segment_id, findings in checked.items():
            if after.get(segment_id) == before[segment_id]:
                settled += findings
            else:
                unsettled[segment_id] = findings
    return settled + [finding for findings in unsettled.values() for finding in findings]


def _all_committed(layout: RunLayout, segment_ids: Iterable[str]) -> dict[str, Committed]:
    """Return the rows of the files that need to be there now, by segment."""
    with open_catalog(layout) as connection:
        found = {segment_id: _committed(connection, segment_id) for segment_id in segment_ids}
    return {segment_id: rows for segment_id, rows in found.items() if rows is not None}


def _committed(connection: sqlite3.Connection, segment_id: str) -> Committed | None:
    """Return the rows of one file; None once it need not be there any more."""
    with connection:  # one moment for all queries
        connection.execute("BEGIN")
        segment = connection.execute(
            f"""SELECT {", ".join(SEGMENT_COLUMNS)}, epoch, retired_why
                FROM segment WHERE segment_id = ? AND {NEEDED}""",
            (segment_id,),
        ).fetchone()
        if segment is None:
            return None
        names = TrajectoryMeta.__slots__
        query = f"SELECT {', '.join(names)} FROM trajectory WHERE segment_id = ?"
        counted = connection.execute(query, (segment_id,)).fetchall()
        query = "SELECT traj_uid FROM duplicate WHERE segment_id = ?"
        excluded = frozenset(row[0] for row in connection.execute(query, (segment_id,)))
        return Committed(
            meta=SegmentMeta.of_rows(dict(segment), counted),
            epoch=segment["epoch"],
            retired_why=segment["retired_why"],
            excluded=excluded,
        )


def _check(
    layout: RunLayout, committed: Committed, *, file: StoredFile | None, contents: bool
) -> list[Finding]:
    """Check the file's name, size and digest, then its rows."""
    path = committed.meta.path
    # Only snapshots from before its retirement miss a retired file.
    kind = "segment" if committed.retired_why is None else "retired"
    if file is None:
        detail = (
            f"the file is gone; {len(committed.meta.trajectories)} trajectories are read from it"
        )
        return [found(f"{kind}_missing", path, detail)]
    if file.n_bytes == committed.meta.n_bytes and not contents:
        return []
    try:
        if file.n_bytes != committed.meta.n_bytes:  # it may be of any size: its rows are not needed
            data = None
            n_bytes = file.n_bytes
            digest = layout.storage.digest(path)
        else:
            data = layout.storage.read(path)
            n_bytes, digest = data.size, file_digest(data)
    except UnavailableError as unavailable:
        return [found("segment_unavailable", path, str(unavailable))]
    except StoreError as unreadable:
        return [found(f"{kind}_damaged", path, str(unreadable))]
    if (digest, n_bytes) != (committed.meta.digest, committed.meta.n_bytes):
        return [_changed(committed, kind=kind, n_bytes=n_bytes, digest=digest)]
    assert data is not None
    return [] if kind == "retired" else _check_content(layout, committed, data=data)


def _changed(committed: Committed, *, kind: str, n_bytes: int, digest: str) -> Finding:
    """Say how a file of this size and digest differs from the row of the catalog."""
    path = committed.meta.path
    if digest == PurePosixPath(path).stem:  # the file is what it was: the row is not
        detail = (
            f"the file is whole; the catalog says digest {committed.meta.digest}, "
            f"{committed.meta.n_bytes} bytes instead of {digest}, {n_bytes} bytes"
        )
        return found("segment_row", path, detail)
    if n_bytes != committed.meta.n_bytes:
        detail = f"it has {n_bytes} bytes, committed were {committed.meta.n_bytes}"
    else:
        detail = f"it has digest {digest}, committed was {committed.meta.digest}"
    return found(f"{kind}_damaged", path, detail)


def _check_content(layout: RunLayout, committed: Committed, *, data: pa.Buffer) -> list[Finding]:
    """Check the rows of a file whose bytes are those that were committed."""
    path = committed.meta.path
    try:
        held = segment_rows.open_rows(data, path=layout.root / path)
    except FormatError as unreadable:
        return [found("segment_unreadable", path, str(unreadable))]
    return [found(what, path, detail) for what, detail in _check_rows(layout, committed, held=held)]


def _check_rows(
    layout: RunLayout, committed: Committed, *, held: segment_rows.Rows
) -> list[tuple[str, str]]:
    """Return (code, detail) of what is wrong with the rows of a whole file."""
    if not layout.info.wrote(held.run_id):
        detail = f"it was written for run {held.run_id}, this is run {layout.info.run_id}"
        return [("segment_foreign", detail)]
    wrong = segment_rows.malformed(held.table)
    if layout.info.canonicaliser_version != CANONICALISER_VERSION:  # hashes of another text
        wrong = [(what, detail) for what, detail in wrong if what != "state_hash"]
    wrong = wrong or _compare(committed, held)
    said = (committed.meta.n_steps, committed.meta.worker, committed.epoch)
    if not wrong and said != (held.table.num_rows, held.worker, held.epoch):
        of_file = f"{held.table.num_rows} by {held.worker} in {held.epoch}"
        of_row = (
            f"{committed.meta.n_steps} rows by {committed.meta.worker} in epoch {committed.epoch}"
        )
        return [("segment_row", f"the catalog says {of_row}; the file has {of_file}")]
    return wrong


def _compare(committed: Committed, held: segment_rows.Rows) -> list[tuple[str, str]]:
    """Compare the trajectories of a file's rows with those of the catalog."""
    played = {one.meta.traj_uid: one.meta for one in segment_rows.trajectories(held.table)}
    counted = {meta.traj_uid: meta for meta in committed.meta.trajectories}
    wrong = []
    for traj_uid in sorted(counted.keys() - played.keys()):
        detail = f"trajectory {uid_text(traj_uid)} is counted, and has no row in the file"
        wrong.append(("missing_rows", detail))
    for traj_uid in sorted(played.keys() - counted.keys() - committed.excluded):
        name = uid_text(traj_uid)
        detail = f"trajectory {name} is seen in the file, and counted elsewhere or nowhere"
        wrong.append(("uncounted_rows", detail))
    for traj_uid in sorted(counted.keys() & played.keys()):
        one, other = counted[traj_uid], played[traj_uid]
        names = [
            name
            for name in TrajectoryMeta.__slots__
            if not _same(getattr(one, name), getattr(other, name))
        ]
        if names:
            detail = f"the catalog and the rows differ in {', '.join(names)}"
            wrong.append(("figures", f"trajectory {uid_text(traj_uid)}: {detail}"))
    return wrong


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE_ERROR, abs_tol=RELATIVE_ERROR)
    return one == other


def _stray(
    connection: sqlite3.Connection, layout: RunLayout, *, path: str, contents: bool
) -> Finding:
    """Judge a file beneath segments/ that the catalog does not know."""
    if not SEGMENT_PATH.fullmatch(path):
        return found("unknown_file", path, "no part of the store writes such a file")
    if not contents:
        return found("orphan", path, "it was never committed")
    try:
        held = segment_rows.open_rows(layout.storage.read(path), path=layout.root / path)
    except StoreError as unreadable:
        detail = f"it was never committed, and cannot be read: {unreadable}"
        return found("orphan", path, detail)
    if not layout.info.wrote(held.run_id):
        detail, remedy = f"it was written for run {held.run_id}", "move it to the run it is of"
        return found("orphan", path, detail, remedy=remedy)
    played = segment_rows.trajectories(held.table)
    query = """SELECT count(*) FROM grp WHERE group_uid = ? AND state = 'open'
               AND NOT EXISTS (SELECT 1 FROM trajectory WHERE traj_uid = ?)"""
    uids = [(one.meta.group_uid, one.meta.traj_uid) for one in played]
    n_missing = sum(connection.execute(query, pair).fetchone()[0] for pair in uids)
    detail = f"it was never committed; {n_missing} of its {len(played)} trajectories are missing"
    kept = ", and its trajectories are played again; to keep them: gigpo rebuild --force {root}"
    return found("orphan", path, detail, remedy=SWEPT + kept if n_missing else SWEPT)
