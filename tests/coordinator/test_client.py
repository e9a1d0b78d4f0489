"""The client of the coordinator: its calls fit the coordinator, and each has a deadline."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from coordinator import Coordinator, CoordinatorClient, CoordinatorSilent


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


class Checks:
    """A handle that compares every call with the signature of the coordinator's method."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given, **named: self._call(name, *given, **named))

    def _call(self, name: str, *given: object, **named: object) -> None:
        inspect.signature(getattr(Coordinator, name)).bind(None, *given, **named)
        self.called.add(name)


def test_every_call_of_the_client_is_one_the_coordinator_takes() -> None:
    handle = Checks()
    client = CoordinatorClient(handle, component="w")
    lease = SimpleNamespace(
        group=SimpleNamespace(group_uid=b""), task=SimpleNamespace(id=""), epoch=1
    )

    def argument(parameter: inspect.Parameter) -> Any:
        return lease if parameter.name == "lease" else None

    methods: list[Callable[..., object]] = [
        getattr(client, name)
        for name in vars(CoordinatorClient)
        if name not in ("__init__", "weight_update", "_reply") and callable(getattr(client, name))
    ]
    for method in methods:
        parameters = inspect.signature(method).parameters.values()
        by_name = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
        by_place = [argument(one) for one in parameters if one not in by_name]
        method(*by_place, **{one.name: argument(one) for one in by_name})
    public = {name for name in vars(Coordinator) if not name.startswith("_")}
    assert handle.called == public, "each method of the coordinator has one in the client"
