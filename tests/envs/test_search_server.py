"""Search-R1's retrieval protocol: our client, our server, and what becomes of a server that
fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from envs import EnvironmentDied, EnvironmentFailed, EnvironmentPool, try_environment
from envs.hosting import http_requests as http_server
from envs.search import client
from envs.search import server as search_server
from envs.search.client import MAX_ANSWER_VALUES, ask_server
from envs.search.corpus import MAX_QUERY_CHARACTERS, Corpus, Passage, bm25_corpus, bm25_index
from envs.search.server import application, load
from envs.search.world import show_passages
from tests.support.search_samples import CORPUS, ROOT, a_task, remote

RECORDED = json.loads((ROOT / "tests" / "data" / "search_r1_exchange.json").read_text())
(DOCUMENTS,) = RECORDED["response"]["result"]


def ours(corpus: Corpus) -> AbstractAsyncContextManager[TestServer]:
    return TestServer(application(corpus, topk=3))


def theirs(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AbstractAsyncContextManager[TestServer]:
    app = web.Application()
    app.router.add_post("/retrieve", answer)
    return TestServer(app)


def url_of(server: TestServer) -> str:
    return str(server.make_url("/retrieve"))


async def post(url: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.01, 0.02))


@pytest.fixture
def unused_url() -> Iterator[str]:
    # bound, so that nobody else is given the port, and listening to nobody
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{kept.getsockname()[1]}/retrieve"


def test_our_server_answers_a_recorded_request_as_search_r1_did() -> None:
    passages = [
        Passage(id=item["document"]["id"], contents=item["document"]["contents"])
        for item in DOCUMENTS
    ]
    found = [(item["document"]["id"], item["score"]) for item in DOCUMENTS]
    corpus = Corpus(passages[::-1], lambda queries, topk: [found[:topk] for _ in queries])

    async def ask() -> None:
        async with ours(corpus) as server:
            assert await post(url_of(server), RECORDED["request"]) == (200, RECORDED["response"])
            # without scores: the documents themselves
            bare = {"queries": RECORDED["request"]["queries"] * 2, "topk": 1}
            assert await post(url_of(server), bare) == (
                200,
                {"result": [[DOCUMENTS[0]["document"]]] * 2},
            )

    asyncio.run(ask())


def test_our_client_sends_that_request_and_understands_that_answer() -> None:
    requests = []

    async def answer(request: web.Request) -> web.Response:
        requests.append((request.content_type, await request.json()))
        return web.json_response(RECORDED["response"])

    async def ask() -> None:
        async with theirs(answer) as server:
            hits = await ask_server(url_of(server), RECORDED["request"]["queries"][0], topk=3)
        assert [(hit.passage.id, hit.score) for hit in hits] == [
            (item["document"]["id"], item["score"]) for item in DOCUMENTS
        ]
        assert show_passages(hits).splitlines()[2] == (
            'Doc 3(Title: "Kirsty MacColl") label shortly before the song was to be released.'
        )

    asyncio.run(ask())
    assert requests == [("application/json", RECORDED["request"])]


def test_round_trip() -> None:
    corpus = bm25_corpus(CORPUS)
    queries = ["Who wrote The Salt Year?", "", "zebra", 'O"Brien\n<the> \u6771\u4eac Tarn']

    async def ask() -> None:
        async with ours(corpus) as server:
            for query in queries:
                for topk in (1, 5):
                    assert (
                        await ask_server(url_of(server), query, topk=topk)
                        == corpus.search([query], topk)[0]
                    )
            status, answer = await post(url_of(server), {"queries": queries, "return_scores": True})
            assert status == 200
            assert [len(hits) for hits in answer["result"]] == [3, 0, 0, 3]  # the server's own topk

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ([], "the body must be"),
        ({"query": "x"}, "the body must be"),
        ({"queries": "x"}, "the body must be"),
        ({"queries": ["x", 1]}, "queries must be texts"),
        ({"queries": ["x"], "topk": -1}, "topk=-1 must be a whole number, at least 1"),
        ({"queries": ["x"], "topk": "3"}, "topk='3' must be"),
        (
            {"queries": ["x"], "topk": 10**9},
            "topk=1000000000 must be a whole number, at least 1 and at most 1000",
        ),
        ({"queries": ["x"] * 5000}, "5000 queries in one request; send at most 4096"),
    ],
)
def test_our_server_refuses_what_is_no_request(body: Any, complaint: str) -> None:
    async def ask() -> None:
        async with ours(bm25_corpus(CORPUS)) as server:
            status, answer = await post(url_of(server), body)
        assert status == 422
        assert complaint in answer["detail"]

    asyncio.run(ask())


def test_several_questions_are_in_flight() -> None:
    """Let a server answer only when eight have asked. One by one, no episode would ever end."""
    at_once, asking, all_ask = 8, [], asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asking.append((await request.json())["queries"][0])
        if len(asking) == at_once:
            all_ask.set()
        await all_ask.wait()
        return web.json_response(RECORDED["response"])

    async def play(pool: EnvironmentPool, number: int) -> bool:
        async with pool.environment() as environment:
            await environment.reset(a_task(f"question {number}?", [str(number)]))
            seen = await environment.step(f"<search>hint {number}</search>")
            assert "Kirsty MacColl" in seen.observation.text
            return (await environment.step(f"<answer>{number}</answer>")).won

    async def play_all() -> None:
        async with theirs(answer) as server:
            pool = EnvironmentPool(
                "search", remote(url_of(server)), processes=1, answer_timeout_s=30.0
            )
            assert (
                await asyncio.gather(*(play(pool, number) for number in range(at_once)))
                == [True] * at_once
            )
            pool.close()

    asyncio.run(play_all())
    assert sorted(asking[:at_once]) == [f"question {number}?" for number in range(at_once)]
    assert sorted(asking[at_once:]) == [f"hint {number}" for number in range(at_once)]


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_not_there_is_named_with_what_to_do(unused_url: str) -> None:
    with pytest.raises(ConnectionError, match="in 3 attempts over 0.03 s") as failure:
        asyncio.run(ask_server(unused_url, "x", topk=3))
    assert f"no retrieval server at {unused_url} " in str(failure.value)
    assert (
        "start it: python -P -m envs.search.server --corpus FILE, or change env.options.retriever"
        in str(failure.value)
    )
    assert "\n" not in str(failure.value)


@pytest.mark.slow
def test_a_start_without_a_server_is_refused(unused_url: str) -> None:
    """It asks for as long as a server may take to start."""
    with pytest.raises(
        EnvironmentFailed,
        match="env.name=search does not start with task heldout/nq-test_0: "
        ".*no retrieval server at",
    ):
        try_environment("search", remote(unused_url), a_task("q?", ["a"]), answer_timeout_s=30.0)


@pytest.mark.usefixtures("impatient")
def test_a_lost_connection_is_tried_again_and_nothing_else_is() -> None:
    requests = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(await request.json())
        if len(requests) < 3:
            assert request.transport is not None
            request.transport.abort()
        if len(requests) > 3:
            return web.Response(status=500, text="out of\nmemory")
        return web.json_response(RECORDED["response"])

    async def ask() -> None:
        async with theirs(answer) as server:
            assert len(await ask_server(url_of(server), "x", topk=3)) == 3
            assert len(requests) == 3
            with pytest.raises(
                ValueError,
                match=f"server at {url_of(server)} answered 500: out of memory; "
                "its log may say why",
            ):
                await ask_server(url_of(server), "x", topk=3)
            assert len(requests) == 4

    asyncio.run(ask())


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 0.05)

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response(RECORDED["response"])

    async def play() -> None:
        async with theirs(answer) as server:
            pool = EnvironmentPool(
                "search", remote(url_of(server)), processes=1, answer_timeout_s=30.0
            )
            async with pool.environment() as environment:
                with pytest.raises(
                    EnvironmentDied,
                    match=f"server at {url_of(server)} did not answer within 0.05 s",
                ):
                    await environment.reset(a_task("q?", ["a"]))
            pool.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        "{}",
        '{"result": []}',
        '{"result": [[{"id": "1", "contents": "x"}]]}',
        '{"result": [[{"document": {"text": "x"}, "score": 1.0}]]}',
        '{"result": [[{"document": {"contents": "x"}, "score": null}]]}',
    ],
)
def test_another_protocol_is_refused_with_what_was_answered(answer: str) -> None:
    async def say(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    async def ask() -> None:
        async with theirs(say) as server:
            with pytest.raises(ValueError, match="not Search-R1's") as refusal:
                await ask_server(url_of(server), "x", topk=3)
            assert answer in str(refusal.value)

    asyncio.run(ask())


def test_an_answer_that_is_no_http_is_one_line() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(b"SSH-2.0 \x1b[31m\r\n\r\n")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await ask_server(f"http://127.0.0.1:{port}/retrieve?key=5ecret", "word", topk=1)

    with pytest.raises(ValueError, match="gave no readable answer: Bad") as refused:
        asyncio.run(asyncio.wait_for(ask(), 60))
    assert "\n" not in str(refused.value) and "5ecret" not in str(refused.value)


def test_anybodys_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_index.py").write_text(
        "def make(corpus):\n    return lambda queries, topk: [[('3', 1.5), (corpus.stem, "
        "1.0)][:topk] for _ in queries]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    corpus = load(CORPUS, "my_index:make")
    ((hit,),) = corpus.search(["whatever"], 1)
    assert (hit.passage.contents.partition("\n")[0], hit.score) == ('"Mount Garrow"', 1.5)
    with pytest.raises(
        ValueError, match=r"the index found passage 'corpus', which the corpus does not have"
    ):
        corpus.search(["whatever"], 2)
    for name in ("no_such_index:make", "my_index:none", "my_index"):
        with pytest.raises(
            ValueError,
            match=f"--index='{name}' cannot be loaded: .*; write it module:name, with its folder",
        ):
            load(CORPUS, name)


def test_the_server_command() -> None:
    command = [sys.executable, "-m", "envs.search.server", "--port", "0", "--corpus"]
    with subprocess.Popen(
        [*command, str(CORPUS)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            url, _, rest = server.stdout.readline().strip().partition(" ")
            assert rest == "answers from 18 passages"
            (hit,) = asyncio.run(ask_server(url, "anthem of Norrland", topk=1))
            assert hit.passage.contents.startswith('"Ivo Castelan"\n')
        finally:
            server.terminate()
    wrong = subprocess.run(
        [*command, "nowhere.jsonl"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "no corpus at nowhere.jsonl; docs/search.md says where to get some\n",
    )


@pytest.mark.parametrize(
    ("headers", "status", "complaint"),
    [
        ({"Origin": "https://a.site"}, 403, "not for pages of a browser"),
        ({"Content-Type": "text/plain"}, 415, "takes application/json"),
    ],
)
def test_a_page_of_another_site_cannot_search(
    headers: dict[str, str], status: int, complaint: str
) -> None:
    async def ask() -> tuple[int, str]:
        async with ours(bm25_corpus(CORPUS)) as server, aiohttp.ClientSession() as session:
            sent = {"Content-Type": "application/json"} | headers
            async with session.post(
                url_of(server), data=b'{"queries": ["x"]}', headers=sent
            ) as answer:
                return answer.status, await answer.text()

    code, said = asyncio.run(ask())
    assert code == status and complaint in said


async def answered(sent: bytes, *, until_closed: bool) -> bytes:
    """Send bytes to a server of its own. Return all that it answers, or the first line."""
    runner = await http_server.listen(application(bm25_corpus(CORPUS), topk=3), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*runner.addresses[0])
    try:
        writer.write(sent)
        async with asyncio.timeout(30.0):
            return await (reader.read() if until_closed else reader.readline())
    finally:
        writer.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    "sent", [b"", b"POST /retrieve HTTP/1.1\r\nHost: a\r\nX: "], ids=["nothing", "half a head"]
)
def test_who_sends_half_a_request_is_disconnected(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "READ_TIMEOUT_S", 0.1)

    assert asyncio.run(answered(sent, until_closed=True)) == b""


HEAD = b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /\x1b[31m HTTP/9.9\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["version", "chunk"],
)
def test_what_is_no_request_is_400_and_one_line(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them had the server write a traceback."""

    assert b" 400 " in asyncio.run(answered(sent, until_closed=False))
    said = "".join(f"{record.getMessage()}\n{record.exc_text or ''}" for record in caplog.records)
    assert "Traceback" not in caplog.text and "\x1b" not in said
    assert len(caplog.records) <= 1


