"""What the coordinator remembers of groups while they are played: it is lost with the processes that play them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from envs import Task
from store import GroupRecord, VersionRecord

MAX_GIVEN_UP = 3  # times that a group is played again because it became too old; it then counts as stale
TURN_S = 60.0  # how long a worker may take to change its weights before the next one may


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One group to play: its task, the uids of its trajectories, and the weights it has to be started on or newer."""

    group: GroupRecord
    task: Task
    version: VersionRecord
    worker: str
    temperature: float
    epoch: int


class Plays:
    """Training groups that are leased, by uid, until they are whole or nobody plays them."""

    def __init__(self) -> None:
        self._leases: dict[bytes, Lease] = {}
        self._given_up: Counter[bytes] = Counter()

    def begin(self, lease: Lease) -> None:
        self._leases[lease.group.group_uid] = lease

    def end(self, group_uid: bytes) -> None:
        self._leases.pop(group_uid, None)

    def end_all_of(self, worker: str) -> None:
        for group_uid in [uid for uid, lease in self._leases.items() if lease.worker == worker]:
            self.end(group_uid)

    def gives_up(self, group_uid: bytes) -> bool:
        """The group became too old while it was played. Whether it is worth another try."""
        self.end(group_uid)
        self._given_up[group_uid] += 1
        return self._given_up[group_uid] <= MAX_GIVEN_UP

    def begun_at(self, version: int) -> bool:
        """Whether a group is being played that began at `version`."""
        return any(lease.version.version == version for lease in self._leases.values())


class Turn:
    """Whose turn it is to change weights: one worker at a time, so that generation never stops everywhere."""

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
