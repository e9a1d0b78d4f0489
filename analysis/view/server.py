"""Serve the pages on this machine. Nothing is written.

The server listens on the loopback only. `guard.py` says whom it answers, and `connections.py` how
many. Pages run no script but ours and Bokeh's, and nothing leaves the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from analysis.view import memory
from analysis.view.charts import warm_up
from analysis.view.connections import make_server, start_threads
from analysis.view.downloads import DOWNLOADS, download
from analysis.view.guard import Guard
from analysis.view.html import BOKEH_SCRIPT, STATIC, html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.pages import PAGES
from analysis.view.panel import ERROR_MARK, Panel, render_panel, render_placeholder, why
from analysis.view.snapshots import Snapshots
from analysis.view.text import plain
from printable import printable
from store import StoreError, limit_memory

LSN_DIGITS = 18  # at most, of a log number that an integer of 64 bits holds
RUN_DIGITS = 5  # at most, of the number of a compared run
LOOPBACK = "127.0.0.1"
MAX_QUERY_BYTES = 1 << 20  # of a program's SELECT
KEPT_CHARACTERS = 2**24  # of panels; most have tens of thousands

_Key = tuple[int, int, str, str, str]  # run, lsn, address, panel and query


def _n_characters(key: _Key, shown: str) -> int:
    """Return the length of a kept panel with its key: an address may be as long as a panel."""
    return len(shown) + sum(len(part) for part in key if isinstance(part, str))


def make_app(
    runs: Sequence[Path], *, token: str, as_of: int | None = None, refresh_s: float | None = None
) -> Starlette:
    """Return the application. The newest snapshot of each run is opened at once.

    Raises StoreError if a run cannot be read.
    """
    threading.Thread(target=warm_up, name="warm up", daemon=True).start()
    settings = {} if refresh_s is None else {"refresh_s": refresh_s}
    stored: list[Snapshots] = []
    try:
        for run in runs:
            stored.append(Snapshots(run, as_of=as_of, **settings))
            if as_of is not None:
                stored[-1].ensure(as_of)
    except BaseException:
        for each in stored:
            each.close()
        raise

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await start_threads()
        yield
        for each in stored:
            each.close()

    names = [str(run) for run in runs]
    viewer = Viewer(stored, names=names, token=token, as_of=as_of)
    app = Starlette(
        routes=[
            Route("/", viewer.start),
            Route("/lsn", viewer.lsn),
            Route("/sql", viewer.sql_for_programs, methods=["POST"]),
            Route("/static/bokeh.js", partial(_file, BOKEH_SCRIPT)),
            *(Route(page.path, partial(viewer.page, page)) for page in PAGES),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard)],
        exception_handlers={404: viewer.not_found},
        lifespan=lifespan,
    )
    app.state.viewer = viewer
    return app


class Viewer:
    """Answer requests from the snapshots of the runs."""

    def __init__(
        self, stored: Sequence[Snapshots], *, names: Sequence[str], token: str, as_of: int | None
    ) -> None:
        self.stored, self.names, self.token, self.as_of = stored, names, token, as_of
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Markup] = OrderedDict()
        self._n_kept = 0  # characters

    def start(self, request: Request) -> Response:
        """Lead to the first page."""
        kept = dict(request.query_params.items())
        if self.as_of is not None:
            kept.setdefault("as_of", str(self.as_of))
        query = f"?{urlencode(kept)}" if kept else ""
        return RedirectResponse(f"{PAGES[0].path}{query}", status_code=303)

    def lsn(self, request: Request) -> Response:
        """Return the newest lsn of a run: pages ask now and then."""
        number = _run_number(request, n_runs=len(self.stored))
        return JSONResponse({"lsn": self.stored[number or 0].look()})

    def page(self, page: Page, request: Request) -> Response:
        """Return a page, or one panel of it, or the rows of one panel as a file."""
        try:
            asked = self._asked(request, compares=page.compares)
            if (kind := request.query_params.get("download")) is not None:
                return self._download(page, asked, kind, request)
            panels = page.panels(asked)
            only = request.query_params.get("panel")
            if only is not None:
                panels = [panel for panel in panels if panel.name == only]
                if not panels:
                    raise BadAddressError(f"the page has no panel {plain(only)}")
            shown = []
            for panel in panels:
                if panel.later and only is None:
                    address = _with(request, panel=panel.name, as_of=asked.lsn)
                    shown.append(render_placeholder(panel, address))
                else:
                    shown.append(self._panel(panel, asked, request))
        except BadAddressError as error:
            return self._error(page, request, str(error), status=400)
        except StoreError as error:
            return self._error(page, request, " ".join(str(error).split()), status=410)
        except Exception as error:  # noqa: BLE001  a stranger's view may give values of any type
            return self._error(page, request, why(error), status=500)
        if only is not None:
            return HTMLResponse(shown[0])
        return HTMLResponse(self._frame(page, asked, request, Markup("").join(shown)))

    def _panel(self, panel: Panel, asked: PageRequest, request: Request) -> Markup:
        """Return a panel, from memory where the same address was shown at the same lsn.

        Drawing a chart takes 50 ms of a core. A panel with an error is not kept.
        """
        key = (asked.run_number, asked.lsn, str(request.url), panel.name, panel.sql)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        shown = render_panel(
            panel,
            partial(
                self.stored[asked.run_number].ask,
                asked.lsn,
                is_long=panel.alone,
                has_left=request.state.left.is_set,
            ),
            run=asked.run,
            lsn=asked.lsn,
            downloads={
                kind: _with(request, panel=panel.name, as_of=asked.lsn, download=kind)
                for kind in (*DOWNLOADS, *panel.files)
            },
        )
        if ERROR_MARK not in shown and panel.keeps:
            with self._lock:
                # another request may have drawn it meanwhile
                if key in self._kept:
                    self._n_kept -= _n_characters(key, self._kept.pop(key))
                self._n_kept += _n_characters(key, shown)
                self._kept[key] = shown
                while self._n_kept > KEPT_CHARACTERS:
                    self._n_kept -= _n_characters(*self._kept.popitem(last=False))
        return shown

    async def sql_for_programs(self, request: Request) -> Response:
        """Answer a SELECT, the body of the request, as an Arrow stream. It needs the token."""
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return PlainTextResponse(
                "give the token that gigpo view printed: Authorization: Bearer TOKEN\n", 401
            )
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_QUERY_BYTES:
                return PlainTextResponse("the query is too long\n", status_code=413)
        return await _in_thread(partial(self._arrow_answer, request, body))

    def not_found(self, request: Request, error: Exception) -> Response:
        """Say that there is no such page."""
        return self._error(None, request, "There is no such page.", status=404)

    def _arrow_answer(self, request: Request, body: bytes) -> Response:
        try:
            query = body.decode()
            asked = self._asked(request)
            table = self.stored[asked.run_number].ask(
                asked.lsn, query, times_as_text=False, is_long=True
            )
        except (StoreError, BadAddressError, UnicodeDecodeError) as error:
            return PlainTextResponse(f"{plain(error, at_most=2000)}\n", status_code=400)
        return download(table, "arrow", name="answer", lsn=asked.lsn)

    def _asked(self, request: Request, *, compares: bool = False) -> PageRequest:
        """Return what the page's function gets. Raises BadAddressError and StoreError.

        Other runs are looked at only if the page compares them: each may be somebody else's, who
        could keep it from being read.
        """
        parameters = dict(request.query_params.items())
        number = _run_number(request, n_runs=len(self.stored))
        if number is None:
            raise BadAddressError(f"run is a number from 0 to {len(self.stored) - 1}")
        stored, has_left = self.stored[number], request.state.left.is_set
        is_live = not parameters.get("as_of")
        if has_left():
            raise StoreError("nobody waits for the page any more")
        lsn = self._moment(number, parameters.get("as_of", ""))

        @cache
        def moment_of(other: int) -> int:
            return self._moment(other, parameters.get(f"as_of_{other}", ""))

        if compares:
            for other in range(len(self.stored)):
                moment_of(other)
        return PageRequest(
            parameters=parameters,
            run=self.names[number],
            run_number=number,
            runs=self.names,
            lsn=lsn,
            is_live=is_live,
            is_foreign=request.headers.get("sec-fetch-site") in ("cross-site", "same-site"),
            ask=partial(stored.ask, lsn, has_left=has_left),
            ask_run=lambda other, query: self.stored[other].ask(
                moment_of(other), query, has_left=has_left
            ),
            lsn_of=moment_of,
            layout_of=lambda other: self.stored[other].checked_layout(),
            has_left=has_left,
        )

    def _moment(self, number: int, text: str) -> int:
        """Return the lsn that an address names, or a run's newest. Raises BadAddressError."""
        self.stored[number].checked_layout()  # a page may read files of it beside the snapshot
        newest = self.stored[number].look()
        if text and not (text.isascii() and text.isdecimal() and len(text) <= LSN_DIGITS):
            raise BadAddressError("as_of is the log number (LSN) of a snapshot")
        lsn = int(text) if text else newest
        if lsn != newest:
            self.stored[number].ensure(lsn)
        return lsn

    def _download(self, page: Page, asked: PageRequest, kind: str, request: Request) -> Response:
        """Return the rows of a panel as a file, to the page that shows it or with the token."""
        is_page = request.headers.get("sec-fetch-site") in ("same-origin", "none")
        given = request.headers.get("authorization", "")
        if not is_page and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return PlainTextResponse("give the token that gigpo view printed\n", status_code=401)
        wanted = request.query_params.get("panel")
        panels = [each for each in page.panels(asked) if each.name == wanted and each.query]
        if not panels:
            raise BadAddressError("the page has no such panel with rows")
        (panel,) = panels
        if kind not in DOWNLOADS and kind not in panel.files:
            raise BadAddressError(f"download is one of {', '.join([*DOWNLOADS, *panel.files])}")
        table = self.stored[asked.run_number].ask(
            asked.lsn,
            panel.query,
            tables=panel.tables,
            times_as_text=kind != "arrow",
            is_long=True,
            has_left=request.state.left.is_set,
        )
        return download(table, kind, name=panel.name, lsn=asked.lsn, write=panel.files.get(kind))

    def _frame(self, page: Page, asked: PageRequest, request: Request, panels: Markup) -> Markup:
        stored = self.stored[asked.run_number]
        others: dict[str, object] = {}
        if page.compares:
            others = {
                f"as_of_{number}": asked.lsn_of(number)
                for number in range(len(self.stored))
                if number != asked.run_number
            }
        return html(
            "page.html",
            page=page,
            asked=asked,
            panels=panels,
            pages=[each for each in PAGES if each.is_start],
            runs=[
                (plain(Path(name).name or name), number, _switched(page, request, run=number))
                for number, name in enumerate(self.names)
            ],
            fixed_link=_with(request, as_of=asked.lsn, **others),
            live_link=_with(request, as_of=None, **dict.fromkeys(others)),
            left_out=stored.left_out or stored.stuck,
        )

    def _error(self, page: Page | None, request: Request, reason: str, *, status: int) -> Response:
        shown = html(
            "error.html",
            page=page,
            pages=[each for each in PAGES if each.is_start],
            reason=reason,
            live_link=_with(request, as_of=None),
        )
        return HTMLResponse(shown, status_code=status)


