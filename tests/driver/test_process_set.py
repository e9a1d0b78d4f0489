"""Test which processes exist, and when one is to be started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from driver import process_set, processes
from driver.process_set import STAGGER_S, ProcessSet
from driver.processes import LEARNER
from tests.support.supervisor_samples import process

NOW_S = 1000.0


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of killed processes, in order. Nothing is really killed."""
    names: list[str] = []
    monkeypatch.setattr(processes, "kill", lambda process: names.append(process.name))
    return names


def at(monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
    monkeypatch.setattr(process_set, "time", SimpleNamespace(monotonic=lambda: now_s))


def test_processes_start_one_after_the_other_when_their_time_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at(monkeypatch, NOW_S)
    members = ProcessSet(process)
    members.plan([LEARNER, "worker-0", "worker-1"], after_s=2.0)
    first_s = NOW_S + 2.0
    due = [first_s, first_s + STAGGER_S, first_s + 2 * STAGGER_S]
    assert list(members.due.values()) == due
    members.start_due()
    assert members.processes == {}, "not yet"
    at(monkeypatch, due[1])
    members.start_due()
    assert list(members.processes) == [LEARNER, "worker-0"]
    assert list(members.due) == ["worker-1"]


def test_a_dropped_plan_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, NOW_S)
    members = ProcessSet(process)
    members.plan(["worker-0", "worker-1"])
    members.drop_plans(["worker-0"])
    at(monkeypatch, NOW_S + 60.0)
    members.start_due()
    assert list(members.processes) == ["worker-1"]


def test_an_ended_process_is_killed_and_no_member(killed: list[str]) -> None:
    members = ProcessSet(process)
    members.plan(["worker-0", "worker-1"], after_s=-60.0)
    members.start_due()
    members.end(members.processes["worker-0"])
    assert killed == ["worker-0"] and list(members.processes) == ["worker-1"]
    members.end(process("worker-0"))  # a call of it ends after it has gone
    assert list(members.processes) == ["worker-1"]


def test_placed_workers_are_those_that_have_a_place_and_keep_it_by_number() -> None:
    places = {
        LEARNER: process(LEARNER, is_placed=True),
        "worker-10": process("worker-10", is_placed=True),
        "worker-9": process("worker-9", is_placed=True),
        "worker-2": process("worker-2", is_placed=True, leaving_why="its node leaves"),
        "worker-1": process("worker-1"),
    }
    members = ProcessSet(places.__getitem__)
    members.plan(list(places), after_s=-60.0)
    members.start_due()
    assert [each.name for each in members.placed_workers()] == ["worker-9", "worker-10"]
    assert len(members.workers()) == 4


def test_nobody_else_changes_the_members() -> None:
    members = ProcessSet(process)
    with pytest.raises(TypeError):
        members.processes["worker-0"] = process("worker-0")  # type: ignore[index]
    with pytest.raises(TypeError):
        members.due["worker-0"] = 0.0  # type: ignore[index]
