"""Keep leases of groups, tasks that lose workers, and the lock on weight updates.

All of it is in memory. Most of it is about processes that are lost together with the coordinator.
How often a group was played again because it became too old counts from 0 after a restart; which
tasks lose workers is read from the catalog.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs import Task
from store import TRAIN, Group, SegmentMeta, Unfinished, VersionRecord, now_us

MAX_REQUEUES = 3  # times that a group is played again because it became too old
SUSPECT_LOSSES = 2  # workers lost with a task in play; it is then played alone, after all others
MAX_LOSSES = 3  # the last one while the task was played alone; it is then abandoned
WORKERS_PER_UPDATE = 10  # of which one may update its weights
WEIGHT_UPDATE_S = 60.0  # longest time that a worker holds the lock on weight updates


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Name a group to play, with its task and its oldest allowed weights."""

    group: Group
    task: Task
    version: VersionRecord
    worker: str
    temperature: float

    @property
    def epoch(self) -> int:
        """Return the catalog's epoch in which the group was leased; later owners fence it."""
        return self.group.epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class _InPlay:
    lease: Lease
    begun_us: int
    numbers: set[int]  # of the episodes that have not been committed


class LeaseTable:
    """Keep leased groups by uid, until they are whole or their worker stopped playing them."""

    def __init__(self, *, extra_members: int) -> None:
        self._extra_members = extra_members
        self._in_play: dict[bytes, _InPlay] = {}
        self._of_worker: defaultdict[str, dict[bytes, Lease]] = defaultdict(dict)
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
        """Cross off the episodes that were committed.

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


class Suspects:
    """Find the tasks that kill workers.

    A worker plays several groups at once, and loses all of them together. A task in play at
    SUSPECT_LOSSES losses is a suspect: it is played after all others, by a worker that plays
    nothing else. If that worker is lost too, the task is condemned.
    """

    def __init__(self, losses: Mapping[str, int]) -> None:
        """Begin with the losses that earlier starts of the run counted, by task id."""
        self._losses = Counter(losses)
        self._reported: dict[str, list[Lease]] = {}
        self._drained = ""
        self.condemned: dict[str, str] = {}  # task id -> reason

    @property
    def task_ids(self) -> set[str]:
        """Return the suspects and the condemned."""
        return {task_id for task_id, n in self._losses.items() if n >= SUSPECT_LOSSES}

    def report(self, worker: str, leases: Sequence[Lease]) -> None:
        """Note groups that `worker` gave up because it fails; it is lost next."""
        self._reported.setdefault(worker, []).extend(leases)

    def lose(self, worker: str, leases: Sequence[Lease], *, why: str) -> Lease | None:
        """Count the loss of `worker` with `leases` in play. Return a lease whose task is to blame.

        Only a task that was played alone can be condemned.
        """
        in_play = [*self._reported.pop(worker, []), *leases]
        self.release(worker)
        self._losses.update({lease.task.id for lease in in_play})
        if len(in_play) != 1 or self._losses[in_play[0].task.id] < MAX_LOSSES:
            return None
        task_id = in_play[0].task.id
        self.condemned[task_id] = (
            f"task {task_id!r} was in play {self._losses[task_id]} times when a worker was lost, "
            f"the last time alone: {worker} {why}"
        )
        return in_play[0]

    def clear(self, task_id: str) -> None:
        """Clear a task of suspicion, because a whole group of it was played."""
        self._losses.pop(task_id, None)

    def begin_drain(self, worker: str) -> bool:
        """Give `worker` no new group until it can play a suspect alone. Return whether it drains.

        One worker at a time drains; for another this returns False.
        """
        self._drained = self._drained or worker
        return self._drained == worker

    def release(self, worker: str) -> None:
        """Let the next worker drain."""
        if self._drained == worker:
            self._drained = ""


class WeightUpdateLock:
    """Let a few workers at a time load the files of new weights: generation never stops everywhere.

    One in WORKERS_PER_UPDATE may, and at least one. With thousands of workers the last one would
    otherwise get its weights hours after the first.
    """

    def __init__(self, n_workers: int) -> None:
        self._n_holders = max(1, n_workers // WORKERS_PER_UPDATE)
        self._until_s: dict[str, float] = {}  # by holder, the longest one first

    def acquire(self, worker: str) -> bool:
        """Return whether `worker` holds the lock now, for up to WEIGHT_UPDATE_S."""
        now_s = time.monotonic()
        self._until_s.pop(worker, None)
        if len(self._until_s) >= self._n_holders:
            longest, until_s = next(iter(self._until_s.items()))
            if now_s < until_s:
                return False
            del self._until_s[longest]
        self._until_s[worker] = now_s + WEIGHT_UPDATE_S
        return True

    def release(self, worker: str) -> None:
        """Release the lock, if `worker` holds it."""
        self._until_s.pop(worker, None)
