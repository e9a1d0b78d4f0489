"""Import groups of other runs, and train on some of them. Each function is part of one transaction.

Imported groups have the split IMPORTED and are only read. An offline group is an imported, complete
group that names the run that played it as its `source`. It may be trained on several times: each
use is a live row of `batch_group` with a number of its own. It is never leased or stale, does not
count as outstanding, and stays complete.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from store.catalog.groups import (
    check_member,
    complete_if_full,
    insert_group,
    insert_trajectories,
    recompute_if_full,
)
from store.catalog.records import EXTRA_OF, IMPORTED, Group
from store.catalog.schema_check import LARGEST_COUNTER
from store.catalog.segment_states import insert_segment
from store.catalog.transaction import Transaction
from store.errors import StoreError
from store.records import uid_text
from store.segments import SegmentMeta, TrajectoryMeta

COMPONENT = "import"
OFFLINE_COMPONENT = "offline"
TAKEN = "sources taken"
NEXT_ORDINAL = "SELECT coalesce(max(ordinal) + 1, 0) FROM grp WHERE split = 'imported'"
# The smallest number from :first_use on that no live use of the group `c` has: the next number, or
# that of a batch that was rolled back.
FREE_USE = """(
    SELECT min(number)
    FROM (SELECT :first_use AS number
          UNION SELECT use + 1 FROM batch_group WHERE group_uid = c.group_uid AND live = 1)
    WHERE number NOT IN (
        SELECT use FROM batch_group WHERE group_uid = c.group_uid AND live = 1))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedSegment:
    """A written segment of trajectories that the run does not have. It does not count yet."""

    segment: SegmentMeta
    groups: tuple[Group, ...]  # all groups of the segment
    source: str  # in words
    own: bool  # the groups were opened by this very run


def known_trajectories(tx: Transaction, traj_uids: Collection[bytes]) -> frozenset[bytes]:
    """Return the trajectories of these that the run has or had. Retention keeps their rows."""
    found = (
        tx.row("SELECT traj_uid FROM trajectory WHERE traj_uid = :traj_uid", traj_uid=name)
        for name in traj_uids
    )
    return frozenset(row["traj_uid"] for row in found if row is not None)


def import_extra(tx: Transaction, segment: SegmentMeta, *, task_id: str, of_group: bytes) -> None:
    """Enter each trajectory of the segment as an imported group of one, for reading only.

    These are extra episodes that ended when their group was already complete. A retry changes
    nothing.
    """
    query = "SELECT 1 FROM segment WHERE segment_id = :segment_id"
    if tx.row(query, segment_id=segment.segment_id) is None:
        groups = tuple(
            Group.imported(group_uid=one.group_uid, task_id=task_id, size=1)
            for one in segment.trajectories
        )
        source = f"{EXTRA_OF} {uid_text(of_group)}"
        extra = ImportedSegment(segment=segment, groups=groups, source=source, own=False)
        import_segments(tx, [extra])


def import_segments(tx: Transaction, segments: Sequence[ImportedSegment]) -> None:
    """Make all these segments count, or none of them.

    A group that the run does not have is entered as imported. An imported group gets its missing
    members, and is complete when it has all. A group that the run opened itself, or trains on, gets
    back the members that it lost, and no others. Raises StoreError as `check_members`.
    """
    for one in segments:
        _import_segment(tx, one)


def _import_segment(tx: Transaction, one: ImportedSegment) -> None:
    segment, groups, source = one.segment, one.groups, one.source
    check_members(tx, segment.trajectories, groups=groups, own=one.own)
    for ordinal, group in enumerate(groups, start=tx.value(NEXT_ORDINAL)):
        if not _is_known(tx, group):
            insert_group(
                tx,
                group_uid=group.group_uid,
                split=IMPORTED,
                ordinal=ordinal,
                task_id=group.task_id,
                size=group.size,
                state=group.state,
                reason=f"imported incomplete from {source}",
            )
    insert_segment(tx, segment, epoch=tx.epoch, level=0)
    insert_trajectories(tx, segment.trajectories, segment_id=segment.segment_id)
    for group in groups:
        recompute_if_full(tx, group.group_uid)
        complete_if_full(tx, group.group_uid)
        complete_imported(tx, group.group_uid, reason=f"imported from {source}")
    detail = f"{len(segment.trajectories)} trajectories of {len(groups)} groups from {source}"
    tx.log(component=COMPONENT, what="imported", detail=detail)
    tx.touch("groups")


