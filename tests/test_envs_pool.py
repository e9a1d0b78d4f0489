"""Environments in other processes: same answers, reuse, and errors that say which environment and why."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from envs import EnvironmentDied, EnvironmentPool, environment_class, list_tasks

OPTIONS: Mapping[str, object] = {}


def test_the_pool_answers_as_the_environment_itself() -> None:
    task = list_tasks("key_room", OPTIONS)["train"][3]
    actions = ["go east", "nonsense", "go west", "go west", "take key"]
    direct = environment_class("key_room")(OPTIONS)
    expected = [direct.reset(task), *(direct.step(action) for action in actions)]

    async def play() -> list[object]:
        pool = EnvironmentPool("key_room", OPTIONS, processes=1)
        async with pool.environment() as environment:
            seen = [await environment.reset(task), *[await environment.step(action) for action in actions]]
        pool.close()
        return seen

    assert asyncio.run(play()) == expected


def test_many_episodes_at_once_keep_apart_and_reuse_their_objects() -> None:
    tasks = list_tasks("key_room", OPTIONS)["train"]

    async def first_text(pool: EnvironmentPool, index: int) -> tuple[str, object]:
        async with pool.environment() as environment:
            observation = await environment.reset(tasks[index])
            await asyncio.sleep(0)
            await environment.step("go east")
            return observation.text, environment

    async def play() -> tuple[list[tuple[str, object]], list[tuple[str, object]]]:
        pool = EnvironmentPool("key_room", OPTIONS, processes=2)
        first = await asyncio.gather(*(first_text(pool, i) for i in range(10)))
        second = await asyncio.gather(*(first_text(pool, i) for i in range(10)))
        pool.close()
        return first, second

    first, second = asyncio.run(play())
    environment = environment_class("key_room")(OPTIONS)
    assert [text for text, _ in first] == [environment.reset(task).text for task in tasks[:10]]
    assert {id(one) for _, one in second} == {id(one) for _, one in first}


BROKEN = """
from envs import Observation, Task
class Broken:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options): return [Task(id=f"b-{split}", env_name="broken", split=split, seed=0)]
    def reset(self, task): return Observation(text="start")
    def step(self, action): raise RuntimeError(f"no such door: {action}")
    def close(self): pass
"""


def broken_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "broken_world.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "broken_world:Broken"


def test_an_error_names_the_environment_the_action_and_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = broken_environment(tmp_path, monkeypatch)

    async def play() -> None:
        pool = EnvironmentPool(name, OPTIONS, processes=1)
        try:
            async with pool.environment() as environment:
                await environment.reset(list_tasks(name, OPTIONS)["train"][0])
                await environment.step("open")
        finally:
            pool.close()

    with pytest.raises(EnvironmentDied, match=r"Broken.*step.*open.*no such door"):
        asyncio.run(play())


def test_a_killed_process_ends_the_wait_with_its_exit_code() -> None:
    async def play() -> None:
        before = {child.pid for child in psutil.Process().children()}
        pool = EnvironmentPool("key_room", OPTIONS, processes=1)
        (pid,) = {child.pid for child in psutil.Process().children()} - before
        try:
            async with pool.environment() as environment:
                await environment.reset(list_tasks("key_room", OPTIONS)["train"][0])
                os.kill(pid, signal.SIGSTOP)  # so that the step is still waiting when the process dies
                step = asyncio.create_task(environment.step("go east"))
                await asyncio.sleep(0.05)
                os.kill(pid, signal.SIGKILL)
                await asyncio.wait_for(step, timeout=10)
        finally:
            pool.close()

    with pytest.raises(EnvironmentDied, match=r"ended with exit code"):
        asyncio.run(play())


def tasks_of(ids: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    train, heldout = ids
    source = BROKEN.replace('id=f"b-{split}"', f'id={{"train": "{train}", "heldout": "{heldout}"}}[split]')
    (tmp_path / f"world_{train}_{heldout}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"world_{train}_{heldout}:Broken"


def test_a_task_in_both_splits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs import EnvironmentFailed

    assert set(list_tasks(tasks_of(["a", "b"], tmp_path, monkeypatch), OPTIONS)) == {"train", "heldout"}
    with pytest.raises(EnvironmentFailed, match="'same' is in the train and in the heldout split"):
        list_tasks(tasks_of(["same", "same"], tmp_path, monkeypatch), OPTIONS)
