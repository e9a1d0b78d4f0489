"""Change segments after their commit: replace, expire, remove. Functions of one transaction.

A segment is live until it is retired. Its file stays for readers of older snapshots until it is
removed. Rows of the table `segment` are never deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from store.catalog.log_check import FROM_OPEN_EVENTS
from store.catalog.records import LiveSegment
from store.catalog.transaction import Transaction
from store.errors import StoreError
from store.run_names import SEGMENT_PATH, checked_name
from store.segments import SEGMENT_COLUMNS, SegmentMeta

# Groups whose rows the learner may still ask for. Offline groups always are, because the number of
# their uses may be raised. A roll-back, which is rare, makes more groups available.
_WANTED = """(g.state IN ('open', 'claimed')
    OR (g.state = 'complete' AND (g.split = 'train' OR g.source IS NOT NULL)))"""

# Removed files that may hold rows that no other file has: lost trajectories were read from them, or
# from the file that replaced them.
WANTED_BACK = """(removed_us IS NOT NULL
    AND (retired_why = 'quarantined' OR retired_why = 'compacted' AND EXISTS (
        SELECT 1 FROM lost_trajectory l WHERE l.lsn >= segment.retired_lsn
        AND l.traj_uid NOT IN (SELECT traj_uid FROM trajectory))))"""

# A file that must be there. A live one must, whatever a changed byte says of its removal.
NEEDED = "(retired_lsn IS NULL OR removed_us IS NULL)"


def live_segments(tx: Transaction) -> tuple[LiveSegment, ...]:
    """Return every live segment, oldest first."""
    rows = tx.rows(
        f"""SELECT s.segment_id, s.level, s.n_bytes, s.n_steps, s.lsn, s.committed_us,
                   s.level > 0 OR NOT EXISTS (
                       SELECT 1 FROM trajectory t JOIN grp g USING (group_uid)
                       WHERE t.segment_id = s.segment_id AND {_WANTED}) AS settled
            FROM segment s WHERE s.retired_lsn IS NULL ORDER BY s.lsn, s.segment_id"""
    )
    return tuple(LiveSegment(**{**row, "settled": bool(row["settled"])}) for row in map(dict, rows))


def segment_metas(tx: Transaction, segment_ids: Sequence[str]) -> tuple[SegmentMeta, ...]:
    """Return these segments with their trajectories that count. Raises StoreError."""
    metas = []
    for segment_id in segment_ids:
        row = tx.row("SELECT * FROM segment WHERE segment_id = :segment_id", segment_id=segment_id)
        if row is None:
            raise StoreError(
                f"segment {segment_id} is not in the catalog; ask live_segments() for those that "
                "are"
            )
        trajectories = tx.rows(
            "SELECT * FROM trajectory WHERE segment_id = :segment_id ORDER BY group_uid, member",
            segment_id=segment_id,
        )
        metas.append(SegmentMeta.of_rows(dict(row), trajectories))
    return tuple(metas)


def replace_segments(
    tx: Transaction, *, old: Collection[str], new: SegmentMeta, level: int
) -> None:
    """Read the rows of the segments `old` from `new` from now on (compaction).

    Raises StoreError if `new` does not hold exactly their trajectories.
    """
    for segment_id in old:
        _check_live(tx, segment_id)
    of_segment = "SELECT traj_uid FROM trajectory WHERE segment_id = :id"
    before = {row["traj_uid"] for one in old for row in tx.rows(of_segment, id=one)}
    if before != {trajectory.traj_uid for trajectory in new.trajectories}:
        raise StoreError(
            f"segment {new.path} does not hold the trajectories of the {len(old)} it replaces; "
            "compact them again"
        )
    insert_segment(tx, new, epoch=tx.epoch, level=level)
    for segment_id in old:
        tx.run(
            "UPDATE trajectory SET segment_id = :new WHERE segment_id = :old",
            new=new.segment_id,
            old=segment_id,
        )
    retire(tx, old, why="compacted")


def retire(tx: Transaction, segment_ids: Collection[str], *, why: str) -> None:
    """Hide segments from later snapshots. `why` is 'compacted', 'expired' or 'quarantined'."""
    for segment_id in segment_ids:
        _check_live(tx, segment_id)
        tx.run(
            """UPDATE segment SET retired_lsn = :lsn, retired_us = :now_us, retired_why = :why
               WHERE segment_id = :segment_id""",
            lsn=tx.lsn,
            now_us=tx.now_us,
            why=why,
            segment_id=segment_id,
        )
    if segment_ids:
        tx.touch("segments", "excluded")


def expire(tx: Transaction, segment_ids: Collection[str]) -> None:
    """Hide segments that retention dropped. Rows of their groups stay."""
    retire(tx, segment_ids, why="expired")


def insert_segment(tx: Transaction, segment: SegmentMeta, *, epoch: int, level: int) -> None:
    """Enter a segment. It is live from now on."""
    columns = {name: getattr(segment, name) for name in SEGMENT_COLUMNS}
    tx.insert("segment", **columns, epoch=epoch, lsn=tx.lsn, committed_us=tx.now_us, level=level)
    tx.touch("segments")


def removable(tx: Transaction, *, retired_before_us: int, pinned_lsn: int | None) -> dict[str, str]:
    """Return retired files that nobody needs: segment id -> path."""
    rows = tx.rows(
        """SELECT segment_id, path FROM segment
           WHERE retired_lsn IS NOT NULL AND removed_us IS NULL AND retired_why <> 'quarantined'
             AND retired_us < :before_us AND (:pinned IS NULL OR retired_lsn <= :pinned)
           ORDER BY retired_lsn""",
        before_us=retired_before_us,
        pinned=pinned_lsn,
    )
    return {
        row["segment_id"]: checked_name(row["path"], SEGMENT_PATH, where="the catalog")
        for row in rows
    }


def mark_removed(tx: Transaction, segment_ids: Collection[str]) -> None:
    """Record that these files are gone. Earlier snapshots can no longer be read.

    Call it before the files are removed: a crash in between leaves files that nobody names, and
    never names a file that is gone.
    """
    for segment_id in segment_ids:
        tx.run(
            "UPDATE segment SET removed_us = :now_us WHERE segment_id = :segment_id",
            now_us=tx.now_us,
            segment_id=segment_id,
        )
        tx.run(
            """UPDATE meta SET horizon_lsn = max(
                   horizon_lsn,
                   (SELECT retired_lsn FROM segment WHERE segment_id = :segment_id))""",
            segment_id=segment_id,
        )


def may_lack_commits(tx: Transaction) -> bool:
    """Return whether commits were in a damaged log, and no rebuild looked for them since."""
    return bool(tx.rows(f"SELECT 1 {FROM_OPEN_EVENTS} LIMIT 1"))


def is_list_damaged(tx: Transaction) -> bool:
    """Return whether the table of segments contradicts its indexes: a file may lack its name."""
    return [row[0] for row in tx.rows("PRAGMA integrity_check('segment')")] != ["ok"]


def known_paths(tx: Transaction) -> frozenset[str]:
    """Return the files that must stay. Other files beneath segments/ may be swept.

    A removed file whose trajectories were lost is kept, should somebody put it back. A file is
    retired before it is removed. If the two times say otherwise, one of them is damaged.
    """
    rows = tx.rows(
        f"""SELECT path FROM segment
            WHERE (removed_us >= retired_us) IS NOT TRUE OR {WANTED_BACK}"""
    )
    return frozenset(row["path"] for row in rows)


def expirable(
    tx: Transaction,
    *,
    completed_before_us: int | None,
    below_version: int | None,
    oldest_checkpoint: int,
) -> tuple[str, ...]:
    """Return the live segments that retention may drop, oldest first.

    Such a segment holds no group that is younger than asked, that may still be consumed, that a
    claimed batch replays, or that was consumed after `oldest_checkpoint`. A roll-back to that
    learner step would make it available again.
    """
    rows = tx.rows(
        f"""SELECT s.segment_id FROM segment s
            WHERE s.retired_lsn IS NULL AND NOT EXISTS (
                SELECT 1 FROM trajectory t JOIN grp g USING (group_uid)
                WHERE t.segment_id = s.segment_id AND ({_WANTED}
                    OR (:before_us IS NOT NULL
                        AND coalesce(g.completed_us, g.opened_us) >= :before_us)
                    OR (:below IS NOT NULL AND (t.version_max >= :below OR g.split = 'imported'))
                    OR EXISTS (SELECT 1 FROM batch_group l JOIN batch b USING (batch_id)
                               WHERE l.group_uid = g.group_uid AND l.live = 1
                                 AND (b.state = 'claimed'
                                      OR b.learner_step > :oldest_checkpoint))))
            ORDER BY s.lsn""",
        before_us=completed_before_us,
        below=below_version,
        oldest_checkpoint=oldest_checkpoint,
    )
    return tuple(row["segment_id"] for row in rows)


def _check_live(tx: Transaction, segment_id: str) -> None:
    row = tx.row(
        "SELECT retired_why FROM segment WHERE segment_id = :segment_id", segment_id=segment_id
    )
    if row is None or row["retired_why"] is not None:
        state = "not in the catalog" if row is None else f"already {row['retired_why']}"
        raise StoreError(f"segment {segment_id} is {state}; choose among the live segments")
