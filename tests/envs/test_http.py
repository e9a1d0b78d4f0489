"""An environment over HTTP: the same answers as without, and errors that say what the server
said.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import traceback
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from aiohttp import web

from envs import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentPool,
    Task,
    environment_class,
    list_tasks,
)
from envs.adapters import common
from envs.adapters import http_client as remote
from envs.adapters.http_client import (
    KEY_VARIABLE,
    MAX_ANSWER_VALUES,
    MAX_LIST_VALUES,
    RemoteEnv,
)
from envs.hosting import http_requests, http_server
from envs.hosting.http_server import LISTENING, Server, main
from tests.envs.test_pool import BROKEN

ROOT = Path(__file__).resolve().parents[2]
ACTIONS = ["go east", "nonsense", "go west", "go west", "take key"]
KeyRoom = environment_class("key_room")
KEY = "a secret of this test"
HALF_A_BODY = (
    f"POST /tasks HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    "Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
).encode()


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        yield KEY


def serving(
    name: str,
    options: Mapping[str, object],
    *,
    processes: int,
    answer_timeout_s: float,
    sessions: int = 64,
) -> Server:
    return Server(
        name,
        options,
        processes=processes,
        answer_timeout_s=answer_timeout_s,
        key=KEY,
        max_sessions=sessions,
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """`python -P -m envs.hosting.http_server`, as users start it."""
    command = [
        sys.executable,
        "-m",
        "envs.hosting.http_server",
        "key_room",
        "{}",
        "0",
        "--processes",
        "1",
    ]
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
            return [
                await environment.reset(task),
                *[await environment.step(action) for action in ACTIONS],
            ]

    async def all_of_them() -> list[list[object]]:
        pool = EnvironmentPool("remote", {"url": url}, processes=1, answer_timeout_s=20.0)
        try:
            return await asyncio.gather(*(episode(pool, tasks[number]) for number in numbers))
        finally:
            pool.close()

    return asyncio.run(all_of_them())


def played_here(number: int) -> list[object]:
    env = KeyRoom({})
    return [
        env.reset(KeyRoom.tasks("train", {})[number]),
        *[env.step(action) for action in ACTIONS],
    ]


JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


def ask(
    url: str, verb: str, body: object, headers: Mapping[str, str] = JSON
) -> tuple[int, dict[str, object]]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{verb}", sent, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_answers_over_http_as_without(url: str) -> None:
    assert play(url, *range(8)) == [played_here(number) for number in range(8)]
    for split, tasks in list_tasks("remote", {"url": url}).items():
        here = KeyRoom.tasks(split, {})
        assert [(t.id, t.split, t.seed, t.data) for t in tasks] == [
            (t.id, t.split, t.seed, t.data) for t in here
        ]
        assert all(task.env_name == "remote" for task in tasks)


def test_the_requests_are_as_documented(url: str) -> None:
    task = {
        "id": "key_room-train-1",
        "env_name": "any",
        "split": "train",
        "seed": 1,
        "data": {"start": "not looked at"},
    }
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
        "reward": 0.0, "terminated": False, "truncated": False, "won": False, "valid": True,
        "task_score": None,
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
def test_a_wrong_request_is_answered_in_one_line(
    url: str, verb: str, body: object, status: int, complaint: str
) -> None:
    code, answer = ask(url, verb, body)
    assert code == status and complaint in str(answer["error"]) and "\n" not in str(answer["error"])


def test_a_step_before_the_first_reset_is_refused_in_one_line(url: str) -> None:
    _, session = ask(url, "create", {})
    status, answer = ask(url, "step", {"id": session["id"], "action": "look"})
    assert (status, answer["error"]) == (409, "the session has no episode yet; POST /reset first")
    assert ask(url, "close", {"id": session["id"]})[0] == 200


def test_nobody_there_is_said_before_anything_starts() -> None:
    with pytest.raises(
        EnvironmentFailed,
        match=r"remote environment http://127.0.0.1:1/tasks gives no tasks: .*is it up\?",
    ):
        list_tasks("remote", {"url": "http://127.0.0.1:1"})


def test_an_error_there_is_the_episodes_error_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_far_away.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def play() -> None:
        there = serving("broken_far_away:Broken", {}, processes=1, answer_timeout_s=20.0)
        options = {"url": f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"}
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0)
        task = Task(id="b-train", env_name="remote", split="train", seed=0)
        try:
            async with pool.environment() as environment:
                await environment.reset(task)
                error = (
                    r"'remote' failed in step 'open' .*500: .*no such door: open, at .*:9 in step; "
                    "the server printed"
                )
                with pytest.raises(EnvironmentDied, match=error):
                    await environment.step("open")
            # and the next episode is none the worse for it
            async with pool.environment() as environment:
                assert (await environment.reset(task)).text == "start"
        finally:
            pool.close()
            await there.close()

    asyncio.run(play())


@pytest.mark.parametrize("reward", ["1e150", "1e308", "-1.7e307", "1" + "0" * 400])
def test_a_server_that_answers_a_reward_beyond_learning_fails_its_episode(reward: str) -> None:
    said = {
        "tasks": '{"tasks": [{"id": "t", "split": "train", "seed": 0, "data": {}}]}',
        "create": '{"id": "1"}',
        "reset": '{"text": "start", "objective": ""}',
        "step": '{"observation": {"text": "end", "objective": ""}, "reward": '
        + reward
        + ', "terminated": true, "truncated": false, "won": true, "valid": true}',
        "close": "{}",
    }

    async def answer(request: web.Request) -> web.Response:
        text = said[request.path.strip("/")]
        return web.Response(text=text, content_type="application/json")

    async def play() -> None:
        app = web.Application()
        app.router.add_route("*", "/{verb}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        options = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(Task(id="t", env_name="remote", split="train", seed=0))
                with pytest.raises(
                    EnvironmentDied, match=r"reward=.*at most 1e\+12 in size"
                ) as died:
                    await environment.step("go")
                assert died.value.at_fault
        finally:
            pool.close()
            await runner.cleanup()

    asyncio.run(play())


def test_an_episode_the_server_has_given_up_fails_and_the_next_one_begins_anew() -> None:
    tasks = KeyRoom.tasks("train", {})

    async def play() -> None:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0)
        options = {"url": f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"}
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(tasks[0])
                await there.end_idle_sessions(idle_s=3600.0)
                assert (await environment.step("go east")).valid
                await there.end_idle_sessions(idle_s=0.0)
                assert (await environment.reset(tasks[1])).text == KeyRoom({}).reset(tasks[1]).text
                await there.end_idle_sessions(idle_s=0.0)
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
    def tasks(cls, split, options):
        return [Task(id=f"h-{split}", env_name="h", split=split, seed=0)]
    def reset(self, task): return Observation(text="start")
    def step(self, action):
        while not os.path.exists(action): time.sleep(0.01)
        return Transition(
            observation=Observation(text="end"),
            reward=0.0, terminated=False, truncated=False, won=False)
    def close(self): pass
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A step waits until the file that it names is there."""
    (tmp_path / "hanging_far_away.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "hanging_far_away:Hanging"


def test_a_place_whose_process_hangs_is_nobodys_until_it_has_answered(
    hanging: str, tmp_path: Path
) -> None:
    task = {"id": "h-train", "split": "train", "seed": 0, "data": {}}

    async def play() -> list[tuple[int, dict[str, object]]]:
        there = serving(hanging, {}, processes=2, answer_timeout_s=60.0)
        url = f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"

        async def began() -> dict[str, object]:
            _, created = await asyncio.to_thread(ask, url, "create", {})
            answer = asyncio.to_thread(ask, url, "reset", created | {"task": task})
            assert (await asyncio.wait_for(answer, timeout=30.0))[0] == 200
            return created

        try:
            first = await began()
            step = asyncio.create_task(
                asyncio.to_thread(ask, url, "step", first | {"action": str(tmp_path / "end")})
            )
            while there._pool.oldest() is None:
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


def test_who_only_lived_in_a_process_that_hung_is_not_at_fault(
    hanging: str, tmp_path: Path
) -> None:
    async def play() -> list[BaseException | object]:
        there = serving(hanging, {}, processes=1, answer_timeout_s=2.0)
        options = {"url": f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"}
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0)
        task = list_tasks(hanging, {})["train"][0]
        try:
            async with pool.environment() as first, pool.environment() as second:
                await first.reset(task)
                await second.reset(task)
                hung = asyncio.create_task(first.step(str(tmp_path / "never")))
                while there._pool.oldest() is None:
                    await asyncio.sleep(0.01)
                return await asyncio.gather(
                    hung, second.step(str(tmp_path)), return_exceptions=True
                )
        finally:
            pool.close()
            await there.close()

    hung, bystander = asyncio.run(play())
    assert isinstance(hung, EnvironmentDied) and isinstance(bystander, EnvironmentDied)
    assert "did not answer within 2 s and was killed" in str(hung)
    assert (hung.at_fault, bystander.at_fault) == (True, False)
    assert hung.ended_process and bystander.ended_process


def test_a_close_that_is_not_answered_is_given_up_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "CLOSE_TIMEOUT_S", 0.05)

    async def fails() -> None:
        raise OSError("no route")

    async def play() -> None:
        common.close_soon(asyncio.sleep(3600), name="the slow one")
        common.close_soon(fails(), name="the broken one")
        while common._CLOSING:
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
    def tasks(cls, split, options):
        return [Task(id=f"a-{split}", env_name="a", split=split, seed=0)]
    def run(self, task, client): pass
