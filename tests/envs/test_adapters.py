"""Gymnasium's environments through the adapter, and what all adapters have in common."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from envs import OptionsError, Task, Transition, environment_class, list_tasks
from envs.adapters.from_gymnasium import GymnasiumEnv

LAKE: dict[str, object] = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False, "map_name": "4x4"},
    "task_kwargs": "",
    "render": "envs.adapters.toy_text:lake",
    "actions": ["left", "down", "right", "up"],
    "objective": "walk to the goal G.",
    "win_at": 1.0,
    "train_seeds": [0, 20],
    "heldout_seeds": [20, 25],
}
TAXI: dict[str, object] = LAKE | {
    "id": "Taxi-v4",
    "kwargs": {},
    "render": "envs.adapters.toy_text:taxi",
    "actions": ["south", "north", "east", "west", "pick up", "drop off"],
    "win_at": 20.0,
}
SEEDED: dict[str, dict[str, object]] = {
    "gymnasium": LAKE,
    "gem": {
        "id": "g",
        "kwargs": {},
        "imports": [],
        "action": "{action}",
        "anchor": "suffix",
        "win_at": 1.0,
    },
    "openenv": {
        "url": "http://127.0.0.1:1",
        "action_field": "a",
        "text_field": "t",
        "objective": "",
        "win_at": 1.0,
    },
    "verl_agent": {
        "manager": "m:f",
        "kwargs": {},
        "shows": "text",
        "action": "{action}",
        "objective": "",
    },
}
SEEDS: dict[str, object] = {"train_seeds": [0, 3], "heldout_seeds": [3, 5]}
ROWS: dict[str, object] = {
    "id": "s",
    "env_config": {},
    "imports": [],
    "train_file": "",
    "heldout_file": "",
    "action": "{action}",
    "win_at": 1.0,
}


def played(env: GymnasiumEnv, *actions: str) -> list[Transition]:
    return [env.step(action) for action in actions]


@pytest.mark.parametrize("name", SEEDED)
def test_a_task_is_a_seed_of_its_splits_range(name: str) -> None:
    splits = list_tasks(name, SEEDED[name] | SEEDS)
    assert {split: [task.seed for task in tasks] for split, tasks in splits.items()} == {
        "train": [0, 1, 2],
        "heldout": [3, 4],
    }
    assert all(
        task.env_name == name and task.split in task.id
        for tasks in splits.values()
        for task in tasks
    )
    with pytest.raises(ValueError, match="split 'test' is not one of"):
        environment_class(name).tasks("test", SEEDED[name] | SEEDS)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"train_seeds": [0, 30]},
            r"train_seeds=\[0, 30\] and heldout_seeds=\[20, 25\] have seeds in common",
        ),
        ({"train_seeds": [5, 5]}, r"option train_seeds=\[5, 5\] must be \[first, end\]"),
        ({"train_seeds": 5}, "option train_seeds=5 must be"),
    ],
)
def test_seeds_that_make_no_splits_are_refused(
    changes: Mapping[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        GymnasiumEnv.tasks("train", LAKE | changes)


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("action", "<answer></answer>", r"a text with \{action\} in it"),
        ("action", None, r"a text with \{action\} in it"),
        ("win_at", "1", "a number"),
        ("win_at", True, "a number"),
        ("imports", "abc", "a list of modules"),
        ("anchor", "foo", "'suffix' or 'observation'"),
        ("shows", "foo", "'anchor' or 'text'"),
        ("manager", "foo", "module:name"),
    ],
)
def test_an_option_of_an_adapter_must_be_what_it_must_be(
    option: str, value: object, complaint: str
) -> None:
    having = {
        name: options
        for name, options in {**SEEDED, "skyrl_gym": ROWS}.items()
        if option in options
    }
    assert having
    for name, options in having.items():
        wrong = options | ({} if name == "skyrl_gym" else SEEDS) | {option: value}
        for use in (
            environment_class(name),
            lambda given, name=name: environment_class(name).tasks("train", given),
        ):
            with pytest.raises(
                OptionsError, match=rf"^{name} option {option}={value!r} must be {complaint}$"
            ):
                use(wrong)


def test_a_row_of_skyrl_gym_is_a_line_and_one_that_is_none_is_named(tmp_path: Path) -> None:
    good = json.dumps(
        {"prompt": [{"role": "user", "content": "two\u2028lines"}]}, ensure_ascii=False
    )
    options = ROWS | {"train_file": str(tmp_path / "train.jsonl")}
    (tmp_path / "train.jsonl").write_text(f"{good}\n{good}\n")
    tasks = environment_class("skyrl_gym").tasks("train", options)
    assert [json.loads(task.data["row"]) for task in tasks] == [json.loads(good)] * 2
    for bad in ("", "{", "[]", '{"question": "?"}'):
        (tmp_path / "train.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
        with pytest.raises(
            ValueError, match=r"train\.jsonl line 2 is no JSON object with a list `prompt`: "
        ):
            environment_class("skyrl_gym").tasks("train", options)


@pytest.mark.parametrize("name", ["gymnasium", "gem", "skyrl_gym"])
def test_a_package_that_is_not_there_is_named_with_the_way_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, package = {
        "gymnasium": ("gymnasium", "gymnasium"),
        "gem": ("gem", "gem-llm"),
        "skyrl_gym": ("skyrl_gym", "skyrl-gym"),
    }[name]
    monkeypatch.setitem(__import__("sys").modules, module, None)
    options = ROWS if name == "skyrl_gym" else SEEDED[name] | SEEDS
    with pytest.raises(
        ValueError,
        match=f"environment '{name}' needs the package {package} .*pip install {package}",
    ):
        environment_class(name)(options)


def test_the_frozen_lake_is_crossed_by_hand() -> None:
    env = GymnasiumEnv(LAKE)
    first = env.reset(env.tasks("train", LAKE)[0])
    assert first.text == "P F F F\nF H F H\nF F F H\nH F F G"
    assert (first.anchor, first.actions, first.objective) == (
        "0",
        ("left", "down", "right", "up"),
        "walk to the goal G.",
    )
    seen = played(env, "down", "down", "right", "right", "down", "right")
    assert [t.observation.anchor for t in seen] == ["4", "8", "9", "10", "14", "15"]
    assert [t.reward for t in seen] == [0.0] * 5 + [1.0]
    assert [t.won for t in seen] == [t.terminated for t in seen] == [False] * 5 + [True]
    assert seen[1].observation.text == "S F F F\nF H F H\nP F F H\nH F F G"
    assert all(t.valid and not t.truncated for t in seen)
    env.close()


def test_a_hole_ends_the_episode_and_does_not_win_it() -> None:
    env = GymnasiumEnv(LAKE)
    env.reset(env.tasks("train", LAKE)[0])
    assert [(t.terminated, t.won, t.reward) for t in played(env, "right", "down")] == [
        (False, False, 0.0),
        (True, False, 0.0),
    ]


def test_an_action_that_has_no_name_is_not_carried_out() -> None:
    env = GymnasiumEnv(LAKE)
    before = env.reset(env.tasks("train", LAKE)[0])
    for action in ("jump", "", "Down", "1"):
        transition = env.step(action)
        assert (transition.valid, transition.observation, transition.terminated) == (
            False,
            before,
            False,
        )
    assert env.step("down").observation.anchor == "4"


def test_a_limit_of_steps_truncates_and_does_not_terminate() -> None:
    options = LAKE | {"kwargs": {"is_slippery": False, "map_name": "4x4", "max_episode_steps": 2}}
    env = GymnasiumEnv(options)
    env.reset(env.tasks("train", options)[0])
    assert [(t.terminated, t.truncated, t.won) for t in played(env, "left", "left")] == [
        (False, False, False),
        (False, True, False),
    ]


def test_the_same_task_slips_the_same_way() -> None:
    options = LAKE | {"kwargs": {"is_slippery": True, "map_name": "8x8"}}
    env, other = GymnasiumEnv(options), GymnasiumEnv(options)
    ways = []
    for task in env.tasks("train", options)[:6]:
        episodes = []
        for one in (env, other):
            one.reset(task)
            episodes.append([t.observation.anchor for t in played(one, *["right", "down"] * 4)])
        assert episodes[0] == episodes[1]
        ways.append(tuple(episodes[0]))
    assert len(set(ways)) > 1


def test_task_kwargs_give_every_task_a_lake_of_its_own() -> None:
    options = LAKE | {
        "kwargs": {"is_slippery": False},
        "task_kwargs": "envs.adapters.toy_text:lake_of_seed",
    }
    env = GymnasiumEnv(options)
    tasks = env.tasks("train", options)
    texts = [env.reset(task).text for task in tasks]
    assert len(set(texts)) > 15
    assert [env.reset(task).text for task in tasks] == texts


def test_a_picture_of_colours_without_an_end_is_shown_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: 80 KB of beginnings took 11 s; these 20 MB would take a week."""
    env = GymnasiumEnv(LAKE | {"render": "ansi"})
    env.reset(env.tasks("train", LAKE)[0])
    picture = "\x1b[m" * 5_000_000
    monkeypatch.setattr(type(env._env.unwrapped), "render", lambda _: picture)
    assert env.step("down").observation.text == picture