@pytest.mark.parametrize("path", ["/retrieve", "/nowhere"])
def test_a_compressed_body_is_refused_and_not_unpacked(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: 200 KB without a key stood for 200 MB. 536 of them held a server for a minute."""
    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer", None)
    body = zlib.compress(b" " * 1_000_000)
    head = HEAD.replace(b"/retrieve", path.encode()) + b"Content-Encoding: deflate\r\n"
    sent = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    assert b" 415 " in asyncio.run(answered(sent, until_closed=False))


def test_an_error_of_our_own_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("a fault \x1b[2J")
    except RuntimeError:
        logger = logging.getLogger("envs.hosting.http_requests")
        logger.addFilter(http_server._shorten)
        logger.exception("Error handling request")
    assert (
        "Traceback" in caplog.text
        and "a fault \\x1b[2J" in caplog.text
        and "\x1b" not in caplog.text
    )


def test_a_compressed_answer_that_unpacks_to_gigabytes_is_given_up() -> None:
    """The attack: half a megabyte of gzip that is half a gigabyte of text."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b"a" * 2**20) for _ in range(512)) + packer.flush()

    async def answer(request: web.Request) -> web.Response:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=bomb, headers=headers)

    async def ask() -> None:
        async with theirs(answer) as server:
            with pytest.raises(
                ValueError, match="the server's answer has more than 16777216 bytes"
            ):
                await ask_server(url_of(server), "x", topk=3)

    tracemalloc.start()
    try:
        asyncio.run(ask())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256 * 2**20


