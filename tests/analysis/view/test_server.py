"""The viewer answers only its own pages, shows text as text, and one moment under one address."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import anyio
import httpx2
import pyarrow as pa
import pytest
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from analysis.evaluation_stats import interval
from analysis.view import charts, connections, downloads, guard, memory, server, snapshots
from analysis.view.connections import MAX_HEAD_BYTES, make_server
from analysis.view.guard import Guard
from analysis.view.heldout_rounds import heldout_tasks
from analysis.view.page import Page
from analysis.view.pages import PAGES
from analysis.view.pages.run import show_processes, show_success
from analysis.view.pages.sql import EXAMPLES
from analysis.view.pages.timeline import show_lanes
from analysis.view.panel import ERROR_MARK, Panel, render_panel, show_rows
from analysis.view.server import make_app
from analysis.view.snapshots import Snapshots
from analysis.view.sql_text import fill
from analysis.view.text import LONG_CHARACTERS, MOST_MARKS, visible
from printable import UNSAFE
from store import PrivateCatalogError, Reader, RunLayout, StoreError, open_run
from store.reading.open_sql import MACROS_MARK
from tests.analysis.view.conftest import HOSTILE, TOKEN, example_addresses, play_one_more
from tests.support.neighbours import Neighbour, give_to_the_user
from tests.support.store_runs import copy_run, fingerprint, make_run

ASKED = {
    "type": "http",
    "method": "GET",
    "path": "/",
    "query_string": b"",
    "headers": [(b"host", b"127.0.0.1")],
}
VISIT = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


def wait_for_newer(client: TestClient, *, than: int) -> None:
    deadline = time.monotonic() + 30
    while client.get("/lsn").json()["lsn"] == than:
        assert time.monotonic() < deadline, "the newer snapshot was not found"
        time.sleep(0.1)


def files_of(layout: RunLayout) -> dict[str, str]:
    """Return the digest of every file of the run; a reader's pin is there while it reads."""
    found = fingerprint(layout.root)
    return {name: digest for name, digest in found.items() if not name.startswith("readers/")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.title)
def test_every_page_answers_each_of_its_queries_and_writes_nothing_into_the_run(
    page: Page, client: TestClient, layout: RunLayout
) -> None:
    before = files_of(layout)
    addresses = example_addresses(page, layout.root)
    assert addresses, "a page that needs parameters has an example"
    for address in addresses:
        answer = client.get(address)
        assert answer.status_code == 200
        later = re.findall(r'data-later="([^"]+)"', answer.text)
        texts = [answer.text, *(client.get(each.replace("&amp;", "&")).text for each in later)]
        for text in texts:
            assert re.findall(r'class="error">([^<]*)', text) == []
            assert "<script>alert" not in text and "run<b>" not in text
            assert not re.search("[\x00-\x08\x1b\u202a-\u202e\u2066-\u2069\u200b]", text)
            assert "49" not in re.findall(r"\$x(\S{2})", text), "a text is never a template"
    assert files_of(layout) == before


def rows_of(page: str) -> str:
    """A page without the ids that Bokeh gives to the parts of a chart."""
    return re.sub(r'"p[0-9]+"', '""', re.sub(r'"[0-9a-f-]{36}"', '""', page))


def test_hidden_characters_are_shown(client: TestClient) -> None:
    page = client.get("/run").text
    assert '<span class="hidden-character" title="U+202E">\\u202e</span>' in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert f"show all ({len(HOSTILE) * 20_000:,} characters" in page
    assert len(page) < 1_000_000, "a long text is cut"


@pytest.mark.parametrize("part", ["\x1b", "a\u202e", "\U000e0001\n"])
def test_many_hidden_characters_make_no_long_page(part: str) -> None:
    shown = visible(part * LONG_CHARACTERS)
    assert shown.count('class="hidden-character"') == 2 * MOST_MARKS  # cut, and whole
    assert len(shown) < 2 * LONG_CHARACTERS
    assert part[-1] == "\n" or not UNSAFE.search(shown.replace("\n", ""))


def kept_characters(viewer: server.Viewer) -> int:
    """Return the characters of all kept panels, their addresses and queries."""
    return sum(
        len(panel) + len(address) + len(name) + len(sql)
        for (_, _, address, name, sql), panel in viewer._kept.items()
    )


def test_answers_are_counted_with_their_queries(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "KEPT_BYTES", 1 << 20)
    stored = snapshots.Snapshots(layout.root)
    try:
        for number in range(12):
            stored.ask(stored.newest_lsn, f"SELECT {number} -- {'x' * 50_000}")
        assert stored._answers.n_kept < 12
        queries_bytes = 4 * 50_000 * stored._answers.n_kept
        assert queries_bytes < stored._answers.n_bytes <= 1 << 20
    finally:
        stored.close()


