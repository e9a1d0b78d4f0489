"""A task that was blamed for the end of a process is played where no other task is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from envs import EnvironmentDied, EnvironmentPool, Task
from envs.hosting.suspect_tasks import SuspectTasks

ENDED = EnvironmentDied("it exited", at_fault=True, ended_process=True)


def a_task(name: str) -> Task:
    return Task(id=name, env_name="rooms", split="train", seed=0)


async def play(
    suspects: SuspectTasks[str], name: str, act: Callable[[], Awaitable[None]] | None = None
) -> str:
    """Return where the task was played."""
    async with suspects.environments_for(a_task(name), "usual") as place:
        if act is not None:
            await act()
        return place


async def ends() -> None:
    raise ENDED


async def blame(suspects: SuspectTasks[str], *names: str) -> None:
    for name in names:
        with pytest.raises(EnvironmentDied):
            await play(suspects, name, ends)


def test_who_was_blamed_is_played_apart_until_that_process_stays_whole() -> None:
    async def rounds() -> list[str]:
        suspects = SuspectTasks("apart")
        await blame(suspects, "bad")
        await blame(suspects, "bad")  # apart now
        return [await play(suspects, name) for name in ("bad", "bad", "good")]

    assert asyncio.run(rounds()) == ["apart", "usual", "usual"]


@pytest.mark.parametrize(
    "error",
    [
        EnvironmentDied("it raised", at_fault=True),
        EnvironmentDied("another ended it", at_fault=False, ended_process=True),
    ],
)
def test_an_error_that_ends_no_process_and_an_end_by_another_make_no_suspect(
    error: EnvironmentDied,
) -> None:
    async def fails() -> None:
        raise error

    async def rounds() -> str:
        suspects = SuspectTasks("apart")
        with pytest.raises(EnvironmentDied):
            await play(suspects, "a", fails)
        return await play(suspects, "a")

    assert asyncio.run(rounds()) == "usual"


def test_one_suspect_has_its_turn_after_the_other_and_its_episodes_together() -> None:
    seen: list[str] = []

    async def rounds() -> None:
        suspects = SuspectTasks("apart")
        await blame(suspects, "a", "b")
        go = asyncio.Event()

        async def stays() -> None:
            seen.append("a")
            await go.wait()

        async def passes() -> None:
            seen.append("b")

        first = [asyncio.create_task(play(suspects, "a", stays)) for _ in range(2)]
        second = [asyncio.create_task(play(suspects, "b", passes)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert seen == ["a", "a"]
        second[0].cancel()  # while it waits
        go.set()
        await asyncio.gather(*first, *second[1:])

    asyncio.run(rounds())
    assert seen == ["a", "a", "b", "b"]


AWAITED = """
import asyncio
from envs import EnvironmentDied, Observation, Transition
class Awaited:  # as one that asks a server, whose process ended
    def __init__(self, options): pass
    def close(self): pass
    @classmethod
    def tasks(cls, split, options): return []
    async def reset(self, task):
        self.task = task.id
        return Observation(text=task.id)
    async def step(self, action):
        await asyncio.sleep(0.01)
        if action == "end": raise EnvironmentDied("it exited", at_fault=True, ended_process=True)
        return Transition(
            observation=Observation(text=self.task),
            reward=0.0, terminated=False, truncated=False, won=False)
"""


def test_episodes_on_the_event_loop_have_an_object_each_after_a_process_elsewhere_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_world.py").write_text(AWAITED)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("awaited_world", None)

    async def episode(pool: EnvironmentPool, name: str, *actions: str) -> list[str]:
        async with pool.environment(a_task(name)) as environment:
            seen = [(await environment.reset(a_task(name))).text]
            return seen + [(await environment.step(each)).observation.text for each in actions]

    async def rounds() -> list[list[str]]:
        pool = EnvironmentPool("awaited_world:Awaited", {}, processes=1, answer_timeout_s=5.0)
        with pytest.raises(EnvironmentDied, match="it exited"):
            await episode(pool, "a", "end")
        try:
            return await asyncio.gather(
                *(episode(pool, name, "go", "look", "go") for name in ("a", "b", "a", "c"))
            )
        finally:
            pool.close()

    assert asyncio.run(rounds()) == [[name] * 4 for name in ("a", "b", "a", "c")]
