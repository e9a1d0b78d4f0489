"""Serve S3 answers that have no end, for tests of their readers."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Kind = Literal["body", "pages", "file", "list", "drip", "short"]
LONG_KEY = "segments/" + 900 * "k"
N_PAGES = 100  # of a list that has an end
DRIPPED_BYTES, DROP_S = 1_000_000, 0.25  # of a file that comes in drops of a few bytes


def _page(*, more: bool, number: int = 0, key: str = LONG_KEY) -> bytes:
    keys = "".join(
        f"<Contents><Key>run/{key}{number}-{n}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for n in range(1000)
    )
    token = f"<NextContinuationToken>{number + 1}</NextContinuationToken>" if more else ""
    head = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
    return f'<?xml version="1.0"?><ListBucketResult>{head}{keys}'.encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"</ListBucketResult>"
PAGE = _page(more=True) + END
BODY = 10 * _chunk(LONG_KEY.encode() * 1000)


class _Handler(socketserver.StreamRequestHandler):
    """Answer a HEAD shortly, and any other request as the server's kind says."""

    def handle(self) -> None:
        with suppress(OSError):
            while request := self.rfile.readline():
                while self.rfile.readline() not in (b"\r\n", b""):
                    pass
                self._answer(request, kind=self.server.kind)  # type: ignore[attr-defined]

    def _answer(self, request: bytes, *, kind: Kind) -> None:
        if kind == "drip" and b"dataset.json" in request:
            self._drip(is_asked_whole=request.startswith(b"GET"))
        elif kind == "short":
            is_head = request.startswith(b"HEAD")
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (100 if is_head else 4)
            )
            self.wfile.write(b"" if is_head else b"some")
        elif request.startswith(b"HEAD"):
            status = b"200 OK" if kind == "file" else b"404 Not Found"
            self.wfile.write(b"HTTP/1.1 %b\r\nContent-Length: 100\r\n\r\n" % status)
        elif kind == "drip":
            self._send(b"")
        elif kind == "pages":
            self._send(PAGE)
        elif kind == "list":
            _, _, token = request.partition(b"continuation-token=")
            number = int(token.partition(b"&")[0] or 0)
            self._send(_page(more=number < N_PAGES - 1, number=number, key="segments/w0/") + END)
        else:
            self.wfile.write(CHUNKED + _chunk(_page(more=False)))
            while True:
                self.wfile.write(BODY)

    def _drip(self, *, is_asked_whole: bool) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n"
        head += b"Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n\r\n"
        self.wfile.write(head % DRIPPED_BYTES)
        ended: threading.Event = self.server.ended  # type: ignore[attr-defined]
        while is_asked_whole and not ended.wait(DROP_S):
            self.wfile.write(16 * b"x")

    def _send(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
        self.wfile.write(head % len(body) + body)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextmanager
def endless_server(kind: Kind) -> Iterator[str]:
    """Give the URI of a run on a server of lists without an end, or of one with 100,000 files.

    `body` is one list without an end, `pages` lists that each name a next one, `file` a file that
    is longer than its head says, and `list` is whole. `drip` is a dataset that comes slower than
    anybody can wait. `short` is a file of 100 bytes, of which 4 come.
    """
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.kind = kind  # type: ignore[attr-defined]
        # A read that is never answered would hold up all others of Arrow in this process.
        server.ended = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        yield f"s3://bucket/run?endpoint_override=http://{host!s}:{port}&scheme=http&region=r"
        server.ended.set()  # type: ignore[attr-defined]
        server.shutdown()