def test_a_query_is_not_begun_where_memory_is_short(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: answers of a few hundred megabytes filled the limit, and Python ended."""
    left = [1]
    monkeypatch.setattr(memory, "_left_bytes", lambda: left[0])
    stored = snapshots.Snapshots(layout.root)
    try:
        stored.ask(stored.newest_lsn, "SELECT 1")
        with pytest.raises(StoreError, match="no memory for another query just now; ask again"):
            stored.ask(stored.newest_lsn, "SELECT 2", is_long=True)
        assert not stored._answers.n_kept, "they take memory"
        left[0] = memory.RESERVE_BYTES
        assert stored.ask(stored.newest_lsn, "SELECT 2", is_long=True).num_rows == 1
        assert stored._answers.n_kept
    finally:
        stored.close()


def test_kept_panels_are_counted_by_their_length(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app([layout.root], token=TOKEN)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        viewer = app.state.viewer
        client.get("/run")
        once = viewer._n_kept
        client.get("/run")
        assert viewer._n_kept == once == kept_characters(viewer) > 0
        monkeypatch.setattr(server, "KEPT_CHARACTERS", once)
        client.get("/run?again=1")
        assert viewer._n_kept == kept_characters(viewer) <= once
        client.get("/run", params={"x": "y" * 60_000})  # the attack: keys were not counted
        assert viewer._n_kept == kept_characters(viewer) <= once


def changed(layout: RunLayout, directory: Path, text: str) -> TestClient:
    """Return a client of a copy of the run, to whose open.sql `text` was added."""
    copy = directory / "copy"
    shutil.copytree(layout.root, copy)
    path = copy / "open.sql"
    path.write_text(path.read_text().replace(MACROS_MARK, f"{text}\n{MACROS_MARK}"))
    return TestClient(make_app([copy], token=TOKEN), base_url="http://127.0.0.1:8000")


def test_a_bound_of_millions_makes_no_list_of_them(layout: RunLayout, tmp_path: Path) -> None:
    with changed(layout, tmp_path, "SET VARIABLE max_staleness = 3000000;") as client:
        for address in ("/staleness?up=behind", "/staleness?panel=share-of-steps-by-staleness"):
            page = client.get(address)
            assert page.status_code == 200
            assert len(page.text) < 1_000_000


def test_values_of_other_types_are_an_error_of_one_line(layout: RunLayout, tmp_path: Path) -> None:
    view = "CREATE OR REPLACE VIEW lineage AS SELECT 'x' AS learner_step, 'trained' AS batch_state,"
    with changed(layout, tmp_path, f"{view} true AS live;") as client:
        page = client.get("/staleness")
    assert page.status_code == 500
    assert "TypeError" in page.text and "Traceback" not in page.text


@pytest.mark.parametrize("error", [TypeError, MemoryError, KeyError, RecursionError])
def test_whatever_a_panel_raises_is_a_line_in_it(error: type[Exception]) -> None:
    def show(table: pa.Table) -> Markup:
        raise error("no\nway")

    panel = Panel(title="a", explains="b", query="SELECT 1", show=show)
    shown = render_panel(panel, lambda query, n_rows=None, tables=(): pa.table({"a": [1]}))
    assert ERROR_MARK in shown and error.__name__ in shown


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({**VISIT, "sec-fetch-dest": "document"}, 200),
        (VISIT, 403),
        # a page asked for in advance, by which site Chromium does not say
        ({**VISIT, "sec-fetch-site": "none", "sec-purpose": "prefetch;prerender"}, 403),
        ({**VISIT, "sec-fetch-dest": "iframe"}, 403),
        ({**VISIT, "sec-fetch-dest": "frame"}, 403),
        ({**VISIT, "sec-fetch-dest": "object"}, 403),
        ({**VISIT, "sec-fetch-dest": "embed"}, 403),
        ({"content-length": "0"}, 200),
        ({"content-length": "1"}, 403),
        ({"transfer-encoding": "chunked"}, 403),
    ],
)
def test_requests_of_other_sites_are_refused(
    headers: dict[str, str], status: int, client: TestClient
) -> None:
    answer = client.get("/lsn", headers=headers)
    assert answer.status_code == status
    assert "script-src 'self';" in answer.headers["content-security-policy"]


def test_an_address_with_an_lsn_shows_the_same_rows_again(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.view.snapshots.CPU_SHARE", math.inf)
    copy = copy_run(layout, tmp_path / "copy")
    app = make_app([copy.root], token=TOKEN, refresh_s=0.2)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        lsn = client.get("/lsn").json()["lsn"]
        fixed = rows_of(client.get(f"/run?as_of={lsn}").text)
        play_one_more(copy.root)
        wait_for_newer(client, than=lsn)
        assert rows_of(client.get(f"/run?as_of={lsn}").text) == fixed
        assert rows_of(client.get("/run").text) != fixed
        gone = client.get("/run?as_of=99999999")
        assert gone.status_code == 410 and 'class="error"' in gone.text
    with TestClient(make_app([copy.root], token=TOKEN), base_url="http://127.0.0.1") as client:
        assert rows_of(client.get(f"/run?as_of={lsn}").text) == fixed, (
            "another process shows the same"
        )


def test_however_much_others_ask_for_newer_rows_are_shown_at_last(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a neighbour's requests used up the time in which newer rows are looked for."""
    monkeypatch.setattr("analysis.view.snapshots.CPU_SHARE", 0.0)
    monkeypatch.setattr("analysis.view.snapshots.MAX_BEHIND_S", 0.5)
    copy = copy_run(layout, tmp_path / "copy")
    app = make_app([copy.root], token=TOKEN, refresh_s=0.2)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        lsn = client.get("/lsn").json()["lsn"]
        play_one_more(copy.root)
        wait_for_newer(client, than=lsn)


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(24, "Too many open files")], ids=["memory", "files"]
)
def test_newer_rows_are_shown_again_when_others_have_left(
    error: Exception, layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a thousand connections for five seconds ended the thread that looks for them."""
    left, used_s = [error] * 3, snapshots._cpu_s

    def cpu_s() -> float:
        if left:
            raise left.pop()
        return used_s()

    monkeypatch.setattr(snapshots, "MAX_BEHIND_S", 0.5)
    copy = copy_run(layout, tmp_path / "copy")
    app = make_app([copy.root], token=TOKEN, refresh_s=0.2)
    monkeypatch.setattr(snapshots, "_cpu_s", cpu_s)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        lsn = client.get("/lsn").json()["lsn"]
        play_one_more(copy.root)
        wait_for_newer(client, than=lsn)
    assert not left


def test_an_answer_that_nobody_takes_leaves_the_memory_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: files that nobody took were kept until Python looked for circles."""
    monkeypatch.setattr(guard, "TAKEN_WITHIN_S", 0.01)
    file = Response(b"x" * 1000)
    kept = weakref.ref(file)

    async def wait(*_: object) -> Any:
        await asyncio.sleep(3600)

    async def take_the_head(message: Any) -> None:
        if message["type"] == "http.response.body":
            await wait()

    app = Guard(file)
    del file
    gc.disable()
    try:
        asyncio.run(app(dict(ASKED), wait, take_the_head))
        del app
        assert kept() is None
    finally:
        gc.enable()


def test_who_takes_one_run_away_leaves_the_pages_of_the_other(
    layout: RunLayout, tmp_path: Path
) -> None:
    """The attack: the owner of one of two runs switched off all pages of the other."""
    other = copy_run(layout, tmp_path / "other")
    app = make_app([layout.root, other.root], token=TOKEN, refresh_s=3600.0)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/compare?run=0").status_code == 200
        other.root.rename(tmp_path / "aside")
        assert client.get("/run?run=0").status_code == 200
        assert client.get("/run?run=1").status_code == 410
        assert client.get("/compare?run=0").status_code == 410


def test_a_bad_address_is_explained(client: TestClient) -> None:
    for address in ("/run?run=7", "/run?run=x", "/run?as_of=x", "/run?panel=none", "/nowhere"):
        answer = client.get(address)
        assert answer.status_code in (400, 404), address
        assert 'class="error"' in answer.text or "no such page" in answer.text


def test_a_program_needs_the_token(client: TestClient, layout: RunLayout) -> None:
    query = "SELECT count(*) AS n FROM groups"
    assert client.post("/sql", content=query).status_code == 401
    token = {"authorization": f"Bearer {TOKEN}"}
    answer = client.post("/sql", content=query, headers=token)
    with open_run(layout.root) as reader:
        expected = reader.sql(query)
    assert pa.ipc.open_stream(answer.content).read_all().equals(expected)
    wrong = client.post("/sql", content="SELECT nothing", headers=token)
    assert wrong.status_code == 400 and wrong.text.count("\n") == 1


def test_examples_stand_in_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "sql.md").read_text()
    explained = " ".join(page.split())
    for title, query in EXAMPLES:
        assert " ".join(query.split()) in explained, title


