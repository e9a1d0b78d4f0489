"""Send messages between a reader and its child process: one byte of kind, eight of length, content.

No text of a query is ever taken for a kind or a length, so no result can pretend to be another
message.
"""

from __future__ import annotations

import socket
import struct
import time

ASK, READY, ROWS, END, ERROR, LEFT_OUT = b"A", b"R", b"D", b"E", b"X", b"L"
_HEAD = struct.Struct("<cQ")


def send(
    connection: socket.socket,
    kind: bytes,
    content: bytes | memoryview,
    *,
    deadline: float | None = None,
) -> None:
    """Send a message. Raises OSError if the other side is gone, TimeoutError after `deadline`."""
    for part in (_HEAD.pack(kind, len(content)), content):
        _allow_until(connection, deadline)
        connection.sendall(part)


def receive(connection: socket.socket, *, deadline: float | None = None) -> tuple[bytes, bytearray]:
    """Return the next message. Raises TimeoutError, EOFError or OSError."""
    kind, length = _HEAD.unpack(_receive_bytes(connection, _HEAD.size, deadline=deadline))
    return kind, _receive_bytes(connection, length, deadline=deadline)


def _receive_bytes(connection: socket.socket, n_bytes: int, *, deadline: float | None) -> bytearray:
    content = bytearray(n_bytes)
    view = memoryview(content)
    while view:
        _allow_until(connection, deadline)
        n_received = connection.recv_into(view)
        if n_received == 0:
            raise EOFError
        view = view[n_received:]
    return content


def _allow_until(connection: socket.socket, deadline: float | None) -> None:
    left_s = None if deadline is None else deadline - time.monotonic()
    if left_s is not None and left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)