"""


def test_a_start_that_fails_prints_the_traceback_before_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_late_agent.py").write_text(
        AGENT.replace("return [Task", "raise KeyError(split); [Task")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["server", "a_late_agent:Agent", "{}", "0"])
    with pytest.raises(SystemExit):
        main()
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith(
        "error: env.name=a_late_agent:Agent: listing its tasks failed: KeyError: 'train', at "
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["key_room", "{seed: 0}", "0"], "'{seed: 0}' is no JSON object such as"),
        (["key_room", "[]", "0"], "'[]' is no JSON object such as"),
        (
            ["keyroom", "{}", "0"],
            "error: env.name: unknown environment 'keyroom': did you mean 'key_room'?",
        ),
        (
            ["an_agent:Agent", "{}", "0"],
            "error: an_agent:Agent is an agent program, and only what has",
        ),
        (["key_room", "{}", "PORT"], "error: cannot listen on 127.0.0.1:PORT ("),
        (["key_room", "{}", "99999"], "error: cannot listen on 127.0.0.1:99999 ("),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "an_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(
            sys,
            "argv",
            ["server", *(port if argument == "PORT" else argument for argument in arguments)],
        )
        with pytest.raises(SystemExit) as ended:
            main()
    error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and complaint.replace("PORT", port) in error[-1]
    assert len(error) == 1 or error[0].startswith("usage:")


CORPUS_OPTIONS = {
    "questions": [str(ROOT / "docs/examples/search/questions.jsonl")],
    "train_sources": ["countries"],
    "heldout_sources": ["countries"],
    "heldout_limit": 0,
    "topk": 5,
    "corpus": str(ROOT / "docs/examples/search/corpus.jsonl"),
    "list_actions": False,
}


def test_a_client_cannot_say_what_is_in_a_task(tmp_path: Path) -> None:
    """The attack: a task of the client's own makes the server read a file and show it as a
    passage.
    """
    secret = tmp_path / "secret.jsonl"
    secret.write_text(
        json.dumps({"id": "0", "contents": '"Password"\nthe password is swordfish'}) + "\n"
    )
    task = {
        "id": "mine",
        "split": "train",
        "seed": 0,
        "data": {"question": "?", "golden_answers": "[]", "corpus": str(secret)},
    }

    async def attack() -> list[tuple[int, dict[str, object]]]:
        there = serving("search_local", CORPUS_OPTIONS, processes=1, answer_timeout_s=20.0)
        url = f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"
        answers = []
        try:
            for asked in (task, {**task, "id": there._tasks["train"][0].id}):
                _, created = await asyncio.to_thread(ask, url, "create", {})
                answers.append(
                    await asyncio.to_thread(ask, url, "reset", created | {"task": asked})
                )
                search = created | {"action": "<search>password</search>"}
                answers.append(await asyncio.to_thread(ask, url, "step", search))
        finally:
            await there.close()
        return answers

    unlisted, _, listed, searched = asyncio.run(attack())
    assert unlisted[0] == 400 and "this server lists no task 'mine'" in str(unlisted[1]["error"])
    assert (listed[0], searched[0]) == (200, 200)
    assert "swordfish" not in json.dumps(searched)


@pytest.mark.parametrize(
    ("headers", "status", "complaint"),
    [
        ({"Authorization": ""}, 401, "the API key is missing or wrong"),
        ({"Authorization": "Bearer another"}, 401, "the API key is missing or wrong"),
        ({"Authorization": f"Bearer {KEY}\u00e9"}, 401, "the API key is missing or wrong"),
        ({"Origin": "https://a.site"}, 403, "not for pages of a browser"),
        ({"Origin": "null"}, 403, "not for pages of a browser"),
        ({"Content-Type": "text/plain"}, 415, "/create takes application/json, not 'text/plain'"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "takes application/json"),
    ],
)
def test_a_stranger_is_refused(
    url: str, headers: dict[str, str], status: int, complaint: str
) -> None:
    code, answer = ask(url, "create", {}, JSON | headers)
    assert code == status and complaint in str(answer["error"])


def test_a_stranger_keeps_no_connection(url: str) -> None:
    """The attack: one connection after the other, held open without a key."""
    host, _, port = url.removeprefix("http://").partition(":")
    request = b"POST /tasks HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as stranger:
        stranger.sendall(request * 3)
        answer = b"".join(iter(lambda: stranger.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 401") == 1 and b"Connection: close" in answer


def test_what_a_stranger_sends_after_his_refusal_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: a body in chunks of one byte, which was read for 10 s more."""
    monkeypatch.setattr(http_requests, "LINGERING_S", 1000.0)
    head = b"POST /tasks HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def attack() -> bytes:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0)
        port = await there.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head + 10 * b"1\r\na\r\n")
            async with asyncio.timeout(60.0):
                return await reader.read()
        finally:
            writer.close()
            await there.close()

    assert b" 401 " in asyncio.run(attack())


