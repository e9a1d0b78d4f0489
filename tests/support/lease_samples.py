"""Trajectories of leased groups, for tests that play them by hand."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator import Lease
from store import Step, Trajectory


def leased_trajectory(
    lease: Lease, member: int, *, won: bool, steps: Sequence[Step], task_score: float | None = None
) -> Trajectory:
    """Make the trajectory of one member of a leased group."""
    return Trajectory(
        traj_uid=lease.group.traj_uids[member],
        group_uid=lease.group.group_uid,
        env_name="key_room",
        task_id=lease.task.id,
        split=lease.task.split,
        seed=0,
        member=member,
        won=won,
        task_score=task_score,
        steps=tuple(steps),
    )
