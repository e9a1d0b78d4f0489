"""Trajectories that come from elsewhere: other runs' groups, which are only read, and this run's
own, lost or not yet here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from store.catalog import group_totals as sums
from store.catalog.database import Transaction
from store.catalog.groups import complete_if_whole, insert_trajectories
from store.catalog.segment_states import insert_segment
from store.errors import StoreError
from store.hashing import uid
from store.records import uid_text
from store.segments import SegmentMeta

# the split of other runs' groups: never leased or counted as outstanding; claimed if they have a
# source
IMPORTED = "imported"
COMPONENT = "import"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedGroup:
    group_uid: bytes
    task_id: str
    size: int  # of the group where it was played, whether all its members are here or not


def known_trajectories(tx: Transaction, traj_uids: Collection[bytes]) -> frozenset[bytes]:
    """Those that the run has or had, also where retention dropped their rows."""
    found = (
        tx.row("SELECT traj_uid FROM trajectory WHERE traj_uid = :traj_uid", traj_uid=name)
        for name in traj_uids
    )
    return frozenset(row["traj_uid"] for row in found if row is not None)


def import_surplus(tx: Transaction, *, segment: SegmentMeta, task_id: str, of_group: bytes) -> None:
    """Enter each trajectory of the segment as a group of its own. Does nothing if one is known: it
    is a retry.
    """
    if not known_trajectories(tx, [trajectory.traj_uid for trajectory in segment.trajectories]):
        groups = [
            ImportedGroup(group_uid=one.group_uid, task_id=task_id, size=1)
            for one in segment.trajectories
        ]
        import_groups(
            tx,
            segment=segment,
            groups=groups,
            source=f"surplus of group {uid_text(of_group)}",
            own=False,
        )


def import_groups(
    tx: Transaction,
    *,
    segment: SegmentMeta,
    groups: Sequence[ImportedGroup],
    source: str,
    own: bool,
) -> None:
    """Make a segment count whose trajectories the run does not have. `groups` are all of its
    groups, `source` says where they are from, in words; `own` ones were opened by this very run.

    A group that is not here is entered as imported; one that is takes its missing members in, and
    is complete when it is whole.
    """
    sizes = {group.group_uid: group.size for group in groups}
    for trajectory in segment.trajectories:
        expected = uid(trajectory.group_uid, trajectory.member)
        if (
            trajectory.traj_uid != expected
            or not 0 <= trajectory.member < sizes[trajectory.group_uid]
        ):
            raise StoreError(
                f"trajectory {uid_text(trajectory.traj_uid)} is not member {trajectory.member} of "
                "group "
                f"{uid_text(trajectory.group_uid)} (size {sizes[trajectory.group_uid]}); import "
                "what `export` wrote"
            )
    if own:
        _refuse_unknown(tx, groups)
    row = tx.row(
        "SELECT coalesce(max(ordinal) + 1, 0) AS next FROM grp WHERE split = :split", split=IMPORTED
    )
    assert row is not None
    for ordinal, group in enumerate(groups, start=row["next"]):
        _enter(tx, group, ordinal=ordinal, source=source)
    insert_segment(tx, segment, epoch=tx.epoch, level=0)
    insert_trajectories(tx, segment.trajectories, segment_id=segment.segment_id)
    for group in groups:
        _take_in(tx, group, source=source)
    n = len(segment.trajectories)
    tx.log(
        component=COMPONENT,
        what="imported",
        detail=f"{n} trajectories of {len(groups)} groups from {source}",
    )
    tx.touch("groups")


def _refuse_unknown(tx: Transaction, groups: Sequence[ImportedGroup]) -> None:
    """The run's own groups must be in its catalog: entered as imported, their ordinals would be
    handed out again for ever.
    """
    for group in groups:
        if (
            tx.row("SELECT 1 FROM grp WHERE group_uid = :group_uid", group_uid=group.group_uid)
            is None
        ):
            raise StoreError(
                f"group {uid_text(group.group_uid)} was played in this very run, but its catalog "
                "does not have it: it is an "
                "older copy; put the newest catalog back before importing"
            )


def _enter(tx: Transaction, group: ImportedGroup, *, ordinal: int, source: str) -> None:
    tx.run(
        """INSERT INTO grp (group_uid, split, ordinal, task_id, size, state, reason,
                            n_members, n_steps, n_won, return_sum, opened_lsn, opened_us)
           VALUES (:group_uid, :split, :ordinal, :task_id, :size, 'abandoned', :reason, 0, 0, 0, 0.0, :lsn, :now_us)
           ON CONFLICT DO NOTHING""",
        group_uid=group.group_uid,
        split=IMPORTED,
        ordinal=ordinal,
        task_id=group.task_id,
        size=group.size,
        reason=f"imported incomplete from {source}",
        lsn=tx.lsn,
        now_us=tx.now_us,
    )


def _take_in(tx: Transaction, group: ImportedGroup, *, source: str) -> None:
    """The group's sums and state, now that more of its members are here."""
    sums.recompute_if_whole(tx, group.group_uid)
    complete_if_whole(tx, group.group_uid)
    whole_again(tx, group.group_uid, reason=f"imported from {source}")


def whole_again(tx: Transaction, group_uid: bytes, *, reason: str | None) -> None:
    """An imported group that has all its members by now is complete, with this reason if there is
    one.
    """
    tx.run(
        """UPDATE grp SET state = 'complete', reason = coalesce(:reason, reason), completed_lsn = :lsn, completed_us = :now_us
           WHERE group_uid = :group_uid AND split = :split AND state = 'abandoned' AND n_members = size""",
        group_uid=group_uid,
        split=IMPORTED,
        reason=reason,
        lsn=tx.lsn,
        now_us=tx.now_us,
    )
