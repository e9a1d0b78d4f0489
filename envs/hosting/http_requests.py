"""Exchange JSON over HTTP with clients and servers that nobody vouches for.

    app = web.Application(middlewares=[guard(key, error_field="error")])
    runner = await listen(app, host, port)         # runner.addresses has the port
    bodies = AtOnce(64 * 2**20)                    # of all clients together
    body = await read_json(request, bodies=bodies, at_most_bytes=MAX_BODY_BYTES)  # in a handler
    answer = await read_bounded(response, max_bytes=MAX_BODY_BYTES)  # in a client
    await runner.cleanup()

A request needs the key, if there is one, and JSON as its content type. Requests of web pages are
refused: another site could otherwise use the browser of somebody who reaches the server. A client
that sends half a request, or reads no answers, is disconnected. Of too many clients the oldest that
waits for no answer is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import resource
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import aiohttp
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from bounded_json import MAX_VALUES, TooManyValues, read_value
from printable import printable

MAX_BODY_BYTES = 16 * 2**20
# For the head of a request, and again for its body. An idle connection is closed after the same
# time, which is longer than the 15 s for which aiohttp's client keeps one.
READ_TIMEOUT_S = 30.0
# The rest of a body is read for so long after its answer: some clients look for the answer only
# when they have sent everything.
LINGERING_S = 1.0
# A client that leaves an answer unread is disconnected unless it takes this much in this time.
WRITE_TIMEOUT_S = 30.0
MIN_WRITTEN_BYTES = 2**20
# Read from one connection before the next has its turn. In chunks of one byte they take 2 ms.
READ_BYTES = 2**14
# A request may wait so long behind another of its connection. A client waits for its answers: the
# next request comes when the last was answered.
BEHIND_ANOTHER_S = 1.0
SMALL_ANSWER_BYTES = 2**16  # each connection may have one: 256 MiB of them all
MAX_CONNECTIONS = 4096  # and at most half of the files that this process may open

NO_OTHER_PROTOCOL = "no other protocol than HTTP is spoken here; send no Upgrade"
MALFORMED_REQUEST = (HttpProcessingError, web.RequestPayloadError, ClientPayloadError)
# Raised for the header Expect, outside of handlers: aiohttp cannot write bytes that are no text.
UNKNOWN_EXPECT = (web.HTTPExpectationFailed, UnicodeError)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestRefused(Exception):
    """A request is refused with an HTTP status and a reason in one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, " ".join(reason.split())


