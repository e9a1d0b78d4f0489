"""One line to the coordinator for everything in a process: what is asked while it is busy goes
together, in the next call.

    handle = BatchedHandle(coordinator)          # looks like the Ray handle, also to CoordinatorClient
    lease = await handle.lease.remote("worker-0")

A question that finds the line free goes at once. So few questions are answered as soon as ever, and
many cost the coordinator one call, and one wait for its disk, for all of them: a call costs it more
than a lease.
"""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    name: str  # of the coordinator's method
    given: tuple[object, ...]

    def put_to(self, target: object) -> object:
        """The answer, or a CallError."""
        try:
            return getattr(target, self.name)(*self.given)
        except Exception as error:  # noqa: BLE001  the border of a process: it is raised where it was asked
            error.add_note(traceback.format_exc())  # of this side: it does not travel by itself
            return CallError(error)


@dataclass(frozen=True, slots=True)
class CallError:
    """In place of an answer: what the method raised."""

    error: Exception


class BatchedHandle:
    """`handle` is the coordinator's. Questions are answered in the order in which they were asked;
    of one event loop.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._ask, name))

    def _ask(self, name: str, *given: object) -> asyncio.Future[Any]:
        """As with Ray the question is on its way when this returns, also if nobody waits for the
        answer any more.
        """
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((Call(name, given), answer))
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._send())
        return answer

    async def _send(self) -> None:
        asked: list[tuple[Call, asyncio.Future[Any]]] = []
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                try:
                    answers = await self._handle.ask_all.remote([question for question, _ in asked])
                except Exception as error:  # noqa: BLE001  of the line itself: the coordinator is dead, and who asked hears it
                    answers = [CallError(error)] * len(asked)
                for (_, future), answer in zip(asked, answers, strict=True):
                    if future.done():
                        continue
                    if isinstance(answer, CallError):
                        future.set_exception(answer.error)
                    else:
                        future.set_result(answer)
        finally:
            self._sending = None
            # of a loop that ends: nobody is to wait for ever
            for _, future in [*asked, *self._waiting]:
                future.cancel()
