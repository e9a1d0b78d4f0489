"""A lost catalog made anew from the exported tables and from what the segment files say. For
upkeep/rebuild.py.

First the exported rows are put back as they were, then everything that is new since is one more
transaction: files and trajectories that the exports do not know, claims that nobody can settle any
more, rows that are gone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from store.catalog.batches import release
from store.catalog.database import Transaction
from store.catalog.groups import (
    abandon_incomplete_offline,
    complete_if_whole,
    insert_trajectories,
    recompute,
    reopen,
)
from store.catalog.imported_groups import complete_imported
from store.catalog.records import IMPORTED
from store.catalog.repairs import STILL_TO_BE_CONSUMED
from store.catalog.schema_check import SCHEMA
from store.catalog.segment_states import insert_segment
from store.hashing import uid
from store.segments import SegmentMeta

Row = Mapping[str, Any]
COMPONENT = "rebuild"
GONE = "gone-before-the-rebuild"  # stands for the files that held what is in no file any more
GONE_WHY = "in no file when the catalog was rebuilt: retention removed it, or it was lost"
BATCH_REASON = "batch {}"  # as `claim` writes it into the ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSegment:
    """A readable file, and which of its trajectories count from it; none: another file holds
    them.
    """

    meta: SegmentMeta
    epoch: int
    level: int
    excluded: tuple[bytes, ...]
    written_us: int  # UTC epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundGroup:
    """A group that the exports do not know, as its rows tell it."""

    group_uid: bytes
    split: str
    ordinal: int
    task_id: str
    size: int
    purpose_version: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """All that is left of a run."""

    run_id: str
    epoch: int  # larger than any there was
    lsn: int  # of the exports
    tables: Mapping[str, Sequence[Row]]
    groups: Sequence[FoundGroup]
    segments: Sequence[FoundSegment]
    versions: Mapping[int, str]  # that the exports do not know → path


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What had to change since the exports."""

    completed: int  # groups that files show to be complete
    reopened: int  # unconsumed groups that lack trajectories the exports counted
    gone: int  # trajectories of consumed groups that no file holds
    released: tuple[int, ...]  # batches that were claimed


def restore(connection: sqlite3.Connection, found: Found) -> Restored:
    """Fill a new, empty database; durable when the connection is closed."""
    connection.executescript(SCHEMA)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        "INSERT INTO meta (id, run_id, epoch, lsn, horizon_lsn) VALUES (1, ?, ?, ?, ?)",
        (found.run_id, found.epoch, found.lsn, found.lsn + 1),
    )
    triggers = connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'"
    ).fetchall()
    for trigger in triggers:  # they would write a ledger of their own
        connection.execute(f"DROP TRIGGER {trigger['name']}")
    tx = Transaction(connection, run_id=found.run_id, epoch=found.epoch, lsn=found.lsn + 1)
    _put_back(tx, found)
    for trigger in triggers:
        connection.execute(trigger["sql"])
    restored = _go_on(tx, found)
    connection.execute("UPDATE meta SET lsn = ?", (tx.lsn,))
    names = ("segments", *found.tables)
    connection.executemany(
        "INSERT OR REPLACE INTO changed (name, lsn) VALUES (?, ?)",
        [(name, tx.lsn) for name in names],
    )
    connection.execute("COMMIT")
    return restored


def _insert(tx: Transaction, table: str, **values: Any) -> None:
    names = ", ".join(values)
    tx.run(
        f"INSERT OR REPLACE INTO {table} ({names}) VALUES "
        f"({', '.join(':' + name for name in values)})",
        **values,
    )