def guard(key: str, *, error_field: str) -> Any:
    """Return the outermost middleware of a server, which checks each request.

    It answers RequestRefused, also of a handler, with `{error_field: reason}`. An empty key asks
    for none.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check_request(request, key)
            return await handler(request)
        except RequestRefused as refused:
            response = web.json_response({error_field: refused.reason}, status=refused.status)
            if refused.status == 401:
                end_connection(request, response)
            return response

    return check


def end_connection(request: web.Request, response: web.Response) -> None:
    """Have the connection of a stranger end with his answer: no more of a body is read."""
    response.force_close()
    request.protocol._lingering_time = 0.0  # aiohttp has no setting for one request


def _check_request(request: web.Request, key: str) -> None:
    if "Origin" in request.headers:
        raise RequestRefused(
            403, f"{request.path} is not for pages of a browser, and this request names an Origin"
        )
    given = request.headers.get("Authorization", "").partition(" ")[2]
    if key and not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
        raise RequestRefused(
            401, "the API key is missing or wrong; send `Authorization: Bearer KEY`"
        )
    if wants_other_protocol(request):
        raise RequestRefused(400, NO_OTHER_PROTOCOL)
    if encoding := content_encoding(request):
        raise RequestRefused(415, f"the body is compressed ({encoding}); send it as it is")
    if request.method == "POST" and request.content_type != "application/json":
        raise RequestRefused(
            415, f"{request.path} takes application/json, not {request.content_type[:60]!r}"
        )


def wants_other_protocol(request: web.Request) -> bool:
    """Return whether a request asks for another protocol than HTTP.

    aiohttp reads nothing more then, and so would not see that the client has left. It goes on with
    HTTP if the client only asks for HTTP/2, as many do.
    """
    return request.headers.get("Upgrade", "").strip().lower() not in ("", "h2c")


def content_encoding(request: web.Request) -> str:
    """Return how the body of a request is compressed, "" if it is not.

    A server that refuses it is made with `auto_decompress=False`. Otherwise the body is unpacked
    before its handler is asked, and kilobytes without a key can stand for gigabytes.
    """
    encoding = request.headers.get("Content-Encoding", "")
    return "" if encoding.strip().lower() == "identity" else encoding[:60]


class AtOnce:
    """Bound what a server holds for all clients together: bytes of bodies, for example."""

    def __init__(self, at_most: int) -> None:
        self._left = at_most

    @contextlib.contextmanager
    def counted(self, number: int) -> Iterator[None]:
        """Count so many more in the block. Raises as `take`."""
        self.take(number)
        try:
            yield
        finally:
            self.give_back(number)

    def give_back(self, number: int) -> None:
        """Count so many less."""
        self._left += number

    def take(self, number: int) -> None:
        """Count so many more. Raises RequestRefused if they are too many."""
        if number > self._left:
            raise RequestRefused(503, "the server has too many requests now; ask again later")
        self._left -= number


async def write_answer(
    request: web.Request, value: object, *, answers: AtOnce
) -> web.StreamResponse:
    """Write a JSON answer, which counts among `answers` until the client has taken it.

    Raises RequestRefused if the server holds too many bytes of answers.
    """
    response = web.json_response(value)
    assert isinstance(response.body, bytes)
    n_bytes = len(response.body)
    counted = answers.counted(n_bytes if n_bytes > SMALL_ANSWER_BYTES else 0)
    with counted, contextlib.suppress(ConnectionError):  # the client has left
        await response.prepare(request)
        await response.write_eof()
        await request.writer.drain()  # GuardedSite disconnects a client that takes too little
    return response


async def read_json(request: web.Request, *, bodies: AtOnce, at_most_bytes: int) -> object:
    """Return the body of a request, None if it is no JSON.

    It counts among `bodies` until it is parsed. Raises RequestRefused, also for one of more than
    `at_most_bytes`.
    """
    received = bytearray()
    try:
        await _receive(request, received, bodies=bodies, at_most_bytes=at_most_bytes)
        return _parsed(bytes(received))
    finally:
        bodies.give_back(len(received))


async def _receive(
    request: web.Request, received: bytearray, *, bodies: AtOnce, at_most_bytes: int
) -> None:
    """Add the bytes of a body to `received` as they come."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                if len(received) + len(chunk) > at_most_bytes:
                    raise RequestRefused(
                        413, f"the body of the request has more than {at_most_bytes:,} bytes"
                    )
                bodies.take(len(chunk))
                received += chunk
    except TimeoutError:
        raise RequestRefused(
            408, f"the body of the request did not come within {READ_TIMEOUT_S:g} s"
        ) from None
    except ConnectionError:  # the client has left: nobody reads the answer, nor a log
        raise RequestRefused(400, "the body of the request ended too early") from None
    except MALFORMED_REQUEST as error:  # for example compressed in another way than its head says
        raise RequestRefused(
            400, f"the body of the request is not readable: {error!s:.200}"
        ) from None


def _parsed(body: bytes) -> object:
    try:
        return read_value(body or b"{}", max_values=MAX_VALUES)
    except TooManyValues as error:
        raise RequestRefused(
            413, f"the body of the request is too large: {error}; send fewer"
        ) from None
    except ValueError:
        return None


async def read_bounded(response: aiohttp.ClientResponse, *, max_bytes: int) -> bytes:
    """Return the body of a server's answer. Raises ValueError if it has more bytes, unpacked."""
    received = bytearray()
    async for chunk in response.content.iter_any():
        received += chunk
        if len(received) > max_bytes:
            raise ValueError(f"the server's answer has more than {max_bytes} bytes")
    return bytes(received)


