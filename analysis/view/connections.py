"""Serve an application to clients that nobody vouches for: their connections and our threads.

make_server(app).run(sockets=[listener])
await start_threads()        # in the application's lifespan
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
import threading
from collections.abc import Iterator
from typing import ClassVar

import anyio
import h11
import uvicorn
from anyio._backends._asyncio import WorkerThread
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from analysis.view.guard import MAX_ADDRESS_BYTES
from linear_h11 import use_linear_patterns

MAX_HEAD_BYTES = 2 * MAX_ADDRESS_BYTES  # of a request: address and headers
# And at most a third of the files that this process may open: one that is sent a file holds two. A
# browser has six connections.
MAX_CONNECTIONS = 1024


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
    WorkerThread.MAX_IDLE_TIME = 2**31  # seconds; anyio has no public setting
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
        if len(self.connections) >= min(MAX_CONNECTIONS, max(1, open_files // 3)):
            clients = [one for one in self.connections if isinstance(one, _OneAtATime)]
            idle = [one for one in clients if one.is_idle]
            if idle:
                oldest = min(idle, key=lambda one: one.number)
                oldest.transport.abort()
                self.connections.discard(oldest)  # it is counted until the loop has closed it
            else:
                transport.abort()
        self.number = next(self._counter)
        # asyncio does so only for a listener that was made with IPPROTO_TCP. Otherwise the second
        # part of an answer waits for the client's delayed acknowledgement, 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
