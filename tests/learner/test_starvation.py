"""How long the learner waits for a batch while held-out tasks are played."""

from __future__ import annotations

import pytest

from learner.training import run_health
from learner.training.run_health import StarvationDeadline


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_health, "time", clock)
    return clock


def waited_s(clock: Clock, heldout_open: list[int]) -> float:
    """Return when a wait of at most 40 s ends; `heldout_open` are the answers of each look, the
    last for ever.
    """
    deadline = StarvationDeadline(40.0, progress=0)
    for look in range(1000):
        while not deadline.check_is_due():
            clock.now_s += 1.0
        if deadline.has_passed(heldout_open[min(look, len(heldout_open) - 1)]):
            return clock.now_s
    raise AssertionError("it never ends")


def test_without_an_evaluation_it_is_the_timeout(clock: Clock) -> None:
    assert waited_s(clock, [0]) == pytest.approx(40.0, abs=11.0)


def test_an_evaluation_that_gets_on_is_waited_for(clock: Clock) -> None:
    """It ends at about 110 s; training groups then have the whole timeout."""
    assert waited_s(clock, [10, 9, 8, 7, 6, 5, 4, 3, 2, 0]) == pytest.approx(150.0, abs=21.0)


def test_an_evaluation_that_hangs_is_not(clock: Clock) -> None:
    assert waited_s(clock, [10]) == pytest.approx(51.0, abs=12.0)
