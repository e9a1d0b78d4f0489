"""Guards the HTTP servers of this folder against clients that they do not know.

    app = web.Application(middlewares=[guard(key)], client_max_size=MAX_BODY_BYTES)
    runner = await listen(app, host, port)        # runner.addresses has the port; await runner.cleanup()
    body = await read_json(request)

A request needs the key, if there is one, and JSON as its content type. No page of a browser may
ask: another site could otherwise use the browser of somebody who reaches the server. A client that
sends half a request is disconnected, and one client too many is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from printable import printable

MAX_BODY_BYTES = 16 * 2**20
# For the head of a request, and again for its body. A connection that asks nothing is closed too:
# longer than the 15 s for which the client of aiohttp keeps one.
READ_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4096  # and at most half of the files that this process may open

BAD_REQUESTS = (HttpProcessingError, web.RequestPayloadError, ClientPayloadError)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestRefused(Exception):
    """A request that is not answered: its HTTP status, and the reason in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status, self.why = status, " ".join(why.split())


def guard(key: str) -> Any:
    """Return the middleware that lets a request pass. `key`: the API key; "" asks for none. Raises
    RequestRefused.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "Origin" in request.headers:
            raise RequestRefused(
                403,
                f"{request.path} is not for pages of a browser, and this request names an Origin",
            )
        given = request.headers.get("Authorization", "").partition(" ")[2]
        if key and not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
            raise RequestRefused(
                401, "the API key is missing or wrong; send `Authorization: Bearer KEY`"
            )
        if request.method == "POST" and request.content_type != "application/json":
            raise RequestRefused(
                415, f"{request.path} takes application/json, not {request.content_type[:60]!r}"
            )
        return await handler(request)

    return check


async def read_json(request: web.Request) -> object:
    """Return the body; None if it is no JSON. Raises RequestRefused,
    web.HTTPRequestEntityTooLarge.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise RequestRefused(
            408, f"the body of the request did not come within {READ_TIMEOUT_S:g} s"
        ) from None
    except BAD_REQUESTS as error:  # such as a body that is not compressed as its head says
        raise RequestRefused(
            400, f"the body of the request is not readable: {error!s:.200}"
        ) from None
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return None


async def listen(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Serve the application until `cleanup` of what is returned. Port 0 takes a free one. Raises
    OSError.
    """
    logger = logging.getLogger(__name__)
    logger.addFilter(_shorten)  # the logger keeps one of equal filters
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=READ_TIMEOUT_S, logger=logger)
    await runner.setup()
    try:
        await _Site(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def _shorten(record: logging.LogRecord) -> bool:
    """Write what is no HTTP in one line: anybody may send it. Another error keeps its traceback.

    Both are escaped, because they quote the request.
    """
    text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
    if isinstance(error, BAD_REQUESTS):
        text = f"{text}: {' '.join(str(error).split())[:200]}"
    elif error is not None:
        text = f"{text}\n{''.join(traceback.format_exception(error))}"
    record.msg, record.args = printable(text, lines=True), ()
    record.exc_info = record.exc_text = None
    return True


class _Site(web.BaseSite):
    """Like aiohttp's TCPSite, with a limit on connections."""

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        super().__init__(runner)
        self._host, self._port = host, port
        self._most = min(
            MAX_CONNECTIONS, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        )

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._protocol, self._host, self._port, backlog=self._backlog
        )

    def _protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None, "the runner is set up"
        return server() if len(server.connections) < self._most else _Refusal()


class _Refusal(asyncio.Protocol):
    """Disconnect one client too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
