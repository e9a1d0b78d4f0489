"""Environments in other processes: same answers, reuse, and errors that say which environment and
why.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import row_bounds
from envs import (
    EnvironmentDied,
    EnvironmentPool,
    Observation,
    Task,
    Transition,
    environment_class,
    list_tasks,
)
from envs import validation as check

OPTIONS: Mapping[str, object] = {}
SOON_S = 2.0  # a busy machine answers within this; what hangs costs a test as much


def test_the_pool_answers_as_the_environment_itself() -> None:
    task = list_tasks("key_room", OPTIONS)["train"][3]
    actions = ["go east", "nonsense", "go west", "go west", "take key"]
    direct = environment_class("key_room")(OPTIONS)
    expected = [direct.reset(task), *(direct.step(action) for action in actions)]

    async def play() -> list[object]:
        pool = EnvironmentPool("key_room", OPTIONS, processes=1, answer_timeout_s=10.0)
        async with pool.environment() as environment:
            seen = [
                await environment.reset(task),
                *[await environment.step(action) for action in actions],
            ]
        pool.close()
        return seen

    assert asyncio.run(play()) == expected


NUMBERED = """
from envs import Observation, Task, Transition
class Numbered:
    made = 0
    def __init__(self, options):
        Numbered.made += 1
        self.number = Numbered.made
    @classmethod
    def tasks(cls, split, options):
        return [Task(id=f"n-{split}", env_name="numbered", split=split, seed=0)]
    def reset(self, task):
        self.task = task
        return Observation(text=task.id, objective=str(self.number))
    def step(self, action):
        return Transition(observation=Observation(text=self.task.id, objective=str(self.number)),
                          reward=0.0, terminated=False, truncated=False, won=False)
    def close(self): pass
"""


def test_many_episodes_at_once_keep_apart_and_reuse_their_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numbered_world.py").write_text(NUMBERED)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = list_tasks("numbered_world:Numbered", OPTIONS)["train"][0]

    async def play_one(pool: EnvironmentPool, index: int) -> str:
        own = replace(task, id=str(index))
        async with pool.environment() as environment:
            first = await environment.reset(own)
            await asyncio.sleep(0)
            then = (await environment.step("wait")).observation
        assert (first.text, then.text) == (own.id, own.id)
        assert first.objective == then.objective
        return first.objective

    async def play() -> tuple[list[str], list[str]]:
        pool = EnvironmentPool(
            "numbered_world:Numbered", OPTIONS, processes=2, answer_timeout_s=10.0
        )
        first = await asyncio.gather(*(play_one(pool, i) for i in range(10)))
        second = await asyncio.gather(*(play_one(pool, i) for i in range(10)))
        pool.close()
        return first, second

    first, second = asyncio.run(play())
    # five objects in each process, and the same ones again
    assert sorted(first) == sorted(second) == sorted([*"12345"] * 2)


BROKEN = """
from envs import Observation, Task
class Broken:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options):
        return [Task(id=f"b-{split}", env_name="broken", split=split, seed=0)]
    def reset(self, task): return Observation(text="start")
    def step(self, action): raise RuntimeError(f"no such door: {action}")
    def close(self): pass
"""


def broken_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "broken_world.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "broken_world:Broken"


def test_an_error_names_the_environment_the_action_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = broken_environment(tmp_path, monkeypatch)

    async def play() -> None:
        pool = EnvironmentPool(name, OPTIONS, processes=1, answer_timeout_s=10.0)
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
        pool = EnvironmentPool("key_room", OPTIONS, processes=1, answer_timeout_s=10.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(list_tasks("key_room", OPTIONS)["train"][0])
                # made when it was needed
                (pid,) = {child.pid for child in psutil.Process().children()} - before
                # so that the step is still waiting when the process dies
                os.kill(pid, signal.SIGSTOP)
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
    source = BROKEN.replace(
        'id=f"b-{split}"', f'id={{"train": "{train}", "heldout": "{heldout}"}}[split]'
    )
    (tmp_path / f"world_{train}_{heldout}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"world_{train}_{heldout}:Broken"


def test_a_task_in_both_splits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs import EnvironmentFailed

    assert set(list_tasks(tasks_of(["a", "b"], tmp_path, monkeypatch), OPTIONS)) == {
        "train",
        "heldout",
    }
    with pytest.raises(EnvironmentFailed, match="'same' is in the train and in the heldout split"):
        list_tasks(tasks_of(["same", "same"], tmp_path, monkeypatch), OPTIONS)


def test_a_task_that_is_there_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from envs import EnvironmentFailed

    (tmp_path / "twice.py").write_text(MOODY.replace("for n in range(4)]", "for n in (1, 2, 1)]"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        EnvironmentFailed, match="lists train task 'm-train-1' 2 times; give each an id of its own"
    ):
        list_tasks("twice:Moody", OPTIONS)


MOODY = """
import asyncio, os, time
import numpy as np
from envs import Observation, Task, Transition
ANSWERS = {"nothing": None, "a dict": {"reward": 1.0}, "a class": Transition}
BAD_REWARDS = {"nan": float("nan"), "1e150": 1e150, "1e308": 1e308, "-1.7e307": -1.7e307, "digits": 10**5000}
def transition(**changes):
    fields = dict(
        observation=Observation(text="later"),
        reward=0.0, terminated=False, truncated=False, won=False)
    return Transition(**(fields | changes))