def test_clients_are_read_in_turn_and_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: 256 KiB of a body in chunks of one byte kept all others waiting for 30 ms."""
    lengths, data_received = [], web.RequestHandler.data_received

    def received(self: web.RequestHandler, data: bytes) -> None:
        lengths.append(len(data))
        data_received(self, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", received)

    async def ask_once() -> int:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0)
        url = f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"
        try:
            return (await asyncio.to_thread(ask, url, "close", {"id": "x" * 1_000_000}))[0]
        finally:
            await there.close()

    assert asyncio.run(ask_once()) == 404
    assert sum(lengths) > 1_000_000 and max(lengths) <= http_requests.READ_BYTES


@pytest.mark.parametrize(
    ("verb", "body", "status", "complaint"),
    [
        ("tasks", b"[" * 200_000, 400, "/tasks needs a JSON object"),
        ("tasks", b"\xff", 400, "/tasks needs a JSON object"),
        ("tasks", {"split": "x" * 10_000}, 400, "xxx...' is not one of"),
        ("reset", {"id": "0", "task": {"id": {"a": 1}}}, 400, "this server lists no task"),
        (
            "reset",
            {"id": "0", "task": {"id": "key_room-train-1", "seed": 7}},
            400,
            "has seed=1 on this server, not '7'",
        ),
        (
            "reset",
            {"id": "0", "task": {"id": "key_room-train-1", "split": "heldout"}},
            400,
            "has split='train' on this server",
        ),
        (
            "step",
            {"id": "0", "action": "x" * 1_000_001},
            400,
            "the action has 1,000,001 characters; send at most 1,000,000",
        ),
        ("nothing", {}, 404, "POST /nothing: Not Found"),
        ("tasks", b"[" + b"[]," * 2**17 + b"[]]", 413, "more than 262144 values; send fewer"),
        ("tasks", b"0" * (http_requests.MAX_BODY_BYTES + 1), 413, "has more than 16,777,216 bytes"),
    ],
)
def test_a_hostile_request_is_answered_in_one_short_line(
    url: str, verb: str, body: object, status: int, complaint: str
) -> None:
    code, answer = ask(url, verb, body)
    assert code == status and complaint in str(answer["error"])
    assert len(str(answer["error"])) < 1000 and "\n" not in str(answer["error"])


def test_a_client_has_no_more_episodes_than_the_server_holds() -> None:
    async def attack() -> list[tuple[int, dict[str, object]]]:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0, sessions=2)
        url = f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"
        try:
            created = [await asyncio.to_thread(ask, url, "create", {}) for _ in range(3)]
            await asyncio.to_thread(ask, url, "close", created[0][1])
            while there._ending:
                await asyncio.sleep(0.01)
            return [*created, await asyncio.to_thread(ask, url, "create", {})]
        finally:
            await there.close()

    first, second, third, after = asyncio.run(attack())
    assert (first[0], second[0], third[0], after[0]) == (200, 200, 503, 200)
    assert "all 2 sessions of this server are taken" in str(third[1]["error"])


def test_the_actions_that_episodes_keep_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: an episode without an end took a megabyte with each step, 4 GB in a minute."""
    monkeypatch.setattr(http_server, "MAX_EPISODE_CHARACTERS", 2500)
    monkeypatch.setattr(http_server, "OWN_CHARACTERS", 1500)
    monkeypatch.setattr(http_server, "MAX_SHARED_CHARACTERS", 1000)
    action = "x" * 500  # 1000 with CHARACTERS_OF_A_STEP

    async def attack() -> None:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0)
        url = f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"

        async def told(verb: str, **body: object) -> tuple[int, str]:
            status, answer = await asyncio.to_thread(ask, url, verb, body)
            return status, str(answer.get("error", answer.get("id", "")))

        async def episode() -> str:
            _, session = await told("create")
            assert await told("reset", id=session, task={"id": "key_room-train-1"}) == (200, "")
            return session

        try:
            sessions = [await episode() for _ in range(3)]
            for session in sessions[:2]:
                assert [(await told("step", id=session, action=action))[0] for _ in range(2)] == [
                    200,
                    200,
                ]
                status, complaint = await told("step", id=session, action=action)
                assert status == 400 and "have more than 2,500 characters together" in complaint
            # Two have 500 more than their own, which is all that there is. The third has its own.
            assert (await told("step", id=sessions[2], action=action))[0] == 200
            assert await told("step", id=sessions[2], action=action) == (
                503,
                "the server has too many requests now; ask again later",
            )
            for _ in range(3):
                await told("reset", id=sessions[0], task={"id": "key_room-train-1"})
                for _ in range(2):
                    assert (await told("step", id=sessions[0], action=action))[0] == 200
            for session in sessions[:2]:
                await told("close", id=session)
            while there._ending:
                await asyncio.sleep(0.01)
            assert (await told("step", id=sessions[2], action=action))[0] == 200
            for session in there._sessions.values():
                assert (session.n_held, session.n_kept) == (2000, 2000)
            assert there._shared._left == 1000 - 500
            monkeypatch.setattr(http_server, "MAX_ANSWER_BYTES", -1)
            await told("reset", id=sessions[2], task={"id": "key_room-train-1"})
            status, complaint = await told("step", id=sessions[2], action="up")
            assert status == 503 and "the running episodes keep too many answers" in complaint
        finally:
            await there.close()

    asyncio.run(attack())


