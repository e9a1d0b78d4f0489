"""Open, lease, commit and count groups. Functions of one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from operator import itemgetter

from store.catalog.records import (
    HELDOUT,
    IMPORTED,
    TRAIN,
    CommitResult,
    Counts,
    Evaluation,
    FoundAtStart,
    Group,
    SuccessRate,
)
from store.catalog.segment_states import insert_segment
from store.catalog.transaction import Transaction, columns_of, pick
from store.clock import US_PER_S
from store.errors import FencedError, StoreError
from store.hashing import uid, valid_text
from store.records import uid_text
from store.segments import SegmentMeta, TrajectoryMeta
from url_secrets import without_secrets

# Reason of a held-out group that was abandoned in a roll-back: its round has no result.
ROLLED_BACK = "the evaluated version was rolled back"
GROUP_COLUMNS = tuple(set(Group.__slots__) - {"missing", "epoch"})


def open_group(
    tx: Transaction,
    *,
    ordinal: int,
    task_id: str,
    split: str,
    size: int,
    evaluated_version: int | None,
) -> Group:
    """Return the group of this ordinal, opened now if it is new.

    `evaluated_version` is the version whose evaluation round a held-out group is of. Such a group
    is never claimed. Raises StoreError if the ordinal belongs to another task or size.

    An imported group under the uid of this address does not block it: the next free uid is taken.
    """
    if size < 1:
        raise StoreError(f"group size {size}: a group has at least one member")
    _check_split(split, evaluated_version)
    find = "SELECT * FROM grp WHERE group_uid = :group_uid"
    for group_uid in uids_of_address(tx.run_id, split, ordinal, evaluated_version):
        group = tx.row(find, group_uid=group_uid)
        if group is None or group["split"] != IMPORTED:
            break
    if group is not None and (group["task_id"], group["size"]) != (task_id, size):
        raise StoreError(
            f"{split} group {ordinal} is {group['task_id']!r} with {group['size']} members, not "
            f"{task_id!r} with {size}; use the task list and group size the run was started with"
        )
    if group is None:
        insert_group(
            tx,
            group_uid=group_uid,
            split=split,
            ordinal=ordinal,
            task_id=task_id,
            size=size,
            evaluated_version=evaluated_version,
            state="open",
            reason=None,
        )
        tx.touch("groups")
        group = tx.row(find, group_uid=group_uid)
        assert group is not None
    return _with_missing_members(tx, group)


def uids_of_address(
    run_id: str, split: str, ordinal: int, evaluated_version: int | None
) -> Iterator[bytes]:
    """Yield the uids that a group of this address may have, without end.

    It has the first, unless a dataset brought imported groups under that uid and those after it.
    """
    address = (run_id, split, ordinal, evaluated_version)
    yield uid(*address)
    for number in count(1):
        yield uid(*address, number)


def insert_group(tx: Transaction, **columns: object) -> None:
    """Enter a group without members. `columns` are those that its sums and times do not fill."""
    sums = {"n_members": 0, "n_steps": 0, "n_won": 0, "return_sum": 0.0}
    tx.insert("grp", **columns, **sums, opened_lsn=tx.lsn, opened_us=tx.now_us)


def open_round(
    tx: Transaction, task_ids: Sequence[str], *, episodes_per_task: int, version: int
) -> None:
    """Open an evaluation round: for each task `episodes_per_task` groups of one episode.

    Groups of the round that exist already stay, so a later call with more episodes adds the rest.
    """
    for ordinal in range(episodes_per_task * len(task_ids)):
        task_id = task_ids[ordinal % len(task_ids)]
        open_group(
            tx, ordinal=ordinal, task_id=task_id, split=HELDOUT, size=1, evaluated_version=version
        )


def next_ordinal(tx: Transaction, split: str, *, evaluated_version: int | None) -> int:
    """Return the ordinal that the next group of the split (and evaluation round) gets."""
    _check_split(split, evaluated_version)
    row = tx.row(
        """SELECT ordinal FROM grp WHERE split = :split AND evaluated_version IS :round
           ORDER BY ordinal DESC LIMIT 1""",
        split=split,
        round=evaluated_version,
    )
    return 0 if row is None else int(row["ordinal"]) + 1


def lease_open_group(
    tx: Transaction,
    *,
    worker: str,
    lease_s: float,
    split: str | None = None,
    without: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Group | None:
    """Lease the oldest open group that has no unexpired lease. Return None if there is none.

    Held-out groups come first, so that evaluation rounds end soon. After a crash this returns the
    groups that were dispatched and not finished, before any new one. Skip the tasks `without`, and
    all tasks but `only` where that is given.
    """
    wanted = {
        "split": split,
        "without": json.dumps(list(without)),
        "only": None if only is None else json.dumps(list(only)),
        "now_us": tx.now_us,
    }
    oldest = """SELECT * FROM grp WHERE state = 'open' AND {} AND (:split IS NULL OR split = :split)
                AND (:without = '[]' OR task_id NOT IN (SELECT value FROM json_each(:without)))
                AND (:only IS NULL OR task_id IN (SELECT value FROM json_each(:only)))
                ORDER BY split, opened_lsn, ordinal LIMIT 1"""  # 'heldout' before 'train'
    # Two queries, because each uses an index of its own.
    free = tx.rows(oldest.format("lease_until_us IS NULL"), **wanted)
    expired = tx.rows(oldest.format("lease_until_us <= :now_us"), **wanted)
    if not free and not expired:
        return None
    group = min(free + expired, key=itemgetter("split", "opened_lsn", "ordinal"))
    tx.run(
        """UPDATE grp SET lease_worker = :worker, lease_until_us = :until_us
           WHERE group_uid = :group_uid""",
        worker=worker,
        until_us=tx.now_us + round(lease_s * US_PER_S),
        group_uid=group["group_uid"],
    )
    return _with_missing_members(tx, group)


def has_free_group(tx: Transaction, task_ids: Collection[str], *, split: str | None) -> bool:
    """Return whether one of the tasks has an open group without an unexpired lease."""
    if not task_ids:
        return False
    row = tx.row(
        """SELECT 1 FROM grp
           WHERE state = 'open' AND (lease_until_us IS NULL OR lease_until_us <= :now_us)
               AND (:split IS NULL OR split = :split)
               AND task_id IN (SELECT value FROM json_each(:task_ids)) LIMIT 1""",
        now_us=tx.now_us,
        split=split,
        task_ids=json.dumps(list(task_ids)),
    )
    return row is not None


def times_lost(tx: Transaction) -> dict[str, int]:
    """Return by task how often a worker was lost while it played the task's group.

    Tasks whose group was finished since are left out. Each loss wrote one row for every episode
    that had not ended, so the episode with the most rows counts the losses.
    """
    rows = tx.rows(
        """SELECT task_id, max(n) AS n
           FROM (SELECT task_id, count(*) AS n FROM unfinished JOIN grp USING (group_uid)
                 WHERE why IN ('worker_lost', 'worker_failed') AND state IN ('open', 'abandoned')
                 GROUP BY group_uid, number)
           GROUP BY task_id"""
    )
    return {row["task_id"]: row["n"] for row in rows}


def renew_leases(tx: Transaction, workers: Collection[str], *, lease_s: float) -> None:
    """Extend all leases of workers that are alive."""
    tx.run(
        """UPDATE grp SET lease_until_us = :until_us
           WHERE lease_worker IN (SELECT value FROM json_each(:workers))""",
        until_us=tx.now_us + round(lease_s * US_PER_S),
        workers=json.dumps(list(workers)),
    )


def release_leases(tx: Transaction, worker: str) -> int:
    """End all leases of a worker: others may play its groups at once. Return their number."""
    return tx.run(
        """UPDATE grp SET lease_worker = NULL, lease_until_us = NULL
           WHERE lease_worker = :worker AND state = 'open'""",
        worker=worker,
    )


def give_up(tx: Transaction, group_uid: bytes, *, worker: str, state: str, reason: str) -> None:
    """End a worker's lease before its group is complete, with a new state for the group.

    'open': others play it again. If members are committed it becomes stale instead, because new
    members would be of other versions. 'stale' or 'abandoned': nobody plays it again. Committed
    members stay. A group that is no longer open, or is leased to another worker, is left as it is.
    """
    if state not in ("open", "stale", "abandoned"):
        raise StoreError(
            f"a group cannot be given up as {state!r}; use 'open', 'stale' or 'abandoned'"
        )
    # It may quote a text of an environment or a program, or the URL that was asked.
    reason = without_secrets(valid_text(reason))
    changed = tx.run(
        """UPDATE grp SET state = iif(:state = 'open' AND n_members > 0, 'stale', :state),
                          reason = :reason, lease_worker = NULL, lease_until_us = NULL
           WHERE group_uid = :group_uid AND state = 'open' AND lease_worker IS :worker""",
        state=state,
        reason=reason,
        group_uid=group_uid,
        worker=worker,
    )
    if changed:
        tx.log(component=worker, what="group given up", detail=f"{uid_text(group_uid)}: {reason}")
        tx.touch("groups")


def commit(tx: Transaction, segment: SegmentMeta, *, epoch: int) -> CommitResult:
    """Make a written segment count. A retry changes nothing.

    Trajectories that another segment already holds are duplicates. Raises FencedError for the epoch
    of an earlier owner.
    """
    if epoch != tx.epoch:
        raise FencedError(
            f"segment {segment.path} was made under epoch {epoch}, the catalog is at {tx.epoch}; "
            "drop it and take a new lease, its members will be played again"
        )
    group_uids = dict.fromkeys(trajectory.group_uid for trajectory in segment.trajectories)
    sizes = {group_uid: _size_of(tx, group_uid) for group_uid in group_uids}
    for trajectory in segment.trajectories:
        size = sizes[trajectory.group_uid]
        check_member(trajectory, size=size, remedy="use the traj_uids of the lease")
    segment_of = {one.traj_uid: _segment_of(tx, one.traj_uid) for one in segment.trajectories}
    new = [one for one in segment.trajectories if segment_of[one.traj_uid] is None]
    if new:
        insert_segment(tx, segment, epoch=epoch, level=0)
        insert_trajectories(tx, new, segment_id=segment.segment_id)
        for traj_uid, segment_id in segment_of.items():
            if segment_id is not None:
                tx.insert("duplicate", segment_id=segment.segment_id, traj_uid=traj_uid)
                tx.touch("excluded")
        for group_uid in dict.fromkeys(trajectory.group_uid for trajectory in new):
            recompute(tx, group_uid)  # once for each group, because its triggers cost the most here
            complete_if_full(tx, group_uid)
    counted = {trajectory.traj_uid for trajectory in new} | {
        traj_uid for traj_uid, segment_id in segment_of.items() if segment_id == segment.segment_id
    }
    return CommitResult(
        new=tuple(traj_uid for traj_uid in segment_of if traj_uid in counted),
        duplicates=tuple(traj_uid for traj_uid in segment_of if traj_uid not in counted),
        full=tuple(group_uid for group_uid in group_uids if _is_full(tx, group_uid)),
    )


def _check_split(split: str, evaluated_version: int | None) -> None:
    if split not in (TRAIN, HELDOUT) or (evaluated_version is not None) != (split == HELDOUT):
        raise StoreError(
            f"split {split!r} with evaluated_version {evaluated_version}: "
            f"use {TRAIN!r} with None, or {HELDOUT!r} with the number of the evaluation round"
        )


def as_group(tx: Transaction, row: sqlite3.Row, *, missing: Iterable[int] = ()) -> Group:
    """Return a row that has all GROUP_COLUMNS as a Group."""
    return Group(**pick(row, GROUP_COLUMNS), missing=tuple(missing), epoch=tx.epoch)


def _with_missing_members(tx: Transaction, row: sqlite3.Row) -> Group:
    """Return the group with the numbers of its members that are not committed."""
    members = tx.rows(
        "SELECT member FROM trajectory WHERE group_uid = :group_uid", group_uid=row["group_uid"]
    )
    committed = {member["member"] for member in members}
    return as_group(tx, row, missing=sorted(set(range(row["size"])) - committed))


def _size_of(tx: Transaction, group_uid: bytes) -> int:
    group = tx.row("SELECT size FROM grp WHERE group_uid = :group_uid", group_uid=group_uid)
    if group is None:
        raise StoreError(
            f"group {uid_text(group_uid)} was never opened; commit to the run that leased it"
        )
    return int(group["size"])


def is_member(trajectory: TrajectoryMeta, *, size: int) -> bool:
    """Return whether a group of this size has the trajectory's number, and gave it its uid."""
    expected = uid(trajectory.group_uid, trajectory.member)
    return 0 <= trajectory.member < size and trajectory.traj_uid == expected


