"""What a worker asks the coordinator, each question with a deadline: it answers in milliseconds, or
it is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from coordinator.leases import TURN_S, Lease
from store import SegmentMeta, Unfinished, VersionRecord

ANSWER_TIMEOUT_S = 60.0
HEARTBEATS = ("lease", "commit")  # questions that say as much
TURN_POLL_S = 0.05


class CoordinatorSilent(RuntimeError):
    """The coordinator did not answer; without it nothing can be leased or committed."""


class CoordinatorClient:
    """`handle` is the coordinator's, of Ray or a `LocalHandle`. Every method raises
    CoordinatorSilent.
    """

    def __init__(self, handle: Any, *, worker: str) -> None:
        self.worker, self._handle = worker, handle
        self._asked_s = float("-inf")

    def quiet_s(self) -> float:
        """For how long nothing was asked that the coordinator takes for a heartbeat, by the event
        loop's clock.
        """
        return asyncio.get_running_loop().time() - self._asked_s

    async def lease(self) -> Lease | None:
        lease: Lease | None = await self._ask("lease", self.worker)
        return lease

    async def commit(self, segment: SegmentMeta, epoch: int) -> None:
        await self._ask("commit", segment, epoch)

    async def keep_extra(self, lease: Lease, segment: SegmentMeta) -> None:
        await self._ask("keep_extra", lease.group.group_uid, lease.task.id, segment, lease.epoch)

    async def record_unfinished(self, lease: Lease, episodes: Sequence[Unfinished]) -> None:
        await self._ask("record_unfinished", self.worker, episodes, lease.epoch)

    async def give_up(self, lease: Lease, why: str) -> None:
        await self._ask("give_up", self.worker, lease.group.group_uid, why)

    async def abandon(self, lease: Lease, why: str) -> None:
        await self._ask("abandon", self.worker, lease.group.group_uid, why)

    async def newest_version(self) -> VersionRecord | None:
        newest: VersionRecord | None = await self._ask("newest_version")
        return newest

    async def rendezvous(self) -> str | None:
        """Where the learner sends its weights from, if it does."""
        address: str | None = await self._ask("rendezvous")
        return address

    async def record(self, what: str, detail: str) -> None:
        await self._ask("record_event", self.worker, what, detail)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Engines change their weights one after the other; who has waited for as long as a turn
        may last goes out of turn.
        """
        deadline_s = time.monotonic() + TURN_S
        while not await self._ask("take_turn", self.worker) and time.monotonic() < deadline_s:
            await asyncio.sleep(TURN_POLL_S)
        try:
            yield
        finally:
            await self._ask("end_turn", self.worker)

    async def _ask(self, question: str, *given: object) -> Any:
        if question in HEARTBEATS:
            self._asked_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await getattr(self._handle, question).remote(*given)
        except TimeoutError:
            raise CoordinatorSilent(
                f"the coordinator has not answered {self.worker}'s {question!r} for "
                f"{ANSWER_TIMEOUT_S:g} s"
            ) from None
