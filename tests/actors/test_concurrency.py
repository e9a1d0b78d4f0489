"""Test the limits of requests and episodes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from actors.concurrency import MORE_AFTER, WIDEN_AFTER, Concurrency, RequestGate
from configs import Config


async def hold(gate: RequestGate, entered: list[int], number: int, until: asyncio.Event) -> None:
    async with gate:
        entered.append(number)
        await until.wait()


async def settled() -> None:
    """Let every task run as far as it can; no task here waits for a clock."""
    for _ in range(100):
        await asyncio.sleep(0)


def run(body: object) -> None:
    asyncio.run(asyncio.wait_for(body, timeout=60))  # type: ignore[arg-type]


def test_the_gate_lets_as_many_in_as_it_may_and_keeps_the_order() -> None:
    async def body() -> None:
        gate, entered, ends = RequestGate(2), [], [asyncio.Event() for _ in range(5)]
        tasks = [
            asyncio.create_task(hold(gate, entered, number, ends[number])) for number in range(5)
        ]
        await settled()
        assert (entered, gate.inside, gate.waiting) == ([0, 1], 2, 3)
        ends[1].set()
        await settled()
        assert (entered, gate.inside, gate.waiting) == ([0, 1, 2], 2, 2)
        gate.limit = 1
        ends[0].set()
        await settled()
        assert (entered, gate.inside) == ([0, 1, 2], 1)  # narrower: one goes, nobody comes
        gate.limit = 3
        gate.let_in()
        await settled()
        assert (entered, gate.inside) == ([0, 1, 2, 3, 4], 3)
        for end in ends:
            end.set()
        await asyncio.gather(*tasks)
        assert (gate.inside, gate.waiting) == (0, 0)

    run(body())


def test_a_request_cancelled_in_line_or_inside_takes_no_place() -> None:
    async def body() -> None:
        gate, entered, never = RequestGate(1), [], asyncio.Event()
        first, second, third = (
            asyncio.create_task(hold(gate, entered, number, never)) for number in range(3)
        )
        await settled()
        second.cancel()
        await settled()
        assert gate.waiting == 1
        first.cancel()
        await settled()
        assert (entered, gate.inside, gate.waiting) == ([0, 2], 1, 0)
        third.cancel()
        await settled()
        assert gate.inside == 0

    run(body())


def test_a_request_cancelled_in_the_moment_it_is_let_in_gives_its_place_back() -> None:
    async def body() -> None:
        gate, entered, ends = RequestGate(1), [], [asyncio.Event() for _ in range(3)]
        tasks = [
            asyncio.create_task(hold(gate, entered, number, ends[number])) for number in range(3)
        ]
        await settled()
        gate.limit = 2
        gate.let_in()  # the second one's place is given, but it has not run yet
        tasks[1].cancel()
        await settled()
        assert (entered, gate.inside) == ([0, 2], 2)
        for end in ends:
            end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.inside == 0

    run(body())


def test_the_mean_is_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    gate = RequestGate(8)
    gate._count(+4)
    now_s[0] += 3.0
    gate._count(-4)
    now_s[0] += 1.0
    assert gate.mean_inside() == 3.0  # 4 requests for 3 of 4 seconds
    now_s[0] += 1.0
    assert gate.mean_inside() == 0.0


class Still(RequestGate):
    """Return a gate with given numbers of requests inside and queued."""

    def __init__(self, limit: int, *, inside: int, waiting: int = 0) -> None:
        super().__init__(limit)
        self.inside, self._waiting = inside, waiting

    @property
    def waiting(self) -> int:
        return self._waiting

    def mean_inside(self) -> float:
        return float(self.inside)


def concurrency(gate: RequestGate) -> Concurrency:
    return Concurrency(gate, group_size=4, groups=5, max_groups=7)


def test_a_preemption_narrows_the_gate_by_a_fifth_of_what_was_inside_and_calm_widens_it_again() -> (
    None
):
    adaptive = concurrency(Still(20, inside=15))
    adaptive.adapt(preempted=3)
    assert adaptive.gate.limit == 12
    for _ in range(WIDEN_AFTER):
        assert adaptive.gate.limit == 12
        adaptive.adapt(preempted=0)
    assert adaptive.gate.limit == 13  # by a twentieth of 20
    for _ in range(100 * WIDEN_AFTER):
        adaptive.adapt(preempted=0)
    assert adaptive.gate.limit == 20  # never beyond what the engine was started for


def test_however_often_it_preempts_one_request_goes_on() -> None:
    adaptive = concurrency(Still(20, inside=1))
    for _ in range(50):
        adaptive.adapt(preempted=1)
    assert adaptive.gate.limit == 1


def test_an_idle_engine_gets_more_groups_up_to_the_most_and_a_crowded_one_fewer() -> None:
    gate = Still(20, inside=10)
    adaptive = concurrency(gate)
    assert adaptive.episodes == 20
    for _ in range(MORE_AFTER):
        assert adaptive.episodes == 20
        adaptive.adapt(preempted=0)
    assert adaptive.episodes == 24
    for _ in range(10 * MORE_AFTER):
        adaptive.adapt(preempted=0)
    assert adaptive.episodes == 28
    gate.inside, gate._waiting = 20, 3
    adaptive.adapt(preempted=0)
    assert adaptive.episodes == 24
    for _ in range(10):
        adaptive.adapt(preempted=0)
    assert adaptive.episodes == 20  # never fewer than groups_in_flight


def test_a_busy_engine_is_left_alone() -> None:
    adaptive = concurrency(Still(20, inside=18))
    for _ in range(10 * MORE_AFTER):
        adaptive.adapt(preempted=0)
    assert (adaptive.episodes, adaptive.gate.limit) == (20, 20)


def test_spares_are_episodes_and_requests_too() -> None:
    config = Config()
    actors = replace(config.actors, groups_in_flight=3, max_groups_in_flight=2, extra_members=2)
    adaptive = Concurrency.of(replace(config, actors=actors))  # groups of 8
    assert (adaptive.gate.limit, adaptive.episodes) == (30, 30)
    for _ in range(3 * MORE_AFTER):
        adaptive.adapt(preempted=0)
    assert adaptive.episodes == 30  # fewer at most than at least: as many as at least
