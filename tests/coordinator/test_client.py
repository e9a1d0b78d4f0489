"""What a worker asks the coordinator: with a deadline, and given up when it is told to stop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import client as client_module
from coordinator.client import CoordinatorClient, CoordinatorSilent


def client_of(answer: asyncio.Future[Any]) -> CoordinatorClient:
    return CoordinatorClient(
        SimpleNamespace(newest_version=SimpleNamespace(remote=lambda: answer)), worker="w"
    )


def test_who_is_cancelled_as_the_answer_comes_is_cancelled() -> None:
    """asyncio.wait_for of Python 3.11 returns the answer instead: a loop that asks would go on for
    ever, and a stop hang.
    """

    async def cancelled_at_once() -> None:
        answer = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(client_of(answer).newest_version())
        await asyncio.sleep(0)
        answer.set_result(None)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancelled_at_once())


def test_a_coordinator_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.01)

    async def ask() -> None:
        await client_of(asyncio.get_running_loop().create_future()).newest_version()

    with pytest.raises(CoordinatorSilent, match="has not answered w's 'newest_version' for 0.01 s"):
        asyncio.run(ask())