def check_member(trajectory: TrajectoryMeta, *, size: int, remedy: str) -> None:
    """Raise StoreError with the remedy unless the trajectory is a member of its group."""
    if not is_member(trajectory, size=size):
        raise StoreError(
            f"trajectory {uid_text(trajectory.traj_uid)} is not member {trajectory.member} of "
            f"group {uid_text(trajectory.group_uid)} (size {size}); {remedy}"
        )


def _segment_of(tx: Transaction, traj_uid: bytes) -> str | None:
    """Return the segment from which the trajectory counts, None before its first commit."""
    query = "SELECT segment_id FROM trajectory WHERE traj_uid = :traj_uid"
    row = tx.row(query, traj_uid=traj_uid)
    return None if row is None else row["segment_id"]


def _is_full(tx: Transaction, group_uid: bytes) -> bool:
    query = "SELECT n_members = size FROM grp WHERE group_uid = :group_uid"
    return bool(tx.value(query, group_uid=group_uid))


def insert_trajectories(
    tx: Transaction, trajectories: Sequence[TrajectoryMeta], *, segment_id: str
) -> None:
    """Enter trajectories of this segment. The caller updates their groups' sums."""
    more = {"segment_id": segment_id, "lsn": tx.lsn}
    tx.insert_many("trajectory", [columns_of(trajectory) | more for trajectory in trajectories])