def _put_back(tx: Transaction, found: Found) -> None:
    tables, lsn = found.tables, found.lsn
    lines: dict[bytes, list[Row]] = {}
    for row in tables["ledger"]:
        lines.setdefault(row["group_uid"], []).append(row)
    for row in tables["groups"]:
        _put_back_group(tx, row, lines=lines.get(row["group_uid"], []), lsn=lsn)
    known = {row["group_uid"] for row in tables["groups"]}
    # of the others the caller has spoken
    for row in (row for row in tables["ledger"] if row["group_uid"] in known):
        names = ("group_uid", "state", "reason", "lsn")
        _insert(tx, "group_state", **{name: row[name] for name in names}, at_us=row["at"])
    for row in tables["groups"]:
        # An export of format 1 has no ledger, and without a manifest (a rebuild was killed) that of
        # another moment may be read.
        if [line["state"] for line in lines.get(row["group_uid"], [])][-1:] != [row["state"]]:
            values = {
                "state": row["state"],
                "reason": row["reason"] or "dispatched",
                "lsn": lsn,
                "at_us": row["opened_at"],
            }
            _insert(tx, "group_state", group_uid=row["group_uid"], **values)
    _put_back_batches(tx, tables["lineage"], lines=lines, lsn=lsn, known=known)
    for row in tables["versions"]:
        values = {
            name: row[name] for name in ("version", "path", "digest", "learner_step", "epoch")
        }
        _insert(tx, "version", **values, published_us=row["published_at"], lsn=lsn)
    # their lsns are not exported, only their order
    for number, row in enumerate(tables["checkpoints"], start=1):
        values = {name: row[name] for name in ("learner_step", "path", "version", "live")}
        _insert(tx, "checkpoint", lsn=number, **values, saved_us=row["saved_at"], changed_lsn=lsn)
    for row in tables["metrics"]:
        values = {name: row[name] for name in ("learner_step", "policy_version", "name", "value")}
        more = {
            "live": row.get("live", True),
            "lsn": row.get("lsn", lsn),
            "changed_lsn": row.get("changed_lsn", lsn),
        }
        _insert(tx, "metric", **values, **more)
    for row in (row for row in tables["unfinished"] if row["group_uid"] in known):
        same = (
            "group_uid",
            "number",
            "worker",
            "version",
            "why",
            "n_steps",
            "n_response_tokens",
            "lsn",
        )
        times = {"begun_us": row["begun_at"], "ended_us": row["ended_at"]}
        _insert(tx, "unfinished", **{name: row[name] for name in same}, **times)
    for row in tables["events"]:
        values = {name: row[name] for name in ("component", "what", "detail")}
        _insert(tx, "event", lsn=row.get("lsn", lsn), at_us=row["at"], **values)


def _put_back_group(tx: Transaction, row: Row, *, lines: Sequence[Row], lsn: int) -> None:
    names = (
        "group_uid",
        "split",
        "ordinal",
        "task_id",
        "size",
        "purpose_version",
        "state",
        "reason",
        "n_members",
        "n_steps",
    )
    values = {
        name: row[name] for name in (*names, "n_won", "return_sum", "version_min", "version_max")
    }
    completed = [line["lsn"] for line in lines if line["state"] == "complete"]
    _insert(
        tx,
        "grp",
        **values,
        opened_lsn=lines[0]["lsn"] if lines else lsn,
        opened_us=row["opened_at"],
        completed_lsn=None if row["completed_at"] is None else (completed[0] if completed else lsn),
        completed_us=row["completed_at"],
        changed_lsn=row.get("changed_lsn", lsn),
        source=row.get("source"),
    )


def _put_back_batches(
    tx: Transaction,
    lineage: Sequence[Row],
    *,
    lines: Mapping[bytes, Sequence[Row]],
    lsn: int,
    known: Container[bytes],
) -> None:
    of_batch: dict[int, list[Row]] = {}
    for row in lineage:
        of_batch.setdefault(row["batch_id"], []).append(row)
    for batch_id, rows in sorted(of_batch.items()):
        first = rows[0]
        state, changed = first["batch_state"], max(row.get("changed_lsn", lsn) for row in rows)
        history = [line for row in rows for line in lines.get(row["group_uid"], ())]
        claimed = [
            line["lsn"] for line in history if line["reason"] == BATCH_REASON.format(batch_id)
        ]
        # of offline groups only: their state, and its ledger, do not change
        since = min(claimed, default=min(lsn, changed))
        settled = [
            line["lsn"]
            for line in history
            if line["state"] in ("trained", "filtered") and line["lsn"] > since
        ]
        trained = first["trained_at"] is not None
        _insert(
            tx,
            "batch",
            batch_id=batch_id,
            epoch=0,  # not exported; no epoch is 0
            state=state,
            claimed_version=first["version_in"],
            version_in=first["version_in"] if trained else None,
            learner_step=first["learner_step"],
            claimed_us=first["claimed_at"],
            trained_us=first["trained_at"],
            claimed_lsn=since,
            trained_lsn=min(settled, default=changed) if trained else None,
            rolled_back_lsn=changed if state == "rolled_back" else None,
        )
        for row in (row for row in rows if row["group_uid"] in known):
            names = ("batch_id", "group_uid", "live", "outcome", "version_min", "version_max")
            more = {"changed_lsn": row.get("changed_lsn", lsn), "use": row.get("use", 1)}
            _insert(tx, "batch_group", **{name: row[name] for name in names}, **more)


