"""The one client of the coordinator, for workers, the learner and the driver.

    coordinator = CoordinatorClient(handle, component="worker-0", timeout_s=60.0)
    lease = await coordinator.lease()            # in an event loop
    batch = coordinator.claim(version).get()     # in a thread

Every method sends its call at once and returns a `Reply`. The coordinator answers in milliseconds,
so a call without a reply by the deadline raises CoordinatorSilent. An error that the coordinator
raised, or its death, is raised as Ray passes it on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError

from coordinator.coordinator import ResumePoint, Status
from coordinator.leases import WEIGHT_UPDATE_S, Lease
from store import Batch, CheckpointRecord, CommitResult, SegmentMeta, Unfinished, VersionRecord

ANSWER_TIMEOUT_S = 60.0
LOCK_POLL_S = 0.05

T = TypeVar("T")


class CoordinatorSilent(RuntimeError):
    """The coordinator did not answer; without it nothing can be leased or committed."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """The reply to a call that is under way: `await reply`, or `reply.get()` in a thread."""

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
    """Calls of `Coordinator`, one method each, under the name of one component."""

    def __init__(self, handle: Any, *, component: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Take Ray's handle of a `CoordinatorActor`, or any object with the same methods."""
        self.component = component
        self._handle, self._timeout_s = handle, timeout_s

    # every component

    def heartbeat(self, waiting_on: str | None, waits_s: float) -> Reply[None]:
        """Send a heartbeat: the component has waited for `waiting_on` for `waits_s`."""
        return self._reply(
            "heartbeat", self._handle.heartbeat.remote(self.component, waiting_on, waits_s)
        )

    def record(self, what: str, detail: str) -> Reply[None]:
        """Record an event that is not shown on the screen."""
        return self._reply(
            "record_event", self._handle.record_event.remote(self.component, what, detail)
        )

    def notice(self, what: str, detail: str) -> Reply[None]:
        """Record an event and show it on the screen."""
        return self._reply("notice", self._handle.notice.remote(self.component, what, detail))

    def status(self) -> Reply[Status]:
        """Return what the screen shows."""
        return self._reply("status", self._handle.status.remote())

    def publish(self, version: VersionRecord) -> Reply[None]:
        """Make a version the newest one."""
        return self._reply("publish", self._handle.publish.remote(version))

    def newest_version(self) -> Reply[VersionRecord | None]:
        """Return the newest published version."""
        return self._reply("newest_version", self._handle.newest_version.remote())

    def checkpoints(self) -> Reply[tuple[CheckpointRecord, ...]]:
        """Return the checkpoints that a learner may start from, newest first."""
        return self._reply("checkpoints", self._handle.checkpoints.remote())

    # workers

    def lease(self) -> Reply[Lease | None]:
        """Lease the next group; None while admission is closed."""
        return self._reply("lease", self._handle.lease.remote(self.component))

    def commit(self, segment: SegmentMeta, epoch: int) -> Reply[CommitResult]:
        """Commit the trajectories of a segment."""
        return self._reply("commit", self._handle.commit.remote(segment, epoch))

    def keep_extra(self, lease: Lease, segment: SegmentMeta) -> Reply[None]:
        """Keep extra episodes, which ended after their group was whole."""
        group_uid, task_id = lease.group.group_uid, lease.task.id
        return self._reply(
            "keep_extra", self._handle.keep_extra.remote(group_uid, task_id, segment, lease.epoch)
        )

    def record_unfinished(self, lease: Lease, episodes: Sequence[Unfinished]) -> Reply[None]:
        """Record episodes that gave no trajectory, and end their lease."""
        return self._reply(
            "record_unfinished",
            self._handle.record_unfinished.remote(self.component, episodes, lease.epoch),
        )

    def give_up(self, lease: Lease, why: str) -> Reply[None]:
        """Give up a group that became too old while it was played."""
        return self._reply(
            "give_up", self._handle.give_up.remote(self.component, lease.group.group_uid, why)
        )

    def abandon(self, lease: Lease, why: str) -> Reply[None]:
        """Give up a group whose environment failed at every attempt."""
        return self._reply(
            "abandon", self._handle.abandon.remote(self.component, lease.group.group_uid, why)
        )

    def rendezvous(self) -> Reply[str | None]:
        """Return the address from which the learner broadcasts its weights, if it does."""
        return self._reply("rendezvous", self._handle.rendezvous.remote())

    @asynccontextmanager
    async def weight_update(self) -> AsyncIterator[None]:
        """Hold the lock on weight updates, or go on without it after WEIGHT_UPDATE_S."""
        deadline_s = time.monotonic() + WEIGHT_UPDATE_S
        while not await self._begin_weight_update() and time.monotonic() < deadline_s:
            await asyncio.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            await self._end_weight_update()

    def _begin_weight_update(self) -> Reply[bool]:
        return self._reply(
            "begin_weight_update", self._handle.begin_weight_update.remote(self.component)
        )

    def _end_weight_update(self) -> Reply[None]:
        return self._reply(
            "end_weight_update", self._handle.end_weight_update.remote(self.component)
        )

    # the learner

    def resume(self, learner_step: int) -> Reply[ResumePoint]:
        """Roll back whatever came after the checkpoint of `learner_step`."""
        return self._reply("resume", self._handle.resume.remote(learner_step))

    def set_rendezvous(self, address: str) -> Reply[None]:
        """State the address from which the learner broadcasts its weights."""
        return self._reply("set_rendezvous", self._handle.set_rendezvous.remote(address))

    def claim(self, current_version: int) -> Reply[Batch | None]:
        """Claim the next batch; None while there are too few complete groups."""
        return self._reply("claim", self._handle.claim.remote(current_version))

    def release_claims(self, learner_step: int) -> Reply[int]:
        """Release the groups claimed after `learner_step`. Return their number."""
        return self._reply("release_claims", self._handle.release_claims.remote(learner_step))

    def settle(
        self,
        batch_id: int,
        *,
        learner_step: int,
        no_signal: Mapping[bytes, str],
        version_in: int,
        metrics: Mapping[str, float],
    ) -> Reply[None]:
        """Record that a batch was trained on, with its metrics."""
        return self._reply(
            "settle",
            self._handle.settle.remote(
                batch_id,
                learner_step=learner_step,
                no_signal=no_signal,
                version_in=version_in,
                metrics=metrics,
            ),
        )

    def export_now(self) -> Reply[int]:
        """Export the catalog. Return its lsn."""
        return self._reply("export_now", self._handle.export_now.remote())

    def checkpoint(self, learner_step: int, path: str, version: int) -> Reply[None]:
        """Record a checkpoint that was written."""
        return self._reply(
            "checkpoint", self._handle.checkpoint.remote(learner_step, path, version)
        )

    # the driver

    def capture_output(self) -> Reply[None]:
        """Send the coordinator's output to its log. Replies once the coordinator has started."""
        return self._reply("capture_output", self._handle.capture_output.remote())

    def evaluate(self, version: int, episodes_per_task: int) -> Reply[None]:
        """Open an evaluation round."""
        return self._reply("evaluate", self._handle.evaluate.remote(version, episodes_per_task))

    def remove(self, component: str, why: str) -> Reply[None]:
        """Remove a component that left or was lost, and free its groups for others."""
        return self._reply("remove", self._handle.remove.remote(component, why))

    def close(self) -> Reply[None]:
        """Export a last time and close the catalog."""
        return self._reply("close", self._handle.close.remote())

    def _reply(self, call: str, reference: Any) -> Reply[Any]:
        return Reply(reference, f"{self.component}'s {call!r}", self._timeout_s)