def test_the_bodies_of_all_clients_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: 160 bodies of 16 MiB that did not end took 2.6 GB."""
    monkeypatch.setattr(http_server, "MAX_BODIES_BYTES", 150_000)

    async def attack() -> None:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0)
        port = await there.start("127.0.0.1", 0)
        head = f"POST /tasks HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 100001\r\n\r\n"
        held = []
        try:
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head.encode() + b"a" * 100_000)
                held.append((reader, writer))
            answers = [asyncio.create_task(reader.readline()) for reader, _ in held]
            done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            assert [b" 503 " in each.result() for each in done] == [True] and len(waiting) == 1
            for each in waiting:
                each.cancel()
        finally:
            for _, writer in held:
                writer.close()
            await there.close()

    asyncio.run(asyncio.wait_for(attack(), 60))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /create HTTP/1.1\r\nHost: a\r\nX: ",
        HALF_A_BODY,
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_who_sends_half_a_request_is_disconnected(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_requests, "READ_TIMEOUT_S", 0.1)

    async def attack() -> bytes:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", await there.start("127.0.0.1", 0)
        )
        try:
            writer.write(sent)
            async with asyncio.timeout(30.0):
                return await reader.read()
        finally:
            writer.close()
            await there.close()

    answer = asyncio.run(attack())
    assert answer == b"" or (b" 408 " in answer and b"did not come within 0.1 s" in answer)


@pytest.mark.parametrize(
    "sent",
    [b"", HALF_A_BODY],
    ids=["nothing", "half a body"],
)
def test_of_too_many_clients_the_one_that_waits_for_no_answer_is_disconnected(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a neighbour held 4,096 connections to an endpoint, and ended the run."""
    monkeypatch.setattr(http_requests, "MAX_CONNECTIONS", 2)

    async def attack() -> tuple[bytes, bool]:
        there = serving("key_room", {}, processes=1, answer_timeout_s=20.0)
        port = await there.start("127.0.0.1", 0)
        request = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        clients = []
        try:
            for _ in range(3):
                clients.append(await asyncio.open_connection("127.0.0.1", port))
                clients[0][1].write(sent if len(clients) == 1 else b"")
                await asyncio.sleep(0.1)  # until the server has read it
            is_lost = await _lost(clients[0][0])
            clients[2][1].write(request)
            return await clients[2][0].read(), is_lost
        finally:
            for _, writer in clients:
                writer.close()
            await there.close()

    served, is_lost = asyncio.run(attack())
    assert b" 401 " in served and is_lost


