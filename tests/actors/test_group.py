"""Playing a group: what is committed when, and what a failing episode costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from actors.rollout import group as group_module
from actors.rollout.episode import EpisodeOverdue
from actors.rollout.group import (
    MAX_BYSTANDER_ATTEMPTS,
    EpisodeFailed,
    as_extra,
    play_group,
    with_attempts,
)
from envs import EnvironmentDied
from store import Trajectory, uid
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
    """Episodes that end when they are told to, and what was committed of them, a list for each
    commit.
    """

    ends: dict[int, asyncio.Future[Trajectory]] = field(default_factory=dict)
    commits: list[list[int]] = field(default_factory=list)
    committed: list[Trajectory] = field(default_factory=list)
    extra: list[Trajectory] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # numbers of episodes that were kept

    async def play(self, member: int) -> Trajectory:
        self.ends[member] = asyncio.get_running_loop().create_future()
        return await self.ends[member]

    async def commit(self, trajectories: Sequence[Trajectory]) -> None:
        await asyncio.sleep(0.01)  # a file takes its time
        self.commits.append([trajectory.member for trajectory in trajectories])
        self.committed += trajectories

    async def keep_extra(self, trajectories: Sequence[Trajectory]) -> None:
        self.extra += trajectories

    def end(self, *members: int) -> None:
        for member in members:
            self.ends[member].set_result(trajectory(member))


async def begun(table: Table, n: int, *, spares: Sequence[int] = ()) -> asyncio.Task[None]:
    task = asyncio.create_task(
        play_group(
            range(n),
            spares=spares,
            play=table.play,
            commit=table.commit,
            keep_extra=table.keep_extra,
            ended=table.ended.append,
        )
    )
    while len(table.ends) < n + len(spares):
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


def test_a_slow_group_commits_what_is_finished_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "COMMIT_EVERY_S", 0.05)

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


def test_a_cancelled_group_commits_what_is_finished_and_stops_the_rest() -> None:
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
    monkeypatch.setattr(group_module, "COMMIT_EVERY_S", 0.01)

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
        with pytest.raises(EpisodeFailed):
            await task
        assert table.ends[2].cancelled()
        return table

    assert asyncio.run(play()).commits == [[1]]


def test_a_spare_takes_the_place_of_the_slowest_which_is_given_up() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 3, spares=(3, 4))
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
    monkeypatch.setattr(group_module, "COMMIT_EVERY_S", 0.01)

    async def play() -> Table:
        table = Table()
        task = await begun(table, 3, spares=(3,))
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
def test_of_a_group_with_spares_as_many_may_fail_as_there_are_spares(fails: int) -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 2, spares=(2, 3))
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
        task = await begun(table, 2, spares=(2,))
        table.end(1)
        await asyncio.sleep(0.01)
        table.ends[2].set_exception(EpisodeFailed("3 attempts failed"))
        await asyncio.sleep(0.01)
        assert not task.done()
        table.ends[0].set_exception(EpisodeFailed("3 attempts failed"))
        with pytest.raises(EpisodeFailed):
            await task
        return table

    assert asyncio.run(play()).commits == [[1]]


def test_what_ends_together_with_the_last_member_is_extra_and_kept() -> None:
    async def play() -> Table:
        table = Table()
        task = await begun(table, 2, spares=(2, 3))
        table.end(3, 0, 2)
        await task
        assert table.ends[1].cancelled()
        return table

    table = asyncio.run(play())
    assert table.commits == [[0, 1]]
    assert [one.member for one in table.extra] == [3]
    alone = as_extra(table.extra[0])
    assert (alone.split, alone.member) == ("imported", 0)
    assert alone.traj_uid == uid(alone.group_uid, 0)
    assert alone.group_uid not in (b"g" * 16, as_extra(trajectory(4)).group_uid)


def attempts(errors: Sequence[Exception], *, allowed: int) -> tuple[list[str], int]:
    """Reasons that were reported, and how often it was played; raises what `with_attempts`
    raises.
    """
    left, reasons = list(errors), []

    async def play() -> Trajectory:
        if left:
            raise left.pop(0)
        return trajectory(0)

    async def failed(why: str) -> None:
        reasons.append(why)

    asyncio.run(with_attempts(play, attempts=allowed, failed=failed))
    return reasons, len(errors) - len(left) + 1


def test_an_episode_is_played_again_until_its_attempts_are_used_up() -> None:
    own = [EnvironmentDied("it broke", at_fault=True), EpisodeOverdue("too slow")]
    assert attempts(own, allowed=3) == (["it broke", "too slow"], 3)
    with pytest.raises(EpisodeFailed, match="2 attempts failed, the last one because: too slow"):
        attempts(own, allowed=2)


def test_another_episodes_fault_uses_up_no_attempt_but_not_for_ever() -> None:
    bystander = EnvironmentDied("its process is gone", at_fault=False)
    assert attempts([bystander] * 5, allowed=1)[1] == 6
    with pytest.raises(EpisodeFailed):
        attempts([bystander] * MAX_BYSTANDER_ATTEMPTS, allowed=1)


def test_any_other_error_is_nobodys_second_chance() -> None:
    with pytest.raises(ZeroDivisionError):
        attempts([ZeroDivisionError()], allowed=3)