def serve(runs: Sequence[Path], *, port: int, opens_browser: bool, as_of: int | None) -> None:
    """Serve the runs until Ctrl-C. Raises StoreError if one cannot be read."""
    limit_memory()
    memory.limit_allocators()
    token = secrets.token_urlsafe(24)
    listener = _listen(port)
    app = make_app(runs, token=token, as_of=as_of)
    address = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    print(printable(f"{address}/  (Ctrl-C ends it)"), flush=True)
    print(
        printable(
            f"for programs: curl -H 'Authorization: Bearer {token}' --data 'FROM groups' "
            f"{address}/sql  answers Arrow"
        ),
        flush=True,
    )
    server = make_server(app)
    # The logger keeps one of equal filters.
    logging.getLogger("uvicorn.error").addFilter(_is_of_use)
    if opens_browser:
        threading.Thread(target=webbrowser.open, args=(f"{address}/",), daemon=True).start()
    server.run(sockets=[listener])


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return False for what uvicorn logs when Ctrl-C cuts requests short.

    It is a line about all of them, and a traceback for each.
    """
    error = record.exc_info[1] if record.exc_info else None
    is_cut = isinstance(error, asyncio.CancelledError)
    return not is_cut and "timeout graceful shutdown exceeded" not in record.getMessage()


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()  # whoever reads the address may connect at once
    except OSError as error:
        listener.close()
        raise StoreError(
            f"cannot listen on port {port} ({error.strerror}); give another --port, "
            "or 0 for a free one"
        ) from error
    return listener


async def _in_thread(function: Callable[[], Response]) -> Response:
    from starlette.concurrency import run_in_threadpool

    return await run_in_threadpool(function)


async def _file(path: Path, request: Request) -> Response:
    return FileResponse(
        path, media_type="text/javascript", headers={"cache-control": "max-age=86400"}
    )


def _run_number(request: Request, *, n_runs: int) -> int | None:
    text = request.query_params.get("run", "0")
    is_number = text.isascii() and text.isdecimal() and len(text) <= RUN_DIGITS
    return int(text) if is_number and int(text) < n_runs else None


def _switched(page: Page, request: Request, *, run: int) -> str:
    """Return the address of another run: of the same page, if it needs no group or task."""
    if page.compares:
        return _with(request, run=run, as_of=None)
    return f"{page.path if page.is_start else '/'}?run={run}"


def _with(request: Request, **changes: object) -> str:
    """Return the address of the request with some parameters changed, or left out if None."""
    kept = {name: value for name, value in request.query_params.items() if name not in changes}
    kept |= {name: str(value) for name, value in changes.items() if value is not None}
    # A browser takes the name after two slashes for another site.
    path = f"/{request.url.path.lstrip('/')}"
    return f"{path}?{urlencode(kept)}" if kept else path