async def listen(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Serve the application until `cleanup()` of the runner. Port 0 takes a free one.

    Raises OSError if it cannot listen there.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=READ_TIMEOUT_S,
        lingering_time=LINGERING_S,
        logger=server_logger(),
    )
    await runner.setup()
    try:
        await GuardedSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def server_logger() -> logging.Logger:
    """Return the logger for `web.AppRunner`, in which a malformed request is one line."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_shorten)  # the logger keeps one of equal filters
    return logger


def _shorten(record: logging.LogRecord) -> bool:
    """Log a malformed request in one line. Any other error keeps its traceback.

    Both are escaped, because they quote the request.
    """
    text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
    if isinstance(error, (*MALFORMED_REQUEST, *UNKNOWN_EXPECT)):
        text = f"{text}: {' '.join(str(error).split())[:200]}"
    elif error is not None:
        text = f"{text}\n{''.join(traceback.format_exception(error))}"
    record.msg, record.args = printable(text, lines=True), ()
    record.exc_info = record.exc_text = None
    return True


class GuardedSite(web.BaseSite):
    """Listen like aiohttp's TCPSite, with limits on connections and on unread answers.

    `await GuardedSite(runner, host, port).start()` after `await runner.setup()`.
    """

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        super().__init__(runner)
        self._host, self._port = host, port
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open: dict[_Connection, None] = {}  # oldest first
        self._max_connections = min(MAX_CONNECTIONS, max(1, open_files // 2))

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._protocol, self._host, self._port, backlog=self._backlog
        )

    def _protocol(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "the runner is set up"
        if len(self._open) >= self._max_connections:
            # Whoever reaches the port could otherwise keep everybody from it, without the key.
            idle = next((connection for connection in self._open if connection.is_idle), None)
            if idle is None:
                return _Refusal()
            del self._open[idle]
            idle.abort()
        connection = _Connection(server(), ended=lambda: self._open.pop(connection, None))
        self._open[connection] = None
        return connection


class _Refusal(asyncio.Protocol):
    """Disconnect one client too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class _Connection(asyncio.BufferedProtocol):
    """Pass everything to aiohttp's handler, and disconnect a client that does not read.

    aiohttp itself would wait for such a client for ever, also after it has closed the connection.
    What a client sends is read in small pieces: asyncio itself would read 256 KiB at a time.
    """

    _transport: asyncio.Transport
    _buffer: bytearray

    def __init__(self, handler: web.RequestHandler, *, ended: Callable[[], object]) -> None:
        self._handler = handler
        self._ended = ended
        self._watch: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A worker's event loop may be uvloop's. Its transports have the methods but not the type.
        self._transport = cast(asyncio.Transport, transport)
        # `pause_writing` comes with the first byte that the client's machine does not take, and
        # `resume_writing` with the last.
        self._transport.set_write_buffer_limits(high=0)
        self._handler.connection_made(transport)

    def pause_writing(self) -> None:
        self._set_timer()
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._cancel_timer()
        self._handler.resume_writing()

    @property
    def is_idle(self) -> bool:
        """Return whether every complete request was answered."""
        handler = self._handler
        request = handler._current_request
        is_answering = request is not None and request.content.is_eof()
        return handler.transport is not None and not is_answering and not handler._messages

    def abort(self) -> None:
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()
        self._cancel_timer()
        if self._watch is not None:
            self._watch.cancel()
        self._handler.connection_lost(error)

    def _watch_first_waiting(self) -> None:
        """Disconnect the client if the first of its waiting requests still waits a while later.

        aiohttp stops reading when many wait, or one with a large body. It would not see then that
        the client has left.
        """
        first = self._handler._messages[0]

        def look_again() -> None:
            self._watch = None
            waiting = self._handler._messages
            if waiting and waiting[0] is first:
                self._transport.abort()
            elif waiting:
                self._watch_first_waiting()

        self._watch = asyncio.get_running_loop().call_later(BEHIND_ANOTHER_S, look_again)

    def get_buffer(self, sizehint: int) -> bytearray:
        self._buffer = bytearray(READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(memoryview(self._buffer)[:nbytes])
        del self._buffer  # most connections are idle
        self._handler.data_received(data)
        if self._handler._messages and self._watch is None:
            self._watch_first_waiting()

    def eof_received(self) -> None:
        self._handler.eof_received()

    def _set_timer(self) -> None:
        unread_bytes = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(
            WRITE_TIMEOUT_S, self._check_progress, unread_bytes
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_progress(self, unread_bytes: int) -> None:
        if unread_bytes - self._transport.get_write_buffer_size() < MIN_WRITTEN_BYTES:
            self._transport.abort()
        else:
            self._set_timer()
