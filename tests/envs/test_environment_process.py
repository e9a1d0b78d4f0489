"""Test the processes of environments: how they start, hang and end, and that none is left over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from envs import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentPool,
    Task,
    list_tasks_in_child,
    try_environment,
)
from envs.hosting import child_process
from tests.support.processes import end_with_their_owner, wait_until_gone

OPTIONS: Mapping[str, object] = {}
ROOT = Path(__file__).resolve().parents[2]
N_EPISODES = 4  # at once
SOON_S = 2.0  # a busy machine answers within this; what hangs costs a test as much
TASK = Task(id="one", env_name="counted", split="train", seed=0)

# Does what the action says; "count" answers how many objects there are and how many were closed,
# "wait" that there is a file.
COUNTED = """
import asyncio, gc, os, time, weakref
from envs import Observation, Transition
LIVE, CLOSED = weakref.WeakSet(), []
def seen(text):
    return Transition(
        observation=Observation(text=text),
        reward=0.0, terminated=False, truncated=False, won=False)
class Counted:
    def __init__(self, options): LIVE.add(self)
    @classmethod
    def tasks(cls, split, options): return []
    def reset(self, task):
        if task.id == "hang": time.sleep(3600)
        return Observation(text=task.id)
    def step(self, action):
        if action == "raise": raise RuntimeError("it broke")
        while action == "wait" and not os.path.exists("PATH"): time.sleep(0.001)
        if action == "hang": time.sleep(3600)
        if action == "child":
            child = os.fork()
            if child == 0: time.sleep(3600)
            return seen(str(child))
        if action == "count": gc.collect()
        return seen(f"{len(LIVE)} {len(CLOSED)}")
    def close(self):
        CLOSED.append(1)
        if len(CLOSED) == 1: raise OSError("too broken to be closed")
class Awaited(Counted):
    async def reset(self, task): return Counted.reset(self, task)
    async def step(self, action):
        if action == "wait": await asyncio.sleep(3600)
        return Counted.step(self, action)