def test_the_error_of_a_query_stands_in_its_panel(client: TestClient) -> None:
    page = client.get("/sql", params={"q": "SELECT nothing FROM groups"})
    assert page.status_code == 200
    (error,) = re.findall(r'class="error">([^<]*)', page.text)
    assert "nothing" in error and "\n" not in error


def test_a_wide_table_of_long_texts_makes_a_page_of_a_few_megabytes() -> None:
    """The attack: one request for 90 columns of 500 long texts took ten gigabytes."""
    for n_columns, n_rows, n_shown in ((90, 300, 111), (3, 600, 500), (30_000, 2, 1)):
        text = '"' * (20_000 if n_columns < 100 else 1)
        table = pa.table({f"c{n}": [text] * n_rows for n in range(n_columns)})
        page = show_rows(table, links={})
        assert len(page) < 20_000_000
        assert page.count("<tr>") == 1 + n_shown
    long = show_rows(pa.table({"c": ["a"]}), links={"c": lambda row: f"/{row['c']}" * 9_000})
    assert "href" not in long
    (cell,) = re.findall("<td>(.*)</td>", show_rows(pa.table({"c": ["z" * 30_000]}), links={}))
    assert "the first 20,000 are here" in cell and cell.count("z") == 20_000 + 160


def test_a_panel_of_many_long_names_is_left_out_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("analysis.view.panel.MAX_CHARACTERS", 1_000)
    many = pa.table({"name": ["a" * 150] * 40})
    panel = Panel(
        title="Names", explains="", query="SELECT 1", show=lambda rows: show_rows(rows, links={})
    )
    assert "too many for a page" in render_panel(panel, lambda *_, **__: many)


def test_a_chart_of_many_rows_is_left_out_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: a view of 900,000 events became a page of 900 MB."""
    table = pa.table({"x": list(range(400)), "y": [0.5] * 400})
    draw = partial(charts.lines, x="x", y=["y"])
    panel = Panel(title="A", explains="", query="SELECT 1", show=draw)
    ask = lambda *_, **__: table  # noqa: E731
    assert "chart-data" in render_panel(panel, ask)
    monkeypatch.setattr("analysis.view.panel.MAX_CHARACTERS", 2_000)
    assert "too many for a page" in render_panel(panel, ask)
    monkeypatch.setattr("analysis.view.panel.MAX_CHARACTERS", 1_000_000)
    monkeypatch.setattr("analysis.view.panel.MAX_ROWS", 399)
    assert "It has 400 rows, too many for a page" in render_panel(panel, ask)
    slices = pa.table({"lane": ["learner"] * 20_001})
    shown = show_lanes(None, slices, begin=None, end=None)  # type: ignore[arg-type]
    assert "choose a shorter window" in shown
    assert len(charts.thinned(range(7 * charts.MAX_POINTS))) == charts.MAX_POINTS


def test_slow_readers_of_large_files_do_not_fill_the_memory(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: each of ninety connections kept 240 MiB for two hours by reading slowly."""
    monkeypatch.setattr(downloads, "MAX_SENT_BYTES", 5 << 20)
    own = {"sec-fetch-site": "same-origin"}
    file = {"panel": "answer", "download": "arrow"}
    large = {**file, "q": "SELECT repeat('x', 1000000) AS text FROM range(4)"}
    small = {**file, "q": "SELECT 1 AS one"}
    held = downloads.download(pa.table({"text": ["x" * (4 << 20)]}), "arrow", name="a", lsn=1)
    refused = client.get("/sql", params=large, headers=own)
    assert "other files with 4 MiB are being sent" in refused.text
    assert client.get("/sql", params=small, headers=own).status_code == 200

    async def receive() -> dict[str, str]:
        raise AssertionError("nothing is asked")

    async def leaves(message: object) -> None:
        raise OSError("the client has left")

    with pytest.raises(OSError, match="has left"):
        asyncio.run(held({"type": "http"}, receive, leaves))  # type: ignore[arg-type]
    assert len(client.get("/sql", params=large, headers=own).content) > 4_000_000
    left_before = downloads.download(
        pa.table({"text": ["x" * (4 << 20)]}), "arrow", name="a", lsn=1
    )
    del left_before
    assert len(client.get("/sql", params=large, headers=own).content) > 4_000_000