def test_ansi_shows_the_player_without_colour() -> None:
    env = GymnasiumEnv(LAKE | {"render": "ansi"})
    assert env.reset(env.tasks("train", LAKE)[0]).text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    text = env.step("down").observation.text
    assert text.endswith("SFFF\n[F]HFH\nFFFH\nHFFG") and "\x1b" not in text


@pytest.mark.parametrize(
    ("login", "shown"), [("ann:5ecret@", "127.0.0.1:9/env: "), ("ann:5#ecret@", "...: ")]
)
def test_an_openenv_server_that_is_not_there_is_named_without_its_secrets(
    login: str, shown: str
) -> None:
    """The attack: aiohttp quotes the whole URL, and its text became the reason of a group."""
    url = f"http://{login}127.0.0.1:9/env?key=hunter2"
    env = environment_class("openenv")({**SEEDED["openenv"], "url": url, **SEEDS})

    async def ask() -> None:
        await env.reset(Task(id="a", env_name="openenv", split="train", seed=0))

    with pytest.raises(ConnectionError) as told:
        asyncio.run(ask())
    assert str(told.value).startswith(f"no OpenEnv server at http://{shown}")
    assert "ecret" not in str(told.value) and "hunter2" not in str(told.value)


def test_a_taxi_ride_by_what_the_text_says() -> None:
    """From the text alone: to the passenger, and with them to the destination. The list of actions
    keeps off the walls.
    """
    env = GymnasiumEnv(TAXI)
    for task in env.tasks("train", TAXI)[:5]:
        observation, rewards = env.reset(task), []
        for goal, act in (
            (r"passenger is at the \w+ stop", "pick up"),
            (r"destination is the \w+ stop", "drop off"),
        ):
            row, column = re.search(rf"{goal}, row (\d) column (\d)", observation.text).groups()  # type: ignore[union-attr]
            for action in way(observation.text, (int(row), int(column))):
                assert action in (observation.actions or ())
                transition = env.step(action)
                observation = transition.observation
                rewards.append(transition.reward)
            transition = env.step(act)
            observation = transition.observation
            rewards.append(transition.reward)
        assert rewards[-1] == 20.0 and set(rewards[:-1]) == {-1.0}
        assert transition.won and transition.terminated