def complete_if_full(tx: Transaction, group_uid: bytes) -> None:
    """Complete an open group if all its members are committed."""
    tx.run(
        """UPDATE grp SET state = 'complete', reason = 'all ' || size || ' trajectories committed',
                          completed_lsn = :lsn, completed_us = :now_us,
                          lease_worker = NULL, lease_until_us = NULL
           WHERE group_uid = :group_uid AND state = 'open' AND n_members = size""",
        lsn=tx.lsn,
        now_us=tx.now_us,
        group_uid=group_uid,
    )


def recompute(tx: Transaction, group_uid: bytes) -> None:
    """Set a group's sums to those of its trajectories."""
    tx.run(
        """UPDATE grp SET (n_members, n_steps, n_won, return_sum, version_min, version_max) = (
               SELECT count(*), coalesce(sum(n_steps), 0), coalesce(sum(won), 0),
                      coalesce(sum(episode_return), 0.0), min(version_min), max(version_max)
               FROM trajectory t WHERE t.group_uid = grp.group_uid)
           WHERE group_uid = :group_uid""",
        group_uid=group_uid,
    )
    tx.touch("groups")


def recompute_if_full(tx: Transaction, group_uid: bytes) -> None:
    """Set a group's sums to those of its trajectories, unless the group lacks some.

    A consumed group keeps the sums of the trajectories that the learner saw.
    """
    has_all = tx.value(
        """SELECT n_members <= (SELECT count(*) FROM trajectory t WHERE t.group_uid = g.group_uid)
           FROM grp g WHERE group_uid = :group_uid""",
        group_uid=group_uid,
    )
    if has_all:
        recompute(tx, group_uid)


