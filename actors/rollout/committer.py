"""Write finished trajectories as segments, and report a group's episodes to the coordinator."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from coordinator import CoordinatorClient, Lease
from envs import PendingOperations
from store import (
    IMPORTED,
    RunLayout,
    SegmentMeta,
    Trajectory,
    Unfinished,
    in_segments,
    uid,
    write_segment,
)

# For writing one segment. Minutes, because a shared disk may pause, and giving up ends the worker
# with all groups that it plays.
STORAGE_TIMEOUT_S = 300.0


class StorageSilent(RuntimeError):
    """A segment was not written in time.

    The worker ends, and another worker plays the group again.
    """


class Committer:
    """Write segments for the leases of one worker. Every method waits for the storage."""

    def __init__(
        self, coordinator: CoordinatorClient, layout: RunLayout, *, pending: PendingOperations
    ) -> None:
        self._coordinator = coordinator
        self._layout = layout
        self._pending = pending

    async def commit(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        """Add trajectories to the leased group. Raises StorageSilent, FencedError."""
        for part in in_segments(trajectories):
            segment = await self._write(lease, part)
            await self._coordinator.commit(segment, lease.epoch)

    async def keep_extra(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        """Keep trajectories that the group had no member left for. Raises StorageSilent."""
        alone = [as_group_of_its_own(trajectory) for trajectory in trajectories]
        for part in in_segments(alone):
            await self._coordinator.keep_extra(lease, await self._write(lease, part))

    async def record_unfinished(self, lease: Lease, episodes: Sequence[Unfinished]) -> None:
        """Report the attempts that gave no trajectory.

        Call it before the group is given up: another worker may lease it from then on.
        """
        if episodes:
            await self._coordinator.record_unfinished(lease, episodes)

    async def _write(self, lease: Lease, trajectories: Sequence[Trajectory]) -> SegmentMeta:
        worker = self._coordinator.component
        with self._pending.on("the storage, to write a segment"):
            writing = asyncio.to_thread(
                write_segment, self._layout, trajectories, worker=worker, epoch=lease.epoch
            )
            try:
                async with asyncio.timeout(STORAGE_TIMEOUT_S):
                    return await writing
            except TimeoutError:
                raise StorageSilent(
                    f"{worker} could not write a segment within {STORAGE_TIMEOUT_S:g} s"
                ) from None


def as_group_of_its_own(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory as the only member of an imported group, which is not trained on.

    Nobody can compute the group's uid: a dataset that is imported could take it before.
    """
    group_uid = uid(trajectory.traj_uid, secrets.token_hex())
    return replace(
        trajectory, group_uid=group_uid, traj_uid=uid(group_uid, 0), member=0, split=IMPORTED
    )
