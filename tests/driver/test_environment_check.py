"""Test that the tasks of a run are made while its base policy is cloned on the first of them."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from rich.console import Console

import configs
from configs import Config, EnvConfig
from driver.environment_check import check_tasks, making_tasks
from driver.run_lock import has_ended
from driver.screen import Screen, shown_in
from driver.train_run import _make_base_policy, _with_first_tasks
from envs import EnvironmentFailed

PATIENCE_S = 120.0  # only for what hangs
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
# Listing its tasks never ends, and starts a process that never ends by itself.
ENDLESS_WORLD = """
import os, pathlib, subprocess, time
class Endless:
    @classmethod
    def tasks(cls, split, options):
        sleeper = subprocess.Popen(["sleep", "3600"])
        part = pathlib.Path(options["pids"] + ".part")
        part.write_text(f"{os.getpid()} {sleeper.pid}")
        part.rename(options["pids"])
        time.sleep(3600)
"""
ENDING_WORLD = """
import os
class Ending:
    @classmethod
    def tasks(cls, split, options): os._exit(3)
"""


def run_of(name: str, options: Mapping[str, object], run_dir: Path) -> Config:
    return Config(run_dir=str(run_dir), env=EnvConfig(name=name, options=dict(options)))


def wait_for(happened: object, what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def test_games_are_made_while_the_base_policy_is_cloned_on_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "CLONE_TASKS", 1)
    games = tmp_path / "games"
    overrides = [f"run_dir={tmp_path / 'run'}", f"env.options.cache_dir={games}"]
    numbers = {"train_games": 3, "heldout_games": 2}
    overrides += [f"env.options.{name}={number}" for name, number in numbers.items()]
    config = configs.load(QUICKSTART, overrides)
    told = io.StringIO()
    screen = shown_in(Console(file=told, width=200))
    check_tasks(_with_first_tasks(config), screen.console)
    assert len(list(games.glob("*.z8"))) == 2, "one of each split is made before"

    def clone(policy: Path, first: Config, *, screen: Screen) -> None:
        assert first.env.options == {**config.env.options, "train_games": 1, "heldout_games": 1}
        wait_for(lambda: len(list(games.glob("*.z8"))) == 5, "the other games are not made")
        policy.mkdir(parents=True)

    monkeypatch.setattr("driver.train_run._clone_scripted_policy", clone)
    policy = _make_base_policy(config, screen)
    assert "textworld: 1 training tasks, 1 held out" in told.getvalue()
    assert "textworld: 3 training tasks, 2 held out" in told.getvalue()
    assert policy.is_dir() and _with_first_tasks(config) == config, "nothing is cloned again"
    assert configs.cloning_config(config).env == config.env


def test_a_start_that_ends_early_ends_the_making_of_tasks_and_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_world.py").write_text(ENDLESS_WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    pids = tmp_path / "pids"
    config = run_of("endless_world:Endless", {"pids": str(pids)}, tmp_path / "run")

    def start_and_stop() -> None:
        with making_tasks(config, Console(file=io.StringIO())):
            wait_for(pids.exists, "listing never began")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_and_stop()
    numbers = [int(pid) for pid in pids.read_text().split()]
    assert len(numbers) == 2 and os.getpid() not in numbers
    living = [psutil.Process(pid) for pid in numbers if psutil.pid_exists(pid)]
    wait_for(lambda: all(map(has_ended, living)), f"still there: {living}")
    assert not (tmp_path / "run").exists(), "an empty log leaves no folder"


def test_tasks_that_cannot_be_made_end_the_start_when_it_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_world.py").write_text(ENDING_WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = run_of("ending_world:Ending", {}, tmp_path / "run")
    with (
        pytest.raises(
            EnvironmentFailed, match="listing its tasks ended the process with"
        ) as failed,
        making_tasks(config, Console(file=io.StringIO())) as wait,
    ):
        wait()
    log = tmp_path / "run" / "logs" / "making-environment.log"
    assert str(failed.value).endswith(f"; log: {log}") and log.is_file()
