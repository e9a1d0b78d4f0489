"""A stop that comes while Ray starts, or while anything else is under way that must not be left half done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import RAY_DIRECTORY
from stopping import REPEAT_S, STOP_SIGNALS, stop_held_back

ROOT = Path(__file__).resolve().parent.parent
STARTS_RAY = """
import sys
import cluster, stopping
stopping.Interrupt().listen()
try:
    with cluster.ray_cluster(sys.argv[1], processes=1):
        print("Ray is up")
except KeyboardInterrupt:
    print("stopped")
"""


def ray_directories_of(process: subprocess.Popen[str]) -> list[str]:
    return [name for name in os.listdir("/tmp") if name.startswith(f"{RAY_DIRECTORY}{process.pid}-")]


def test_a_stop_while_ray_starts_is_heard_and_prints_nothing_of_ray(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_RAY, str(tmp_path / "run")]
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as starting:
        while starting.poll() is None and not ray_directories_of(starting):
            time.sleep(0.01)
        starting.send_signal(signal.SIGTERM)
        printed, _ = starting.communicate(timeout=600.0)
    assert printed == "stopped\n"
    assert ray_directories_of(starting) == []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_that_is_held_back_is_heard_at_the_end(number: signal.Signals) -> None:
    handler, done = signal.getsignal(number), []

    @stop_held_back()
    def work() -> None:
        os.kill(os.getpid(), number)
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(number) is handler


def test_one_more_stop_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, done = [100.0], []
    monkeypatch.setattr("stopping.time.monotonic", lambda: now_s[0])

    @stop_held_back()
    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        now_s[0] += REPEAT_S / 2
        os.kill(os.getpid(), signal.SIGINT)  # the group's: the same wish
        done.append("this")
        now_s[0] += REPEAT_S
        os.kill(os.getpid(), signal.SIGINT)
        done.append("not that")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["this"]


def test_an_error_of_what_is_not_to_be_left_half_done_comes_first() -> None:
    @stop_held_back()
    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        work()
