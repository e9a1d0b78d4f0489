"""Receive the messages of `multiprocessing.connection` without waiting for the rest of one.

`Connection.recv` waits for a whole message. An event loop that called it would stand still for as
long as the sender is stopped in the middle of one.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

CHUNK_BYTES = 1 << 20
# A message begins with its length: SHORT, or -1 as SHORT and then LONG.
SHORT, LONG = struct.Struct("!i"), struct.Struct("!Q")


class MessageStream:
    """Call `received()` whenever the socket can be read. The socket stays the caller's."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._buffer = channel, bytearray()

    def received(self) -> Iterator[Any]:
        """Yield the complete messages. Raises EOFError after them if the other end is closed."""
        is_open = self._fill_buffer()
        while (message := self._take_message()) is not None:
            yield pickle.loads(message)
        if not is_open:
            raise EOFError

    def _fill_buffer(self) -> bool:
        """Read all that has arrived. Return whether the other end is open."""
        try:
            while chunk := self._channel.recv(CHUNK_BYTES, socket.MSG_DONTWAIT):
                self._buffer += chunk
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        return False

    def _take_message(self) -> bytes | None:
        start = SHORT.size
        if len(self._buffer) < start:
            return None
        (length,) = SHORT.unpack_from(self._buffer)
        if length < 0:
            start += LONG.size
            if len(self._buffer) < start:
                return None
            (length,) = LONG.unpack_from(self._buffer, SHORT.size)
        if len(self._buffer) < start + length:
            return None
        message = bytes(self._buffer[start : start + length])
        del self._buffer[: start + length]
        return message