"""


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "counted_world.py").write_text(COUNTED.replace("PATH", str(tmp_path / "waited")))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("counted_world", None)  # its counts are of another test
    return "counted_world:Counted"


def a_pool(name: str, *, answer_timeout_s: float = 20.0, processes: int = 1) -> EnvironmentPool:
    return EnvironmentPool(name, OPTIONS, processes=processes, answer_timeout_s=answer_timeout_s)


async def an_episode(
    pool: EnvironmentPool, action: str, begun: asyncio.Semaphore, go: asyncio.Event
) -> None:
    async with pool.environment() as environment:
        await environment.reset(TASK)
        begun.release()
        await go.wait()
        await environment.step(action)
        if action == "overdue":
            raise TimeoutError


@pytest.mark.parametrize("kind", ["Counted", "Awaited"])
@pytest.mark.parametrize("how", ["raise", "wait", "overdue"])
def test_however_episodes_end_there_are_never_more_objects_than_episodes_at_once(
    counted: str, kind: str, how: str, tmp_path: Path
) -> None:
    async def a_round(pool: EnvironmentPool) -> None:
        begun, go = asyncio.Semaphore(0), asyncio.Event()
        episodes = [
            asyncio.create_task(an_episode(pool, how, begun, go)) for _ in range(N_EPISODES)
        ]
        for _ in episodes:
            await begun.acquire()
        # the steps of the round before have ended: a reset was answered since
        (tmp_path / "waited").unlink(missing_ok=True)
        go.set()
        if how == "wait":
            while pool.oldest() is None:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)  # the first waits for the file, the others for the first
            for episode in episodes:  # in the middle of a step
                episode.cancel()
            (tmp_path / "waited").touch()
        endings = await asyncio.gather(*episodes, return_exceptions=True)
        expected = {
            "raise": EnvironmentDied,
            "wait": asyncio.CancelledError,
            "overdue": TimeoutError,
        }[how]
        assert [type(ending) for ending in endings] == [expected] * N_EPISODES

    async def play() -> str:
        pool = a_pool(counted.replace("Counted", kind))
        for _ in range(5):
            await a_round(pool)
        # until then the loop's own wake-up call holds the last round's errors, and they their
        # frames
        await asyncio.sleep(0)
        async with pool.environment() as environment:
            await environment.reset(TASK)
            answer = (await environment.step("count")).observation.text
        pool.close()
        return answer

    live, closed = map(int, asyncio.run(play()).split())
    assert 1 <= live <= N_EPISODES
    # the others are used again
    all_were_closed = how == "raise" or (how == "wait" and kind == "Awaited")
    assert closed == (5 * N_EPISODES if all_were_closed else 0)


def test_a_hung_process_is_ended_with_what_it_started_though_that_keeps_its_socket(
    counted: str,
) -> None:
    async def play() -> tuple[str, str]:
        pool = a_pool(counted, answer_timeout_s=SOON_S)
        async with pool.environment() as environment:
            await environment.reset(TASK)
            child = (await environment.step("child")).observation.text
            with pytest.raises(
                EnvironmentDied, match=f"did not answer within {SOON_S:g} s and was killed"
            ):
                await asyncio.wait_for(environment.step("hang"), timeout=20)
            again = await environment.reset(TASK)
        pool.close()
        return child, again.text

    child, again = asyncio.run(play())
    wait_until_gone(int(child))
    assert again == "one"


def test_hundreds_of_requests_to_a_process_that_hangs_do_not_stop_the_event_loop(
    counted: str,
) -> None:
    def stands_still(*_: object) -> None:
        raise SystemExit("the event loop stood still")  # which no task keeps to itself

    async def play() -> list[BaseException | object]:
        pool = a_pool(counted, answer_timeout_s=1.0)
        async with pool.environment() as environment:
            await environment.reset(TASK)
            hung = asyncio.create_task(environment.step("hang"))
            host = pool._hosts[0]
            asked = [asyncio.create_task(host.call(n, "reset", TASK)) for n in range(1, 1000)]
            endings = await asyncio.gather(hung, *asked, return_exceptions=True)
        pool.close()
        return endings

    before = signal.signal(signal.SIGALRM, stands_still)
    signal.alarm(120)
    try:
        endings = asyncio.run(play())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert {type(ending) for ending in endings} == {EnvironmentDied}
    assert [ending.at_fault for ending in endings] == [True] + [False] * 999  # type: ignore[union-attr]


def test_a_process_that_ends_as_soon_as_it_is_ready_fails_the_episode_and_nothing_else(
    counted: str, tmp_path: Path
) -> None:
    """The worker ended with `OSError: handle is closed`: its event loop had other work meanwhile."""
    world = tmp_path / "counted_world.py"
    ends_soon = "threading.Timer(0.01, os._exit, (3,)).start()"
    made = "def __init__(self, options): "
    text = world.read_text().replace(made, f"{made}{ends_soon}; ")
    world.write_text(text.replace("import asyncio,", "import asyncio, threading,"))

    async def is_busy() -> None:
        while True:
            time.sleep(0.1)
            await asyncio.sleep(0.002)

    async def an_episode_later(pool: EnvironmentPool) -> None:
        async with pool.environment() as environment:
            await environment.reset(TASK)
            await asyncio.sleep(0.5)
            await environment.step("count")

    async def play() -> list[EnvironmentDied]:
        busy, errors = asyncio.create_task(is_busy()), []
        for _ in range(4):
            pool = a_pool(counted, answer_timeout_s=SOON_S)
            with pytest.raises(EnvironmentDied) as raised:
                await an_episode_later(pool)
            errors.append(raised.value)
            pool.close()
        busy.cancel()
        return errors

    for error in asyncio.run(play()):
        assert "ended with exit code 3" in str(error) and error.at_fault and error.ended_process


@pytest.mark.parametrize("kind", ["Counted", "Awaited"])
def test_the_request_that_has_waited_longest_is_named(counted: str, kind: str) -> None:
    async def play() -> list[tuple[str, float] | None]:
        pool = a_pool(counted.replace("Counted", kind), answer_timeout_s=SOON_S)
        named = [pool.oldest()]
        async with pool.environment() as first, pool.environment() as second:
            await first.reset(TASK)
            await second.reset(TASK)
            named.append(pool.oldest())
            action = "hang" if kind == "Counted" else "wait"
            waiting = [
                asyncio.create_task(first.step(action)),
                asyncio.create_task(second.step("x" * 1000)),
            ]
            await asyncio.sleep(0.1)
            named.append(pool.oldest())
            await asyncio.gather(*waiting, return_exceptions=True)
        named.append(pool.oldest())
        pool.close()
        return named

    unused, idle, waiting, after = asyncio.run(play())
    assert (unused, idle, after) == (None, None, None)
    assert waiting is not None
    assert (
        waiting[0] == ("step 'hang'" if kind == "Counted" else "step 'wait'")
        and 0 < waiting[1] < 20
    )


SLOW_START = """
import os, time
from envs import Observation
class Slow:
    def __init__(self, options):
        with open("PATH", "a") as file: file.write(f"{os.getpid()} begins\\n")
        time.sleep(0.05)
        with open("PATH", "a") as file: file.write(f"{os.getpid()} ends\\n")
    @classmethod
    def tasks(cls, split, options): return []
    def reset(self, task): return Observation(text="here")
    def step(self, action): pass
    def step(self, action): ...
    def close(self): pass
