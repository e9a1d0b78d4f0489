"""Adopt files and groups that a backup of the catalog does not know: functions of one transaction.

    recover(
        tx, groups=groups, files=files, segment_of={uid: "5540"}, unread=(), versions=versions
    )

For maintenance/rebuild.py, on a copy of the backup that nobody owns yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from store.catalog.groups import (
    complete_if_full,
    insert_group,
    insert_trajectories,
    is_member,
    recompute_if_full,
)
from store.catalog.imported_groups import complete_imported
from store.catalog.records import IMPORTED
from store.catalog.segment_states import insert_segment
from store.catalog.transaction import Transaction, columns_of
from store.segments import SegmentMeta, TrajectoryMeta


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """A readable segment file with the trajectories of its rows."""

    meta: SegmentMeta  # with every trajectory of its rows
    epoch: int
    level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundGroup:
    """A group that the backup does not know."""

    group_uid: bytes
    split: str
    ordinal: int
    task_id: str
    size: int
    evaluated_version: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The numbers of rows that a rebuild changed in the backup."""

    adopted: int  # trajectories that the backup does not know
    moved: int  # trajectories whose file was replaced by another one
    strangers: int  # trajectories that are no member of any group
    completed: int  # groups
    imported: int  # groups that the backup does not know, and that count as imported


def recover(
    tx: Transaction,
    *,
    groups: Sequence[FoundGroup],
    files: Sequence[FoundFile],
    segment_of: Mapping[bytes, str],
    unread: Sequence[str],
    versions: Mapping[int, str],
) -> Recovered:
    """Bring the backup up to what is on disk: `files`, and version -> path.

    `segment_of` has the segment that each trajectory is taken from. `unread` are segment ids of
    other files on disk, which the backup knows. Batches stay claimed: a learner that starts rolls
    them back, and counts their groups.
    """
    for group in groups:
        # Workers play open groups. The members of an imported group come from another run.
        state = "abandoned" if group.split == IMPORTED else "open"
        reason = "found in a file when the catalog was rebuilt"
        insert_group(tx, **columns_of(group), state=state, reason=reason)
    count_open = "SELECT count(*) FROM grp WHERE state = 'open'"
    n_open = tx.value(count_open)
    on_disk = {*unread, *(file.meta.segment_id for file in files)}
    known = {row["segment_id"] for row in tx.rows("SELECT segment_id FROM segment")}
    counts = Counter(adopted=0, moved=0, strangers=0)
    for file in files:
        if file.meta.segment_id in known:
            _correct_figures(tx, file.meta)
        else:
            counts.update(_adopt(tx, file, segment_of=segment_of, on_disk=on_disk))
    for version, path in versions.items():
        made = {"digest": "unknown", "epoch": 0, "published_us": tx.now_us, "lsn": tx.lsn}
        tx.insert("version", version=version, path=path, **made)
    tx.touch("groups", "lineage", "versions", "segments", "excluded")
    n_imported = sum(group.split == IMPORTED for group in groups)
    return Recovered(completed=n_open - tx.value(count_open), imported=n_imported, **counts)


def _adopt(
    tx: Transaction,
    file: FoundFile,
    *,
    segment_of: Mapping[bytes, str],
    on_disk: Collection[str],
) -> dict[str, int]:
    """Count the trajectories that are taken from this file, which the backup does not know.

    Return how many of its trajectories have each of the first three fates of `Recovered`.
    """
    segment_id = file.meta.segment_id
    new: list[TrajectoryMeta] = []
    moved: list[TrajectoryMeta] = []
    others: list[TrajectoryMeta] = []
    n_strangers = 0
    for trajectory in file.meta.trajectories:
        row = tx.row(
            "SELECT segment_id FROM trajectory WHERE traj_uid = :traj_uid",
            traj_uid=trajectory.traj_uid,
        )
        if segment_of[trajectory.traj_uid] != segment_id:
            others.append(trajectory)
        elif row is not None:
            moved.append(trajectory)
        elif _belongs(tx, trajectory):
            new.append(trajectory)
        else:
            n_strangers += 1
            others.append(trajectory)
    fates = {"adopted": len(new), "moved": len(moved), "strangers": n_strangers}
    if not new and not moved:
        return fates
    insert_segment(tx, file.meta, epoch=file.epoch, level=file.level)
    insert_trajectories(tx, new, segment_id=segment_id)
    for trajectory in moved:
        _lose_other_attempt(tx, trajectory, on_disk=on_disk)
        tx.run(
            "UPDATE trajectory SET segment_id = :segment_id WHERE traj_uid = :traj_uid",
            segment_id=segment_id,
            traj_uid=trajectory.traj_uid,
        )
    _correct_figures(tx, file.meta)
    for trajectory in others:
        tx.insert("duplicate", segment_id=segment_id, traj_uid=trajectory.traj_uid)
    for group_uid in dict.fromkeys(trajectory.group_uid for trajectory in new):
        recompute_if_full(tx, group_uid)
        complete_if_full(tx, group_uid)
        complete_imported(tx, group_uid, reason=None)
    return fates


def _belongs(tx: Transaction, trajectory: TrajectoryMeta) -> bool:
    group = tx.row("SELECT size FROM grp WHERE group_uid = :g", g=trajectory.group_uid)
    return group is not None and is_member(trajectory, size=group["size"])


def _lose_other_attempt(
    tx: Transaction, trajectory: TrajectoryMeta, *, on_disk: Collection[str]
) -> None:
    """List a known trajectory as lost if another attempt takes its place.

    The backup's critic values and results belong to the attempt that is lost. Its rows no longer
    count, if its file is still there.
    """
    row = tx.row("SELECT * FROM trajectory WHERE traj_uid = :uid", uid=trajectory.traj_uid)
    assert row is not None, "it is moved"
    if row["segment_id"] in on_disk:
        tx.insert("duplicate", segment_id=row["segment_id"], traj_uid=trajectory.traj_uid)
    if TrajectoryMeta.of_row(row) == trajectory:
        return
    names = ("traj_uid", "group_uid", "member", "segment_id")
    lost = {name: row[name] for name in names}
    tx.insert("lost_trajectory", **lost, reason="it was played again", lsn=tx.lsn)
    # So that no fork of an earlier checkpoint has it.
    tx.run(
        "UPDATE trajectory SET lsn = :lsn WHERE traj_uid = :uid", lsn=tx.lsn, uid=row["traj_uid"]
    )


def _correct_figures(tx: Transaction, meta: SegmentMeta) -> None:
    """Set the figures of a file's trajectories to those of its rows."""
    names = [name for name in TrajectoryMeta.__slots__ if name not in ("traj_uid", "member")]
    columns, values_of = ", ".join(names), ", ".join(f":{name}" for name in names)
    changed = []
    for trajectory in meta.trajectories:
        values = {name: getattr(trajectory, name) for name in names}
        n_changed = tx.run(
            f"""UPDATE trajectory SET ({columns}) = ({values_of})
                WHERE traj_uid = :traj_uid AND segment_id = :segment_id
                  AND ({columns}) IS NOT ({values_of})""",
            **values,
            traj_uid=trajectory.traj_uid,
            segment_id=meta.segment_id,
        )
        if n_changed:
            changed.append(trajectory.group_uid)
    for group_uid in dict.fromkeys(changed):
        recompute_if_full(tx, group_uid)
