"""Test how all processes are stopped in order, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

import configs
from coordinator import Component
from driver import shutdown
from driver.processes import LEARNER, ManagedProcess
from driver.shutdown import outcome, stop_in_order
from tests.support.supervisor_samples import Actor, Calls, as_ray_passes_it_on, process

CONFIG = configs.from_yaml("{learner: {step_timeout_s: 500}}")


class World:
    """Ray and its clock: each call ends when it is due, or with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.ends_at_s, self.errors = 0.0, {}, {}
        monkeypatch.setattr(shutdown, "ray", self)
        monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def process(
        self, name: str, *, ends_at_s: float, error: RayError | None = None
    ) -> ManagedProcess:
        self.ends_at_s |= {f"run {name}": ends_at_s, f"where {name}": 0.0}
        self.errors[f"run {name}"] = error
        return process(
            name,
            handle=Actor(),
            where=f"where {name}",
            call=f"run {name}",
            has_started=True,
            is_placed=True,
        )

    def wait(
        self, calls: list[str], *, timeout: float, num_returns: int = 1
    ) -> tuple[list[str], list[str]]:
        done = [call for call in calls if self.ends_at_s.get(call, 0.0) <= self.now_s]
        if len(done) < num_returns:
            self.now_s += timeout
        return done, [call for call in calls if call not in done]

    def get(self, call: str) -> None:
        if error := self.errors.get(call):
            raise error


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_learner_may_finish_its_step_when_the_run_is_stopped(
    world: World, said: list[str]
) -> None:
    learner, worker = (
        world.process(LEARNER, ends_at_s=300.0),
        world.process("worker-0", ends_at_s=1.0),
    )
    coordinator = Calls()
    coordinator.components = {
        LEARNER: Component(waiting_on="learner step", waits_s=31.0, silent_s=0.0)
    }
    assert (
        stop_in_order(
            [learner, worker], status=coordinator.driver_tick, config=CONFIG, say=said.append
        )
        == {}
    )
    assert learner.handle.asked == worker.handle.asked == ["stop", "close"]
    assert world.now_s >= 300.0
    assert said[0].startswith(
        "stopping for 0 s: waiting for learner (learner step, 31 s), worker-0; Ctrl-C once more"
    )
    assert "s: waiting for learner (learner step, 31 s); " in said[-1]
    assert len(set(said)) == len(said), (
        "who waits outside for news takes the same line again for silence"
    )


def test_who_does_not_stop_is_named_and_not_closed_beside_its_work(
    world: World, said: list[str]
) -> None:
    late, stuck = world.process(LEARNER, ends_at_s=501.0), world.process("worker-0", ends_at_s=61.0)
    failed = world.process(
        "worker-1", ends_at_s=1.0, error=as_ray_passes_it_on(ValueError("no disk"))
    )
    unstopped = stop_in_order(
        [late, stuck, failed], status=Calls().driver_tick, config=CONFIG, say=said.append
    )
    assert unstopped == {
        LEARNER: "it took longer than 500 s",
        "worker-0": "it took longer than 60 s",
        "worker-1": "ValueError: no disk",
    }
    assert late.handle.asked == stuck.handle.asked == failed.handle.asked == ["stop"]


def test_a_learner_nobody_hears_of_is_not_waited_for(world: World, said: list[str]) -> None:
    coordinator = Calls()
    coordinator.components = {LEARNER: Component(waiting_on=None, waits_s=0.0, silent_s=99.0)}
    unstopped = stop_in_order(
        [world.process(LEARNER, ends_at_s=1e9)],
        status=coordinator.driver_tick,
        config=CONFIG,
        say=said.append,
    )
    assert "no sign of life for 99 s" in unstopped[LEARNER]
    assert world.now_s < 5.0


def test_who_has_no_process_yet_is_not_waited_for(world: World, said: list[str]) -> None:
    part = world.process("worker-0", ends_at_s=1e9)
    world.ends_at_s["where worker-0"] = 1e9
    assert stop_in_order([part], status=Calls().driver_tick, config=CONFIG, say=said.append) == {}
    assert world.now_s < 5.0


@pytest.mark.parametrize(
    ("unstopped", "learner_step", "checkpoint", "line"),
    [
        (
            {},
            7,
            7,
            "stopped in order, with a checkpoint at learner step 7; nothing that was committed is "
            "lost",
        ),
        (
            {},
            0,
            None,
            "stopped in order, before the first learner step; nothing that was committed is lost",
        ),
        (
            {LEARNER: "it took longer than 500 s"},
            7,
            5,
            "learner did not stop in order (it took longer than 500 s), learner steps after 5, the "
            "newest checkpoint, up to 7 "
            "are trained again; nothing that was committed is lost",
        ),
        (
            {LEARNER: "x"},
            2,
            None,
            "learner did not stop in order (x), learner steps (there is no checkpoint) up to 2 are "
            "trained again; nothing "
            "that was committed is lost",
        ),
    ],
)
def test_what_came_of_a_stop(
    unstopped: dict[str, str], learner_step: int, checkpoint: int | None, line: str
) -> None:
    assert outcome(unstopped, learner_step=learner_step, checkpoint=checkpoint) == line