"""


def test_processes_start_when_they_are_needed_and_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = tmp_path / "diary"
    (tmp_path / "slow_world.py").write_text(SLOW_START.replace("PATH", str(diary)))
    monkeypatch.syspath_prepend(str(tmp_path))

    async def one(pool: EnvironmentPool) -> None:
        async with pool.environment() as environment:
            await environment.reset(TASK)

    async def play() -> bool:
        pool = a_pool("slow_world:Slow", processes=3)
        is_lazy = not diary.exists()
        await asyncio.gather(*(one(pool) for _ in range(3)))
        pool.close()
        return is_lazy

    assert asyncio.run(play())
    lines = [line.split() for line in diary.read_text().splitlines()]
    assert [word for _, word in lines] == ["begins", "ends"] * 3
    assert len({pid for pid, _ in lines}) == 3


OWNER = """
import asyncio
from envs import EnvironmentPool, Task
async def main():
    pool = EnvironmentPool("hanging_world:Hanging", {}, processes=1, answer_timeout_s=600.0)
    async with pool.environment() as environment:
        await environment.reset(Task(id="t", env_name="e", split="train", seed=0))
asyncio.run(main())
"""
# Holds Python's lock, so that no thread of its own could end it.
HANGING = """
import ctypes, os, subprocess
class Hanging:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options): return []
    def reset(self, task):
        child = subprocess.Popen(["sleep", "600"])
        with open("PATH", "w") as file: file.write(f"{os.getpid()} {child.pid}")
        ctypes.PyDLL(None).sleep(600)
    def step(self, action): pass
    def step(self, action): ...
    def close(self): pass
"""


def test_a_child_finds_no_class_that_its_parent_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in this project's folder was listed by the child, and then missing in the driver."""
    started: list[Any] = []

    def noted(arguments: Sequence[str], **options: Any) -> NoReturn:
        started.append(options["env"])
        raise InterruptedError

    monkeypatch.setattr(child_process.subprocess, "Popen", noted)
    monkeypatch.setattr(sys, "path", ["/somewhere"])
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(InterruptedError):
        child_process.ChildProcess([], options={}, channel=theirs, log=None)
    assert started[0]["PYTHONPATH"] == "/somewhere"