def check_members(
    tx: Transaction, trajectories: Sequence[TrajectoryMeta], *, groups: Sequence[Group], own: bool
) -> None:
    """Raise StoreError for trajectories that `import_segments` does not take in.

    Call it before their segment is written: a rebuild counts a file although it was never
    committed.
    """
    sizes = {group.group_uid: group.size for group in groups}
    for one in trajectories:
        check_member(one, size=sizes[one.group_uid], remedy="import what `export` wrote")
    if own:
        _refuse_unknown(tx, groups)
    _refuse_new_members(tx, trajectories, groups=groups)
    _refuse_contradictions(tx, groups)


def _refuse_unknown(tx: Transaction, groups: Sequence[Group]) -> None:
    """Raise StoreError if a group of this very run is not in its catalog.

    Entered as imported, its ordinal would be handed out a second time.
    """
    for group in groups:
        if not _is_known(tx, group):
            raise StoreError(
                f"group {uid_text(group.group_uid)} was played in this very run, but its catalog "
                "does not have it: it is an "
                "older copy; put the newest catalog back before importing"
            )


def _refuse_contradictions(tx: Transaction, groups: Sequence[Group]) -> None:
    """Raise StoreError if an earlier dataset said another size or another task of a group."""
    query = """SELECT size, task_id FROM grp
               WHERE group_uid = :group_uid AND split = 'imported' AND source IS NULL"""
    for group in groups:
        row = tx.row(query, group_uid=group.group_uid)
        if row is not None and row["size"] != group.size:
            raise StoreError(
                f"group {uid_text(group.group_uid)} has {group.size} members in the dataset, and "
                f"the run has it with another size, {row['size']}; export it again from the run "
                "that played it, and import it into a new run"
            )
        if row is not None and row["task_id"] != group.task_id:
            raise StoreError(
                f"group {uid_text(group.group_uid)} is of task {group.task_id!a:.200} in the "
                f"dataset, and the run has it with another, {row['task_id']!a:.200}; export it "
                "again from the run that played it, and import it into a new run"
            )


def _refuse_new_members(
    tx: Transaction, trajectories: Sequence[TrajectoryMeta], *, groups: Sequence[Group]
) -> None:
    """Raise StoreError for a member that a group of this very run never had.

    The group would be trained on, or evaluated, with an episode that the run did not play. Anybody
    can compute the group's uid from the run id. The same holds for an offline group, which has all
    its members: a dataset that says a larger size would bring more.
    """
    task_ids = {group.group_uid: group.task_id for group in groups}
    newest = tx.value(f"SELECT coalesce(max(version), {LARGEST_COUNTER}) FROM version")
    of_group = """SELECT task_id, split FROM grp WHERE group_uid = :group_uid
                  AND (split <> 'imported' OR source IS NOT NULL)"""
    of_lost = """SELECT 1 FROM lost_trajectory
                 WHERE (traj_uid, group_uid) = (:traj_uid, :group_uid)"""
    for one in trajectories:
        group = tx.row(of_group, group_uid=one.group_uid)
        if group is None:
            continue
        fault = ""
        if tx.row(of_lost, traj_uid=one.traj_uid, group_uid=one.group_uid) is None:
            fault = "is none that it lost"
        # The versions of an offline group are those of the run that played it.
        elif group["split"] != IMPORTED and one.version_max > newest:
            fault = f"is of a version after its newest, {newest}"
        elif group["task_id"] != task_ids[one.group_uid]:
            fault = f"is of another task than its {group['task_id']!a:.200}"
        if fault:
            raise StoreError(
                f"group {uid_text(one.group_uid)} was opened in this very run, or is trained on in "
                f"it, and trajectory {uid_text(one.traj_uid)} {fault}; put the newest "
                "catalog back if this one is an older copy, or export only groups that this run "
                "does not have"
            )


def splits_of(tx: Transaction, group_uids: Collection[bytes]) -> dict[bytes, str]:
    """Return the split of each of these groups that the run has."""
    query = "SELECT group_uid, split FROM grp WHERE group_uid = :group_uid"
    found = (tx.row(query, group_uid=group_uid) for group_uid in group_uids)
    return {row["group_uid"]: row["split"] for row in found if row is not None}