async def _lost(reader: asyncio.StreamReader) -> bool:
    """Tell whether the other end closed the connection without a word."""
    try:
        async with asyncio.timeout(30.0):
            return await reader.read() == b""
    except ConnectionResetError:
        return True


def test_a_server_that_sends_the_client_elsewhere_does_not_get_it_to_take_the_key_there() -> None:
    seen: list[str] = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{request.url.port}/elsewhere")

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization", ""))
        return web.json_response({"id": "1"})

    async def play() -> None:
        app = web.Application()
        app.router.add_route("*", "/elsewhere", elsewhere)
        app.router.add_post("/{verb}", redirect)
        runner = await http_requests.listen(app, "127.0.0.1", 0)
        options = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        try:
            with pytest.raises(ValueError, match="the server answers 307"):
                await asyncio.to_thread(RemoteEnv.tasks, "train", options)
            env = RemoteEnv(options)
            with pytest.raises(EnvironmentDied, match="the server answers 307"):
                await env.reset(KeyRoom.tasks("train", {})[0])
            env.close()
        finally:
            await runner.cleanup()

    asyncio.run(play())
    assert not seen


def test_an_error_of_a_server_is_one_printable_line_of_the_log(tmp_path: Path) -> None:
    """The attack: a line feed in it made a line of its own, as if the worker had written it."""
    error = "no\x1b[2J\n2026-01-01 00:00:00 worker-0: all is well"
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 500 Error\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    log = tmp_path / "a.log"

    async def play(options: dict[str, object]) -> None:
        pool = EnvironmentPool("remote", options, processes=1, answer_timeout_s=20.0, log=log)
        try:
            async with pool.environment() as environment:
                await environment.reset(KeyRoom.tasks("train", {})[0])
        finally:
            pool.close()

    with (
        Raw(head.encode() + body) as server,
        pytest.raises(EnvironmentDied, match=r"no.\[2J 2026-01-01 00:00:00 worker-0: all is well"),
    ):
        asyncio.run(play(server.options))
    assert "\x1b" not in log.read_text()
    assert not [line for line in log.read_text().splitlines() if line.startswith("2026-01-01")]


