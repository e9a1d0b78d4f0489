"""Test the commits of a group, and the cost of a failing episode."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.policy import EngineLostError
from actors.rollout.committer import as_group_of_its_own
from actors.rollout.episode import AttemptProgress, EpisodeOverdue, EpisodeRules
from actors.rollout.group import MAX_BAD_NEIGHBOURS, EpisodeFailed, GroupRollout
from actors.rollout.step_records import EpisodeIds
from configs import Config
from coordinator import Lease
from envs import EnvironmentDied, Task
from store import Trajectory, Unfinished, uid
from tests.support.store_samples import make_step


def trajectory(member: int) -> Trajectory:
    steps = (make_step(0, n_steps=1, version=0, reward=1.0),)
    return Trajectory(
        traj_uid=uid(b"g" * 16, member),
        group_uid=b"g" * 16,
        env_name="rooms",
        task_id="t",
        split="train",
        seed=0,
        member=member,
        won=True,
        task_score=None,
        steps=steps,
    )


@dataclass
class Table:
    """Stand in for episodes, committer and coordinator. Episodes end when a test says so."""

    ends: dict[int, asyncio.Future[Trajectory]] = field(default_factory=dict)
    commits: list[list[int]] = field(default_factory=list)
    committed: list[Trajectory] = field(default_factory=list)
    extra: list[Trajectory] = field(default_factory=list)
    unfinished: list[tuple[int, str]] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        self.ends[ids.member] = asyncio.get_running_loop().create_future()
        return await self.ends[ids.member]

    async def commit(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        await asyncio.sleep(0.01)  # a file takes its time
        self.commits.append([trajectory.member for trajectory in trajectories])
        self.committed += trajectories

    async def keep_extra(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        self.extra += trajectories

    async def record_unfinished(self, lease: Lease, episodes: Sequence[Unfinished]) -> None:
        self.unfinished += [(episode.number, episode.why) for episode in episodes]

    async def abandon(self, lease: Lease, why: str) -> None:
        self.abandoned.append(why)

    async def give_up(self, lease: Lease, why: str) -> None:
        self.given_up.append(why)

    async def record(self, what: str, detail: str) -> None:
        self.events.append(detail)

    def end(self, *members: int) -> None:
        for member in members:
            self.ends[member].set_result(trajectory(member))


def group_of(table: Any, n: int, *, n_extra: int = 0, attempts: int = 1) -> GroupRollout:
    config = Config()
    config = replace(
        config,
        actors=replace(config.actors, extra_members=n_extra),
        env=replace(config.env, attempts=attempts),
    )
    group = SimpleNamespace(group_uid=b"g" * 16, size=n, missing=tuple(range(n)), split="train")
    lease: Any = SimpleNamespace(
        group=group,
        task=Task(id="t", env_name="rooms", split="train", seed=0),
        version=SimpleNamespace(version=0),
        temperature=1.0,
    )
    return GroupRollout(lease, config, coordinator=table, committer=table, episodes=table)


async def begun(table: Table, n: int, *, n_extra: int = 0) -> asyncio.Task[None]:
    task = asyncio.create_task(group_of(table, n, n_extra=n_extra).run())
    while len(table.ends) < n + n_extra:
        await asyncio.sleep(0)
    return task


def test_a_quick_group_is_one_commit_in_the_order_of_its_members() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 3)
        table.end(2, 0, 1)
        await task
        return table

    assert asyncio.run(play()).commits == [[0, 1, 2]]


def test_a_slow_group_commits_finished_members_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rollout.group.COMMIT_EVERY_S", 0.05)

    async def play() -> Table:
        table = Table()
        task = await begun(table, 3)
        table.end(1)
        while not table.commits:
            await asyncio.sleep(0.01)
        table.end(0, 2)
        await task
        return table

    assert asyncio.run(play()).commits == [[1], [0, 2]]


def test_a_cancelled_group_commits_finished_members_and_stops_the_rest() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 3)
        table.end(2)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(table.ends[member].cancelled() for member in (0, 1))
        return table

    assert asyncio.run(play()).commits == [[2]]


def test_cancelling_in_the_middle_of_a_commit_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.rollout.group.COMMIT_EVERY_S", 0.01)

    async def play() -> Table:
        table = Table()
        task = await begun(table, 2)
        table.end(0)
        await asyncio.sleep(0.015)  # now it commits
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return table

    assert asyncio.run(play()).commits == [[0]]


def test_a_member_that_fails_for_good_does_not_take_the_finished_ones_along() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 3)
        table.end(1)
        await asyncio.sleep(0)
        table.ends[0].set_exception(EpisodeFailed("3 attempts failed"))
        await task
        assert table.ends[2].cancelled()
        assert table.abandoned == ["task 't': 3 attempts failed"]
        return table

    assert asyncio.run(play()).commits == [[1]]


def test_a_member_that_its_own_code_cancels_ends_the_group_with_a_reason() -> None:
    """The attack: the group stayed leased, and the worker began another one, without end."""

    async def play() -> Table:
        table = Table()
        task = await begun(table, 2)
        table.end(0)
        table.ends[1].cancel()
        await task
        return table

    table = asyncio.run(play())
    assert table.commits == [[0]] and table.unfinished == [(1, "group_failed")]
    assert table.abandoned == ["task 't': its own code cancelled the task in which it was played"]


def test_a_spare_takes_the_place_of_the_slowest_which_is_given_up() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 3, n_extra=2)
        table.end(3)
        await asyncio.sleep(0)
        table.end(0, 1)
        await task
        assert table.ends[2].cancelled() and table.ends[4].cancelled()
        return table

    table = asyncio.run(play())
    assert table.commits == [[0, 1, 2]]
    assert [one.traj_uid for one in table.committed] == [
        uid(b"g" * 16, member) for member in range(3)
    ]
    assert table.extra == []


def test_a_member_whose_place_is_taken_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rollout.group.COMMIT_EVERY_S", 0.01)

    async def play() -> Table:
        table = Table()
        task = await begun(table, 3, n_extra=1)
        table.end(3)
        while not table.commits:  # as member 2, the last one
            await asyncio.sleep(0.01)
        table.end(2)
        while len(table.commits) < 2:
            await asyncio.sleep(0.01)
        table.end(0)
        await task
        return table

    table = asyncio.run(play())
    assert table.commits == [[2], [1], [0]]
    assert len({one.traj_uid for one in table.committed}) == 3


@pytest.mark.parametrize("fails", [0, 2, 3])
def test_a_group_completes_while_no_more_members_fail_than_it_has_spares(fails: int) -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 2, n_extra=2)
        table.ends[fails].set_exception(EpisodeFailed("3 attempts failed"))
        await asyncio.sleep(0.01)
        table.end(*{0, 1, 2, 3} - {fails})
        await task
        return table

    assert asyncio.run(play()).commits == [[0, 1]]


def test_when_more_fail_than_there_are_spares_the_group_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 2, n_extra=1)
        table.end(1)
        await asyncio.sleep(0.01)
        table.ends[2].set_exception(EpisodeFailed("3 attempts failed"))
        await asyncio.sleep(0.01)
        assert not task.done()
        table.ends[0].set_exception(EpisodeFailed("3 attempts failed"))
        await task
        assert len(table.abandoned) == 1
        return table

    assert asyncio.run(play()).commits == [[1]]


def test_an_episode_that_ends_together_with_the_last_member_is_extra_and_kept() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 2, n_extra=2)
        table.end(3, 0, 2)
        await task
        assert table.ends[1].cancelled()
        return table

    table = asyncio.run(play())
    assert table.commits == [[0, 1]]
    assert [one.member for one in table.extra] == [3]
    alone = as_group_of_its_own(table.extra[0])
    assert (alone.split, alone.member) == ("imported", 0)
    assert alone.traj_uid == uid(alone.group_uid, 0)
    assert alone.group_uid not in (b"g" * 16, as_group_of_its_own(trajectory(4)).group_uid)
    # nobody who knows the trajectory can import a group of that uid before
    assert alone.group_uid != as_group_of_its_own(table.extra[0]).group_uid


class Failing:
    """Raise one error for each attempt; the attempt after the last error succeeds."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self.errors, self.n_attempts = list(errors), 0

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        self.n_attempts += 1
        if self.errors:
            raise self.errors.pop(0)
        return trajectory(ids.member)


