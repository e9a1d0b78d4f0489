"""Test the turns in which workers change their weights."""

from __future__ import annotations

import time

import pytest

from coordinator.weight_update_lock import WEIGHT_UPDATE_S, WeightUpdateLock


def test_one_worker_at_a_time_changes_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lock = WeightUpdateLock(n_workers=19)
    assert lock.acquire("a")
    assert lock.acquire("a")
    assert not lock.acquire("b")
    lock.release("b")  # it does not hold it
    assert not lock.acquire("b")
    lock.release("a")
    assert lock.acquire("b")
    now[0] += WEIGHT_UPDATE_S
    assert lock.acquire("a"), "who takes too long loses it"


def test_one_of_ten_workers_changes_its_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lock = WeightUpdateLock(n_workers=30)
    for worker in ("a", "b", "c"):
        assert lock.acquire(worker)
        now[0] += 1.0
    assert not lock.acquire("d")
    lock.release("b")
    assert lock.acquire("d") and not lock.acquire("b")
    now[0] = 100.0 + WEIGHT_UPDATE_S
    assert lock.acquire("b"), "a held it for longest"
    assert not lock.acquire("a")
