"""Test that heartbeats are sent while reports come in time, and how the driver reads them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import configs
from configs import SupervisionConfig
from coordinator import Component, Heartbeat, heartbeat_every_s, heartbeats
from coordinator.heartbeats import HeartbeatTracker
from driver.health import HealthMonitor, Restarts
from learner import LEARNER_STEP

CONFIG = SupervisionConfig(silent_s=10.0, max_restarts=3)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes time pass."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_s(seconds: float) -> None:
        now[0] += seconds

    return pass_s


@pytest.mark.parametrize("every_s", [0.01, 60.0])
def test_it_sends_by_itself_and_at_once_when_the_reason_changes(every_s: float) -> None:
    sent: list[str | None] = []
    heartbeat = Heartbeat(lambda waiting_on, waits_s: sent.append(waiting_on), every_s=every_s)
    heartbeat.report("groups", waits_s=0.0, within_s=60.0)
    wait_for(lambda: sent.count("groups") >= (3 if every_s < 1.0 else 1))
    heartbeat.report(None, waits_s=0.0, within_s=60.0)
    wait_for(lambda: sent[-1] is None)
    heartbeat.close()


@pytest.mark.parametrize(
    ("workers", "silent_s", "every_s"),
    [
        (1, 15.0, 0.5),
        (250, 15.0, 0.5),
        (1_000, 15.0, 2.0),
        (10_000, 15.0, 5.0),
        (10_000, 90.0, 20.0),
    ],
)
def test_many_workers_send_more_seldom_but_well_within_their_silence(
    workers: int, silent_s: float, every_s: float
) -> None:
    settings = f"{{actors: {{workers: {workers}}}, supervision: {{silent_s: {silent_s}}}}}"
    assert heartbeat_every_s(configs.from_yaml(settings)) == every_s


def test_it_stops_while_a_report_is_overdue_and_goes_on_with_the_next() -> None:
    sent: list[str | None] = []
    heartbeat = Heartbeat(lambda waiting_on, waits_s: sent.append(waiting_on), every_s=0.01)
    heartbeat.report("a", waits_s=0.0, within_s=0.1)
    time.sleep(0.3)
    n = len(sent)
    time.sleep(0.2)
    assert len(sent) == n, "the report was overdue, and it went on sending"
    heartbeat.report("b", waits_s=0.0, within_s=60.0)
    wait_for(lambda: "b" in sent)
    heartbeat.close()
    n = len(sent)
    time.sleep(0.1)
    assert len(sent) == n


def test_the_tracker_keeps_how_long_a_wait_has_lasted(clock: Callable[[float], None]) -> None:
    tracker = HeartbeatTracker()
    tracker.record("learner", "groups", waits_s=0.0)
    clock(2.0)
    tracker.record("learner", "groups", waits_s=2.0)
    clock(1.0)
    tracker.touch("learner")
    clock(2.0)
    assert tracker.components() == {
        "learner": Component(waiting_on="groups", waits_s=5.0, silent_s=2.0)
    }
    tracker.record("learner", None, waits_s=0.0)
    assert tracker.components() == {
        "learner": Component(waiting_on=None, waits_s=0.0, silent_s=0.0)
    }
    tracker.remove("learner")
    assert tracker.components() == {}


def test_each_wait_has_a_clock_of_its_own_also_with_the_same_reason(
    clock: Callable[[float], None],
) -> None:
    """Say "learner step" again and again without a pause, as a learner does that never waits."""
    monitor, sent = HealthMonitor(CONFIG), HeartbeatTracker()
    heartbeat = Heartbeat(
        lambda waiting_on, waits_s: sent.record("learner", waiting_on, waits_s=waits_s),
        every_s=0.5,
    )
    heartbeat.close()  # ends its thread: this test sends the heartbeats
    named: dict[str, str] = {}
    for _ in range(40):
        heartbeat.report(LEARNER_STEP, waits_s=0.0, within_s=1800.0)
        clock(2.0)
        heartbeat.send()
        named |= monitor.starving(sent.components())
    assert named == {}
    clock(40.0)
    heartbeat.send()
    assert monitor.starving(sent.components()) == {
        "learner": "has been at one learner step for 42 s"
    }


def test_beats_are_written_together_and_not_at_each(clock: Callable[[float], None]) -> None:
    tracker = HeartbeatTracker()
    tracker.record("a", None, waits_s=0.0)
    assert list(tracker.take_unwritten()) == ["a"]
    tracker.record("a", None, waits_s=0.0)
    tracker.record("b", "admission", waits_s=0.0)
    assert tracker.take_unwritten() == {}
    clock(heartbeats.WRITE_EVERY_S)
    assert list(tracker.take_unwritten()) == ["a", "b"]
    clock(heartbeats.WRITE_EVERY_S)
    assert tracker.take_unwritten() == {}


def test_a_write_that_takes_long_is_followed_by_a_pause(clock: Callable[[float], None]) -> None:
    tracker = HeartbeatTracker()
    for took_s, pause_s in ((0.2, 4.0), (5.0, 10.0)):
        tracker.record("a", None, waits_s=0.0)
        assert list(tracker.take_unwritten()) == ["a"]
        tracker.record("a", None, waits_s=0.0)
        clock(took_s)
        tracker.written()
        clock(pause_s - 0.1)
        assert tracker.take_unwritten() == {}
        clock(0.2)


def test_leases_are_renewed_more_seldom_than_heartbeats_come(
    clock: Callable[[float], None],
) -> None:
    tracker = HeartbeatTracker()
    tracker.record("a", None, waits_s=0.0)
    assert tracker.take_unrenewed(every_s=15.0) == {"a"}
    tracker.record("a", None, waits_s=0.0)
    tracker.record("b", None, waits_s=0.0)
    tracker.remove("b")
    clock(14.0)
    assert not tracker.take_unrenewed(every_s=15.0)
    clock(1.0)
    assert tracker.take_unrenewed(every_s=15.0) == {"a"}, "b is gone"


def component(
    *, waiting_on: str | None = None, waits_s: float = 0.0, silent_s: float = 0.0
) -> Component:
    return Component(waiting_on=waiting_on, waits_s=waits_s, silent_s=silent_s)


def test_silence_counts_at_the_second_look_in_a_row() -> None:
    monitor = HealthMonitor(CONFIG)
    silent = {
        "worker-0": component(waiting_on="admission", silent_s=11.0),
        "driver": component(silent_s=99.0),
    }
    assert monitor.silent(silent) == {}
    assert monitor.silent({"worker-0": component()}) == {}
    assert monitor.silent(silent) == {}
    assert monitor.silent(silent) == {
        "worker-0": "gave no sign of life for 11 s (it waited for admission then): stopped, or hung"
    }


def test_who_waits_for_long_is_named_once_for_each_wait() -> None:
    monitor = HealthMonitor(CONFIG)
    long = {
        "learner": component(waiting_on="groups", waits_s=31.0),
        "w": component(waiting_on="admission", waits_s=500.0),
    }
    assert monitor.starving({"learner": component(waiting_on="groups", waits_s=29.0)}) == {}
    assert monitor.starving(long) == {"learner": "has waited 31 s for groups"}
    assert monitor.starving(long) == {}
    assert monitor.starving({"learner": component()}) == {}
    assert monitor.starving(long) == {"learner": "has waited 31 s for groups"}


def test_restarts_pause_longer_each_time_and_end(clock: Callable[[float], None]) -> None:
    restarts = Restarts(CONFIG)
    assert [restarts.pause_s("learner") for _ in range(4)] == [1.0, 2.0, 4.0, None]
    assert restarts.pause_s("worker-0") == 1.0, "each component has a limit of its own"
    clock(3601.0)
    assert restarts.pause_s("learner") == 1.0
