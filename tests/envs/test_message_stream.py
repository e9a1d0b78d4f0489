"""Messages of another process that come in pieces."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from envs.hosting.environment_process import MessageStream


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def framed(message: object) -> bytes:
    """Return the bytes that a Connection sends. A thread sends: a long message fills a socket."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with Connection(theirs.detach()) as connection:
            connection.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    with ours:
        received = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    sender.join()
    return received


def test_a_message_is_there_when_its_last_byte_is(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    answers = MessageStream(ours)
    first, second = framed(("one", 1)), framed([2] * 50)
    for k in range(len(first) - 1):
        theirs.send(first[k : k + 1])
        assert list(answers.received()) == []
    theirs.send(first[-1:] + second + first[:3])
    assert list(answers.received()) == [("one", 1), [2] * 50]
    theirs.send(first[3:])
    assert list(answers.received()) == [("one", 1)]


def test_one_longer_than_the_socket_holds_comes_whole(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    answers, found, image = MessageStream(ours), [], np.arange(3_000_000, dtype=np.uint8)
    message = framed(image)
    theirs.setblocking(False)
    while not found:
        message = message[theirs.send(message) :] if message else message
        found = list(answers.received())
    assert np.array_equal(found[0], image)


def test_what_was_sent_before_the_end_is_read_before_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    answers = MessageStream(ours)
    theirs.send(framed("last words") + framed("never")[:5])
    theirs.close()
    arrived = answers.received()
    assert next(arrived) == "last words"
    with pytest.raises(EOFError):
        next(arrived)