@pytest.mark.parametrize("stopped", [False, True])
def test_neither_a_hung_environment_nor_its_child_outlives_an_owner_that_was_killed(
    tmp_path: Path, stopped: bool
) -> None:
    written = tmp_path / "pids"
    (tmp_path / "hanging_world.py").write_text(HANGING.replace("PATH", str(written)))
    environ = dict(os.environ, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, env=environ)
    end_with_their_owner(owner, pid_file=written, stopped=stopped)


def test_a_reset_that_hangs_in_a_new_process_has_the_time_of_an_answer_not_of_a_start(
    counted: str,
) -> None:
    async def play() -> None:
        pool = EnvironmentPool(counted, OPTIONS, processes=1, answer_timeout_s=0.5)
        try:
            async with pool.environment() as environment:
                await environment.reset(replace(TASK, id="hang"))
        finally:
            pool.close()

    with pytest.raises(EnvironmentDied, match=r"did not answer within 0\.5 s and was killed"):
        asyncio.run(asyncio.wait_for(play(), timeout=60.0))


def test_an_environment_that_hangs_is_found_before_anything_is_started(counted: str) -> None:
    try_environment(counted, OPTIONS, TASK, answer_timeout_s=60.0)
    with pytest.raises(
        EnvironmentFailed,
        match=r"does not start with task train/hang: .*did not answer within 0\.5 s",
    ):
        try_environment(counted, OPTIONS, replace(TASK, id="hang"), answer_timeout_s=0.5)


READS = """
from envs import Observation
class Reads:
    def __init__(self, options): self.path = options["data"]
    @classmethod
    def tasks(cls, split, options): return []
    def reset(self, task):
        import lying_about
        return Observation(text=open(self.path).read())
    def step(self, action): pass
    def step(self, action): ...
    def close(self): pass
"""


def test_a_relative_path_means_the_same_in_the_process_and_imports_do_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds, here = tmp_path / "worlds", tmp_path / "here"
    for folder, file, text in (
        (worlds, "reading_world.py", READS),
        (worlds, "lying_about.py", ""),
        (here, "lying_about.py", "raise OSError('not on the path of the owner')"),
        (here, "data", "found"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(str(worlds))
    monkeypatch.chdir(here)

    async def play() -> str:
        pool = EnvironmentPool(
            "reading_world:Reads", {"data": "data"}, processes=1, answer_timeout_s=10.0
        )
        try:
            async with pool.environment() as environment:
                return (await environment.reset(TASK)).text
        finally:
            pool.close()

    assert asyncio.run(play()) == "found"


# Its task and its observation are the command lines of their processes, with the option that is a
# secret here.
NOSY = """
from pathlib import Path
from envs import Observation, Task
def seen(options):
    command = Path("/proc/self/cmdline").read_text().replace("\\0", " ")
    return command + " KEY " + options.get("key", "")
class Nosy:
    def __init__(self, options): self.options = options
    @classmethod
    def tasks(cls, split, options):
        data = {"seen": seen(options)}
        return [Task(id=split, env_name="nosy", split=split, seed=0, data=data)]
    def reset(self, task): return Observation(text=seen(self.options))
    def step(self, action): ...
    def close(self): pass
"""


def test_options_are_in_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine can read those, and an option may be the key of a server."""
    (tmp_path / "nosy.py").write_text(NOSY)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"key": "s3cret"}
    splits = list_tasks_in_child("nosy:Nosy", options, creating=True, log=tmp_path / "log")
    assert splits is not None
    observation = try_environment(
        "nosy:Nosy", options, splits["train"][0], answer_timeout_s=60.0, log=None
    )
    assert observation is not None
    for text in (str(splits["train"][0].data["seen"]), observation.text):
        command_line, _, key = text.partition(" KEY ")
        assert "envs" in command_line and "s3cret" not in command_line
        assert key == "s3cret"
