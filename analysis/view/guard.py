"""Answer only the person at this machine, and bound how long an answer is kept.

    app = Starlette(routes=..., middleware=[Middleware(Guard)])

A browser sends any page's requests to any address. So only requests to the server's own name (Host)
are answered, and none that another site's page made (Origin, Sec-Fetch-Site). A client that takes
too little of its answer is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = ("127.0.0.1", "localhost", "[::1]")
IN_ADVANCE = ("sec-purpose", "purpose", "x-moz")  # headers by which browsers say so
MAX_ADDRESS_BYTES = 64 << 10  # of the query of an address, such as the SELECT of the SQL page
PIECE_BYTES = 1 << 20  # of an answer are sent at once
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

    A thread cannot be stopped from here, so `left` is set for it to look at. Its place is free for
    another request when it has ended: anyio's cancellation waits for it. asyncio's would not, and
    each client that leaves would have another thread started.
    """
    answering = anyio.CancelScope()

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        answering.cancel()

    leaving = asyncio.ensure_future(leave())
    try:
        with answering:
            await answer
    finally:
        left.set()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        # The traceback of an error keeps this frame. Without these names the answer is freed at
        # once, and not when Python next collects garbage.
        del answer, leaving, leave


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
        if not is_taken:  # not where the TimeoutError is handled: its traceback keeps the task
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
