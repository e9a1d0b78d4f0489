"""What another process sends over a socket by `multiprocessing.connection`, received without
waiting for the rest of a message.

A long message comes in pieces. `Connection.recv` would wait for all of them, and an event loop that
called it would stand still for as long as the sender is stopped in the middle of one.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

PIECE_BYTES = 1 << 20
# a message's length; -1 says that the second one has it
SHORT, LONG = struct.Struct("!i"), struct.Struct("!Q")


class Answers:
    """`arrived()` whenever the socket can be read. The socket is the caller's."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._bytes = channel, bytearray()

    def arrived(self) -> Iterator[Any]:
        """The messages that are whole by now. Raises EOFError after them if the other end is
        closed, or lost.
        """
        is_open = self._receive()
        while (message := self._first()) is not None:
            yield pickle.loads(message)
        if not is_open:
            raise EOFError

    def _receive(self) -> bool:
        """Whether there may be more to come."""
        try:
            while piece := self._channel.recv(PIECE_BYTES, socket.MSG_DONTWAIT):
                self._bytes += piece
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        return False

    def _first(self) -> bytes | None:
        start = SHORT.size
        if len(self._bytes) < start:
            return None
        (length,) = SHORT.unpack_from(self._bytes)
        if length < 0:
            start += LONG.size
            if len(self._bytes) < start:
                return None
            (length,) = LONG.unpack_from(self._bytes, SHORT.size)
        if len(self._bytes) < start + length:
            return None
        message = bytes(self._bytes[start : start + length])
        del self._bytes[: start + length]
        return message
