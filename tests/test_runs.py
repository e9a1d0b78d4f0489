"""A run seen from outside: who drives it, and that only its own leftovers are removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

import runs
from runs import DRIVER_FILE, RUN_MARK, driver_of, driving, remove_leftovers
from store import StoreError

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleep_with(mark: Path | None, sleepers: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if name != RUN_MARK}
    if mark is not None:
        environ[RUN_MARK] = str(mark.resolve())
    sleepers.append(subprocess.Popen(SLEEP, env=environ))
    return sleepers[-1]


def test_leftovers_are_those_that_carry_the_runs_mark(tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]) -> None:
    ours = [sleep_with(tmp_path / "run", sleepers) for _ in range(2)]
    others = [sleep_with(tmp_path / "run2", sleepers), sleep_with(None, sleepers)]
    assert remove_leftovers(tmp_path / "run") == 2
    assert [process.wait(timeout=10) for process in ours] == [-9, -9]
    assert [process.poll() for process in others] == [None, None]


def test_this_process_and_its_parents_are_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_MARK, str((tmp_path / "run").resolve()))  # as a driver's own environment has it
    assert remove_leftovers(tmp_path / "run") == 0


def test_one_process_drives_a_run_at_a_time(tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]) -> None:
    run = tmp_path / "run"
    with driving(run) as n_removed:
        assert n_removed == 0
        driver = driver_of(run)
        assert driver is not None and driver.pid == os.getpid()
    assert driver_of(run) is None
    other = psutil.Process(sleep_with(None, sleepers).pid)
    (run / DRIVER_FILE).write_text(json.dumps({"pid": other.pid, "started_s": other.create_time(), "host": driver.host}))
    with pytest.raises(StoreError, match=rf"process {other.pid} drives .*--stop"), driving(run):
        pass
    assert other.is_running()


def test_a_pid_that_is_another_process_by_now_drives_nothing(tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]) -> None:
    run = tmp_path / "run"
    with driving(run):
        driver = driver_of(run)
    assert driver is not None
    other = psutil.Process(sleep_with(None, sleepers).pid)
    stale = {"pid": other.pid, "started_s": other.create_time() - 1000.0, "host": driver.host}
    (run / DRIVER_FILE).write_text(json.dumps(stale))
    with driving(run):
        assert other.is_running()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nobody drives"):
        runs.ask_for_workers(tmp_path, 3)
    (tmp_path / DRIVER_FILE).write_text("{")
    with pytest.raises(StoreError, match=r"driver\.json is not readable"):
        driver_of(tmp_path)
    (tmp_path / DRIVER_FILE).write_text(json.dumps({"pid": 1, "started_s": 0.0, "host": "elsewhere"}))
    with pytest.raises(StoreError, match="process 1 of elsewhere; stop it there"):
        runs.stop(tmp_path, Console())


def test_as_many_workers_as_were_asked_for(tmp_path: Path) -> None:
    assert runs.wanted_workers(tmp_path) is None
    with driving(tmp_path):
        runs.ask_for_workers(tmp_path, 3)
        assert runs.wanted_workers(tmp_path) == 3
    with driving(tmp_path):
        assert runs.wanted_workers(tmp_path) is None, "a new start follows its config"