@pytest.mark.parametrize(("status", "at_fault"), [("503 Unavailable", False), ("400 Bad", True)])
def test_a_task_is_not_to_blame_for_a_server_that_others_fill(status: str, at_fault: bool) -> None:
    body = b'{"error": "the running episodes keep too many answers"}'
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"

    async def play() -> None:
        env = RemoteEnv(server.options)
        try:
            await env.reset(KeyRoom.tasks("train", {})[0])
        finally:
            env.close()

    with Raw(head.encode() + body) as server, pytest.raises(EnvironmentDied) as died:
        asyncio.run(play())
    assert died.value.at_fault == at_fault


def test_a_server_that_sets_cookies_without_end_is_sent_none() -> None:
    sent: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Cookie", ""))
        verb = request.match_info["verb"]
        response = web.json_response({"id": "1"} if verb == "create" else {"text": "here"})
        response.set_cookie(f"c{len(sent)}", "x" * 2000)
        return response

    async def play() -> None:
        app = web.Application()
        app.router.add_post("/{verb}", answer)
        runner = await http_requests.listen(app, "127.0.0.1", 0)
        # aiohttp keeps no cookies of a bare address
        env = RemoteEnv({"url": f"http://localhost:{runner.addresses[0][1]}"})
        try:
            for _ in range(3):
                await env.reset(KeyRoom.tasks("train", {})[0])
            env.close()
        finally:
            await runner.cleanup()

    asyncio.run(play())
    assert len(sent) >= 4 and not any(sent)


