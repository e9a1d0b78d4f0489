"""An environment over HTTP: the same answers as without, and errors that say what the server said."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs import EnvironmentDied, EnvironmentFailed, EnvironmentPool, Task, closing, environment_class, list_tasks
from envs.server import LISTENING, Server, main
from tests.test_envs_pool import BROKEN

ROOT = Path(__file__).resolve().parent.parent
ACTIONS = ["go east", "nonsense", "go west", "go west", "take key"]
KeyRoom = environment_class("key_room")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """`python -m envs.server`, as users start it."""
    command = [sys.executable, "-m", "envs.server", "key_room", "{}", "0", "--processes", "1"]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(LISTENING), line
    yield line.removeprefix(LISTENING).strip()
    process.terminate()
    process.wait(timeout=20)


def play(url: str, *numbers: int) -> list[list[object]]:
    """Episodes of these training tasks, at once."""
    tasks = list_tasks("remote", {"url": url})["train"]

    async def episode(pool: EnvironmentPool, task: Task) -> list[object]:
        async with pool.environment() as environment:
            return [await environment.reset(task), *[await environment.step(action) for action in ACTIONS]]

    async def all_of_them() -> list[list[object]]:
        pool = EnvironmentPool("remote", {"url": url}, processes=1, answer_timeout_s=20.0)
        try:
            return await asyncio.gather(*(episode(pool, tasks[number]) for number in numbers))
        finally:
            pool.close()

    return asyncio.run(all_of_them())


def played_here(number: int) -> list[object]:
    env = KeyRoom({})
    return [env.reset(KeyRoom.tasks("train", {})[number]), *[env.step(action) for action in ACTIONS]]


def ask(url: str, verb: str, body: object) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(f"{url}/{verb}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_answers_over_http_as_without(url: str) -> None:
    assert play(url, *range(8)) == [played_here(number) for number in range(8)]
    for split, tasks in list_tasks("remote", {"url": url}).items():
        here = KeyRoom.tasks(split, {})
        assert [(t.id, t.split, t.seed, t.data) for t in tasks] == [(t.id, t.split, t.seed, t.data) for t in here]
        assert all(task.env_name == "remote" for task in tasks)


def test_the_requests_are_as_documented(url: str) -> None:
    task = {"id": "mine", "env_name": "any", "split": "train", "seed": 0, "data": {"start": "0", "key": "1", "door": "2"}}
    status, created = ask(url, "create", {})
    assert status == 200 and created.keys() == {"id"}
    assert ask(url, "reset", created | {"task": task}) == (
        200,
        {
            "text": "The red room.",
            "objective": "unlock the door.",
            "anchor": None,
            "actions": ["go east"],
            "demonstrated": None,
        },
    )
    status, transition = ask(url, "step", created | {"action": "go east"})
    assert status == 200 and transition["observation"]["text"] == "The blue room. A key lies here."  # type: ignore[index]
    assert {k: v for k, v in transition.items() if k != "observation"} == {
        "reward": 0.0, "terminated": False, "truncated": False, "won": False, "valid": True, "task_score": None,
    }  # fmt: skip
    assert ask(url, "close", created) == (200, {})
    assert ask(url, "step", created | {"action": "go east"})[0] == 404


@pytest.mark.parametrize(
    ("verb", "body", "status", "complaint"),
    [
        ("step", {"id": "7", "action": "go east"}, 404, "id 7 is unknown"),
        ("step", {"id": "7"}, 400, "/step needs a JSON object with id, action; action is missing"),
        ("reset", [], 400, "/reset needs a JSON object with id, task"),
        ("tasks", {"split": "test"}, 400, "split 'test' is not one of ['heldout', 'train']"),
    ],
)
def test_a_wrong_request_is_answered_in_one_line(url: str, verb: str, body: object, status: int, complaint: str) -> None:
    code, answer = ask(url, verb, body)
    assert code == status and complaint in str(answer["error"]) and "\n" not in str(answer["error"])


def test_nobody_there_is_said_before_anything_starts() -> None:
    with pytest.raises(EnvironmentFailed, match=r"remote environment http://127.0.0.1:1/tasks gives no tasks: .*is it up\?"):
        list_tasks("remote", {"url": "http://127.0.0.1:1"})


def test_an_error_there_is_the_episodes_error_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_far_away.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def play() -> None:
        there = Server("broken_far_away:Broken", {}, processes=1, answer_timeout_s=20.0)
        options = {"url": f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"}
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0)
        task = Task(id="b-train", env_name="remote", split="train", seed=0)
        try:
            async with pool.environment() as environment:
                await environment.reset(task)
                said = r"'remote' failed in step 'open' .*500: .*no such door: open, at .*:8 in step; the server printed"
                with pytest.raises(EnvironmentDied, match=said):
                    await environment.step("open")
            async with pool.environment() as environment:  # and the next episode is none the worse for it
                assert (await environment.reset(task)).text == "start"
        finally:
            pool.close()
            await there.close()

    asyncio.run(play())


def test_an_episode_the_server_has_given_up_fails_and_the_next_one_begins_anew() -> None:
    tasks = KeyRoom.tasks("train", {})

    async def play() -> None:
        there = Server("key_room", {}, processes=1, answer_timeout_s=20.0)
        options = {"url": f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"}
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(tasks[0])
                await there.give_up(idle_s=3600.0)
                assert (await environment.step("go east")).valid
                await there.give_up(idle_s=0.0)
                assert (await environment.reset(tasks[1])).text == KeyRoom({}).reset(tasks[1]).text
                await there.give_up(idle_s=0.0)
                with pytest.raises(EnvironmentDied, match=r"404: id \w+ is unknown, or was idle"):
                    await environment.step("go east")
        finally:
            pool.close()
            await there.close()

    asyncio.run(play())


HANGING = """
import os, time
from envs import Observation, Task, Transition
class Hanging:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options): return [Task(id=f"h-{split}", env_name="h", split=split, seed=0)]
    def reset(self, task): return Observation(text="start")
    def step(self, action):
        while not os.path.exists(action): time.sleep(0.01)
        return Transition(observation=Observation(text="end"), reward=0.0, terminated=False, truncated=False, won=False)
    def close(self): pass
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A step waits until the file that it names is there."""
    (tmp_path / "hanging_far_away.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "hanging_far_away:Hanging"


def test_a_place_whose_process_hangs_is_nobodys_until_it_has_answered(hanging: str, tmp_path: Path) -> None:
    task = {"id": "h-train", "split": "train", "seed": 0, "data": {}}

    async def play() -> list[tuple[int, dict[str, object]]]:
        there = Server(hanging, {}, processes=2, answer_timeout_s=60.0)
        url = f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"

        async def began() -> dict[str, object]:
            _, created = await asyncio.to_thread(ask, url, "create", {})
            answer = asyncio.to_thread(ask, url, "reset", created | {"task": task})
            assert (await asyncio.wait_for(answer, timeout=30.0))[0] == 200
            return created

        try:
            first = await began()
            step = asyncio.create_task(asyncio.to_thread(ask, url, "step", first | {"action": str(tmp_path / "end")}))
            while there._pool.slowest() is None:
                await asyncio.sleep(0.01)
            closed = await asyncio.to_thread(ask, url, "close", first)
            await began()
            assert not step.done()
            (tmp_path / "end").touch()
            return [closed, await step]
        finally:
            (tmp_path / "end").touch()
            await there.close()

    closed, (status, answer) = asyncio.run(play())
    assert closed == (200, {})
    assert status == 200 and answer["observation"]["text"] == "end"  # type: ignore[index]


def test_who_only_lived_in_a_process_that_hung_is_not_at_fault(hanging: str, tmp_path: Path) -> None:
    async def play() -> list[BaseException | object]:
        there = Server(hanging, {}, processes=1, answer_timeout_s=2.0)
        options = {"url": f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"}
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0)
        task = list_tasks(hanging, {})["train"][0]
        try:
            async with pool.environment() as first, pool.environment() as second:
                await first.reset(task)
                await second.reset(task)
                hung = asyncio.create_task(first.step(str(tmp_path / "never")))
                while there._pool.slowest() is None:
                    await asyncio.sleep(0.01)
                return await asyncio.gather(hung, second.step(str(tmp_path)), return_exceptions=True)
        finally:
            pool.close()
            await there.close()

    hung, bystander = asyncio.run(play())
    assert isinstance(hung, EnvironmentDied) and isinstance(bystander, EnvironmentDied)
    assert "did not answer within 2 s and was killed" in str(hung)
    assert (hung.at_fault, bystander.at_fault) == (True, False)


def test_a_close_that_is_not_answered_is_given_up_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(closing, "CLOSE_TIMEOUT_S", 0.05)

    async def fails() -> None:
        raise OSError("no route")

    async def play() -> None:
        closing.close_soon(asyncio.sleep(3600), what="the slow one")
        closing.close_soon(fails(), what="the broken one")
        while closing._CLOSING:
            await asyncio.sleep(0.01)

    asyncio.run(play())
    said = sorted(capsys.readouterr().err.splitlines())
    assert said == [
        "the broken one was not closed: OSError('no route')",
        "the slow one was not closed: no answer within 0.05 s",
    ]


AGENT = """
from envs import Task
class Agent:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options): return [Task(id=f"a-{split}", env_name="a", split=split, seed=0)]
    def run(self, task, client): pass
"""


def test_a_start_that_fails_prints_the_traceback_before_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_late_agent.py").write_text(AGENT.replace("return [Task", "raise KeyError(split); [Task"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["server", "a_late_agent:Agent", "{}", "0"])
    with pytest.raises(SystemExit):
        main()
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith("error: env.name=a_late_agent:Agent: listing its tasks failed: KeyError: 'train', at ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["key_room", "{seed: 0}", "0"], "'{seed: 0}' is no JSON object such as"),
        (["key_room", "[]", "0"], "'[]' is no JSON object such as"),
        (["keyroom", "{}", "0"], "error: env.name: unknown environment 'keyroom': did you mean 'key_room'?"),
        (["an_agent:Agent", "{}", "0"], "error: an_agent:Agent is an agent program, and only what has"),
        (["key_room", "{}", "PORT"], "error: cannot listen on 127.0.0.1:PORT ("),
        (["key_room", "{}", "99999"], "error: cannot listen on 127.0.0.1:99999 ("),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "an_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["server", *(port if argument == "PORT" else argument for argument in arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and complaint.replace("PORT", port) in error[-1]
    assert len(error) == 1 or error[0].startswith("usage:")
