"""Serve the pages on this machine. Only the person at it is answered, and nothing is written.

A browser sends any page's requests to any address. So the server listens on the loopback only,
answers only requests to its own name (Host), and none that another site's page made (Origin,
Sec-Fetch-Site). Pages run no script but ours and Bokeh's, and nothing leaves the machine.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import h11
import uvicorn
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from analysis.view.charts import warm_up
from analysis.view.downloads import DOWNLOADS, download
from analysis.view.html import BOKEH_SCRIPT, STATIC, html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.pages import PAGES
from analysis.view.panel import ERROR_MARK, Panel, render_panel, render_placeholder, why
from analysis.view.snapshots import Snapshots
from analysis.view.text import plain
from linear_h11 import use_linear_patterns
from printable import printable
from store import StoreError

LOOPBACK = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")
IN_ADVANCE = ("sec-purpose", "purpose", "x-moz")  # headers by which browsers say so
MAX_ADDRESS_BYTES = 64 << 10  # of the query of an address, such as the SELECT of the SQL page
MAX_HEAD_BYTES = 2 * MAX_ADDRESS_BYTES  # of a request: address and headers
MAX_QUERY_BYTES = 1 << 20  # of a program's SELECT
PIECE_BYTES = 1 << 20  # of an answer are sent at once
TAKEN_WITHIN_S = 30.0  # a client takes each piece within this time
KEPT_CHARACTERS = 2**24  # of panels; most have tens of thousands
HEADERS = {
    # Bokeh sets styles in the page; scripts come from files of ours only.
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


_Key = tuple[int, int, str, str, str]  # run, lsn, address, panel and query


def _n_characters(key: _Key, shown: str) -> int:
    """Return the length of a kept panel with its key: an address may be as long as a panel."""
    return len(shown) + sum(len(part) for part in key if isinstance(part, str))


class Guard:
    """Refuse requests that the person at this machine did not make, and add the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in HEADERS.items()
                        if name.encode() not in own
                    ),
                    # What comes of a body after the answer is not read: in pieces of one byte it
                    # takes 0.75 s a megabyte, and nobody else is answered meanwhile.
                    *([(b"connection", b"close")] if _has_body(request) else []),
                ]
            if message["type"] == "http.response.body":
                await _send_in_pieces(send, message)
            else:
                await send(message)

        refusal = refusal_of(request)
        answer = PlainTextResponse(refusal, status_code=403) if refusal else self.app
        with contextlib.suppress(_StalledError):  # the server ends the connection
            left = request.state.left = threading.Event()
            answering = answer(scope, receive, send_with_headers)
            if request.method == "POST":  # its body is still to come
                await answering
            else:
                await _answer_until_left(answering, receive, left=left)


class _StalledError(Exception):
    """A client takes nothing, or too little, of its answer."""


async def _answer_until_left(
    answer: Awaitable[None], receive: Receive, *, left: threading.Event
) -> None:
    """Send an answer, and give it up if the client leaves: others wait for the threads.

    `left` is set then, for an answer that is being made in one.
    """
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        left.set()
        for each in (answering, leaving):
            each.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_in_pieces(send: Send, message: Message) -> None:
    """Send a body. Raises _StalledError if a piece is not taken within TAKEN_WITHIN_S.

    The whole answer would stay in memory for as long as a client that reads nothing stays.
    """
    body, is_last = message.get("body", b""), not message.get("more_body", False)
    for begin in range(0, max(len(body), 1), PIECE_BYTES):
        piece = body[begin : begin + PIECE_BYTES]
        more = not is_last or begin + PIECE_BYTES < len(body)
        try:
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await send({"type": message["type"], "body": piece, "more_body": more})
        except TimeoutError as error:
            raise _StalledError from error


def _has_body(request: Request) -> bool:
    """Return whether a request brings a body."""
    lengths = request.headers.getlist("content-length")
    return "transfer-encoding" in request.headers or any(length != "0" for length in lengths)


def refusal_of(request: Request) -> str:
    """Return why a request is refused, "" if it is not."""
    headers = request.headers
    if _name_of(headers.get("host", "")) not in NAMES:
        return "this server answers to 127.0.0.1 and localhost only\n"
    if headers.get("origin") not in (None, f"http://{headers.get('host')}"):
        return "requests of other sites are refused\n"
    # Of a page that is asked for in advance the browser does not say which site wanted it.
    if any("prefetch" in headers.get(name, "").lower() for name in IN_ADVANCE):
        return "no page is made in advance\n"
    # A link that somebody follows. A frame of another page navigates too.
    is_visit = headers.get("sec-fetch-dest") == "document" and request.method == "GET"
    is_visit = is_visit and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_visit:
        return "requests of other sites are refused\n"
    if len(request.url.query) > MAX_ADDRESS_BYTES:
        return "the address is too long\n"
    if request.method != "POST" and _has_body(request):
        return "a page takes no body\n"
    return ""


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
            stored.append(Snapshots(run, **settings))
            if as_of is not None:
                stored[-1].ensure(as_of)
    except BaseException:
        for each in stored:
            each.close()
        raise

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
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
            asked = self._asked(request)
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

    def _asked(self, request: Request) -> PageRequest:
        """Return what the page's function gets. Raises BadAddressError and StoreError."""
        parameters = dict(request.query_params.items())
        number = _run_number(request, n_runs=len(self.stored))
        if number is None:
            raise BadAddressError(f"run is a number from 0 to {len(self.stored) - 1}")
        for each in self.stored:
            each.checked_layout()  # a page may read files of a run beside its snapshot
        stored, has_left = self.stored[number], request.state.left.is_set
        is_live = not parameters.get("as_of")
        if has_left():
            raise StoreError("nobody waits for the page any more")
        lsn = self._moment(number, parameters.get("as_of", ""))
        moments = [
            self._moment(other, parameters.get(f"as_of_{other}", ""))
            for other in range(len(self.stored))
        ]
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
                moments[other], query, has_left=has_left
            ),
            lsn_of=moments.__getitem__,
        )

    def _moment(self, number: int, text: str) -> int:
        """Return the lsn that an address names, or a run's newest. Raises BadAddressError."""
        newest = self.stored[number].look()
        if text and not (text.isascii() and text.isdecimal() and len(text) < 19):
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


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Return the server of an application, with bounds on what a connection may send ahead.

    uvicorn's other parser, httptools, keeps headers, trailers and waiting requests without end. Its
    other loop, uvloop, reads a connection until it is empty before it goes on to the next.
    """
    use_linear_patterns()
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_OneAtATime,
            loop="asyncio",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            ws="none",
        )
    )


class _OneAtATime(H11Protocol):
    """Disconnect a client that sends a request before the last is answered; browsers do not.

    Nothing more would be read of it, so nobody would see that it has left.
    """

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_whole = self.conn.their_state is not h11.SEND_BODY
        if is_answering and is_whole and self.conn.trailing_data[0]:
            self.transport.abort()


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


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()


def _run_number(request: Request, *, n_runs: int) -> int | None:
    text = request.query_params.get("run", "0")
    is_number = text.isascii() and text.isdecimal() and len(text) < 6
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
