"""Test which waits the driver names, and how a component that left is recorded.

tests/coordinator/test_heartbeats.py tests the rest of supervision.
"""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

import configs
from configs import SupervisionConfig
from coordinator import Component
from coordinator.heartbeats import GONE, HeartbeatTracker
from driver.health import HealthMonitor
from driver.progress import Progress
from learner import LEARNER_STEP

CONFIG = SupervisionConfig(silent_s=10.0, max_restarts=3)


def waiting(reason: str, waits_s: float) -> Component:
    return Component(waiting_on=reason, waits_s=waits_s, silent_s=0.0)


def test_a_hung_environment_is_named_with_its_task_before_it_is_killed() -> None:
    monitor = HealthMonitor(CONFIG)
    reason = "environment: key_room-train-3"
    assert monitor.starving({"worker-0": waiting(reason, 29.0)}) == {}
    assert monitor.starving({"worker-0": waiting(reason, 31.0)}) == {
        "worker-0": f"has waited 31 s for {reason}"
    }
    assert monitor.starving({"worker-0": waiting(reason, 32.0)}) == {}
    assert monitor.starving({"worker-0": waiting("environment: key_room-train-4", 31.0)}) != {}, (
        "another wait"
    )


def test_a_long_learner_step_is_named_but_not_each_where_all_are_long() -> None:
    monitor = HealthMonitor(CONFIG)
    named = []
    for step_s in (29.0, 31.0, 45.0, 45.0, 45.0, 63.0, 100.0, 130.0):
        named += monitor.starving({"learner": waiting(LEARNER_STEP, step_s)}).values()
        monitor.starving({"learner": waiting("groups", 0.0)})
    assert named == [f"has been at one learner step for {step_s} s" for step_s in (31, 63, 130)]


def test_the_screen_shows_what_is_waited_for_and_only_long_learner_steps() -> None:
    table_of = SimpleNamespace(config=configs.Config(), title="training")

    def shown(**components: Component) -> str:
        output = StringIO()
        Console(file=output, width=200).print(
            Progress._table(table_of, SimpleNamespace(components=components), [])
        )
        return output.getvalue()

    assert "environment: games[3], 31 s" in shown(worker=waiting("environment: games[3]", 31.0))
    assert "one learner step, 31 s" in shown(learner=waiting(LEARNER_STEP, 31.0))
    assert "learner" not in shown(learner=waiting(LEARNER_STEP, 5.0))


def test_who_left_is_written_as_gone_until_it_beats_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.heartbeats.WRITE_EVERY_S", 0.0)
    tracker = HeartbeatTracker()
    tracker.record("worker-1", "admission", waits_s=0.0)
    tracker.remove("worker-1")
    assert dict(tracker.take_unwritten()) == {"worker-1": GONE}
    assert tracker.components() == {}
    tracker.record("worker-1", None, waits_s=0.0)
    assert dict(tracker.take_unwritten()) == {"worker-1": None}