class Moody:
    def __init__(self, options): self.task = None
    @classmethod
    def tasks(cls, split, options):
        return [
            Task(id=f"m-{split}-{n}", env_name="moody", split=split, seed=n) for n in range(4)]
    def reset(self, task):
        self.task = task
        return Observation(text=task.id)
    def step(self, action):
        if action == "sleep": time.sleep(3600)
        if action == "fork" and os.fork() == 0: return transition(reward=100.0, won=True)
        if action == "fork": time.sleep(0.3)
        if action == "unpicklable": return transition(reward=lambda: 1.0)
        if action in BAD_REWARDS: return transition(reward=BAD_REWARDS[action])
        if action == "flag": return transition(won="yes")
        if action == "text": return transition(observation=Observation(text=3))
        if action == "actions": return transition(observation=Observation(text="x", actions="go"))
        if action == "half":
            return transition(observation=Observation(text="x", actions=("go", chr(0xD800))))
        if action in ANSWERS: return ANSWERS[action]
        return transition(observation=Observation(text=self.task.id, actions=["a", "b"]), reward=1)
    def close(self): pass
class Mute(Exception):
    def __str__(self): raise KeyError("no words")
class Base(BaseException): pass
class Awaited(Moody):
    frame = np.zeros((2, 2, 3), np.uint8)
    stays = True
    async def reset(self, task):
        Moody.reset(self, task)
        task.data["mine"] = "written"
        self.frame[:] = 1
        return Observation(text=task.id, images=(self.frame,))
    async def step(self, action):
        if action == "sleep": await asyncio.sleep(3600)
        if action == "draw": self.frame[:] = 2
        if action == "mute": raise Mute()
        if action == "base": raise Base("odd")
        if action == "exit": raise GeneratorExit
        if action == "interrupt": raise KeyboardInterrupt
        if action == "long": raise RuntimeError("x\\n" * 2_000_000)
        if action == "cancelled": raise asyncio.CancelledError
        while action == "stays" and self.stays:
            try: await asyncio.sleep(0.05)
            except asyncio.CancelledError: pass
        return Moody.step(self, action)
