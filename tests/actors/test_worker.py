"""Test that the heartbeats of a worker name its longest wait."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from actors.worker import Worker
from envs import EnvironmentStuckError


def test_a_heartbeat_says_how_long_the_oldest_wait_has_lasted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight episodes that reset the same task give the same reason eight times."""
    monkeypatch.setattr("actors.worker.HEARTBEAT_EVERY_S", 0.0)
    reported: list[tuple[str | None, float]] = []
    oldest = iter([("reset of task 'a'", 7.0), ("reset of task 'a'", 5.5), ("step 'go'", 0.1)])
    worker = object.__new__(Worker)
    worker.server = None
    worker.runner = SimpleNamespace(waiting=lambda: None)  # type: ignore[assignment]
    worker.episodes = SimpleNamespace(waiting=lambda: next(oldest))  # type: ignore[assignment]
    worker.heartbeat = SimpleNamespace(  # type: ignore[assignment]
        report=lambda reason, *, waits_s, within_s: reported.append((reason, waits_s))
    )
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(worker._send_heartbeats())
    reason = "environment: reset of task 'a'"
    assert reported == [(reason, 7.0), (reason, 5.5), (None, 0.0)]


def test_an_environment_that_cannot_be_cancelled_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("actors.worker.HEARTBEAT_EVERY_S", 0.0)
    answers = iter([None, None, "step 'go' of task train/7"])
    worker = object.__new__(Worker)
    worker.name = "worker-0"
    worker.episodes = SimpleNamespace(stuck=lambda: next(answers))  # type: ignore[assignment]
    with pytest.raises(EnvironmentStuckError, match="^step 'go' of task train/7 goes on though"):
        asyncio.run(worker._watch_episodes())
    assert "worker-0: step 'go' of task train/7 goes on" in capsys.readouterr().out