def abandon_incomplete_offline(tx: Transaction, group_uid: bytes, *, why: str) -> None:
    """Abandon an offline group that lost trajectories. Other groups stay as they are.

    Its advantages would compare only some of its members.
    """
    n_abandoned = tx.run(
        """UPDATE grp SET state = 'abandoned', reason = 'trajectories of it were lost: ' || :why,
                          completed_lsn = NULL, completed_us = NULL
           WHERE group_uid = :group_uid AND source IS NOT NULL AND state = 'complete'
             AND size > (SELECT count(*) FROM trajectory t WHERE t.group_uid = grp.group_uid)""",
        why=why,
        group_uid=group_uid,
    )
    if n_abandoned:
        recompute(tx, group_uid)


def reopen(tx: Transaction, group_uid: bytes, *, reason: str) -> None:
    """Open a group again, so that the members it lacks are played. Its other members stay."""
    tx.run(
        """UPDATE grp SET state = 'open', reason = :reason, completed_lsn = NULL,
                          completed_us = NULL, lease_worker = NULL, lease_until_us = NULL
           WHERE group_uid = :group_uid""",
        group_uid=group_uid,
        reason=reason,
    )
    recompute(tx, group_uid)


def counts(tx: Transaction) -> Counts:
    """Return the training groups by state, at a cost that does not grow: see group_counts.sql."""
    rows = tx.rows(
        "SELECT state, n_groups AS n, n_members, n_steps FROM group_count WHERE split = 'train'"
    )
    n = {row["state"]: row["n"] for row in rows}
    states = ("open", "complete", "claimed", "trained", "stale", "filtered")
    return Counts(
        **{state: n.get(state, 0) for state in states},
        leased=tx.value(
            """SELECT count(*) FROM grp
               WHERE lease_until_us > :now_us AND lease_until_us IS NOT NULL
                 AND split = 'train' AND state = 'open'""",
            now_us=tx.now_us,
        ),
        trajectories=sum(row["n_members"] for row in rows),
        steps=sum(row["n_steps"] for row in rows),
    )