def way(text: str, goal: tuple[int, int]) -> list[str]:
    """Over the middle row, which no wall of the 5x5 map crosses."""
    here = tuple(map(int, re.search(r"taxi is in row (\d) column (\d)", text).groups()))  # type: ignore[union-attr]
    stops = [here, *([(2, here[1]), (2, goal[1])] if here[1] != goal[1] else []), goal]
    actions = []
    for (row, column), (next_row, next_column) in pairwise(stops):
        actions += ["south" if next_row > row else "north"] * abs(next_row - row)
        actions += ["east" if next_column > column else "west"] * abs(next_column - column)
    return actions


def test_what_the_action_mask_forbids_is_neither_offered_nor_carried_out() -> None:
    env = GymnasiumEnv(TAXI)
    for task in env.tasks("train", TAXI):
        before = env.reset(task)
        assert "drop off" not in (before.actions or ())  # there is nobody in the taxi
        transition = env.step("drop off")
        assert (transition.valid, transition.observation, transition.reward) == (False, before, 0.0)


ECHO = """
import gymnasium
from gymnasium.spaces import Text
class Echo(gymnasium.Env):
    observation_space = action_space = Text(20, charset="abcdefghijklmnopqrstuvwxyz 0123456789")
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = f"word{seed}"
        return "say " + self.word, {}
    def step(self, action): return "you said " + action, float(action == self.word), True, False, {}
gymnasium.register("Echo-v0", Echo)
"""


