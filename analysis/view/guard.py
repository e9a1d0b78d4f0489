"""Answer only the person at this machine, and bound what a client can hold.

    app = Starlette(routes=..., middleware=[Middleware(Guard)])
    make_server(app).run(sockets=[listener])

A browser sends any page's requests to any address. So only requests to the server's own name (Host)
are answered, and none that another site's page made (Origin, Sec-Fetch-Site). A client that takes
too little of its answer, or sends more before it has it, is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import threading
from collections.abc import Awaitable, Iterator
from typing import ClassVar

import anyio
import h11
import uvicorn
from anyio._backends._asyncio import WorkerThread
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from linear_h11 import use_linear_patterns

NAMES = ("127.0.0.1", "localhost", "[::1]")
IN_ADVANCE = ("sec-purpose", "purpose", "x-moz")  # headers by which browsers say so
MAX_ADDRESS_BYTES = 64 << 10  # of the query of an address, such as the SELECT of the SQL page
MAX_HEAD_BYTES = 2 * MAX_ADDRESS_BYTES  # of a request: address and headers
PIECE_BYTES = 1 << 20  # of an answer are sent at once
MAX_CONNECTIONS = 1024  # and at most half of the files that this process may open
TAKEN_WITHIN_S = 30.0  # a client takes each piece within this time
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
    """Send an answer, and give it up if the client leaves, because others wait for the threads.

    A thread cannot be stopped from here. So `left` is set at the end, for the thread to look at.
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
        # The error of a task knows this frame. With a name here the answer would stay in memory
        # until Python looks for such circles.
        del answering, leaving, each


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_in_pieces(send: Send, message: Message) -> None:
    """Send a body. Raises _StalledError if a piece is not taken within TAKEN_WITHIN_S.

    The whole answer would stay in memory for as long as a client that reads nothing stays.
    """
    body, is_last = message.pop("body", b""), not message.get("more_body", False)
    for begin in range(0, max(len(body), 1), PIECE_BYTES):
        piece = body[begin : begin + PIECE_BYTES]
        more = not is_last or begin + PIECE_BYTES < len(body)
        is_taken = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await send({"type": message["type"], "body": piece, "more_body": more})
            is_taken = True
        if not is_taken:  # raised here, it knows no time-out, which knows the task: see above
            raise _StalledError


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


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()


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


async def start_threads() -> None:
    """Start all threads that answer requests, and keep them.

    Whoever starts a thread waits until it runs. A thread that finds no memory ends without a word,
    and the event loop would wait for good.
    """
    WorkerThread.MAX_IDLE_TIME = 2**31  # seconds
    number = int(anyio.to_thread.current_default_thread_limiter().total_tokens)
    all_run = threading.Barrier(number)
    try:
        await asyncio.gather(*(anyio.to_thread.run_sync(all_run.wait) for _ in range(number)))
    except BaseException:  # one could not be started, and the others wait for it
        all_run.abort()
        raise


class _OneAtATime(H11Protocol):
    """Disconnect a client that sends a request before the last is answered; browsers do not.

    Nothing more would be read of it, so nobody would see that it has left. Of too many clients the
    oldest that waits for no answer is disconnected: who reads the runs needs files to open.
    """

    _counter: ClassVar[Iterator[int]] = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(self.connections) >= min(MAX_CONNECTIONS, open_files // 2):
            clients = [one for one in self.connections if isinstance(one, _OneAtATime)]
            idle = [one for one in clients if one.is_idle]
            oldest = min(idle, key=lambda one: one.number, default=None)
            (transport if oldest is None else oldest.transport).abort()
            self.connections.discard(oldest)
        self.number = next(self._counter)
        super().connection_made(transport)

    @property
    def is_idle(self) -> bool:
        """Return whether the client waits for no answer."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_whole = self.conn.their_state is not h11.SEND_BODY
        if is_answering and is_whole and self.conn.trailing_data[0]:
            self.transport.abort()
