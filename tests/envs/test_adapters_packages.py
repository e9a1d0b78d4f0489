"""Adapters against the packages they are for, where those are installed; verl-agent, not on PyPI,
is a test double.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from envs import (
    EnvironmentDied,
    EnvironmentPool,
    PooledEnvironment,
    Task,
    Transition,
    environment_class,
    list_tasks,
)
from envs.adapters.http_client import KEY_VARIABLE
from envs.hosting.http_server import LISTENING

ROOT = Path(__file__).resolve().parents[2]
SEEDS: dict[str, object] = {"train_seeds": [0, 20], "heldout_seeds": [20, 25]}


# verl-agent: a double, written from the interface that its README and EnvironmentManagerBase
# describe.

MANAGER = """
import numpy
class Guess:  # `reset(kwargs)` and `step(texts)` of a batch, here of one
    def __init__(self, seed, limit):
        self.numbers = iter(numpy.random.RandomState(seed).randint(0, 10, 5))  # one for each game
        self.limit = limit
    def reset(self, kwargs):
        self.number, self.turns = next(self.numbers), 0
        return {"text": ["Guess in <action> tags."], "image": None, "anchor": ["start"]}, [{}]
    def step(self, text_actions):
        (text,) = text_actions
        self.turns += 1
        guess = text.partition("<action>")[2].partition("</action>")[0]
        valid = guess.isdigit() and "<think>" in text
        won = valid and int(guess) == self.number
        hint = "?" if not valid else "low" if int(guess) < self.number else "high"
        text = f"After {self.turns} guesses: {hint}"
        observations = {"text": [text], "image": None, "anchor": [hint]}
        score = 1.0 / self.turns if won else 0.0
        infos = [{"won": won, "is_action_valid": numpy.array(valid), "task_score": score}]
        dones = numpy.array([won or self.turns == self.limit])
        return observations, numpy.array([10.0 * won]), dones, infos
    def close(self): pass
