"""The client of the coordinator: each call has a deadline, and can be cancelled."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
import ray

from coordinator import CoordinatorClient, CoordinatorSilent


def client_of(answer: object, *, timeout_s: float = 60.0) -> CoordinatorClient:
    newest_version = SimpleNamespace(remote=lambda: answer)
    return CoordinatorClient(
        SimpleNamespace(newest_version=newest_version), component="w", timeout_s=timeout_s
    )


def test_a_task_cancelled_as_the_reply_comes_is_cancelled() -> None:
    """asyncio.wait_for of Python 3.11 returns the reply instead: a stop would hang."""

    async def cancelled_at_once() -> None:
        answer = asyncio.get_running_loop().create_future()
        calling = asyncio.ensure_future(client_of(answer).newest_version())
        await asyncio.sleep(0)
        answer.set_result(None)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(cancelled_at_once())


SILENT = "has not answered w's 'newest_version' for 0.01 s"


def test_a_coordinator_that_does_not_answer_a_task_is_named() -> None:
    async def call() -> None:
        await client_of(asyncio.get_running_loop().create_future(), timeout_s=0.01).newest_version()

    with pytest.raises(CoordinatorSilent, match=SILENT):
        asyncio.run(call())


def test_a_coordinator_that_does_not_answer_a_thread_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(reference: threading.Event, *, timeout: float) -> None:
        if not reference.wait(timeout):
            raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    reply = client_of(threading.Event(), timeout_s=60.0).newest_version()
    with pytest.raises(CoordinatorSilent, match=SILENT):
        reply.get(timeout_s=0.01)