@pytest.mark.parametrize("status", ["200 OK", "500 Error"])
def test_an_answer_of_many_values_is_not_parsed(status: str) -> None:
    body = b"[" + b"[]," * (MAX_ANSWER_VALUES // 2) + b"[]]"
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    complaint = "more than 2097152 values" if status == "200 OK" else r"answers 500: \[\[\],\["

    async def play() -> None:
        env = RemoteEnv(server.options)
        try:
            await env.reset(KeyRoom.tasks("train", {})[0])
        finally:
            env.close()

    with (
        Raw(head.encode() + body) as server,
        pytest.raises(EnvironmentDied, match=complaint) as error,
    ):
        asyncio.run(play())
    assert len(str(error.value)) < 1200


def test_a_list_of_tasks_of_many_values_is_not_parsed() -> None:
    """The attack: empty objects took 26 times their bytes, before the list was refused."""
    body = b'{"tasks": [' + b"{}," * (MAX_LIST_VALUES // 2) + b"{}]}"
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with (
        Raw(head.encode() + body) as server,
        pytest.raises(ValueError, match="gives no tasks: .*more than 4194304 values"),
    ):
        RemoteEnv.tasks("train", server.options)


def test_the_key_is_named_and_never_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(
        ValueError, match="remote option api_key_env=NOT_SET is not set in the environment"
    ):
        RemoteEnv({"url": "http://127.0.0.1:1", "api_key_env": "NOT_SET"})
    with pytest.raises(
        ValueError, match="must be a URL like http://HOST:PORT, without a name or password"
    ):
        RemoteEnv({"url": "http://me:secret@127.0.0.1:1"})
    monkeypatch.setattr(sys, "argv", ["server", "key_room", "{}", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (
        ended.value.code == 2
        and f"no API key: export {KEY_VARIABLE}=SECRET" in capsys.readouterr().err
    )


def test_a_client_without_the_key_is_told_which_variable_has_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "another")
    with pytest.raises(
        EnvironmentFailed,
        match=f"401: the API key is missing or wrong.* is the key in {KEY_VARIABLE}",
    ):
        list_tasks("remote", {"url": url})
    monkeypatch.setenv("MY_KEY", KEY)
    assert list_tasks("remote", {"url": url, "api_key_env": "MY_KEY"})["train"]


class Raw:
    """A server that answers every connection with these bytes, the last of them again and again."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.ended = pieces, threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.options = {"url": f"http://127.0.0.1:{self.socket.getsockname()[1]}"}
        self.thread = threading.Thread(target=self.serve)

    def serve(self) -> None:
        while not self.ended.is_set():
            with contextlib.suppress(OSError):
                client, _ = self.socket.accept()
                with client:
                    client.recv(65536)
                    client.sendall(b"".join(self.pieces))
                    while len(self.pieces) > 1 and not self.ended.wait(0.02):
                        client.sendall(self.pieces[-1])

    def __enter__(self) -> Raw:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        with socket.create_connection(self.socket.getsockname()):  # wakes the one that accepts
            pass
        self.thread.join()
        self.socket.close()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{", b" "),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n",) * 2,
    ],
    ids=["body", "header", "continue"],
)
def test_a_list_that_comes_a_byte_at_a_time_is_given_up(
    pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LIST_TIMEOUT_S", 0.5)
    with Raw(*pieces) as server:
        found: list[str] = []

        def listed() -> None:
            try:
                list_tasks("remote", server.options)
            except EnvironmentFailed as error:
                found.append(str(error))

        thread = threading.Thread(target=listed, daemon=True)
        thread.start()
        thread.join(timeout=30.0)
        assert found and "gives no tasks" in found[0] and "\n" not in found[0]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("500 x", json.dumps({"error": f"you sent {KEY}"})),
        ("500 x", '{"error": "you sent \\u0061' + KEY[1:] + '"}'),
        ("500 x", "x" * 190 + KEY),
        (f"200 {KEY}\x00", ""),
        ("200 OK", json.dumps({"tasks": [{KEY: 1}]})),
    ],
)
def test_a_server_that_repeats_the_key_does_not_get_it_written(status: str, body: str) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with Raw((head + body).encode()) as server:
        with pytest.raises(EnvironmentFailed) as listing:
            list_tasks("remote", server.options)
        assert KEY[:5] not in "".join(traceback.format_exception(listing.value))

        async def play() -> None:
            env = RemoteEnv(server.options)
            try:
                await env.reset(KeyRoom.tasks("train", {})[0])
            finally:
                env.close()

        if status.startswith("500"):
            with pytest.raises(EnvironmentDied) as playing:
                asyncio.run(play())
            assert KEY[:5] not in str(playing.value)


@pytest.mark.parametrize(
    "answer",
    [
        f"HTTP/1.1 200 OK\r\nAuthorization Bearer {KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{KEY}\r\n",
        f"{KEY}\r\n\r\n",
        "",
    ],
    ids=["head", "chunk", "status", "nothing"],
)
def test_an_answer_that_is_no_http_writes_neither_key_nor_query(answer: str) -> None:
    """The attack: aiohttp quotes the URL and what came, and the key was in the run's events."""

    async def play(options: dict[str, str]) -> None:
        env = RemoteEnv(options)
        try:
            await env.reset(KeyRoom.tasks("train", {})[0])
        finally:
            env.close()

    with Raw(answer.encode()) as server:
        options = {"url": f"{server.options['url']}/x?api_key=5ecret"}
        with pytest.raises(ConnectionError, match=r"/x gave no answer [(]\w+") as refused:
            asyncio.run(asyncio.wait_for(play(options), 60))
        with pytest.raises(EnvironmentFailed) as listing:
            list_tasks("remote", options)
    for error in (refused.value, listing.value):
        told = "".join(traceback.format_exception(error))
        assert KEY[:5] not in told and "5ecret" not in told


@pytest.mark.parametrize("given", ["x" * 201, 7, ["x"]])
def test_the_id_of_a_session_is_a_short_text(given: object) -> None:
    """The attack: one of 30 million characters was kept, and sent with each step."""
    body = json.dumps({"id": given}).encode()
    with Raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as server:

        async def play() -> None:
            env = RemoteEnv(server.options)
            try:
                await env.reset(KeyRoom.tasks("train", {})[0])
            finally:
                env.close()

        with pytest.raises(EnvironmentDied, match="id is no text of at most 200 characters"):
            asyncio.run(asyncio.wait_for(play(), 60))


ADDER = """
from envs import Observation, Task, Transition
class Adder:
    deterministic = True
    def __init__(self, options): self.text = "nobody"
    @classmethod
    def tasks(cls, split, options): return [Task(id=split, env_name="", split=split, seed=0)]
    def reset(self, task):
        self.text = task.id
        return Observation(text=self.text)
    def step(self, action):
        self.text += str(int(action))  # raises for what is no number
        return Transition(observation=Observation(text=self.text), reward=0.0, terminated=False,
                          truncated=False, won=False, valid=True)
    def close(self): pass
"""


def test_after_an_error_no_client_gives_the_others_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a new object, which was never reset, answered for the task of all."""
    (tmp_path / "adder_world.py").write_text(ADDER)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def attack() -> list[str]:
        pool = EnvironmentPool("adder_world:Adder", {}, processes=1, answer_timeout_s=20.0)
        task = Task(id="train", env_name="adder_world:Adder", split="train", seed=0)
        try:
            async with pool.environment() as one:
                await one.reset(task)
                for action in ("x", "5"):
                    with pytest.raises(EnvironmentDied):
                        await one.step(action)
                first = await one.reset(task)
                second = await one.step("5")
            async with pool.environment() as other:
                await other.reset(task)
                third = await other.step("5")
            return [first.text, second.observation.text, third.observation.text]
        finally:
            pool.close()

    assert asyncio.run(attack()) == ["train", "train5", "train5"]


def test_after_an_error_a_session_is_reset_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adder_world.py").write_text(ADDER)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def attack() -> list[tuple[int, dict[str, object]]]:
        there = serving("adder_world:Adder", {}, processes=1, answer_timeout_s=20.0)
        url = f"http://127.0.0.1:{await there.start('127.0.0.1', 0)}"

        async def post(verb: str, **fields: object) -> tuple[int, dict[str, object]]:
            return await asyncio.to_thread(ask, url, verb, fields)

        try:
            (_, created) = await post("create")
            begin = {"id": created["id"], "task": {"id": "train"}}
            return [
                await post("reset", **begin),
                await post("step", id=created["id"], action="x"),
                await post("step", id=created["id"], action="5"),
                await post("reset", **begin),
                await post("step", id=created["id"], action="5"),
            ]
        finally:
            await there.close()

    answers = asyncio.run(attack())
    assert [status for status, _ in answers] == [200, 500, 409, 200, 200]
    assert "POST /reset first" in str(answers[2][1]["error"])
    assert "train5" in str(answers[4][1]["observation"])