def _is_known(tx: Transaction, group: Group) -> bool:
    query = "SELECT 1 FROM grp WHERE group_uid = :group_uid"
    return tx.row(query, group_uid=group.group_uid) is not None


def complete_imported(tx: Transaction, group_uid: bytes, *, reason: str | None) -> None:
    """Complete an abandoned imported group if it has all its members now.

    Keep its reason where none is given.
    """
    tx.run(
        """UPDATE grp SET state = 'complete', reason = coalesce(:reason, reason),
                          completed_lsn = :lsn, completed_us = :now_us
           WHERE group_uid = :group_uid AND split = :split AND state = 'abandoned'
             AND n_members = size""",
        group_uid=group_uid,
        split=IMPORTED,
        reason=reason,
        lsn=tx.lsn,
        now_us=tx.now_us,
    )


def take_offline_groups(
    tx: Transaction,
    sources: Mapping[bytes, str],
    *,
    segments: Sequence[ImportedSegment],
    detail: str,
) -> None:
    """Import `segments`, and train on these groups from now on: group uid -> run that played it.

    All the groups are complete then. They are used in this order. Raises StoreError on a second
    call for the same run.
    """
    if has_offline_groups(tx):
        raise StoreError(
            "the offline groups of this run were chosen already; start a new run to choose others"
        )
    import_segments(tx, segments)
    for ordinal, (group_uid, source) in enumerate(sources.items(), start=tx.value(NEXT_ORDINAL)):
        n = tx.run(
            """UPDATE grp SET ordinal = :ordinal, source = :source
               WHERE group_uid = :group_uid AND split = 'imported' AND state = 'complete'
                   AND n_members = size""",
            ordinal=ordinal,
            source=source,
            group_uid=group_uid,
        )
        if n != 1:
            raise StoreError(
                f"group {uid_text(group_uid)} of run {source} is no whole imported group here: the "
                "run has it with another size; take its source in a new run_dir"
            )
    tx.log(component=OFFLINE_COMPONENT, what=TAKEN, detail=detail)
    tx.touch("groups")


def has_offline_groups(tx: Transaction) -> bool:
    """Return whether the run has taken its offline groups."""
    return tx.row("SELECT 1 FROM grp WHERE source IS NOT NULL LIMIT 1") is not None


def least_used(tx: Transaction, *, n_groups: int, uses: int) -> list[sqlite3.Row]:
    """Return the next `n_groups` offline groups: by the number of their uses, then by their order.

    Fewer are returned if fewer are left. `use` is the number of the group's next use.
    """
    return tx.rows(
        f"""WITH chosen AS (
               SELECT g.*, count(l.use) AS n_uses
               FROM grp g LEFT JOIN batch_group l ON l.group_uid = g.group_uid AND l.live = 1
               WHERE source IS NOT NULL AND state = 'complete'
               GROUP BY g.group_uid HAVING n_uses < :uses
               ORDER BY n_uses, ordinal LIMIT :n_groups)
           SELECT *, {FREE_USE} AS use FROM chosen c ORDER BY n_uses, ordinal""",
        first_use=1,
        uses=uses,
        n_groups=n_groups,
    )


def offline_batches_left(tx: Transaction, n_groups: int, *, uses: int) -> int:
    """Return how many more batches of `n_groups` different offline groups there are."""
    rows = tx.rows(
        """SELECT :uses - count(use) AS n
           FROM grp g LEFT JOIN batch_group l ON l.group_uid = g.group_uid AND l.live = 1
           WHERE source IS NOT NULL AND state = 'complete' GROUP BY g.group_uid""",
        uses=uses,
    )
    return rounds([row["n"] for row in rows], n_groups)


def rounds(left: Sequence[int], n: int) -> int:
    """Return how often `n` different things can be taken if thing i can be taken left[i] times.

    Things with most left are taken first. k times are possible if and only if sum(min(left[i], k))
    >= k n: left (2, 2, 2), n = 2 gives 3, left (5, 1), n = 2 gives 1.
    """
    k = sum(max(0, one) for one in left) // n
    while k * n > sum(min(max(0, one), k) for one in left):
        k -= 1
    return k