def test_no_thread_is_started_while_it_serves(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: with no memory left a new thread ended at once, and the server waited for it."""
    app = server.make_app([layout.root], token="t")

    def refuse(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread.name} is started")

    async def answer_many() -> None:
        async with app.router.lifespan_context(app):
            monkeypatch.setattr(threading.Thread, "start", refuse)
            number = int(anyio.to_thread.current_default_thread_limiter().total_tokens)
            for _ in range(2):
                together = threading.Barrier(number).wait
                await asyncio.gather(*(anyio.to_thread.run_sync(together) for _ in range(number)))
            monkeypatch.undo()

    asyncio.run(answer_many())


def test_who_leaves_has_no_other_thread_started() -> None:
    """The attack: clients that ask and leave. The place of each was free while its thread went on,
    so another one was started, until there was no memory.
    """
    began, may_end, n_begun = threading.Event(), threading.Event(), 0

    def answer(_: object) -> Response:
        nonlocal n_begun
        n_begun += 1
        began.set()
        may_end.wait(60)
        return Response("x")

    app = Starlette(routes=[Route("/", answer)], middleware=[Middleware(Guard)])

    async def leave() -> dict[str, str]:
        while not began.is_set():
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        await asyncio.sleep(0)
        raise AssertionError("nobody is there")

    async def ask_and_leave() -> None:
        places = anyio.to_thread.current_default_thread_limiter()
        places.total_tokens = 1
        asked = [asyncio.ensure_future(app(dict(ASKED), leave, send)) for _ in range(5)]
        done, _ = await asyncio.wait(asked, timeout=1)
        assert len(done) == 4, "those that wait for a thread have left"
        assert places.borrowed_tokens == 1
        may_end.set()
        await asyncio.gather(*asked)
        assert places.borrowed_tokens == 0 and n_begun == 1

    asyncio.run(ask_and_leave())


def test_a_viewer_that_cannot_start_its_threads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 5:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(RuntimeError, match="new thread"):
        asyncio.run(connections.start_threads())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([True] * 250_000),
        pa.array(["x" * 1000] * 1250).dictionary_encode(),
    ],
    ids=["bits", "numbers of a text"],
)
def test_a_file_is_counted_as_it_is_and_not_as_its_rows_are(
    column: pa.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: an answer of 15 MB in memory became a file of 200 MB."""
    monkeypatch.setattr(downloads, "SMALL_BYTES", 100_000)
    monkeypatch.setattr(downloads, "MAX_SENT_BYTES", 2_000_000)
    table = pa.table({"a": column})
    first = downloads.download(table, "csv", name="a", lsn=1)
    for _ in range(2):  # what was refused is not counted any more
        with pytest.raises(StoreError, match="other files with 1 MiB are being sent"):
            downloads.download(table, "csv", name="a", lsn=1)
    del first
    assert len(downloads.download(table, "csv", name="a", lsn=1).body) > 1_000_000


def test_an_answer_is_drawn_and_downloaded(client: TestClient, layout: RunLayout) -> None:
    query = "SELECT learner_step, value, [1] AS list FROM metrics ORDER BY ALL"
    wanted = {"q": query, "x": "learner_step", "y": "value"}
    assert 'class="chart-data"' in client.get("/sql", params=wanted).text
    own = {"sec-fetch-site": "same-origin"}
    file = {"q": query, "panel": "answer"}
    assert client.get("/sql", params={**file, "download": "csv"}).status_code == 401
    csv = client.get("/sql", params={**file, "download": "csv"}, headers=own)
    assert csv.text.splitlines()[0] == '"learner_step","value","list"'
    arrow = client.get("/sql", params={**file, "download": "arrow"}, headers=own)
    with open_run(layout.root) as reader:
        assert pa.ipc.open_stream(arrow.content).read_all().equals(reader.sql(query))


def test_a_query_that_another_site_brings_is_not_asked(client: TestClient) -> None:
    visit = {**VISIT, "sec-fetch-dest": "document"}
    page = client.get("/sql", params={"q": "SELECT 6 * 7 AS asked"}, headers=visit)
    assert page.status_code == 200
    assert "not asked yet" in page.text and ">42<" not in page.text


def test_a_group_shows_the_same_advantages_as_the_macro(
    client: TestClient, layout: RunLayout
) -> None:
    with open_run(layout.root) as reader:
        (row,) = reader.rows(
            "SELECT group_uid::VARCHAR AS group_uid, max(advantage) AS largest FROM advantages() "
            "GROUP BY 1 ORDER BY largest DESC LIMIT 1"
        )
    page = client.get("/group", params={"group": row["group_uid"]}).text
    assert page.count('class="lane-name"') == 2
    (data,) = re.findall(r'class="cells">(.*?)</script>', page)
    advantages = [float(cell["advantage"].split(" = ")[0]) for cell in json.loads(data)]
    assert max(advantages) == pytest.approx(row["largest"], abs=0.01)


def test_groups_can_be_selected(client: TestClient) -> None:
    page = client.get("/groups", params={"state": "stale", "from_version": "0"}).text
    assert page.count('<td><a href="/group?group=') == 1
    assert "is not a whole number" in client.get("/groups", params={"to_version": "x"}).text
    assert "No group fits" in client.get("/groups", params={"task": "it's; --"}).text


def test_a_value_in_a_query_is_that_value(layout: RunLayout) -> None:
    values = [None, True, 7, -0.5, float("inf"), "it's $x", HOSTILE, "a\nb\t", uuid.uuid4()]
    with open_run(layout.root) as reader:
        for value in values:
            (row,) = reader.rows(fill("SELECT $value AS value", value=value))
            assert row["value"] == (str(value) if isinstance(value, uuid.UUID) else value)
    for bad in ("\0", "\ud800"):
        with pytest.raises(ValueError, match="holds no NUL"):
            fill("$value", value=bad)


def test_a_run_that_is_silent_is_not_shown_as_working() -> None:
    processes = pa.table(
        {
            "process": ["driver", "learner"],
            "waits_for": ["working", "groups"],
            "last_beat_at": ["2026-01-01 00:00:00", "2026-01-01 00:00:30.5"],
        }
    )
    later = datetime(2026, 1, 1, 2, 59, 30)
    assert "Nothing was heard of this run for 2 h 59 min" in show_processes(
        "a", processes, now=later
    )
    assert "Nothing was heard" not in show_processes("a", processes, now=None)
    assert "30 s ago" in show_processes("a", processes, now=None)


def test_the_first_look_after_a_pause_finds_what_was_committed(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_run(layout, tmp_path / "run")
    stored = Snapshots(copy.root, refresh_s=3600.0)
    try:
        before = stored.look()
        play_one_more(copy.root)
        assert stored.look() == before
        monkeypatch.setattr("analysis.view.snapshots.LOOKED_AT_S", 0.0)
        assert stored.look() > before
    finally:
        stored.close()


def test_a_group_shows_the_attempts_that_gave_no_episode(
    client: TestClient, layout: RunLayout
) -> None:
    with open_run(layout.root) as reader:
        (row,) = reader.rows("SELECT DISTINCT group_uid FROM unfinished")
    page = client.get("/group", params={"group": str(row["group_uid"])}).text
    _, _, panel = page.partition('id="unfinished-attempts"')
    assert "worker_lost" in panel.partition("</section>")[0]


def test_a_checkpoint_that_is_gone_is_said_to_be_removed(layout: RunLayout, tmp_path: Path) -> None:
    copy = copy_run(layout, tmp_path / "run")
    copy.checkpoints.mkdir(exist_ok=True)
    outside = copy.checkpoint_dir(1)
    outside.symlink_to(tmp_path, target_is_directory=True)  # says nothing about what it leads to
    for expected in ("removed", "yes"):
        with TestClient(make_app([copy.root], token=TOKEN), base_url="http://127.0.0.1") as client:
            _, _, panel = client.get("/lineage").text.partition('id="checkpoints"')
        assert re.findall("<td>(removed|yes)</td>", panel.partition("</section>")[0]) == [expected]
        if outside.is_symlink():
            outside.unlink()
            outside.mkdir()


def test_a_chart_without_columns_takes_the_first_and_the_numbers(client: TestClient) -> None:
    query = "SELECT 'a' AS name, 1 AS one, 'b' AS text, 2.5 AS two"
    assert 'id="chart"' not in client.get("/sql", params={"q": query, "chart": ""}).text
    drawn = client.get("/sql", params={"q": query, "chart": "lines"}).text
    assert 'aria-label="one and two by name, 1 bars"' in drawn
    refused = client.get("/sql", params={"q": "SELECT 'a' AS name", "chart": "lines"}).text
    assert "beside name the answer has no column of numbers to draw" in refused


def test_an_evaluation_is_drawn_with_its_interval() -> None:
    tasks = [{"task_id": "a", "won": 3, "played": 4}, {"task_id": "b", "won": 1, "played": 4}]
    batch = {"learner_step": 1, "success": 0.5, "low": 0.4, "high": 0.6, "episodes": 8}
    table = pa.Table.from_pylist(
        [
            {**batch, "heldout": None, "heldout_tasks": None},
            {**batch, "learner_step": 2, "heldout": 0.5, "heldout_tasks": tasks},
        ]
    )
    text = json.dumps(show_success(table).item)
    low, high = interval(heldout_tasks(tasks))
    assert f"{low}" in text and f"{high}" in text


def tooltips(part: object) -> Iterator[tuple[str, str]]:
    """Give label and template of every line of the tooltips in a chart's description."""
    if isinstance(part, dict):
        yield from part.get("tooltips") or ()
        for below in part.values():
            yield from tooltips(below)
    elif isinstance(part, list):
        for below in part:
            yield from tooltips(below)


def test_the_name_of_a_column_is_no_template_of_a_tooltip() -> None:
    """The attack: a view whose column is called so that another one is shown as HTML."""
    hostile, shown = "value}{safe", "<b>theirs</b>"
    table = pa.table({"x": [1, 2], hostile: [1.0, 2.0], "value": [shown, shown], "low": [0.0, 0.0]})
    table = table.append_column("high", pa.array([1.0, 1.0]))
    drawn = [
        charts.lines(table, x="x", y=[hostile], low="low", high="high"),
        charts.lines(table, x="x", y=[], points=[hostile], whiskers={hostile: ("low", "high")}),
        charts.lines(table, x=hostile, y=["x"]),
        charts.bars(table, x="value", y=[hostile]),
        charts.steps(table, x="x", y=[hostile]),
        charts.intervals(table, x="x", y=hostile),
    ]
    templates = [tip[1] for chart in drawn for tip in tooltips(chart.item)]
    assert len(templates) >= 2 * len(drawn)
    for template in templates:
        assert re.fullmatch(r"@c\d({0[^}]*})?( to @c\d{0[^}]*})?", template)


SLOW = "SELECT count(*) FROM range(10000000) AS a, range(10000000) AS b WHERE a.range % 7 = b.range"


@pytest.mark.parametrize("in_flight", [(), (SLOW,)], ids=["idle", "a query that takes long"])
def test_who_reads_the_address_may_connect_at_once_and_ctrl_c_says_one_word(
    layout: RunLayout, in_flight: tuple[str, ...]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cli", "view", layout.root, "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as viewer:
        assert viewer.stdout is not None
        line = viewer.stdout.readline()
        assert line, viewer.communicate()[1]
        address = line.split()[0]
        assert httpx2.get(f"{address}run", timeout=60).status_code == 200
        for query in in_flight:
            asked = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2][:-1])))
            head = "GET /sql?" + urlencode({"q": query}) + f" HTTP/1.1\r\nHost: {address[7:-1]}"
            asked.sendall(f"{head}\r\n\r\n".encode())
            time.sleep(1.0)  # the query is being computed
        viewer.send_signal(signal.SIGINT)
        _, error = viewer.communicate(timeout=60)
    assert error.strip() == "interrupted"