def test_an_answer_of_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: 16 MiB of empty lists took 0.4 GiB and seconds of the worker's event loop."""
    monkeypatch.setattr("bounded_json.json.loads", lambda text: pytest.fail("it was parsed"))

    async def say(request: web.Request) -> web.Response:
        return web.Response(text='{"result": [' + "[]," * MAX_ANSWER_VALUES + "[]]}")

    async def ask() -> None:
        async with theirs(say) as server:
            with pytest.raises(ValueError, match="not Search-R1's"):
                await ask_server(url_of(server), "x", topk=3)

    asyncio.run(ask())


def test_a_server_that_sends_the_client_elsewhere_is_not_followed() -> None:
    """The attack: a redirect to a machine that only this one can reach."""
    visited: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async def elsewhere(request: web.Request) -> web.Response:
        visited.append(request.path)
        return web.json_response(RECORDED["response"])

    async def ask() -> None:
        app = web.Application()
        app.router.add_post("/retrieve", redirect)
        app.router.add_post("/elsewhere", elsewhere)
        async with TestServer(app) as server:
            with pytest.raises(ValueError, match="answered 307"):
                await ask_server(url_of(server), "x", topk=3)

    asyncio.run(ask())
    assert not visited


def test_queries_times_passages_of_one_request_are_bounded() -> None:
    async def ask() -> None:
        async with ours(bm25_corpus(CORPUS)) as server:
            status, answer = await post(url_of(server), {"queries": ["x"] * 4096, "topk": 1000})
            assert status == 422
            assert "4096 queries with topk=1000 ask for over 100000 passages" in answer["detail"]
            assert (await post(url_of(server), {"queries": ["x"] * 100, "topk": 1000}))[0] == 200

    asyncio.run(ask())


