"""Test how the workers of a run follow the nodes of its cluster, and a person's wish."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

import configs
from driver import processes, worker_scaling
from driver.errors import DIED, ComponentFailed
from driver.processes import LEARNER
from driver.supervisor import Supervisor
from tests.support.supervisor_samples import Actor, known, place, process


@pytest.fixture
def elastic(session: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Give a supervisor on a joined cluster, with a learner and the first two of 2 to 4 workers."""
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr(worker_scaling, "node_of", lambda handle: handle.node)
    monkeypatch.setattr(worker_scaling, "draining_nodes", dict)
    monkeypatch.setattr(processes, "has_process", lambda process: process.is_placed)
    monkeypatch.setattr(ray, "get", lambda call: None)
    workers = "{workers: {min: 2, max: 4}}"
    session.config = configs.from_yaml(f"{{run_dir: {session.config.run_dir}, actors: {workers}}}")
    session.scaling.config = session.config
    for name in (LEARNER, "worker-0", "worker-1"):
        place(session, name, node="a")
    return session


def test_a_range_asks_for_its_most_once_the_run_has_begun(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic.is_up = False
    elastic._follow_cluster()
    assert not elastic.members.due
    elastic.is_up = True
    elastic._follow_cluster()
    assert list(elastic.members.due) == ["worker-2", "worker-3"]
    monkeypatch.setattr(worker_scaling, "wanted_workers", lambda run: 3)
    elastic._follow_cluster()
    assert list(elastic.members.due) == ["worker-2"], "gigpo workers RUN 3 comes before the range"


def test_on_one_machine_a_range_is_its_least(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    elastic._follow_cluster()
    assert not elastic.members.due


def test_a_worker_beyond_the_least_may_wait_for_a_place_in_silence(elastic: Supervisor) -> None:
    known(elastic, process("worker-2", handle=Actor()))
    elastic._look_for_place(elastic.members.processes["worker-2"])
    assert elastic.coordinator.told == []  # type: ignore[attr-defined]


def test_a_lost_learner_gets_its_place_before_more_workers(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(elastic, "worker-2", node="a")
    known(elastic, process("worker-3", handle=Actor()))
    known(elastic, process(LEARNER, handle=Actor(), asked_at_s=time.monotonic()))
    elastic._follow_cluster()
    assert list(elastic.members.processes) == [LEARNER, "worker-0", "worker-1", "worker-2"]
    assert not elastic.members.due, "worker-3 is not asked for until the learner has its place"
    elastic.members.processes[LEARNER].asked_at_s = -1e9
    monkeypatch.setattr(processes, "why_unplaced", lambda name, config: "no room")
    for _ in range(2):
        elastic._look_for_place(elastic.members.processes[LEARNER])
    asked = {name: each.handle.asked for name, each in elastic.members.processes.items()}
    assert asked == {LEARNER: [], "worker-0": [], "worker-1": [], "worker-2": ["leave"]}
    elastic.members.processes[LEARNER].is_placed = True
    elastic._follow_cluster()
    assert list(elastic.members.due) == ["worker-3"]


def test_a_worker_of_a_draining_node_leaves_in_order_and_is_asked_for_again(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, calls = place(elastic, "worker-1", node="b"), elastic.coordinator
    monkeypatch.setattr(worker_scaling, "draining_nodes", lambda: {"b": 20.0})
    for _ in range(2):
        elastic.scaling.leave_draining_nodes()
    assert leaving.handle.asked == ["leave"]
    assert elastic.members.processes["worker-0"].handle.asked == []
    elastic._ended(leaving)  # its run
    assert leaving.handle.asked == ["leave", "close"]
    told: Any = calls.told  # type: ignore[attr-defined]
    assert told[-1] == ("gone", "left, with its node"), "its groups are free before it has closed"
    elastic._ended(leaving)  # its close
    assert "worker-1" in elastic.members.due and "worker-1" not in elastic.members.processes
    assert elastic.restarts.pause_s("worker-1") == 1.0, "the first that counts"


def test_a_worker_that_starts_on_a_draining_node_is_asked_for_again_at_once(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = place(elastic, "worker-1", node="b")
    starting.has_started = False
    monkeypatch.setattr(worker_scaling, "draining_nodes", lambda: {"b": 20.0})
    elastic.scaling.leave_draining_nodes()
    assert starting.handle.asked == [] and "worker-1" in elastic.members.due


def test_a_notice_that_is_too_short_counts_as_no_restart(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = place(elastic, "worker-1", node="b")
    monkeypatch.setattr(worker_scaling, "draining_nodes", lambda: {"b": 0.0})
    elastic.scaling.leave_draining_nodes()
    elastic._failed(leaving, ActorDiedError())
    assert "worker-1" in elastic.members.due and "worker-1" not in elastic.members.processes
    assert elastic.restarts.pause_s("worker-1") == 1.0


def test_nodes_may_drain_as_often_as_they_like(elastic: Supervisor) -> None:
    """A death after the notice counts as no restart, also the learner's, which does not leave."""
    elastic.scaling.drained_nodes.add("gone")
    for name in ("worker-1", LEARNER):
        for _ in range(elastic.config.supervision.max_restarts + 2):
            elastic.members._due.clear()
            elastic._failed(place(elastic, name, node="gone"), ActorDiedError())
            assert name in elastic.members.due
    for _ in range(elastic.config.supervision.max_restarts):
        elastic._failed(place(elastic, "worker-1", node="a"), ActorDiedError())
    with pytest.raises(ComponentFailed, match="more than 5 times"):
        elastic._failed(place(elastic, "worker-1", node="a"), ActorDiedError())


def test_a_worker_that_does_not_close_is_killed(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(processes, "kill", lambda process: killed.append(process.name))
    leaving = place(elastic, "worker-1", node="a")
    elastic.scaling.leave(leaving, "left", within_s=0.0)
    elastic._ended(leaving)
    elastic.scaling.end_late_closings()
    assert killed == []
    leaving.closes_by_s = 0.0
    elastic.scaling.end_late_closings()
    assert killed == ["worker-1"] and "worker-1" not in elastic.members.processes


def test_each_change_of_the_workers_is_recorded_with_its_reason(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: Any = elastic.coordinator.recorded  # type: ignore[attr-defined]
    for _ in range(2):
        elastic._tell_workers()
    place(elastic, "worker-2", node="b")
    elastic._tell_workers()
    monkeypatch.setattr(worker_scaling, "draining_nodes", lambda: {"b": 20.0})
    elastic.scaling.leave_draining_nodes()
    elastic._tell_workers()
    elastic._failed(elastic.members.processes["worker-1"], ActorDiedError())
    elastic._tell_workers()
    monkeypatch.setattr(worker_scaling, "wanted_workers", lambda run: 9)
    for number in range(1, 9):
        place(elastic, f"worker-{number}", node="a")
    elastic._tell_workers()
    assert [what for what, _ in recorded] == ["workers"] * 5
    range_ = "wanted: 2 to 4 (actors.workers)"
    assert [detail for _, detail in recorded] == [
        f"from 0 to 2: worker-0, worker-1 began to play; {range_}",
        f"from 2 to 3: worker-2 began to play; {range_}",
        f"from 3 to 2: worker-2 ended (left, with its node); {range_}",
        f"from 2 to 1: worker-1 ended ({DIED}); {range_}",
        "from 1 to 9: worker-1, worker-2, worker-3, worker-4 and 4 more began to play; "
        "wanted: 9 (gigpo workers)",
    ]


def test_a_fixed_number_of_workers_is_recorded_too(session: Supervisor) -> None:
    place(session, "worker-0", node="a")
    session._tell_workers()
    assert session.coordinator.recorded == [  # type: ignore[attr-defined]
        ("workers", "from 0 to 1: worker-0 began to play; wanted: 1 (actors.workers)")
    ]