"""
VERL: dict[str, object] = SEEDS | {
    "manager": "verl_double:Guess",
    "kwargs": {"limit": 11},
    "shows": "anchor",
    "action": "<think></think><action>{action}</action>",
    "objective": "guess the number.",
}


@pytest.fixture
def verl_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl_double.py").write_text(MANAGER)
    monkeypatch.syspath_prepend(str(tmp_path))


def guessed(env: Any) -> int:
    for number in range(10):
        if env.step(str(number)).won:
            return number
    raise AssertionError("none of them")


def test_a_verl_agent_manager_plays_the_task_it_is_asked_for(verl_double: None) -> None:
    env = environment_class("verl_agent")(VERL)
    tasks = env.tasks("train", VERL)
    first = env.reset(tasks[3])
    assert (first.text, first.anchor, first.objective) == ("start", "start", "guess the number.")
    number = guessed(env)
    env.reset(tasks[4])
    env.reset(tasks[3])
    bad = env.step("three")
    assert (bad.valid, bad.won, bad.terminated, bad.reward, bad.task_score) == (
        False,
        False,
        False,
        0.0,
        0.0,
    )
    # the same as before, though the manager by itself would have gone on to another
    won = env.step(str(number))
    assert (won.valid, won.won, won.terminated, won.reward, won.task_score) == (
        True,
        True,
        True,
        10.0,
        0.5,
    )
    assert len({env.reset(task) and guessed(env) for task in tasks}) > 1


def test_a_verl_agent_manager_can_show_its_own_prompt(verl_double: None) -> None:
    options = VERL | {"shows": "text"}
    env = environment_class("verl_agent")(options)
    assert env.reset(env.tasks("train", options)[0]).text == "Guess in <action> tags."
    seen = env.step("x").observation
    assert (seen.text, seen.anchor) == ("After 1 guesses: ?", "?")  # the anchor has no count in it
    with pytest.raises(ValueError, match="shows='both' must be 'anchor' or 'text'"):
        environment_class("verl_agent")(VERL | {"shows": "both"})


def test_the_pool_takes_numbers_of_numpy_from_a_manager(verl_double: None) -> None:
    async def play() -> Any:
        pool = EnvironmentPool("verl_agent", VERL, processes=1, answer_timeout_s=30.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(list_tasks("verl_agent", VERL)["train"][0])
                return await environment.step("3")
        finally:
            pool.close()

    transition = asyncio.run(play())
    assert (type(transition.reward), type(transition.won), transition.valid) == (float, bool, True)


# SkyRL-gym

SKYRL_WORLD = """
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
class Sum(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.truth, self.tries = extras["reward_spec"]["ground_truth"], env_config.tries
    def step(self, action):
        self.turns += 1
        right = action == f"<answer>{self.truth}</answer>"
        done = right or self.turns >= self.tries
        said = [] if done else [{"role": "user", "content": "No. Again."}]
        return BaseTextEnvStepOutput(observations=said, reward=float(right), done=done, metadata={})
if "sum" not in skyrl_gym.envs.registration.registry:
    skyrl_gym.register("sum", "skyrl_world:Sum")
"""


@pytest.fixture
def skyrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    (tmp_path / "skyrl_world.py").write_text(SKYRL_WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    for split, start in (("train", 0), ("heldout", 7)):
        rows = [
            {
                "prompt": [
                    {"role": "system", "content": "Add."},
                    {"role": "user", "content": f"What is {n} + 1?"},
                ],
                "reward_spec": {"ground_truth": str(n + 1)},
            }
            for n in range(start, start + 3)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "id": "sum",
        "env_config": {"tries": 2},
        "imports": ["skyrl_world"],
        "train_file": str(tmp_path / "train.jsonl"),
        "heldout_file": str(tmp_path / "heldout.jsonl"),
        "action": "<answer>{action}</answer>",
        "win_at": 1.0,
    }


def test_a_skyrl_environment_of_ones_own(skyrl: dict[str, object]) -> None:
    splits = list_tasks("skyrl_gym", skyrl)
    assert {split: len(tasks) for split, tasks in splits.items()} == {"train": 3, "heldout": 3}
    env = environment_class("skyrl_gym")(skyrl)
    assert env.reset(splits["heldout"][1]).objective == "Add.\n\nWhat is 8 + 1?"
    wrong, right = env.step("8"), env.step("9")
    assert (wrong.observation.text, wrong.terminated, wrong.won, wrong.reward) == (
        "No. Again.",
        False,
        False,
        0.0,
    )
    assert (right.observation.text, right.terminated, right.won, right.reward) == (
        "",
        True,
        True,
        1.0,
    )
    env.reset(splits["heldout"][1])  # a row again is a new environment: its turns begin anew
    assert [env.step("8").terminated for _ in range(2)] == [False, True]
    env.close()


def test_an_environment_that_comes_with_skyrl_gym(skyrl: dict[str, object], tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "What is 6 times 7? End with #### and the number."}],
        "reward_spec": {"ground_truth": "42"},
        "extra_info": {"max_turns": 5},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = skyrl | {
        "id": "gsm8k",
        "env_config": {},
        "imports": [],
        "train_file": str(tmp_path / "rows.jsonl"),
        "action": "#### {action}",
    }
    env = environment_class("skyrl_gym")(options)
    (task,) = env.tasks("train", options)
    env.reset(task)
    right = env.step("42")
    assert (right.terminated, right.won, right.reward) == (True, True, 1.0)
    env.reset(task)
    assert not env.step("41").won


def test_a_skyrl_id_or_module_that_is_not_there_is_named(skyrl: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"imports=\['no_such_world'\]"):
        environment_class("skyrl_gym")(skyrl | {"imports": ["no_such_world"]})


# GEM and OpenEnv: packages that want other versions than training does, so where they are installed
# they serve

PYTHON = os.environ.get("ADAPTERS_PYTHON", sys.executable)


@contextmanager
def served(module: str, *command: str) -> Iterator[str]:
    """Yield the URL of a server run by the interpreter ADAPTERS_PYTHON.

    Skip the test if that has no such module.
    """
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([PYTHON, "-c", look], cwd=ROOT, check=False).returncode:
        pytest.skip(
            f"{PYTHON} has no module {module}; set ADAPTERS_PYTHON to an interpreter that has it"
        )
    process = subprocess.Popen([PYTHON, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(LISTENING), line
        yield line.removeprefix(LISTENING).strip()
    finally:
        process.terminate()
        process.wait(timeout=20)


Episode = Callable[[PooledEnvironment, Task], Coroutine[Any, Any, Any]]


def play(name: str, options: dict[str, object], episode: Episode, *, times: int) -> list[Any]:
    """Return the results of `episode` for every training task, all at once, so many times."""
    tasks = list_tasks(name, options)["train"]

    async def one(pool: EnvironmentPool, task: Task) -> Any:
        async with pool.environment() as environment:
            return await episode(environment, task)

    async def all_of_them() -> list[Any]:
        pool = EnvironmentPool(name, options, processes=1, answer_timeout_s=30.0)
        try:
            return [
                done
                for _ in range(times)
                for done in await asyncio.gather(*(one(pool, task) for task in tasks))
            ]
        finally:
            pool.close()

    return asyncio.run(all_of_them())


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a key")


def gem_options(**changes: object) -> dict[str, object]:
    game = {
        "id": "game:GuessTheNumber-v0-easy",
        "kwargs": {"max_turns": 10},
        "anchor": "observation",
    }
    return SEEDS | {"imports": [], "action": "\\boxed{{action}}", "win_at": 1.0} | game | changes


def test_a_gem_game_gives_the_same_task_the_same_number() -> None:
    async def guess_up(environment: PooledEnvironment, task: Task) -> int:
        first = await environment.reset(task)
        assert "between 1 and 10" in first.objective and first.text == "Enter your next guess."
        for number in range(1, 10):
            transition = await environment.step(str(number))
            assert transition.won == (transition.terminated and transition.reward == 1.0)
            if transition.won:
                return number
            assert "higher" in transition.observation.text
        return 10

    with served(
        "gem", "-m", "envs.hosting.http_server", "gem", json.dumps(gem_options()), "0"
    ) as url:
        numbers = play("remote", {"url": url}, guess_up, times=2)
    assert numbers[:20] == numbers[20:] and len(set(numbers)) > 3


def test_a_gem_game_that_is_cut_off_is_truncated_and_not_terminated() -> None:
    async def guess_twice(environment: PooledEnvironment, task: Task) -> Transition:
        await environment.reset(task)
        first, last = await environment.step("1"), await environment.step("2")
        assert (first.terminated, first.truncated) == (False, False)
        return last

    options = gem_options(kwargs={"min_number": 1, "max_number": 1000, "max_turns": 2})
    with served("gem", "-m", "envs.hosting.http_server", "gem", json.dumps(options), "0") as url:
        ends = play("remote", {"url": url}, guess_twice, times=1)
    assert {(end.terminated, end.truncated, end.won) for end in ends} == {(False, True, False)}


def test_a_gem_games_board_is_its_anchor() -> None:
    async def back_and_forth(environment: PooledEnvironment, task: Task) -> bool:
        board = (await environment.reset(task)).anchor
        seen = [
            (await environment.step(move)).observation
            for move in ("up", "down", "left", "right", "up", "down")
        ]
        assert board is not None and all(
            one.text != one.anchor and one.text.endswith(one.anchor or "") for one in seen
        )
        # of two opposite moves one pair at least is possible, and leads back
        return board in [one.anchor for one in seen]

    options = gem_options(
        id="game:FifteenPuzzle-v0-easy", kwargs={"max_turns": 50}, anchor="suffix"
    )
    with served("gem", "-m", "envs.hosting.http_server", "gem", json.dumps(options), "0") as url:
        assert all(play("remote", {"url": url}, back_and_forth, times=1))


STAIRS = """
import socket
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
class Move(Action):
    way: str
class Seen(Observation):
    height: str
class Stairs(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.height = 2 + seed % 3
        return Seen(height=f"at {self.height}")
    def step(self, action, timeout_s=None, **kwargs):
        if action.way == "jump": raise RuntimeError("the stairs break")
        self.height -= action.way == "down"
        is_done = self.height == 0
        return Seen(height=f"at {self.height}", done=is_done, reward=float(is_done))
    @property
    def state(self): return State()
app = create_fastapi_app(Stairs, Move, Seen, max_concurrent_envs=40)
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen(100)
    print(f"listens on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""


def openenv_options(url: str, **changes: object) -> dict[str, object]:
    fields = {
        "url": url,
        "action_field": "way",
        "text_field": "height",
        "objective": "go down.",
        "win_at": 1.0,
    }
    return SEEDS | fields | changes


def test_an_openenv_environment_many_at_once() -> None:
    async def go_down(environment: PooledEnvironment, task: Task) -> list[str]:
        seen = [(await environment.reset(task)).text]
        while not seen[-1].endswith(" 0"):
            transition = await environment.step("down")
            seen.append(transition.observation.text)
            assert (
                transition.won
                == transition.terminated
                == (transition.reward == 1.0)
                == seen[-1].endswith(" 0")
            )
        return seen

    expected = [[f"at {height}" for height in range(2 + seed % 3, -1, -1)] for seed in range(20)]
    with served("openenv", "-c", STAIRS) as url:
        assert play("openenv", openenv_options(url), go_down, times=2) == expected * 2


def test_an_openenv_error_is_the_episodes_and_names_the_cause() -> None:
    async def jump(environment: PooledEnvironment, task: Task) -> None:
        await environment.reset(task)
        await environment.step("jump")

    with served("openenv", "-c", STAIRS) as url:
        with pytest.raises(
            EnvironmentDied, match=r"'openenv' failed in step .*the server says: the stairs break"
        ):
            play("openenv", openenv_options(url), jump, times=1)
        with pytest.raises(
            EnvironmentDied, match=r"text_field='depth' is none of the observation's: \['height'\]"
        ):
            play("openenv", openenv_options(url, text_field="depth"), jump, times=1)
        with pytest.raises(EnvironmentDied, match="'openenv' failed in step .*the server says: "):
            play("openenv", openenv_options(url, action_field="speed"), jump, times=1)


def test_an_openenv_server_that_is_not_there_is_the_episodes_error() -> None:
    async def begin(environment: PooledEnvironment, task: Task) -> None:
        await environment.reset(task)

    with pytest.raises(EnvironmentDied, match=r"'openenv' failed in reset .*127\.0\.0\.1:1"):
        play("openenv", openenv_options("http://127.0.0.1:1"), begin, times=1)
