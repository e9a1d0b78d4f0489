"""Names lead to classes; a wrong name leads to one line that says what to write instead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from envs import ENVIRONMENTS, Environment, environment_class


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
        ("textwrld", rf"unknown environment 'textwrld': did you mean 'textworld'\? Known: {', '.join(ENVIRONMENTS)}"),
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
    with pytest.raises(ValueError, match=rf"^{name} options missing or unknown: .*speed.*; it takes \[.*\]$"):
        environment_class(name).tasks("train", {"speed": 1})
