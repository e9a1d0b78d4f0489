"""Names lead to classes; a wrong name leads to one line that says what to write instead."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from envs import ENVIRONMENTS, Environment, Task, environment_class
from tests.support.search_samples import LOCAL, remote
from tests.support.webshop_samples import ALL

ROOMS = {
    "rows": 5,
    "columns": 5,
    "boxes": 1,
    "least_moves": 1,
    "most_moves": 4,
    "train_rooms": 1,
    "heldout_rooms": 1,
    "seed": 0,
}
GAMES = {
    "data": "",
    "train": "train",
    "heldout": "valid_seen",
    "task_types": [],
    "train_games": 1,
    "heldout_games": 1,
    "seed": 0,
}


def test_every_registered_name_leads_to_an_environment() -> None:
    for name in ENVIRONMENTS:
        found = environment_class(name)
        assert all(hasattr(found, method) for method in ("tasks", "reset", "step", "close")), name
    assert isinstance(environment_class("key_room")({}), Environment)


def test_a_class_of_ones_own_is_found_by_module_and_class() -> None:
    assert environment_class("envs.key_room:KeyRoomEnv") is environment_class("key_room")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "textwrld",
            r"unknown environment 'textwrld': did you mean 'textworld'\? Known: "
            + ", ".join(ENVIRONMENTS),
        ),
        ("zzz", rf"unknown environment 'zzz': Known: {', '.join(ENVIRONMENTS)}"),
        ("no_such_module:Env", "no module 'no_such_module'"),
        ("envs.key_room:Nothing", "module 'envs.key_room' has no class 'Nothing'"),
        ("envs.key_room:ROOMS", "has no class 'ROOMS'"),
        ("envs:Task", "lacks tasks, reset, step, close"),
    ],
)
def test_a_wrong_name_is_one_line_naming_the_value_and_the_fix(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        environment_class(name)
    assert "\n" not in str(caught.value)


def test_importing_the_package_loads_no_engine() -> None:
    script = "import sys, envs; sys.exit('textworld' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_world_names_options_that_are_missing_or_unknown_in_the_same_words(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name} options missing or unknown: .*speed.*; it takes \[.*\]$"
    ):
        environment_class(name).tasks("train", {"speed": 1})


def played(env: Environment, action: str) -> None:
    step = env.step(action)
    if inspect.iscoroutine(step):
        asyncio.run(step)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("key_room", {}),
        ("sokoban", ROOMS),
        (
            "textworld",
            {
                "cache_dir": "DATA",
                "seed": 0,
                "train_games": 1,
                "heldout_games": 1,
                "rooms": 2,
                "things": 1,
            },
        ),
        ("alfworld", GAMES),
        ("webshop", ALL | {"data": "DATA"}),
        ("search", remote("http://127.0.0.1:1")),
        ("search_local", LOCAL),
    ],
)
def test_no_world_takes_a_step_before_reset(
    name: str, options: dict[str, object], tmp_path: Path
) -> None:
    env = environment_class(name)(
        {key: str(tmp_path) if value == "DATA" else value for key, value in options.items()}
    )
    with pytest.raises(ValueError, match=r"^the episode is over: call reset\(task\) before step$"):
        played(env, "go east")


@pytest.mark.parametrize(
    ("name", "options", "data", "last"),
    [
        ("key_room", {}, {"start": "0", "key": "0", "door": "0"}, ["take key", "unlock door"]),
        ("sokoban", ROOMS, {"room": "# # # # #\n# P X O #\n# # # # #"}, ["right"]),
    ],
)
def test_no_world_takes_a_step_after_the_end(
    name: str, options: dict[str, object], data: dict[str, str], last: list[str]
) -> None:
    env = environment_class(name)(options)
    env.reset(Task(id="t", env_name=name, split="train", seed=0, data=data))
    for action in last:
        played(env, action)
    with pytest.raises(ValueError, match="the episode is over"):
        played(env, last[0])