def test_an_environment_of_ones_own_with_text_for_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_world.py").write_text(ECHO)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = LAKE | {
        "id": "echo_world:Echo-v0",
        "kwargs": {},
        "render": "observation",
        "actions": [],
    }
    env = GymnasiumEnv(options)
    first = env.reset(env.tasks("heldout", options)[1])
    assert (first.text, first.anchor, first.actions) == ("say word21", None, None)
    transition = env.step("word21")
    assert (transition.observation.text, transition.won) == ("you said word21", True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"actions": ["left", "right"]}, "FrozenLake-v1 has 4 actions; give each a name"),
        (
            {"id": "MountainCarContinuous-v0", "kwargs": {}},
            r"MountainCarContinuous-v0 has actions Box\(.*wrap it",
        ),
        (
            {
                "id": "CartPole-v1",
                "kwargs": {},
                "actions": ["left", "right"],
                "render": "observation",
            },
            r"observes Box.*use ansi",
        ),
        (
            {"render": "envs.adapters.toy_text:sea"},
            "option render='envs.adapters.toy_text:sea' cannot be loaded",
        ),
        ({"task_kwargs": "nowhere"}, "option task_kwargs='nowhere' cannot be loaded"),
    ],
)
def test_what_cannot_be_adapted_is_said_in_one_line(
    changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        GymnasiumEnv(LAKE | changes).reset(GymnasiumEnv.tasks("train", LAKE)[0])
    assert "\n" not in str(caught.value)


def test_the_password_of_an_openenv_server_is_in_no_task_id() -> None:
    """The attack: reports, pages and datasets showed it, as a task's id."""
    url = "http://ann:pa55@host:8000/env?key=5ecret#top"
    options = {**SEEDED["openenv"], "url": url, **SEEDS}
    ids = [task.id for task in environment_class("openenv").tasks("train", options)]
    assert ids and all(name.startswith("openenv-http://host:8000/env-train-") for name in ids)


def test_an_openenv_server_leads_its_client_to_no_other_server() -> None:
    """The attack: a redirect made a worker send a GET to a machine that only it could reach."""
    visited: list[str] = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{request.url.port}/elsewhere?drop=all")

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        visited.append(request.path_qs)
        return web.Response()

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/ws", redirect)
        app.router.add_get("/elsewhere", elsewhere)
        async with TestServer(app) as server:
            options = {**SEEDED["openenv"], "url": str(server.make_url("/")), **SEEDS}
            env = environment_class("openenv")(options)
            with pytest.raises(RuntimeError, match="redirect, which is not followed"):
                await env.reset(Task(id="a", env_name="openenv", split="train", seed=0))
            env.close()
            await asyncio.sleep(0.1)

    asyncio.run(play())
    assert not visited


@pytest.mark.parametrize("n_pings", [3, None])
def test_an_openenv_server_that_pings_without_end_costs_one_episode(n_pings: int | None) -> None:
    """The attack: a worker answered pings for 14 s in one turn, and was taken for hung."""
    turns = 0

    async def sends_pings(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        with contextlib.suppress(ConnectionError):
            for number in itertools.count():
                if number == n_pings:
                    await socket.send_json({"type": "observation", "data": answered})
                await socket.ping()
        return socket

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/ws", sends_pings)
        async with TestServer(app) as server:
            given = {"url": str(server.make_url("/")), "text_field": "text"}
            env = environment_class("openenv")({**SEEDED["openenv"], **given, **SEEDS})
            task = Task(id="a", env_name="openenv", split="train", seed=0)
            counting = asyncio.create_task(count_turns())
            if n_pings is None:
                with pytest.raises(RuntimeError, match="the server sent 1000 pings and no answer"):
                    await env.reset(task)
                assert turns >= 1000
            else:
                assert (await env.reset(task)).text == "seen"
            counting.cancel()
            env.close()
            await asyncio.sleep(0.1)

    answered = {"observation": {"text": "seen"}, "reward": None, "done": False}
    asyncio.run(play())
