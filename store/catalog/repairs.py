"""Correct the catalog after damage to files or sums, for fsck. Functions of one transaction.

No row is deleted: a damaged file is retired as 'quarantined', and its trajectories are listed as
lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from store.catalog.batches import release
from store.catalog.groups import (
    abandon_incomplete_offline,
    complete_if_full,
    insert_trajectories,
    recompute,
    recompute_if_full,
    reopen,
)
from store.catalog.imported_groups import complete_imported
from store.catalog.records import SetAside
from store.catalog.segment_states import WANTED_BACK, insert_segment, mark_removed, retire
from store.catalog.transaction import Transaction
from store.errors import StoreError
from store.records import uid_text
from store.segments import SegmentMeta, TrajectoryMeta

COMPONENT = "fsck"
# Consumed groups keep their state. A held-out group is consumed once its round has a figure.
STILL_TO_BE_CONSUMED = """(state = 'open' OR split = 'train' AND state IN ('complete', 'claimed')
    OR split = 'heldout' AND state = 'complete' AND NOT EXISTS (
        SELECT 1 FROM metric m
        WHERE m.name = 'heldout/success' AND m.policy_version = evaluated_version))"""


def replaced_files(tx: Transaction) -> Mapping[str, frozenset[bytes]]:
    """Return the replaced files that are not removed yet: path -> duplicates in it."""
    excluded: dict[str, set[bytes]] = {}
    rows = tx.rows(
        """SELECT path, traj_uid FROM segment LEFT JOIN duplicate USING (segment_id)
           WHERE retired_why = 'compacted' AND removed_us IS NULL ORDER BY segment.lsn"""
    )
    for row in rows:
        excluded.setdefault(row["path"], set()).add(row["traj_uid"])
    return {path: frozenset(uids - {None}) for path, uids in excluded.items()}


def set_aside(tx: Transaction, path: str, *, why: str, rescued: SegmentMeta | None) -> SetAside:
    """Stop counting a damaged or missing file. Trajectories that `rescued` does not hold are lost.

    Groups that lost members and are still to be consumed are opened again. A claimed batch with
    such a group is rolled back: its other groups are complete again, and it can no longer be
    settled.
    """
    segment = tx.row("SELECT * FROM segment WHERE path = :path AND removed_us IS NULL", path=path)
    if segment is None:
        raise StoreError(f"{path} is not a file the catalog counts on; run fsck again")
    segment_id = segment["segment_id"]
    if rescued is not None:
        insert_segment(tx, rescued, epoch=tx.epoch, level=segment["level"])
        for trajectory in rescued.trajectories:
            tx.run(
                """UPDATE trajectory SET segment_id = :new
                   WHERE traj_uid = :traj_uid AND segment_id = :old""",
                new=rescued.segment_id,
                traj_uid=trajectory.traj_uid,
                old=segment_id,
            )
    if segment["retired_lsn"] is None:
        retire(tx, [segment_id], why="quarantined")
        lost = _lose_trajectories(tx, segment_id, why=why)
    else:  # only older snapshots need it
        lost = ()
    mark_removed(tx, [segment_id])
    reopened, released = _give_back(tx, traj_uids=lost, why=f"{path}: {why}")
    n_rescued = 0 if rescued is None else len(rescued.trajectories)
    detail = (
        f"{path}: {why}; {len(lost)} trajectories lost, {n_rescued} rescued, {len(reopened)} "
        "groups open again" + "".join(f", batch {batch_id} rolled back" for batch_id in released)
    )
    tx.log(component=COMPONENT, what="quarantine", detail=detail)
    return SetAside(rescued=n_rescued, lost=lost, reopened=reopened, released=released)


def take_back(tx: Transaction, path: str, *, held: Collection[TrajectoryMeta]) -> int:
    """Count a file again that was set aside. Return how many lost trajectories it brings back.

    `held` are all trajectories in the file. If another file holds all of them, this file counts as
    replaced and will be swept. Groups keep their state, but an open one may become complete.
    """
    row = tx.row(f"SELECT segment_id FROM segment WHERE path = :path AND {WANTED_BACK}", path=path)
    if row is None:
        raise StoreError(f"{path} is not a file that was set aside; run fsck again")
    segment_id = row["segment_id"]
    taken = {meta.traj_uid: meta for meta in held if _is_missing(tx, meta)}
    tx.run(
        """UPDATE segment SET lsn = iif(:live, :lsn, lsn),
               retired_lsn = iif(:live, NULL, :lsn), removed_us = NULL,
               retired_us = iif(:live, NULL, :now_us),
               retired_why = iif(:live, NULL, 'compacted')
           WHERE segment_id = :segment_id""",
        live=bool(taken),
        lsn=tx.lsn,
        now_us=tx.now_us,
        segment_id=segment_id,
    )
    tx.run("DELETE FROM duplicate WHERE segment_id = :segment_id", segment_id=segment_id)
    for meta in held:
        if meta.traj_uid in taken:
            insert_trajectories(tx, [meta], segment_id=segment_id)
        else:
            tx.insert("duplicate", segment_id=segment_id, traj_uid=meta.traj_uid)
    for group_uid in dict.fromkeys(meta.group_uid for meta in taken.values()):
        recompute_if_full(tx, group_uid)
        complete_if_full(tx, group_uid)
        complete_imported(tx, group_uid, reason=f"{path} is here again")
    detail = f"{path}: {len(taken)} trajectories that were lost are here again"
    tx.log(component=COMPONENT, what="return", detail=detail)
    tx.touch("segments", "excluded", "groups")
    return len(taken)


def _is_missing(tx: Transaction, meta: TrajectoryMeta) -> bool:
    """Return whether the trajectory was committed once and is in no file now."""
    return bool(
        tx.row(
            """SELECT 1 FROM lost_trajectory WHERE traj_uid = :traj_uid
               AND NOT EXISTS (SELECT 1 FROM trajectory WHERE traj_uid = :traj_uid)""",
            traj_uid=meta.traj_uid,
        )
    )


def exclude(tx: Transaction, path: str, *, traj_uids: Collection[bytes]) -> int:
    """Hide trajectories of a live file that were never counted from it. Return their number."""
    segment = tx.row(
        "SELECT segment_id FROM segment WHERE path = :path AND retired_lsn IS NULL", path=path
    )
    if segment is None:
        raise StoreError(f"{path} is not a live segment; run fsck again")
    n = 0
    for traj_uid in traj_uids:
        n += tx.run(
            """INSERT OR IGNORE INTO duplicate (segment_id, traj_uid) SELECT :segment_id, :traj_uid
               WHERE NOT EXISTS (
                   SELECT 1 FROM trajectory
                   WHERE (traj_uid, segment_id) = (:traj_uid, :segment_id))""",
            segment_id=segment["segment_id"],
            traj_uid=traj_uid,
        )
    tx.log(
        component=COMPONENT, what="exclude", detail=f"{path}: {n} trajectories in it do not count"
    )
    tx.touch("excluded")
    return n


def _lose_trajectories(tx: Transaction, segment_id: str, *, why: str) -> tuple[bytes, ...]:
    """List all trajectories of a segment as lost, and return them."""
    of_segment = "FROM trajectory WHERE segment_id = :segment_id"
    lost = tx.rows(f"SELECT traj_uid {of_segment}", segment_id=segment_id)
    tx.run(
        f"""INSERT INTO lost_trajectory (traj_uid, group_uid, member, segment_id, reason, lsn)
            SELECT traj_uid, group_uid, member, segment_id, :why, :lsn {of_segment}""",
        why=why,
        lsn=tx.lsn,
        segment_id=segment_id,
    )
    tx.run(f"DELETE {of_segment}", segment_id=segment_id)
    return tuple(row["traj_uid"] for row in lost)


def _give_back(
    tx: Transaction, *, traj_uids: Collection[bytes], why: str
) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Open groups of lost trajectories again, and release claimed batches. Return both."""
    of_lost = "SELECT group_uid FROM lost_trajectory WHERE traj_uid = :lost"
    rows = [row for traj_uid in traj_uids for row in tx.rows(of_lost, lost=traj_uid)]
    groups = dict.fromkeys(row["group_uid"] for row in rows)
    still_wanted = f"SELECT 1 FROM grp WHERE group_uid = :group_uid AND {STILL_TO_BE_CONSUMED}"
    wanted = [group_uid for group_uid in groups if tx.row(still_wanted, group_uid=group_uid)]
    of_group = """SELECT batch_id FROM batch_group JOIN batch USING (batch_id)
                  WHERE group_uid = :group_uid AND live = 1 AND state = 'claimed'"""
    claims = [row for group_uid in groups for row in tx.rows(of_group, group_uid=group_uid)]
    claimed = dict.fromkeys(row["batch_id"] for row in claims)
    for batch_id in claimed:
        release(tx, batch_id, why="rolled back: a file of it is damaged")
    for group_uid in wanted:
        reopen(tx, group_uid, reason=f"to be played again: {why}")
    for group_uid in groups:
        abandon_incomplete_offline(tx, group_uid, why=why)
    return tuple(wanted), tuple(claimed)


def correct_segment(
    tx: Transaction, path: str, *, digest: str, n_bytes: int, n_steps: int, worker: str, epoch: int
) -> None:
    """Set a segment's row to the values that its file says."""
    tx.run(
        """UPDATE segment SET digest = :digest, n_bytes = :n_bytes, n_steps = :n_steps,
               worker = :worker, epoch = :epoch WHERE path = :path""",
        digest=digest,
        n_bytes=n_bytes,
        n_steps=n_steps,
        worker=worker,
        epoch=epoch,
        path=path,
    )
    tx.log(component=COMPONENT, what="correct", detail=f"{path}: its row is that of its file")


def correct_group(tx: Transaction, group_uid: bytes) -> None:
    """Set a group's sums to those of its trajectories."""
    recompute(tx, group_uid)
    tx.log(component=COMPONENT, what="recompute", detail=f"group {uid_text(group_uid)}")