def test_long_queries_of_a_run_whose_catalog_is_private_are_asked_of_the_open_reader(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's run went on meanwhile, so a second reader would need its catalog."""
    stored = Snapshots(layout.root, refresh_s=3600.0)

    def of_another_user(run: Path, **options: object) -> Reader:
        raise PrivateCatalogError(f"{run} may not be read by you")

    monkeypatch.setattr(snapshots, "open_run", of_another_user)
    try:
        rows = stored.ask(stored.newest_lsn, "SELECT count(*) AS n FROM steps", is_long=True)
        assert rows["n"][0].as_py() > 0
        with pytest.raises(PrivateCatalogError, match="may not be read by you"):
            stored.ask(stored.newest_lsn - 1, "SELECT 1", is_long=True)
    finally:
        stored.close()


def test_the_viewer_serves_no_run_but_the_one_that_it_was_opened_for(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a neighbour whose run is viewed puts a link to a private run in its place.

    The pages of that run were served to everyone on the machine.
    """
    viewed, private = copy_run(layout, tmp_path / "viewed"), tmp_path / "private" / "run"
    private.parent.mkdir()
    make_run(private)
    neighbour = Neighbour(monkeypatch)
    for each in (private, private.parent, tmp_path):
        give_to_the_user(each)
    app = make_app([viewed.root], token=TOKEN, refresh_s=3600.0)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        assert client.get("/run").status_code == 200
        viewed.root.rename(tmp_path / "aside")
        for put in ("link", "directory"):
            if put == "link":
                viewed.root.symlink_to(private)
                neighbour.gets(viewed.root)
                why = "was exchanged: a link of another user"
            else:
                viewed.root.unlink()
                private.rename(viewed.root)
                why = "was exchanged"
            for address in ("/run", "/groups", "/lineage", "/run?as_of=1"):
                answer = client.get(address)
                assert answer.status_code == 410 and why in answer.text
                assert str(private) not in answer.text
            snapshots_of_it = app.state.viewer.stored[0]
            assert snapshots_of_it._catch_up() and why in snapshots_of_it.stuck
            with pytest.raises(StoreError, match="link of another user|was exchanged"):
                snapshots_of_it._open(None)
            program = {"authorization": f"Bearer {TOKEN}"}
            answer = client.post("/sql", content="FROM versions", headers=program)
            assert answer.status_code == 400 and why in answer.text


def test_a_reader_never_shows_another_run_than_it_was_opened_for(
    layout: RunLayout, tmp_path: Path
) -> None:
    """A query that took too long ends the child, and the next one opens the path again."""
    viewed = copy_run(layout, tmp_path / "run")
    with open_run(viewed.root) as reader:
        reader._discard()
        viewed.root.rename(tmp_path / "aside")
        make_run(viewed.root)
        with pytest.raises(StoreError, match="was exchanged"):
            reader.sql("FROM versions")


@pytest.mark.parametrize("path", ["//evil.test/", "///evil.test/"])
def test_no_page_links_to_another_site_that_the_address_names(
    client: TestClient, path: str
) -> None:
    answer = client.get(f"http://127.0.0.1:8000{path}")
    assert answer.status_code == 404
    links = re.findall(r'(?:href|data-later)="([^"]*evil[^"]*)"', answer.text)
    assert links and all(re.match(r"/[^/]", link) for link in links)


LARGE = bytes(64 << 20)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Serve nothing, as the pages are served."""
    listener = socket.create_server(("127.0.0.1", 0))
    large = Route("/large", lambda _: Response(LARGE))
    served = make_server(Starlette(routes=[large], middleware=[Middleware(Guard)]))
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    served.should_exit = True
    thread.join(timeout=30)


def test_an_answer_does_not_wait_for_an_acknowledgement(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each connection has TCP_NODELAY. Each page took 40 ms more without."""
    receive, seen = connections._OneAtATime.data_received, []

    def noted(connection: connections._OneAtATime, data: bytes) -> None:
        accepted = connection.transport.get_extra_info("socket")
        seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        receive(connection, data)

    monkeypatch.setattr(connections._OneAtATime, "data_received", noted)
    assert httpx2.get(f"http://127.0.0.1:{port}/nothing", timeout=60).status_code == 404
    assert seen and all(seen)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "], ids=["nothing", "half a head"])
def test_who_holds_many_connections_keeps_nobody_out(
    sent: bytes, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a thousand connections, and no file was left for reading the run."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as opened:
        for _ in range(8):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(sent)
        answer = httpx2.get(f"http://127.0.0.1:{port}/nothing", timeout=60)
        assert answer.status_code == 404


@pytest.mark.parametrize("error", ["no process", "killed"])
def test_what_the_machine_lacked_for_a_moment_is_no_answer(
    error: str, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: with all files of the viewer open, its pages showed an error for good."""
    stored = Snapshots(layout.root)
    query = "SELECT count(*) AS n FROM groups"
    try:
        with monkeypatch.context() as patch:
            if error == "killed":
                patch.setattr("store.reading.reader._Child.table", raise_end)
            else:
                reader = next(iter(stored._snapshots.values())).reader
                reader._discard()
                patch.setattr("store.reading.reader._Child", raise_no_files)
            with pytest.raises(StoreError, match="raise ulimit -n|its process"):
                stored.ask(stored.newest_lsn, query)
        assert stored.ask(stored.newest_lsn, query)["n"].to_pylist() != [0]
    finally:
        stored.close()


def raise_end(*_: object) -> None:
    raise EOFError


def raise_no_files() -> None:
    raise OSError(24, "Too many open files")


HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.mark.parametrize(
    ("begun", "repeated"),
    [
        (b"GET /", b"x"),
        (HEAD, b"A: b\r\n"),
        (HEAD + b"A: ", b"x"),
        (HEAD + CHUNKS + b"0\r\n", b"A: b\r\n"),
        (HEAD + CHUNKS + b"1;", b"x"),
    ],
    ids=["address", "headers", "header", "trailers", "chunk"],
)
def test_a_head_without_end_is_cut_off(port: int, begun: bytes, repeated: bytes) -> None:
    """It would be kept until the memory is full, and every user of the machine can send one."""
    endless = begun + repeated * (4 * MAX_HEAD_BYTES // len(repeated))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        client.sendall(endless)
        while client.recv(65536):
            pass


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT"])
def test_a_body_that_no_page_takes_is_not_read(port: int, method: bytes) -> None:
    """The attack: pieces of one byte kept the viewer busy for as long as they came."""
    head = method + HEAD.removeprefix(b"GET") + b"Transfer-Encoding: chunked\r\n\r\n"
    sent, answer = 0, b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        client.sendall(head)
        answer = client.recv(65536)
        while sent < 32 << 20:
            sent += client.send(b"1\r\nx\r\n" * 1000)
    assert b"connection: close" in answer
    assert sent < 32 << 20


def bytes_of_the_large_answer(port: int, *, wait: Callable[[], object]) -> int:
    """Return how many bytes of it a client gets that takes nothing before `wait` returns."""
    taken = 0
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        wait()
        while data := client.recv(1 << 20):
            taken += len(data)
    return taken


def test_an_answer_that_nobody_takes_is_not_kept(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytes_of_the_large_answer(port, wait=lambda: None) > len(LARGE)
    stalled, send = threading.Event(), guard._send_in_pieces

    async def watched(*given: Any) -> None:
        try:
            await send(*given)
        except guard._StalledError:
            stalled.set()
            raise

    monkeypatch.setattr(guard, "_send_in_pieces", watched)
    monkeypatch.setattr(guard, "TAKEN_WITHIN_S", 0.5)
    assert bytes_of_the_large_answer(port, wait=partial(stalled.wait, 60)) < len(LARGE)
    assert stalled.is_set()


def test_requests_ahead_of_their_answers_are_not_kept(port: int) -> None:
    """A client that waits for its answer sends none, so one that sends some is disconnected."""
    sent = 0
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        while sent < 32 << 20:
            sent += client.send((HEAD + b"\r\n") * 1000)
    assert sent < 32 << 20


HEAVY = "SELECT sum(a.range * b.range + {}) AS s FROM range(100000000) a, range(1000000) b"


@pytest.mark.parametrize(
    ("headers", "ahead"),
    [("", b""), ("", b"GET / HTTP/1.1\r\n"), ("Connection: Upgrade\r\nUpgrade: x\r\n", b"x")],
    ids=["nothing", "another request", "another protocol"],
)
def test_queries_of_clients_that_left_are_not_answered(
    headers: str, ahead: bytes, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a hundred clients that had left kept every page from everybody for minutes. Behind a
    second request nobody saw that they had left.
    """
    asked, ask = [], Snapshots._answer
    monkeypatch.setattr(snapshots, "QUERY_TIMEOUT_S", 2.0)

    def noted(stored: Snapshots, reader: Reader, query: str, *given: Any, **options: Any) -> object:
        if "range(100000000)" in query:
            asked.append(query)
        return ask(stored, reader, query, *given, **options)

    monkeypatch.setattr(Snapshots, "_answer", noted)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = make_server(make_app([layout.root], token=TOKEN, refresh_s=3600.0))
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        with contextlib.ExitStack() as opened:
            clients = [
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                for _ in range(100)
            ]
            for number, client in enumerate(clients):
                address = urlencode({"q": HEAVY.format(number)})
                head = f"GET /sql?{address} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n"
                client.sendall(head.encode())
            while not asked:
                time.sleep(0.01)
            for client in clients:
                with contextlib.suppress(OSError):
                    client.sendall(ahead)
        read = partial(httpx2.get, timeout=60)
        assert read(f"http://127.0.0.1:{port}/groups").status_code == 200
        query = f"http://127.0.0.1:{port}/sql?q=SELECT+42+AS+n"
        while "that may take long are being answered" in read(query).text:
            time.sleep(0.05)
    finally:
        served.should_exit = True
        thread.join(timeout=30)
    assert len(asked) <= 3, "one was being answered, and another may have begun"


def test_older_snapshots_that_are_waited_for_are_bounded(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: 150 connections of another user asked for older snapshots, each of which takes a
    second. They held all threads of the server, and a page took two minutes.
    """
    stored = Snapshots(layout.root, refresh_s=3600.0, as_of=1)
    stored.ensure(1)
    go_on = threading.Event()
    older = list(range(2, stored.newest_lsn))[-snapshots.MAX_OPENING - 1 :]
    said: list[str] = []

    def wait(self: Snapshots, lsn: int | None, *, is_long: bool = False) -> int:
        go_on.wait(60)
        raise StoreError("it was opened")

    def ensure(lsn: int) -> None:
        try:
            stored.ensure(lsn)
        except StoreError as error:
            said.append(str(error))

    monkeypatch.setattr(Snapshots, "_open", wait)
    try:
        threads = [threading.Thread(target=ensure, args=(lsn,)) for lsn in (*older, *older[:2])]
        for thread in threads:
            thread.start()
        while not said:
            time.sleep(0.01)
        for shown in (stored.newest_lsn, 1):  # of these readers are there
            stored.ensure(shown)
        go_on.set()
        for thread in threads:
            thread.join()
        refused = f"{snapshots.MAX_OPENING} older snapshots of this run are being opened"
        assert [text.startswith(refused) for text in said].count(True) in (1, 2)
        said.clear()
        ensure(older[0])
        assert said == ["it was opened"]
    finally:
        stored.close()


def test_queries_that_may_take_long_are_bounded(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that waits has a thread of the server, which other pages need."""
    stored, go_on, begun = Snapshots(layout.root, refresh_s=3600.0), threading.Event(), []
    lsn, answers = stored.newest_lsn, []

    def answer(reader: Reader, query: str, *given: Any, **options: Any) -> pa.Table:
        begun.append(query)
        go_on.wait(60)
        return pa.table({"n": [1]})

    def ask(number: int) -> None:
        try:
            asked = f"SELECT {number}"
            stored.ask(lsn, asked, is_long=True, has_left=lambda: number > 0)
            answers.append("answered")
        except StoreError as error:
            answers.append(str(error))

    monkeypatch.setattr(stored, "_answer", answer)
    try:
        first = threading.Thread(target=ask, args=(0,))
        first.start()
        while not begun:
            time.sleep(0.01)
        others = [threading.Thread(target=ask, args=(n,)) for n in range(1, snapshots.MAX_LONG + 1)]
        for thread in others:
            thread.start()
        while not answers:
            time.sleep(0.01)
        assert len(answers) == 1 and answers[0].startswith(f"{snapshots.MAX_LONG} queries of this")
        go_on.set()
        for thread in (first, *others):
            thread.join()
        assert begun == ["SELECT 0"] and "answered" in answers
        assert answers.count("nobody waits for the answer any more") == snapshots.MAX_LONG - 1
        ask(0)  # it is remembered
        assert stored.ask(lsn, "SELECT 9", is_long=True).num_rows == 1
    finally:
        stored.close()


def test_a_failed_query_that_is_asked_again_keeps_no_request(layout: RunLayout) -> None:
    """The attack: each asking added its frames to the error that was kept, without end."""
    stored = Snapshots(layout.root)
    try:
        raised = []
        for _ in range(3):
            with pytest.raises(StoreError, match="no such thing") as caught:
                stored.ask(stored.newest_lsn, "SELECT error('no such thing')")
            raised.append(caught.value)
        assert len({id(error) for error in raised}) == 3
        (kept,) = stored._answers._answers.values()
        assert isinstance(kept, StoreError) and kept.__traceback__ is None
    finally:
        stored.close()


def test_a_run_that_was_away_for_a_moment_is_no_answer(layout: RunLayout) -> None:
    stored = Snapshots(layout.root)
    aside = layout.root.with_name("aside")
    try:
        layout.root.rename(aside)
        with pytest.raises(StoreError, match="was moved or deleted"):
            stored.ask(stored.newest_lsn, "SELECT 42 AS n")
        aside.rename(layout.root)
        assert stored.ask(stored.newest_lsn, "SELECT 42 AS n")["n"].to_pylist() == [42]
    finally:
        stored.close()


def test_without_a_file_to_open_newer_rows_are_looked_for_again(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: slow clients held all open files for a moment, and nobody looked from then on."""
    stored = Snapshots(layout.root, refresh_s=0.01)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_left_bytes", mock.Mock(side_effect=OSError(24, "too many")))
            while stored.stuck != snapshots.LACKS_RESOURCES:
                time.sleep(0.01)
        assert stored._thread.is_alive()
    finally:
        stored.close()
