"""fsck of the segments: every file the catalog counts on is there and holds what was committed; no
other file is there.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath

from store.catalog.segment_states import WANTED_BACK
from store.clock import US_PER_S, now_us
from store.errors import FormatError, StoreError, UnavailableError
from store.hashing import CANONICALISER_VERSION, file_digest
from store.layout import SEGMENT_PATH, RunLayout
from store.maintenance import segment_rows
from store.maintenance.finding import Finding, error, warning
from store.records import uid_text
from store.segments import TrajectoryMeta
from store.storage import StoredFile

GRACE_S = 600.0  # a younger file may be one that a worker is about to commit
AGAIN = "make it readable, then check again; --repair leaves it alone"
ATTEMPTS = 5  # live → retired → removed: the owner cannot change one file more often
_RELATIVE = 1e-9  # of a return: the order of a sum is not fixed
RETURNED = f"SELECT path, retired_why FROM segment WHERE {WANTED_BACK}"

Opener = Callable[[], AbstractContextManager[sqlite3.Connection]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """What the catalog says of one file."""

    segment_id: str
    path: str
    digest: str
    n_steps: int
    n_bytes: int
    worker: str
    epoch: int
    retired_why: str | None
    trajectories: tuple[TrajectoryMeta, ...]
    excluded: frozenset[bytes]  # rows of it that do not count


def check_segments(catalog: Opener, layout: RunLayout, *, contents: bool) -> list[Finding]:
    """Live and retired files; `contents`: not only names and sizes. What the listing lacks is asked
    for again.
    """
    listed = {file.path: file for file in layout.storage.files(layout.relative(layout.segments))}
    with catalog() as connection:
        ids = [
            row["segment_id"]
            for row in connection.execute("SELECT segment_id FROM segment WHERE removed_us IS NULL")
        ]
        found = []
        for segment_id in ids:
            committed = _committed(connection, segment_id)
            if committed is not None and _check(
                layout, committed, listed.get(committed.path), contents=contents
            ):
                found += _check_again(catalog, layout, segment_id, contents=contents)
    with catalog() as connection:  # a new one: of what was committed since the listing
        known = {
            row["path"]
            for row in connection.execute("SELECT path FROM segment WHERE removed_us IS NULL")
        }
        returned = {row["path"]: row["retired_why"] for row in connection.execute(RETURNED)}
        for path in sorted(listed.keys() & returned.keys()):
            if layout.storage.exists(path):  # else it was set aside while we looked
                detail = f"it was {returned[path]} and removed, and is there again; only it may hold what was lost with it"
                found.append(
                    error(
                        "segment_returned",
                        path,
                        detail,
                        remedy=f"gigpo fsck --repair {layout.root}",
                    )
                )
        for path in sorted(listed.keys() - known - returned.keys()):
            if listed[path].modified_us < now_us() - GRACE_S * US_PER_S:
                found.append(_stray(connection, layout, path, contents=contents))
    return found


def _check_again(
    catalog: Opener, layout: RunLayout, segment_id: str, *, contents: bool
) -> list[Finding]:
    """Until the catalog says the same of the file before and after we look at it."""
    found: list[Finding] = []
    for _ in range(ATTEMPTS):
        with catalog() as connection:
            before = _committed(connection, segment_id)
        if before is None:
            return []
        directory = str(PurePosixPath(before.path).parent)
        listed = {file.path: file for file in layout.storage.files(directory)}
        found = _check(layout, before, listed.get(before.path), contents=contents)
        with catalog() as connection:
            if _committed(connection, segment_id) == before:
                break
    return found


def _committed(connection: sqlite3.Connection, segment_id: str) -> Committed | None:
    """None once the file need not be there any more."""
    connection.execute("BEGIN")  # one moment for all queries
    try:
        segment = connection.execute(
            """SELECT segment_id, path, digest, n_steps, n_bytes, worker, epoch, retired_why FROM segment
               WHERE segment_id = ? AND removed_us IS NULL""",
            (segment_id,),
        ).fetchone()
        if segment is None:
            return None
        names = TrajectoryMeta.__slots__
        counted = connection.execute(
            f"SELECT {', '.join(names)} FROM trajectory WHERE segment_id = ?", (segment_id,)
        )
        metas = tuple(TrajectoryMeta(**{**dict(row), "won": bool(row["won"])}) for row in counted)
        excluded = connection.execute(
            "SELECT traj_uid FROM duplicate WHERE segment_id = ?", (segment_id,)
        )
        return Committed(
            **dict(segment), trajectories=metas, excluded=frozenset(row[0] for row in excluded)
        )
    finally:
        connection.execute("COMMIT")


def _check(
    layout: RunLayout, committed: Committed, file: StoredFile | None, *, contents: bool
) -> list[Finding]:
    retired = committed.retired_why is not None
    codes = (
        ("retired_missing", "retired_damaged")
        if retired
        else ("segment_missing", "segment_damaged")
    )
    mend = f"gigpo fsck --repair {layout.root}"
    repair = f"restore it from a backup, or {mend}"

    def problem(what: str, detail: str, *, remedy: str = repair) -> Finding:
        # A retired file is missed only by snapshots from before.
        return (warning if retired else error)(what, committed.path, detail, remedy=remedy)

    n = len(committed.trajectories)
    if file is None:
        return [problem(codes[0], f"the file is gone; {n} trajectories are read from it")]
    if file.n_bytes == committed.n_bytes and not contents:
        return []
    try:
        if file.n_bytes != committed.n_bytes:  # it may be of any size: its rows are not needed
            data, n_bytes, digest = None, file.n_bytes, layout.storage.digest(committed.path)
        else:
            data = layout.storage.read(committed.path)
            n_bytes, digest = data.size, file_digest(data)
    except UnavailableError as unavailable:
        return [problem("segment_unavailable", str(unavailable), remedy=AGAIN)]
    except StoreError as unreadable:
        return [problem(codes[1], str(unreadable))]
    if (digest, n_bytes) != (committed.digest, committed.n_bytes):
        if digest == PurePosixPath(committed.path).stem:  # the file is what it was: the row is not
            detail = f"the file is whole; the catalog says digest {committed.digest}, {committed.n_bytes} bytes"
            return [
                error(
                    "segment_row",
                    committed.path,
                    f"{detail} instead of {digest}, {n_bytes} bytes",
                    remedy=mend,
                )
            ]
        if n_bytes != committed.n_bytes:
            return [
                problem(codes[1], f"it has {n_bytes} bytes, committed were {committed.n_bytes}")
            ]
        return [problem(codes[1], f"it has digest {digest}, committed was {committed.digest}")]
    assert data is not None
    if retired or not contents:
        return []
    try:
        held = segment_rows.open_rows(data, path=layout.root / committed.path)
    except FormatError as unreadable:
        return [problem("segment_unreadable", str(unreadable))]
    if not layout.info.wrote(held.run_id):
        return [
            problem(
                "segment_foreign",
                f"it was written for run {held.run_id}, this is run {layout.info.run_id}",
            )
        ]
    hashes = layout.info.canonicaliser_version == CANONICALISER_VERSION
    found = [
        problem(what, detail)
        for what, detail in segment_rows.malformed(held)
        if hashes or what != "state_hash"
    ]
    rebuild = f"gigpo rebuild --force {layout.root}"
    found = found or [
        problem(*wrong, remedy=repair if wrong[0] != "figures" else rebuild)
        for wrong in _compare(committed, held)
    ]
    said = (committed.n_steps, committed.worker, committed.epoch)
    if not found and said != (held.table.num_rows, held.worker, held.epoch):
        detail = f"the catalog says {committed.n_steps} rows by {committed.worker} in epoch {committed.epoch}; "
        detail += f"the file has {held.table.num_rows} by {held.worker} in {held.epoch}"
        found = [error("segment_row", committed.path, detail, remedy=mend)]
    return found


def _compare(committed: Committed, held: segment_rows.Rows) -> list[tuple[str, str]]:
    """The rows of a file against what was committed of it."""
    played = {
        trajectory.meta.traj_uid: trajectory.meta for trajectory in segment_rows.trajectories(held)
    }
    counted = {trajectory.traj_uid: trajectory for trajectory in committed.trajectories}
    found = []
    for traj_uid in sorted(counted.keys() - played.keys()):
        found.append(
            (
                "missing_rows",
                f"trajectory {uid_text(traj_uid)} is counted, and has no row in the file",
            )
        )
    for traj_uid in sorted(played.keys() - counted.keys() - committed.excluded):
        found.append(
            (
                "uncounted_rows",
                f"trajectory {uid_text(traj_uid)} is seen in the file, and counted elsewhere or "
                "nowhere",
            )
        )
    for traj_uid in sorted(counted.keys() & played.keys()):
        names = _differing(counted[traj_uid], played[traj_uid], columns=held.columns)
        if names:
            found.append(
                (
                    "figures",
                    f"trajectory {uid_text(traj_uid)}: the catalog and the rows differ in "
                    f"{', '.join(names)}",
                )
            )
    return found


def _differing(one: TrajectoryMeta, other: TrajectoryMeta, *, columns: frozenset[str]) -> list[str]:
    sources = {
        "n_steps": "step_index",
        "episode_return": "reward",
        "invalid_steps": "is_action_valid",
    }
    names = [name for name in TrajectoryMeta.__slots__ if sources.get(name, name) in columns]
    return [name for name in names if not _same(getattr(one, name), getattr(other, name))]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_RELATIVE)
    return one == other


def _stray(
    connection: sqlite3.Connection, layout: RunLayout, path: str, *, contents: bool
) -> Finding:
    if not SEGMENT_PATH.fullmatch(path):
        return warning(
            "unknown_file",
            path,
            "no part of the store writes such a file",
            remedy="move it elsewhere",
        )
    remedy = "the running job or `gigpo compact` sweeps it"
    if not contents:
        return warning("orphan", path, "it was never committed", remedy=remedy)
    try:
        held = segment_rows.open_rows(layout.storage.read(path), path=layout.root / path)
    except StoreError as unreadable:
        return warning(
            "orphan",
            path,
            f"it was never committed, and cannot be read: {unreadable}",
            remedy=remedy,
        )
    if not layout.info.wrote(held.run_id):
        return warning(
            "orphan",
            path,
            f"it was written for run {held.run_id}",
            remedy="move it to the run it is of",
        )
    played = segment_rows.trajectories(held)
    wanted = 0
    for trajectory in played:
        wanted += connection.execute(
            """SELECT count(*) FROM grp WHERE group_uid = ? AND state = 'open'
               AND NOT EXISTS (SELECT 1 FROM trajectory WHERE traj_uid = ?)""",
            (trajectory.meta.group_uid, trajectory.meta.traj_uid),
        ).fetchone()[0]
    if wanted:
        remedy += f", and its trajectories are played again; to keep them: gigpo rebuild --force {layout.root}"
    return warning(
        "orphan",
        path,
        f"it was never committed; {wanted} of its {len(played)} trajectories are missing",
        remedy=remedy,
    )