"""


@pytest.fixture
def moody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "moody_world.py").write_text(MOODY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "moody_world:Moody"


@pytest.mark.parametrize("kind", ["Moody", "Awaited"])
@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("nothing", "step returned NoneType None; it must return a Transition"),
        ("a dict", "step returned dict"),
        ("a class", "step returned type"),
        ("unpicklable", "it must be a finite number"),
        ("nan", "reward=nan; it must be a finite number"),
        ("1e150", "reward=1e+150; it must be a finite number, at most 1e+12 in size"),
        ("1e308", "reward=1e+308; it must be a finite number, at most 1e+12 in size"),
        ("-1.7e307", "reward=-1.7e+307; it must be a finite number, at most 1e+12 in size"),
        ("digits", "reward=int of very many digits; it must be a finite number"),
        ("flag", "won='yes'; it must be True or False"),
        ("text", "text or objective is no str"),
        ("actions", "actions='go'; they must be a tuple of texts"),
        ("half", "text with '\\ud800' in it, half of a character"),
    ],
)
def test_nonsense_is_refused_by_name(moody: str, kind: str, action: str, words: str) -> None:
    async def play() -> None:
        pool = EnvironmentPool(
            moody.replace("Moody", kind), OPTIONS, processes=1, answer_timeout_s=10.0
        )
        try:
            async with pool.environment() as environment:
                await environment.reset(list_tasks(moody, OPTIONS)["train"][0])
                await environment.step(action)
        finally:
            pool.close()

    with pytest.raises(EnvironmentDied, match="(Moody|Awaited).*step") as raised:
        asyncio.run(play())
    assert words in str(raised.value)
    assert raised.value.at_fault


@pytest.mark.parametrize("size", [1e150, -1.7e307, 1e308])
def test_a_score_that_no_mean_can_take_is_refused(size: float) -> None:
    observation = Observation(text="")
    answer = Transition(
        observation=observation,
        reward=row_bounds.MAX_REWARD,
        terminated=True,
        truncated=False,
        won=True,
        task_score=-row_bounds.MAX_REWARD,
    )
    assert check.checked_answer("step", answer) == answer
    with pytest.raises(ValueError, match=r"task_score=.*at most 1e\+12 in size, or None"):
        check.checked_answer("step", replace(answer, task_score=size))


@pytest.mark.parametrize("kind", ["Moody", "Awaited"])
def test_answers_come_with_pythons_own_numbers_and_tuples(moody: str, kind: str) -> None:
    async def play() -> object:
        pool = EnvironmentPool(
            moody.replace("Moody", kind), OPTIONS, processes=1, answer_timeout_s=10.0
        )
        async with pool.environment() as environment:
            await environment.reset(list_tasks(moody, OPTIONS)["train"][1])
            transition = await environment.step("go")
        pool.close()
        return transition

    transition = asyncio.run(play())
    assert transition.observation.text == "m-train-1"  # type: ignore[attr-defined]
    assert transition.observation.actions == ("a", "b")  # type: ignore[attr-defined]
    assert type(transition.reward) is float  # type: ignore[attr-defined]


def test_one_that_hangs_is_killed_and_only_its_own_episode_is_to_blame(moody: str) -> None:
    async def play() -> tuple[list[EnvironmentDied], str]:
        pool = EnvironmentPool(moody, OPTIONS, processes=1, answer_timeout_s=SOON_S)
        tasks = list_tasks(moody, OPTIONS)["train"]
        async with (
            pool.environment() as first,
            pool.environment() as second,
            pool.environment() as third,
        ):
            for environment, task in zip((first, second, third), tasks, strict=False):
                await environment.reset(task)
            asked = await asyncio.gather(
                first.step("sleep"), second.step("go"), return_exceptions=True
            )
            # it asked nothing when the process died
            (later,) = await asyncio.gather(third.step("go"), return_exceptions=True)
            again = await third.reset(tasks[3])  # in a new process
        pool.close()
        return [*asked, later], again.text  # type: ignore[list-item]

    (hung, waiting, later), text = asyncio.run(play())
    assert f"did not answer within {SOON_S:g} s and was killed" in str(hung)
    assert (hung.at_fault, waiting.at_fault, later.at_fault) == (True, False, False)
    assert text == "m-train-3"


def test_an_awaited_one_that_hangs_costs_only_its_own_episode(moody: str) -> None:
    async def play() -> tuple[BaseException, object]:
        pool = EnvironmentPool(
            moody.replace("Moody", "Awaited"), OPTIONS, processes=1, answer_timeout_s=SOON_S
        )
        task = list_tasks(moody, OPTIONS)["train"][0]
        async with pool.environment() as first, pool.environment() as second:
            await first.reset(task)
            await second.reset(task)
            hung, fine = await asyncio.gather(
                first.step("sleep"), second.step("go"), return_exceptions=True
            )
        pool.close()
        assert isinstance(hung, BaseException)
        return hung, fine

    hung, fine = asyncio.run(play())
    said = (
        rf"did not answer step 'sleep' of task train/m-train-0 within {SOON_S:g} s, "
        "at .*moody_world.py:47 in step"
    )
    assert re.search(said, str(hung))
    assert fine.reward == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["Moody", "Awaited"])
def test_a_fork_that_comes_back_from_an_environment_answers_for_nobody(
    moody: str, kind: str
) -> None:
    async def play() -> list[Transition]:
        name = moody.replace("Moody", kind)
        pool = EnvironmentPool(name, OPTIONS, processes=1, answer_timeout_s=20.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(list_tasks(moody, OPTIONS)["train"][0])
                return [await environment.step("fork"), await environment.step("go")]
        finally:
            pool.close()

    assert [(step.reward, step.won) for step in asyncio.run(play())] == [(1.0, False)] * 2


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("mute", "Mute: it has no message, for its __str__ raises KeyError, at .*moody_world.py"),
        ("base", "Base: odd, at .*moody_world.py"),
        ("exit", "GeneratorExit, at .*moody_world.py"),
        ("interrupt", "KeyboardInterrupt, at .*moody_world.py"),
        ("long", "RuntimeError: x x x"),
        ("cancelled", "CancelledError, at .*moody_world.py"),
    ],
)
def test_whatever_an_awaited_one_raises_fails_its_episode_alone(
    moody: str, action: str, words: str
) -> None:
    """Nobody cancelled an episode that raises CancelledError: its group was played without end."""

    async def play() -> EnvironmentDied:
        pool = EnvironmentPool(
            moody.replace("Moody", "Awaited"), OPTIONS, processes=1, answer_timeout_s=20.0
        )
        async with pool.environment() as environment:
            await environment.reset(list_tasks(moody, OPTIONS)["train"][0])
            with pytest.raises(EnvironmentDied, match=words) as failed:
                await environment.step(action)
        pool.close()
        return failed.value

    with ThreadPoolExecutor() as worker:  # Ctrl-C comes to the main thread
        error = worker.submit(asyncio.run, play()).result()
    assert error.at_fault and len(str(error)) < 1000


def test_an_awaited_one_that_is_left_behind_ends_without_an_error(moody: str) -> None:
    """Its event loop has ended, so nobody would hear the error, and another test showed it."""

    async def begin() -> asyncio.Task[Transition]:
        pool = EnvironmentPool(
            moody.replace("Moody", "Awaited"), OPTIONS, processes=1, answer_timeout_s=20.0
        )
        async with pool.environment() as environment:
            await environment.reset(list_tasks(moody, OPTIONS)["train"][0])
            step = asyncio.ensure_future(environment.step("sleep"))
            while not pool.oldest():
                await asyncio.sleep(0.01)
            return step

    step = asyncio.new_event_loop().run_until_complete(begin())
    coroutine = step.get_coro()
    assert coroutine is not None
    coroutine.close()  # raises what comes out of it in place of GeneratorExit


def test_an_awaited_one_changes_neither_what_was_seen_nor_the_task(moody: str) -> None:
    async def play() -> tuple[Observation, Task]:
        pool = EnvironmentPool(
            moody.replace("Moody", "Awaited"), OPTIONS, processes=1, answer_timeout_s=20.0
        )
        task = list_tasks(moody, OPTIONS)["train"][0]
        async with pool.environment() as environment:
            seen = await environment.reset(task)
            await environment.step("draw")
        pool.close()
        return seen, task

    seen, task = asyncio.run(play())
    assert (seen.images[0] == 1).all(), "the step drew into the image that the policy had seen"
    assert task.data == {}


def test_an_awaited_one_that_cannot_be_cancelled_is_named(
    moody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.hosting.pool.STUCK_AFTER_S", 0.1)
    name = moody.replace("Moody", "Awaited")

    async def play() -> list[str | None]:
        pool = EnvironmentPool(name, OPTIONS, processes=1, answer_timeout_s=0.1)
        async with pool.environment() as environment:
            await environment.reset(list_tasks(moody, OPTIONS)["train"][0])
            step = asyncio.ensure_future(environment.step("stays"))
            named = [pool.stuck()]
            while pool.stuck() is None:
                await asyncio.sleep(0.01)
            assert not step.done()
            named.append(pool.stuck())
            # A coroutine that is left is closed in the middle of whatever test runs then.
            monkeypatch.setattr(environment_class(name), "stays", False)
            await step
            return [*named, pool.stuck()]

    assert asyncio.run(play()) == [None, "step 'stays' of task train/m-train-0", None]


@pytest.mark.parametrize("field", ["text", "objective", "anchor", "actions"])
def test_an_observation_that_no_episode_can_keep_is_refused(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "MAX_CHARACTERS", 10)
    long = ("go " * 2, "go " * 2) if field == "actions" else "go " * 4
    with pytest.raises(
        ValueError, match="an Observation with 12 characters; at most 10 can be kept"
    ):
        check.checked_answer("reset", Observation(**{"text": "", field: long}))  # type: ignore[arg-type]


def test_images_that_no_episode_can_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_PIXEL_BYTES", 24)
    image = np.zeros((2, 2, 3), np.uint8)
    kept = check.checked_answer("reset", Observation(text="", images=(image, image)))
    assert isinstance(kept, Observation) and len(kept.images) == 2
    with pytest.raises(ValueError, match="images of 36 bytes; at most 24 can be kept, draw them"):
        check.checked_answer("reset", Observation(text="", images=(image,) * 3))


def test_a_list_of_actions_has_an_end_though_each_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_ACTIONS", 10)
    kept = check.checked_answer("reset", Observation(text="", actions=("",) * 10))
    assert isinstance(kept, Observation) and kept.actions == ("",) * 10
    with pytest.raises(ValueError, match="reset returned more than 10 actions"):
        check.checked_answer("reset", Observation(text="", actions=("",) * 11))