def _go_on(tx: Transaction, found: Found) -> Restored:
    for group in found.groups:
        names = ("group_uid", "split", "ordinal", "task_id", "size", "purpose_version")
        values = {name: getattr(group, name) for name in names}
        sums = {"n_members": 0, "n_steps": 0, "n_won": 0, "return_sum": 0.0}
        tx.run(
            f"""INSERT INTO grp ({", ".join({**values, **sums})}, state, opened_lsn, opened_us)
                VALUES ({", ".join(":" + name for name in {**values, **sums})}, :state, :lsn, :now_us)""",
            **values,
            **sums,
            # nobody plays what was imported
            state="abandoned" if group.split == IMPORTED else "open",
            lsn=tx.lsn,
            now_us=tx.now_us,
        )
    for segment in found.segments:
        _count(tx, segment, lsn=found.lsn)
    for version, path in found.versions.items():
        _insert(
            tx,
            "version",
            version=version,
            path=path,
            digest="unknown",
            epoch=0,
            published_us=tx.now_us,
            lsn=tx.lsn,
        )
    claimed = [
        row["batch_id"] for row in tx.rows("SELECT batch_id FROM batch WHERE state = 'claimed'")
    ]
    for batch_id in claimed:
        release(tx, batch_id, why="rolled back: the catalog was rebuilt")
    reopened, gone = _compare(tx)
    before = tx.row("SELECT count(*) AS n FROM grp WHERE state = 'open'")
    for row in tx.rows("SELECT group_uid FROM grp WHERE state = 'open'"):
        complete_if_whole(tx, row["group_uid"])
    for row in tx.rows(
        "SELECT group_uid FROM grp WHERE split = :split AND state = 'abandoned'", split=IMPORTED
    ):
        complete_imported(tx, row["group_uid"], reason=None)
    after = tx.row("SELECT count(*) AS n FROM grp WHERE state = 'open'")
    assert before is not None and after is not None
    return Restored(
        completed=before["n"] - after["n"], reopened=reopened, gone=gone, released=tuple(claimed)
    )


def _count(tx: Transaction, segment: FoundSegment, *, lsn: int) -> None:
    insert_segment(tx, segment.meta, epoch=segment.epoch, level=segment.level)
    tx.run(
        "UPDATE segment SET committed_us = :written_us, lsn = :lsn WHERE segment_id = :segment_id",
        written_us=segment.written_us,
        lsn=lsn,
        segment_id=segment.meta.segment_id,
    )
    if not segment.meta.trajectories:
        tx.run(
            """UPDATE segment SET retired_lsn = :lsn, retired_us = :now_us, retired_why = 'compacted'
               WHERE segment_id = :segment_id""",
            lsn=tx.lsn,
            now_us=tx.now_us,
            segment_id=segment.meta.segment_id,
        )
    insert_trajectories(tx, segment.meta.trajectories, segment_id=segment.meta.segment_id)
    for traj_uid in segment.excluded:
        _insert(tx, "duplicate", segment_id=segment.meta.segment_id, traj_uid=traj_uid)


def _compare(tx: Transaction) -> tuple[int, int]:
    """The exported groups against the trajectories that were found."""
    reopened = gone = 0
    for row in tx.rows(
        """SELECT g.group_uid, g.state, g.size, g.n_members, count(t.traj_uid) AS n
           FROM grp g LEFT JOIN trajectory t USING (group_uid) GROUP BY g.group_uid HAVING g.n_members <> n"""
    ):
        if row["n"] > row["n_members"] or row["state"] in ("open", "abandoned"):
            recompute(tx, row["group_uid"])
        elif tx.row(
            f"SELECT 1 FROM grp WHERE group_uid = :g AND {STILL_TO_BE_CONSUMED}", g=row["group_uid"]
        ):
            reopen(
                tx,
                row["group_uid"],
                reason="to be played again: rows were lost before the catalog was rebuilt",
            )
            reopened += 1
        else:
            gone += _list_as_gone(tx, row["group_uid"], size=row["size"])
            abandon_incomplete_offline(tx, row["group_uid"], why=GONE_WHY)
    return reopened, gone


def _list_as_gone(tx: Transaction, group_uid: bytes, *, size: int) -> int:
    held = {
        row["member"]
        for row in tx.rows("SELECT member FROM trajectory WHERE group_uid = :g", g=group_uid)
    }
    missing = [member for member in range(size) if member not in held]
    tx.run(
        """INSERT OR IGNORE INTO segment (segment_id, path, digest, n_steps, n_bytes, worker, epoch, lsn, retired_lsn,
                                          committed_us, retired_us, retired_why, removed_us)
           VALUES (:id, :id, '', 0, 0, '', 0, 0, :lsn, :now_us, :now_us, 'expired', :now_us)""",
        id=GONE,
        lsn=tx.lsn,
        now_us=tx.now_us,
    )
    for member in missing:
        _insert(
            tx,
            "lost_trajectory",
            traj_uid=uid(group_uid, member),
            group_uid=group_uid,
            member=member,
            segment_id=GONE,
            reason=GONE_WHY,
            lsn=tx.lsn,
        )
    return len(missing)
