"""What the coordinator remembers of groups while they are played: it is lost with the processes
that play them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs import Task
from store import Group, SegmentMeta, Unfinished, VersionRecord, now_us

# times that a group is played again because it became too old; it then counts as stale
MAX_GIVEN_UP = 3
# workers that were lost with a task in play; from then on it is played alone, after all others
SUSPECT_LOSSES = 2
MAX_LOSSES = 3  # the last one while the task was played alone; it is then abandoned
TURN_S = 60.0  # how long a worker may take to change its weights before the next one may


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One group to play: its task, the uids of its trajectories, and the weights it has to be
    started on or newer.
    """

    group: Group
    task: Task
    version: VersionRecord
    worker: str
    temperature: float
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """A lease, and the numbers of its episodes that have not been committed."""

    lease: Lease
    begun_us: int
    numbers: set[int]


class LeaseTable:
    """Groups that are leased, by uid, until they are whole or nobody plays them."""

    def __init__(self, *, spare_members: int) -> None:
        self._spare_members = spare_members
        self._plays: dict[bytes, Play] = {}
        self._given_up: Counter[bytes] = Counter()

    def begin(self, lease: Lease) -> None:
        size = lease.group.size
        spares = range(size, size + self._spare_members if lease.group.split == "train" else size)
        numbers = {*lease.group.missing, *spares}
        self._plays[lease.group.group_uid] = Play(lease=lease, begun_us=now_us(), numbers=numbers)

    def of(self, worker: str) -> list[Lease]:
        """Return the leases that `worker` plays."""
        return [play.lease for play in self._plays.values() if play.lease.worker == worker]

    def task_id(self, group_uid: bytes) -> str | None:
        """Return the task of a group that is being played; None for one that nobody plays."""
        play = self._plays.get(group_uid)
        return None if play is None else play.lease.task.id

    def committed(self, segment: SegmentMeta) -> None:
        """Note the episodes that ended as trajectories.

        A spare that took a member's number leaves its own behind. The count of the others is right.
        """
        for trajectory in segment.trajectories:
            if trajectory.group_uid in self._plays:
                self._plays[trajectory.group_uid].numbers.discard(trajectory.member)

    def end(self, group_uid: bytes) -> None:
        self._plays.pop(group_uid, None)

    def reported(self, worker: str, episodes: Sequence[Unfinished]) -> Sequence[Unfinished]:
        """Note that `worker` plays the groups of these episodes no longer; return the episodes."""
        for group_uid in {episode.group_uid for episode in episodes}:
            play = self._plays.get(group_uid)
            if play is not None and play.lease.worker == worker:
                self.end(group_uid)
        return episodes

    def lose(self, worker: str) -> list[Unfinished]:
        """End all groups of a worker that is gone. Return the episodes that it played and did not
        report.
        """
        lost = [play for play in self._plays.values() if play.lease.worker == worker]
        for play in lost:
            self.end(play.lease.group.group_uid)
        ended_us = now_us()
        return [
            Unfinished(
                group_uid=play.lease.group.group_uid,
                number=number,
                version=play.lease.version.version,
                begun_us=play.begun_us,
                ended_us=ended_us,
                n_steps=None,
                n_response_tokens=None,
                why="worker_lost",
            )
            for play in lost
            for number in sorted(play.numbers)
        ]

    def may_requeue(self, group_uid: bytes) -> bool:
        """The group became too old while it was played. Whether it is worth another try."""
        self.end(group_uid)
        self._given_up[group_uid] += 1
        return self._given_up[group_uid] <= MAX_GIVEN_UP

    def begun_at(self, version: int) -> bool:
        """Whether a training group is being played that began at `version`."""
        leases = (play.lease for play in self._plays.values())
        return any(
            lease.version.version == version for lease in leases if lease.group.split == "train"
        )


class Suspects:
    """Count the workers that were lost while they played a task, and find the task that is to
    blame.

    A worker plays several groups at once, and all of them are lost with it. A task that was in play
    twice is a suspect: it is played after all others, by a worker that plays nothing else. If that
    worker is lost too, the task is condemned.
    """

    def __init__(self, losses: Mapping[str, int]) -> None:
        """`losses` is what earlier sessions of the run have counted, by task id."""
        self._losses = Counter(losses)
        self._reported: dict[str, list[Lease]] = {}
        self._drained = ""
        self.condemned: dict[str, str] = {}  # task id -> reason

    @property
    def task_ids(self) -> set[str]:
        """The tasks that are played alone, or not any more."""
        return {task_id for task_id, n in self._losses.items() if n >= SUSPECT_LOSSES}

    def report(self, worker: str, leases: Sequence[Lease]) -> None:
        """Note groups that `worker` gave up because it fails; it is lost next."""
        self._reported.setdefault(worker, []).extend(leases)

    def lose(self, worker: str, leases: Sequence[Lease], why: str) -> Lease | None:
        """Count the loss of `worker` with `leases` in play. Return the one that is to blame, if
        that is known now.
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

    def played(self, task_id: str) -> None:
        """Clear a task of suspicion: a whole group of it has been played."""
        self._losses.pop(task_id, None)

    def drains(self, worker: str) -> bool:
        """Return whether `worker` gets no new group until it plays nothing, to play a suspect then.

        One worker does so at a time.
        """
        self._drained = self._drained or worker
        return self._drained == worker

    def release(self, worker: str) -> None:
        """Let the next worker drain."""
        if self._drained == worker:
            self._drained = ""


class WeightUpdateLock:
    """Whose turn it is to change weights: one worker at a time, so that generation never stops
    everywhere.
    """

    def __init__(self) -> None:
        self._holder, self._until_s = "", 0.0

    def take(self, worker: str) -> bool:
        """Whether it is `worker`'s turn now. Who does not end it in TURN_S loses it."""
        now_s = time.monotonic()
        if self._holder not in ("", worker) and now_s < self._until_s:
            return False
        self._holder, self._until_s = worker, now_s + TURN_S
        return True

    def end(self, worker: str) -> None:
        if self._holder == worker:
            self._holder = ""