def attempts(errors: Sequence[Exception], *, allowed: int, size: int = 1) -> tuple[Table, int]:
    """Play a group; return what was reported, and the number of attempts."""
    table, episodes = Table(), Failing(errors)
    group = group_of(table, size, attempts=allowed)
    group._episodes = episodes  # type: ignore[assignment]
    asyncio.run(group.run())
    return table, episodes.n_attempts


def test_an_episode_is_played_again_until_its_attempts_are_used_up() -> None:
    own = [EnvironmentDied("it broke", at_fault=True), EpisodeOverdue("too slow")]
    table, n_attempts = attempts(own, allowed=3)
    named = "rooms task 't', member 0: "
    assert table.events == [f"{named}it broke", f"{named}too slow"]
    assert (table.commits, table.abandoned, n_attempts) == ([[0]], [], 3)
    assert table.unfinished == [(0, "failed"), (0, "failed")]
    table, _ = attempts(own, allowed=2)
    assert table.abandoned == ["task 't': 2 attempts failed, the last one because: too slow"]


def test_another_episodes_fault_uses_up_no_attempt_but_not_for_ever() -> None:
    not_at_fault = EnvironmentDied("its process is gone", at_fault=False)
    assert attempts([not_at_fault] * 5, allowed=1)[1] == 6
    table, n_attempts = attempts([not_at_fault] * MAX_BAD_NEIGHBOURS * 2, allowed=2)
    assert n_attempts == MAX_BAD_NEIGHBOURS * 2 and len(table.abandoned) == 1


def test_a_group_ends_the_process_of_all_no_more_often_than_one_episode_may() -> None:
    ended = EnvironmentDied("it exited", at_fault=True, ended_process=True)
    table, n_attempts = attempts([ended] * 9, allowed=3, size=8)
    (failed,) = table.abandoned
    assert re.fullmatch(
        "task 't': its group ended the environment process . times, .* because: it exited", failed
    )
    assert n_attempts < 9 + 3


def test_any_other_error_is_nobodys_second_chance() -> None:
    with pytest.raises(ZeroDivisionError):
        attempts([ZeroDivisionError()], allowed=3)


def test_a_lost_engine_ends_the_group_and_its_episodes_are_reported() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 2)
        table.ends[0].set_exception(EngineLostError("gone"))
        with pytest.raises(EngineLostError):
            await task
        return table

    table = asyncio.run(play())
    assert table.unfinished == [(0, "worker_failed"), (1, "worker_failed")]
    assert table.abandoned == table.given_up == []


def test_a_group_that_is_too_old_is_given_up_with_its_reason() -> None:
    async def play() -> Table:
        table = Table()
        group = group_of(table, 2)
        task = asyncio.create_task(group.run())
        while len(table.ends) < 2:
            await asyncio.sleep(0)
        group.too_old = "3 versions apart"
        task.cancel()
        await task
        return table

    table = asyncio.run(play())
    assert table.given_up == ["3 versions apart"]
    assert table.unfinished == [(0, "too_old"), (1, "too_old")]
