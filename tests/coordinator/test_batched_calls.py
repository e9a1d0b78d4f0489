"""Questions of one process that go together, and what becomes of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from actors.simulation import Delay, LocalHandle
from coordinator.batched_calls import BatchedHandle, Call
from store import FencedError


class Oracle:
    """What it was asked, call for call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def ask_all(self, questions: Sequence[Call]) -> list[object]:
        self.calls.append([question.name for question in questions])
        return [question.put_to(self) for question in questions]

    def twice(self, number: int) -> int:
        return 2 * number

    def refuse(self) -> None:
        raise FencedError("epoch 1, not 2")


class Dead:
    def ask_all(self, questions: Sequence[Call]) -> list[object]:
        raise ConnectionError("nobody there")


def shared(target: object) -> BatchedHandle:
    return BatchedHandle(LocalHandle(target, delay=Delay(median_s=0.01, sigma=0.0), seed=0))


def test_what_is_asked_while_the_line_is_busy_goes_together_and_in_order() -> None:
    async def ask() -> list[int]:
        handle = shared(oracle)
        first = handle.twice.remote(1)
        await asyncio.sleep(0)  # it is on its way
        return await asyncio.gather(first, handle.twice.remote(2), handle.twice.remote(3))

    oracle = Oracle()
    assert asyncio.run(ask()) == [2, 4, 6]
    assert oracle.calls == [["twice"], ["twice", "twice"]]


def test_a_refused_question_is_refused_to_whoever_asked_it_and_to_nobody_else() -> None:
    async def ask() -> list[object]:
        handle = shared(oracle)
        return await asyncio.gather(
            handle.refuse.remote(), handle.twice.remote(4), return_exceptions=True
        )

    oracle = Oracle()
    refused, answered = asyncio.run(ask())
    assert isinstance(refused, FencedError) and str(refused) == "epoch 1, not 2"
    assert answered == 8


def test_what_nobody_waits_for_any_more_is_asked_all_the_same() -> None:
    async def ask() -> int:
        handle = shared(oracle)
        forgotten = handle.twice.remote(5)
        forgotten.cancel()
        return int(await handle.twice.remote(6))

    oracle = Oracle()
    assert asyncio.run(ask()) == 12
    assert oracle.calls == [["twice", "twice"]]


def test_a_dead_coordinator_is_heard_of_by_all_who_asked_and_by_those_who_ask_later() -> None:
    async def ask() -> None:
        handle = shared(Dead())
        answers = await asyncio.gather(
            handle.lease.remote("a"), handle.lease.remote("b"), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [ConnectionError] * 2
        with pytest.raises(ConnectionError, match="nobody there"):
            await handle.lease.remote("c")

    asyncio.run(ask())