def test_a_large_answer_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: unread answers of 200 MB each for small requests."""
    monkeypatch.setattr(search_server, "MAX_ANSWER_CHARACTERS", 2_000)

    async def ask() -> None:
        async with ours(bm25_corpus(CORPUS)) as server:
            status, answer = await post(url_of(server), {"queries": ["the anthem"] * 50})
            assert status == 422
            assert "characters, more than 2,000; send fewer queries at once" in answer["detail"]
            assert (await post(url_of(server), {"queries": ["the anthem"], "topk": 1}))[0] == 200

    asyncio.run(ask())


def test_the_beginning_of_a_query_is_searched_for() -> None:
    asked: list[str] = []

    def index(queries: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
        asked.extend(queries)
        return [[("1", 1.0)] for _ in queries]

    corpus = Corpus([Passage(id="1", contents="x")], index)
    corpus.search(["a." * 1_000_000, "b"], 1)
    assert asked == ["a." * (MAX_QUERY_CHARACTERS // 2), "b"]


def test_a_client_that_reads_no_answers_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: whole requests, one after the other, whose answers nobody reads.

    The connection was kept for ever, and counted against the limit.
    """
    monkeypatch.setattr(http_server, "WRITE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(http_server, "BEHIND_ANOTHER_S", 60.0)  # not what is tried here
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"  # its answer, 404, takes no search

    async def attack() -> int:
        app = application(bm25_corpus(CORPUS), topk=3)
        runner = await http_server.listen(app, "127.0.0.1", 0)
        assert runner.server is not None
        address = runner.addresses[0]
        attacker = socket.socket()
        attacker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        try:
            attacker.connect(address)
            attacker.setblocking(False)
            async with asyncio.timeout(60.0):
                while not runner.server.connections:
                    await asyncio.sleep(0.01)
                (connection,) = runner.server.connections
                while not connection._paused:  # until its answers find no more room
                    with contextlib.suppress(BlockingIOError):
                        attacker.send(request * 100)
                    await asyncio.sleep(0.01)
                assert not await _is_served(address), "there is room for one client"
                while not await _is_served(address):
                    await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{address[1]}/retrieve"
            return (await post(url, {"queries": ["lamp"]}))[0]
        finally:
            attacker.close()
            await runner.cleanup()

    assert asyncio.run(attack()) == 200


async def _is_served(address: tuple[str, int]) -> bool:
    """Return whether the server has a connection left for another client."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        return b"404" in await reader.read()
    except ConnectionError:
        return False
    finally:
        writer.close()


def test_the_bodies_of_all_clients_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: a hundred bodies of 16 MiB that did not end took 1.7 GiB. Nobody needs a key."""
    monkeypatch.setattr(search_server, "MAX_BODY_BYTES", 100_000)
    monkeypatch.setattr(search_server, "MAX_BODIES_BYTES", 250_000)

    async def half_a_body(server: TestServer, n_bytes: int) -> tuple[Any, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {n_bytes + 1}\r\n\r\n".encode() + b"a" * n_bytes)
        await writer.drain()
        return reader, writer

    async def attack() -> None:
        async with ours(bm25_corpus(CORPUS)) as server:
            reader, writer = await half_a_body(server, 150_000)
            assert b" 413 " in await reader.readline()
            writer.close()
            held = [await half_a_body(server, 90_000) for _ in range(3)]
            statuses = [asyncio.create_task(reader.readline()) for reader, _ in held]
            done, waiting = await asyncio.wait(
                statuses, return_when=asyncio.FIRST_COMPLETED, timeout=60
            )
            assert [b" 503 " in each.result() for each in done] == [True] and len(waiting) == 2
            status, refused = await post(url_of(server), {"queries": ["x" * 80_000]})
            assert (status, refused["detail"]) == (
                503,
                "the server has too many requests now; ask again later",
            )
            for each in waiting:
                each.cancel()
            for _, writer in held:
                writer.close()
            while (await post(url_of(server), {"queries": ["x" * 80_000]}))[0] == 503:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(attack(), 120))


def test_the_answers_that_clients_leave_unread_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: 150 clients asked for 96 MB each and read nothing, which took 14 GB."""
    monkeypatch.setattr(search_server, "MAX_ANSWERS_BYTES", 20_000_000)
    long = Passage(id="1", contents="word " + "x" * 6_000_000)
    corpus = Corpus([long], bm25_index([long]))
    asked = json.dumps({"queries": ["word"], "topk": 1}).encode()
    head = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked

    async def attack() -> None:
        async with ours(corpus) as server:
            held = []
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1000)
                writer.write(request)
                held.append(writer)
            while (await post(url_of(server), {"queries": ["word"], "topk": 1}))[0] != 503:
                await asyncio.sleep(0.01)
            for writer in held:
                writer.close()
            while (await post(url_of(server), {"queries": ["word"], "topk": 1}))[0] == 503:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(attack(), 120))


@pytest.mark.parametrize(
    ("n_queries", "n_characters", "in_a_piece"),
    [(4096, 4, search_server.PIECE_QUERIES), (64, 16_000, 2)],
)
def test_large_requests_hold_up_no_question_and_end_with_their_clients(
    n_queries: int, n_characters: int, in_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: 300 clients asked for 4,096 queries each, and left. For two minutes no question
    was answered. 12 clients with 64 queries of a whole page each did the same.
    """
    go_on, searched = threading.Event(), []
    waiting_at_most = 20 * n_queries * (n_characters + search_server.CHARACTERS_OF_AN_OBJECT)
    monkeypatch.setattr(search_server, "MAX_WAITING_CHARACTERS", waiting_at_most)

    def index(queries: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
        searched.append(len(queries))
        if len(queries) > 1:
            go_on.wait(60)
        return [[("1", 1.0)]] * len(queries)

    async def attack() -> None:
        async with ours(Corpus([Passage(id="1", contents="word")], index)) as server:
            large = {"queries": ["x" * n_characters] * n_queries, "topk": 1}
            clients = [asyncio.create_task(post(url_of(server), large)) for _ in range(21)]
            while not searched:
                await asyncio.sleep(0.01)
            assert (await post(url_of(server), {"queries": ["word"], "topk": 1}))[0] == 200
            one_too_many, waiting = await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
            assert [client.result()[0] for client in one_too_many] == [503]
            for client in waiting:
                client.cancel()
            await asyncio.wait(waiting)
            assert server.runner is not None and server.runner.server is not None
            while server.runner.server.connections:  # until the server knows it
                await asyncio.sleep(0.01)
            go_on.set()
            while (told := await post(url_of(server), large))[0] == 503:
                await asyncio.sleep(0.01)
            status, answer = told
            assert status == 200 and len(answer["result"]) == n_queries
            pieces = [n for n in searched if n > 1]
            assert set(pieces) == {in_a_piece}
            assert len(pieces) < 2 * n_queries / in_a_piece

    asyncio.run(asyncio.wait_for(attack(), 120))


def test_a_client_that_left_is_seen_also_behind_a_request_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: behind a large request another one waited, whose body was not read. Nobody saw
    that the client had left, and all of the first was searched for.
    """
    go_on, searched = threading.Event(), []
    monkeypatch.setattr(http_server, "BEHIND_ANOTHER_S", 0.1)

    def index(queries: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
        searched.append(len(queries))
        go_on.wait(60)
        return [[("1", 1.0)]] * len(queries)

    async def attack() -> None:
        corpus = Corpus([Passage(id="1", contents="word")], index)
        runner = await http_server.listen(search_server.application(corpus, topk=1), "127.0.0.1", 0)
        port = runner.addresses[0][1]
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            asked = json.dumps({"queries": ["word"] * 4096, "topk": 1}).encode()
            head = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            for body in (asked, b" " * 1_000_000):
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not searched:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            assert runner.server is not None
            (handler,) = runner.server.connections
            while handler.transport is not None:  # until the server knows it
                await asyncio.sleep(0.01)
            go_on.set()
            url = f"http://127.0.0.1:{port}/retrieve"
            assert (await post(url, {"queries": ["word"], "topk": 1}))[0] == 200
            assert sum(searched) < 4096
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(attack(), 60))


@pytest.mark.parametrize(("wanted", "status"), [("WebSocket", 400), ("h2c", 200)])
def test_no_other_protocol_is_spoken(wanted: str, status: int) -> None:
    """The attack: aiohttp keeps what comes after such a request, and reads nothing more. Nobody saw
    that the client had left.
    """

    async def ask() -> int:
        async with ours(bm25_corpus(CORPUS)) as server, aiohttp.ClientSession() as session:
            headers = {"Connection": "Upgrade", "Upgrade": wanted}
            asked = {"queries": ["word"]}
            async with session.post(url_of(server), json=asked, headers=headers) as response:
                return response.status

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == status


def test_a_request_that_waits_keeps_only_what_is_searched_for() -> None:
    """The attack: 900 clients with bodies of 4 MiB took gigabytes while they waited."""
    go_on = threading.Event()

    def index(queries: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
        go_on.wait(60)
        return [[("1", 1.0)]] * len(queries)

    async def attack() -> int:
        async with ours(Corpus([Passage(id="1", contents="word")], index)) as server:
            asked = {"queries": ["x" * 2_000_000, *["word"] * 64], "topk": 1}
            tracemalloc.start()
            clients = []
            try:
                for _ in range(10):
                    clients.append(asyncio.create_task(post(url_of(server), asked)))
                    await asyncio.sleep(0.2)  # until the server has read it
                go_on.set()
                assert {(await client)[0] for client in clients} == {200}
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    max_bytes = asyncio.run(asyncio.wait_for(attack(), 120))
    assert max_bytes < 45_000_000, "ten clients here hold 20 MB, and the server held 40 more"
