"""Call the coordinator, from workers, the learner and the driver.

    coordinator = CoordinatorClient(handle, component="worker-0")
    lease = await coordinator.lease(serves=3)    # in an event loop
    batch = coordinator.claim(version).get()     # in a thread

Every method sends its call at once and returns a `Reply`. The coordinator answers in milliseconds,
so a call without a reply by the deadline raises CoordinatorSilent. An error that the coordinator
raised, or its death, is raised as Ray passes it on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError

from coordinator.coordinator import Coordinator, ResumePoint, Settlement, Status
from coordinator.leases import Lease
from coordinator.weight_update_lock import WEIGHT_UPDATE_S
from store import Batch, CheckpointRecord, CommitResult, SegmentMeta, Unfinished, VersionRecord

ANSWER_TIMEOUT_S = 60.0  # far longer than any call; then the coordinator is lost or hangs
# Between two requests for the lock on weight updates: twice as long each time.
LOCK_POLL_S, LONGEST_LOCK_POLL_S = 0.05, 0.5

P = ParamSpec("P")
T = TypeVar("T")


class CoordinatorSilent(RuntimeError):
    """The coordinator did not answer; without it nothing can be leased or committed."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A call that is under way: `await reply`, or `reply.get()` in a thread."""

    reference: Any  # Ray's
    call: str
    timeout_s: float

    def get(self, *, timeout_s: float | None = None) -> T:
        """Block until the reply is there. Raises CoordinatorSilent."""
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            result: T = ray.get(self.reference, timeout=deadline_s)
        except GetTimeoutError:
            raise self._silent(deadline_s) from None
        return result

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            async with asyncio.timeout(self.timeout_s):
                result: T = await self.reference
        except TimeoutError:
            raise self._silent(self.timeout_s) from None
        return result

    def _silent(self, waited_s: float) -> CoordinatorSilent:
        return CoordinatorSilent(
            f"the coordinator has not answered {self.call} for {waited_s:g} s: its process is "
            "stopped, or its disk hangs"
        )


class CoordinatorClient:
    """Call `Coordinator`, which documents each method, under the name of one component."""

    def __init__(self, handle: Any, *, component: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Take Ray's handle of a `CoordinatorActor`, or any object with the same methods."""
        self.component = component
        self._handle, self._timeout_s = handle, timeout_s

    def _call(
        self,
        method: Callable[Concatenate[Coordinator, P], T],
        *given: P.args,
        **named: P.kwargs,
    ) -> Reply[T]:
        # The method is named by reference, so that mypy checks arguments and result.
        name = method.__name__
        reference = getattr(self._handle, name).remote(*given, **named)
        return Reply(reference, f"{self.component}'s {name!r}", self._timeout_s)

    # every component

    def heartbeat(self, waiting_on: str | None, waits_s: float) -> Reply[None]:
        return self._call(Coordinator.heartbeat, self.component, waiting_on, waits_s=waits_s)

    def record(self, what: str, detail: str) -> Reply[None]:
        return self._call(Coordinator.record_event, self.component, what, detail=detail)

    def notice(self, what: str, detail: str) -> Reply[None]:
        return self._call(Coordinator.notice, self.component, what, detail=detail)

    def status(self) -> Reply[Status]:
        return self._call(Coordinator.status)

    def newest_version(self) -> Reply[VersionRecord | None]:
        return self._call(Coordinator.newest_version)

    def is_written(self, version: int) -> Reply[bool]:
        return self._call(Coordinator.is_written, version)

    def checkpoints(self) -> Reply[tuple[CheckpointRecord, ...]]:
        return self._call(Coordinator.checkpoints)

    # workers

    def lease(self, serves: int | None) -> Reply[Lease | None]:
        return self._call(Coordinator.lease, self.component, serves)

    def commit(self, segment: SegmentMeta, epoch: int) -> Reply[CommitResult]:
        return self._call(Coordinator.commit, segment, epoch)

    def keep_extra(self, lease: Lease, segment: SegmentMeta) -> Reply[None]:
        group_uid, task_id = lease.group.group_uid, lease.task.id
        return self._call(
            Coordinator.keep_extra, group_uid, task_id, segment=segment, epoch=lease.epoch
        )

    def record_unfinished(self, lease: Lease, episodes: Sequence[Unfinished]) -> Reply[None]:
        return self._call(
            Coordinator.record_unfinished, self.component, episodes, epoch=lease.epoch
        )

    def count_answers(self, n_answers: int, n_remembered: int) -> Reply[None]:
        return self._call(Coordinator.count_answers, n_answers, n_remembered)

    def give_up(self, lease: Lease, why: str) -> Reply[None]:
        return self._call(Coordinator.give_up, self.component, lease.group.group_uid, why=why)

    def abandon(self, lease: Lease, why: str) -> Reply[None]:
        return self._call(Coordinator.abandon, self.component, lease.group.group_uid, why=why)

    def rendezvous(self) -> Reply[str | None]:
        return self._call(Coordinator.rendezvous)

    @asynccontextmanager
    async def weight_update(self) -> AsyncIterator[None]:
        """Hold the lock on weight updates, or go on without it after WEIGHT_UPDATE_S."""
        deadline_s, poll_s = time.monotonic() + WEIGHT_UPDATE_S, LOCK_POLL_S
        while not await self._call(Coordinator.begin_weight_update, self.component):
            if time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_LOCK_POLL_S)
        try:
            yield
        finally:
            await self._call(Coordinator.end_weight_update, self.component)

    # the learner

    def resume(self, learner_step: int) -> Reply[ResumePoint]:
        return self._call(Coordinator.resume, learner_step)

    def set_rendezvous(self, address: str) -> Reply[None]:
        return self._call(Coordinator.set_rendezvous, address)

    def claim(self, current_version: int) -> Reply[Batch | None]:
        return self._call(Coordinator.claim, current_version)

    def refill(
        self, batch_id: int, *, filtered: Collection[bytes], n_groups: int, current_version: int
    ) -> Reply[Batch | None]:
        return self._call(
            Coordinator.refill,
            batch_id,
            filtered=filtered,
            n_groups=n_groups,
            current_version=current_version,
        )

    def release_claims(self, learner_step: int) -> Reply[int]:
        return self._call(Coordinator.release_claims, learner_step)

    def settle(self, trained: Settlement) -> Reply[None]:
        return self._call(Coordinator.settle, trained)

    def announce(self, version: VersionRecord) -> Reply[None]:
        return self._call(Coordinator.announce, version)

    def written(self, version: int) -> Reply[None]:
        return self._call(Coordinator.written, version)

    def export_now(self) -> Reply[int]:
        return self._call(Coordinator.export_now)

    def checkpoint(self, record: CheckpointRecord, *, lsn: int) -> Reply[bool]:
        return self._call(Coordinator.checkpoint, record, lsn=lsn)

    # the driver

    def capture_output(self) -> Reply[None]:
        return self._call(Coordinator.capture_output)

    def publish(self, version: VersionRecord) -> Reply[None]:
        return self._call(Coordinator.publish, version)

    def driver_tick(self) -> Reply[Status]:
        return self._call(Coordinator.driver_tick)

    def evaluate(self, version: int, episodes_per_task: int) -> Reply[None]:
        return self._call(Coordinator.evaluate, version, episodes_per_task)

    def remove(self, component: str, why: str) -> Reply[None]:
        return self._call(Coordinator.remove, component, why)

    def close(self) -> Reply[None]:
        return self._call(Coordinator.close)
