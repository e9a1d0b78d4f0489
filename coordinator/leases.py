"""Keep leases: which worker plays which group, and how often a group was played again.

All of it is in memory, because it is about processes that are lost together with the coordinator.
How often a group was played again because it became too old counts from 0 after a restart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from envs import Task
from store import TRAIN, Group, SegmentMeta, Unfinished, VersionRecord, now_us

# Times that a group is played again because it became too old. It only bounds wasted play: a group
# that is played once more begins with new weights, so a count that begins at 0 after a restart
# costs at most three more plays of a group.
MAX_REQUEUES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A group to play, with its task and its oldest allowed weights."""

    group: Group
    task: Task
    version: VersionRecord
    worker: str
    temperature: float

    @property
    def epoch(self) -> int:
        """Return the catalog's epoch in which the group was leased; later owners fence it."""
        return self.group.epoch


@dataclass(kw_only=True, slots=True)
class _InPlay:
    """A leased group, and its episodes that are still to be committed; `committed` removes them."""

    lease: Lease
    begun_us: int
    numbers: set[int]  # of the episodes that have not been committed


class LeaseTable:
    """Keep leased groups by uid, until they are whole or their worker stopped playing them."""

    def __init__(self, *, extra_members: int) -> None:
        self._extra_members = extra_members
        self._in_play: dict[bytes, _InPlay] = {}
        self._of_worker: defaultdict[str, dict[bytes, Lease]] = defaultdict(dict)
        # Times by group. The catalog's unfinished episodes would tell it too, by one more query;
        # MAX_REQUEUES says why a count that begins at 0 after a restart is enough.
        self._n_requeued: Counter[bytes] = Counter()

    def begin(self, lease: Lease) -> None:
        group_uid, size = lease.group.group_uid, lease.group.size
        self.end(group_uid)  # another worker's lease on it may have run out
        extra = range(size, size + self._extra_members if lease.group.split == TRAIN else size)
        self._of_worker[lease.worker][group_uid] = lease
        self._in_play[group_uid] = _InPlay(
            lease=lease, begun_us=now_us(), numbers={*lease.group.missing, *extra}
        )

    def of(self, worker: str) -> list[Lease]:
        """Return the leases that `worker` plays."""
        return list(self._of_worker.get(worker, {}).values())

    def task_id(self, group_uid: bytes) -> str | None:
        """Return the task of a group in play, None for any other group."""
        entry = self._in_play.get(group_uid)
        return None if entry is None else entry.lease.task.id

    def committed(self, segment: SegmentMeta) -> None:
        """Remove committed episodes from those that are still to be committed.

        An extra episode that took a member's number leaves its own behind. The count stays right.
        """
        for trajectory in segment.trajectories:
            if trajectory.group_uid in self._in_play:
                self._in_play[trajectory.group_uid].numbers.discard(trajectory.member)

    def end(self, group_uid: bytes) -> None:
        entry = self._in_play.pop(group_uid, None)
        if entry is None:
            return
        of_worker = self._of_worker[entry.lease.worker]
        del of_worker[group_uid]
        if not of_worker:
            del self._of_worker[entry.lease.worker]

    def end_reported(self, worker: str, episodes: Sequence[Unfinished]) -> None:
        """Remove the leases of `worker` on the groups of these episodes."""
        for group_uid in {episode.group_uid for episode in episodes}:
            entry = self._in_play.get(group_uid)
            if entry is not None and entry.lease.worker == worker:
                self.end(group_uid)

    def lose(self, worker: str) -> list[Unfinished]:
        """Remove all leases of a lost worker. Return the episodes that it did not report."""
        lost = [self._in_play[lease.group.group_uid] for lease in self.of(worker)]
        for entry in lost:
            self.end(entry.lease.group.group_uid)
        ended_us = now_us()
        return [
            Unfinished(
                group_uid=entry.lease.group.group_uid,
                number=number,
                version=entry.lease.version.version,
                begun_us=entry.begun_us,
                ended_us=ended_us,
                n_steps=None,
                n_response_tokens=None,
                why="worker_lost",
            )
            for entry in lost
            for number in sorted(entry.numbers)
        ]

    def end_too_old(self, group_uid: bytes) -> bool:
        """End a group that became too old in play. Return whether it may be played again."""
        self.end(group_uid)
        self._n_requeued[group_uid] += 1
        return self._n_requeued[group_uid] <= MAX_REQUEUES

    def begun_at(self, version: int) -> bool:
        """Return whether a training group in play began at `version`."""
        leases = (entry.lease for entry in self._in_play.values())
        return any(
            lease.group.split == TRAIN and lease.version.version == version for lease in leases
        )
