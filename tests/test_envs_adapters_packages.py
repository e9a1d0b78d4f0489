"""Adapters against the packages they are for, where those are installed; verl-agent, not on PyPI, is a test double."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs import EnvironmentDied, EnvironmentPool, environment_class, list_tasks

SEEDS: dict[str, object] = {"train_seeds": [0, 20], "heldout_seeds": [20, 25]}


# verl-agent: a double, written from the interface that its README and EnvironmentManagerBase describe.

MANAGER = """
import numpy
class Guess:  # `reset(kwargs)` and `step(texts)` of a batch, here of one
    def __init__(self, seed, limit):
        self.numbers = iter(numpy.random.RandomState(seed).randint(0, 10, 5))  # of one game after the other
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
        observations = {"text": [f"After {self.turns} guesses: {hint}"], "image": None, "anchor": [hint]}
        infos = [{"won": won, "is_action_valid": numpy.array(valid), "task_score": 1.0 / self.turns if won else 0.0}]
        return observations, numpy.array([10.0 * won]), numpy.array([won or self.turns == self.limit]), infos
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
    assert (bad.valid, bad.won, bad.terminated, bad.reward, bad.task_score) == (False, False, False, 0.0, 0.0)
    won = env.step(str(number))  # the same as before, though the manager by itself would have gone on to another
    assert (won.valid, won.won, won.terminated, won.reward, won.task_score) == (True, True, True, 10.0, 0.5)
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
                "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"What is {n} + 1?"}],
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
    assert (wrong.observation.text, wrong.terminated, wrong.won, wrong.reward) == ("No. Again.", False, False, 0.0)
    assert (right.observation.text, right.terminated, right.won, right.reward) == ("", True, True, 1.0)
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


# GEM

GEM: dict[str, object] = SEEDS | {
    "id": "game:GuessTheNumber-v0-easy",
    "kwargs": {"min_number": 1, "max_number": 10, "max_turns": 11},
    "imports": [],
    "action": "\\boxed{{action}}",
    "win_at": 1.0,
}


def test_a_gem_game_gives_the_same_task_the_same_number() -> None:
    pytest.importorskip("gem", reason="gem-llm is not installed")
    env, other = environment_class("gem")(GEM), environment_class("gem")(GEM)
    numbers = []
    for task in env.tasks("train", GEM):
        first = env.reset(task)
        assert "between 1 and 10" in first.objective and first.text == "Nothing has happened yet."
        other.reset(task)
        numbers.append(guess_up(env))
        assert guess_up(other) == numbers[-1]
    assert len(set(numbers)) > 3


def guess_up(env: Any) -> int:
    for number in range(1, 11):
        transition = env.step(str(number))
        assert transition.won == (transition.terminated and transition.reward == 1.0)
        if transition.won:
            return number
        assert "higher" in transition.observation.text
    raise AssertionError("none of them")


def test_a_gem_game_that_is_cut_off_is_truncated_and_not_terminated() -> None:
    pytest.importorskip("gem", reason="gem-llm is not installed")
    env = environment_class("gem")(GEM | {"kwargs": {"min_number": 1, "max_number": 1000, "max_turns": 2}})
    for task in env.tasks("train", GEM):
        env.reset(task)
        first, last = env.step("1"), env.step("2")
        assert (first.terminated, first.truncated) == (False, False)
        assert (last.terminated, last.truncated, last.won) == (False, True, False)


# OpenEnv: its own server, in a thread


def openenv_world() -> tuple[type, type, type]:
    """Steps "down" from a number that follows from the seed, to zero: the environment, its actions, its observations."""
    from openenv.core.env_server import Action, Environment, Observation, State

    class Move(Action):
        way: str

    class Seen(Observation):
        height: str

    class Stairs(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.height = 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
            self.height = 2 + (seed or 0) % 3
            return Seen(height=f"at {self.height}", done=False, reward=None)

        def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
            if action.way == "jump":
                raise RuntimeError("the stairs break")
            self.height -= action.way == "down"
            return Seen(height=f"at {self.height}", done=self.height == 0, reward=float(self.height == 0))

        @property
        def state(self) -> State:
            return State()

    return Stairs, Move, Seen


@pytest.fixture(scope="module")
def openenv_url() -> Iterator[str]:
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    stairs, move, seen = openenv_world()
    app = create_fastapi_app(stairs, move, seen, max_concurrent_envs=20)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=10)


def openenv_options(url: str) -> dict[str, object]:
    return SEEDS | {"url": url, "action_field": "way", "text_field": "height", "objective": "go down.", "win_at": 1.0}


def test_an_openenv_environment_through_the_pool_many_at_once(openenv_url: str) -> None:
    options = openenv_options(openenv_url)
    tasks = list_tasks("openenv", options)["train"]

    async def episode(pool: EnvironmentPool, number: int) -> list[str]:
        async with pool.environment() as environment:
            seen = [(await environment.reset(tasks[number])).text]
            while not seen[-1].endswith(" 0"):
                transition = await environment.step("down")
                seen.append(transition.observation.text)
                assert transition.won == transition.terminated == (transition.reward == 1.0) == seen[-1].endswith(" 0")
            return seen

    async def play() -> list[list[str]]:
        pool = EnvironmentPool("openenv", options, processes=1, answer_timeout_s=20.0)
        try:
            first = await asyncio.gather(*(episode(pool, number) for number in range(8)))
            return [*first, *await asyncio.gather(*(episode(pool, number) for number in range(8)))]
        finally:
            pool.close()

    expected = [[f"at {height}" for height in range(2 + number % 3, -1, -1)] for number in range(8)]
    assert asyncio.run(play()) == expected * 2


def test_an_openenv_error_is_the_episodes_and_names_the_cause(openenv_url: str) -> None:
    async def play(options: dict[str, object]) -> None:
        pool = EnvironmentPool("openenv", options, processes=1, answer_timeout_s=20.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(list_tasks("openenv", options)["train"][0])
                await environment.step("jump")
        finally:
            pool.close()

    with pytest.raises(EnvironmentDied, match=r"'openenv' failed in step: .*the stairs break"):
        asyncio.run(play(openenv_options(openenv_url)))
    with pytest.raises(EnvironmentDied, match=r"text_field='depth' is none of the observation's: \['height'\]"):
        asyncio.run(play(openenv_options(openenv_url) | {"text_field": "depth"}))
    with pytest.raises(EnvironmentDied, match="'openenv' failed in reset: .*Failed to connect"):
        asyncio.run(play(openenv_options("http://127.0.0.1:1")))