def found_at_start(tx: Transaction) -> FoundAtStart:
    """Count the rollouts that a start goes on with. Call it before any group is leased."""
    return FoundAtStart(
        open=counts(tx).open,
        trajectories=tx.value(
            """SELECT count(*) FROM trajectory JOIN segment USING (segment_id)
               WHERE retired_lsn IS NULL"""
        ),
    )


def complete_by_version(tx: Transaction) -> dict[int, int]:
    """Count the complete training groups by their oldest version."""
    rows = tx.rows(
        """SELECT version_min, count(*) AS n FROM grp WHERE split = 'train' AND state = 'complete'
           GROUP BY version_min"""
    )
    return {row["version_min"]: row["n"] for row in rows}


def outstanding(tx: Transaction) -> int:
    """Return the training groups handed out and not yet trained on, which admission bounds.

    Groups of a claimed batch that are known to teach nothing are not among them: see `refill` in
    batches.py. It reads indexes only.
    """
    query = """SELECT (SELECT count(*) FROM grp
                       WHERE split = 'train' AND state IN ('open', 'complete', 'claimed'))
                    - (SELECT count(*) FROM batch CROSS JOIN batch_group USING (batch_id)
                       WHERE state = 'claimed' AND outcome = 'filtered')"""
    return int(tx.value(query))


def open_heldout(tx: Transaction) -> int:
    """Return the number of held-out groups still to be played, over all evaluation rounds."""
    return int(tx.value("SELECT count(*) FROM grp WHERE split = 'heldout' AND state = 'open'"))


def finished_evaluations(tx: Transaction) -> list[Evaluation]:
    """Return evaluation rounds that are played to the end and have no figure `heldout/success` yet.

    A round whose version was rolled back is not returned. Episodes whose environment failed are
    only counted.
    """
    rows = tx.rows(
        # Step from round to round by the index. Look only into the groups of rounds without a
        # figure, which are few.
        """WITH RECURSIVE round (version) AS (
               SELECT min(evaluated_version) FROM grp WHERE split = 'heldout'
               UNION ALL
               SELECT (SELECT min(evaluated_version) FROM grp
                       WHERE split = 'heldout' AND evaluated_version > round.version)
               FROM round WHERE round.version IS NOT NULL)
           SELECT v.version, coalesce(v.learner_step, 0) AS learner_step,
                  sum(g.n_members) AS n_trajectories, sum(g.n_won) AS n_won,
                  sum(g.state = 'abandoned') AS n_abandoned,
                  coalesce(max(g.version_max), v.version) AS newest_version,
                  sum(g.return_sum) AS return_sum, sum(g.n_steps) AS n_steps
           FROM round CROSS JOIN version v ON v.version = round.version
           CROSS JOIN grp g ON g.split = 'heldout' AND g.evaluated_version = round.version
           WHERE NOT EXISTS (
               SELECT 1 FROM metric m
               WHERE m.name = 'heldout/success' AND m.policy_version = round.version)
           GROUP BY round.version HAVING sum(g.state = 'open' OR g.reason = :rolled_back) = 0""",
        rolled_back=ROLLED_BACK,
    )
    fields = set(Evaluation.__slots__) - {"success"}
    return [
        Evaluation(
            success=SuccessRate(n_trajectories=row["n_trajectories"], n_won=row["n_won"]),
            **pick(row, fields),
        )
        for row in rows
    ]
