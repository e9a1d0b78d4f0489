"""Serve a corpus in Search-R1's retrieval protocol, which `client.py` shows.

    python -P -m envs.search.server --corpus corpus.jsonl --port 8000 --index my_module:make

Without --index the words are indexed with BM25. `make(corpus)` is called once with the path of the
corpus and returns an `Index` (corpus.py).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from envs.hosting.http_requests import (
    AtOnce,
    RequestRefused,
    guard,
    listen,
    read_json,
    write_answer,
)
from envs.options import load_target
from envs.search.corpus import MAX_QUERY_CHARACTERS, Corpus, Hit, bm25_index, read_passages
from printable import ArgumentParser, printable, protect_terminal

# Bounds of one request.
MAX_QUERIES, MAX_TOPK = 4096, 1000
MAX_HITS = 100_000  # queries times topk
MAX_BODY_BYTES = 4 * 2**20  # a kilobyte for each of the most queries
# Bound of the bodies of all requests together: nobody needs a key to send some.
MAX_BODIES_BYTES = 64 * 2**20
# Bound of the passages in an answer, which stays in memory until the client has read it. A batch of
# 512 queries with three passages each has about 1.5 million.
MAX_ANSWER_CHARACTERS = 16_000_000
# Bound of all answers together that clients have not read yet. One has 192 MB at most, as escapes.
MAX_ANSWERS_BYTES = 256 * 2**20
# A larger request is searched for in pieces of at most so many queries and characters. A piece of
# short questions takes some 10 ms, one of long texts some 200 ms.
PIECE_QUERIES, PIECE_CHARACTERS = 64, 32_768
# Larger requests that are searched for at once: a question waits for a piece of each at most.
LARGE_REQUESTS_AT_ONCE = 2
# Bounds of the queries that wait, of larger requests and of the others. A training batch has some
# hundred thousand characters.
MAX_WAITING_CHARACTERS = 32 * 2**20
CHARACTERS_OF_AN_OBJECT = 64  # a short query takes as much memory as so many more characters


def application(corpus: Corpus, *, topk: int) -> web.Application:
    """Return the web application. `topk` is the default of a request's `topk`."""
    # Search-R1's protocol has no key: the corpus is open to everybody who can reach the server.
    app = web.Application(middlewares=[guard("", error_field="detail")])
    app.router.add_post("/retrieve", Retrieval(corpus, topk=topk).answer)
    return app


class Retrieval:
    """Answer requests, and bound what all clients together can take."""

    def __init__(self, corpus: Corpus, *, topk: int) -> None:
        self._corpus, self._topk = corpus, topk
        self._bodies = AtOnce(MAX_BODIES_BYTES)
        self._answers = AtOnce(MAX_ANSWERS_BYTES)
        self._few, self._many = AtOnce(MAX_WAITING_CHARACTERS), AtOnce(MAX_WAITING_CHARACTERS)
        self._large = asyncio.Semaphore(LARGE_REQUESTS_AT_ONCE)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        queries, wanted, with_scores = await self._read(request)
        hits_of = await self._search(request, queries, wanted)
        n_characters = sum(len(hit.passage.contents) for hits in hits_of for hit in hits)
        if n_characters > MAX_ANSWER_CHARACTERS:
            raise RequestRefused(
                422,
                f"the passages found have {n_characters:,} characters, more than "
                f"{MAX_ANSWER_CHARACTERS:,}; send fewer queries at once, or a smaller topk",
            )
        result = [[_to_json(hit, with_scores=with_scores) for hit in hits] for hits in hits_of]
        return await write_answer(request, {"result": result}, answers=self._answers)

    async def _read(self, request: web.Request) -> tuple[list[str], int, bool]:
        """Return what is asked for. When it returns, the body takes no memory any more."""
        asked = await read_json(request, bodies=self._bodies, at_most_bytes=MAX_BODY_BYTES)
        try:
            return _parse_request(asked, topk=self._topk)
        except ValueError as error:
            raise RequestRefused(422, str(error)) from None

    async def _search(self, request: web.Request, queries: list[str], topk: int) -> list[list[Hit]]:
        n_characters = sum(len(query) + CHARACTERS_OF_AN_OBJECT for query in queries)
        pieces = _pieces(queries)
        if len(pieces) == 1:
            with self._few.counted(n_characters):
                return await asyncio.to_thread(self._search_piece, request, queries, topk)
        found: list[list[Hit]] = []
        with self._many.counted(n_characters):
            async with self._large:
                for piece in pieces:
                    found += await asyncio.to_thread(self._search_piece, request, piece, topk)
        return found

    def _search_piece(self, request: web.Request, queries: list[str], topk: int) -> list[list[Hit]]:
        """Search, in a thread. Raises RequestRefused if nobody waits for the answer any more."""
        if request.transport is None:
            raise RequestRefused(499, "the client has closed the connection")
        return self._corpus.search(queries, topk)


def _pieces(queries: Sequence[str]) -> list[list[str]]:
    """Return the queries as pieces, at least one. A query longer than a piece is one of its own."""
    pieces: list[list[str]] = [[]]
    n_characters = 0
    for query in queries:
        n_characters += len(query)
        is_full = len(pieces[-1]) == PIECE_QUERIES or n_characters > PIECE_CHARACTERS
        if pieces[-1] and is_full:
            pieces.append([])
            n_characters = len(query)
        pieces[-1].append(query)
    return pieces


def _parse_request(body: object, *, topk: int) -> tuple[list[str], int, bool]:
    """Return queries, topk and return_scores. Raises ValueError for a malformed request."""
    if not isinstance(body, dict) or not isinstance(queries := body.get("queries"), list):
        raise ValueError(
            'the body must be {"queries": ["...", ...], "topk": 3, "return_scores": true}'
        )
    if not all(isinstance(query, str) for query in queries):
        raise ValueError("queries must be texts")
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"{len(queries)} queries in one request; send at most {MAX_QUERIES}")
    wanted = topk if body.get("topk") is None else body["topk"]
    if not isinstance(wanted, int) or not 1 <= wanted <= MAX_TOPK:
        raise ValueError(
            f"topk={repr(wanted)[:60]} must be a whole number, at least 1 and at most {MAX_TOPK}"
        )
    if len(queries) * wanted > MAX_HITS:
        raise ValueError(
            f"{len(queries)} queries with topk={wanted} ask for over {MAX_HITS} passages; send "
            "fewer queries at once"
        )
    searched = [query[:MAX_QUERY_CHARACTERS] for query in queries]  # as `Corpus.search` does
    return searched, wanted, bool(body.get("return_scores", False))


def _to_json(hit: Hit, *, with_scores: bool) -> dict[str, object]:
    document: dict[str, object] = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if with_scores else document


def load(path: Path, index: str) -> Corpus:
    """Read and index a corpus. `index` is "module:make", or "" for BM25. Raises ValueError."""
    passages = read_passages(path)
    if not index:
        return Corpus(passages, bm25_index(passages))
    return Corpus(passages, load_target("search.server", "--index", index)(path))


async def serve(corpus: Corpus, *, host: str, port: int, topk: int) -> None:
    """Print the URL and answer until it is cancelled. Port 0 takes a free one."""
    runner = await listen(application(corpus, topk=topk), host, port)
    try:
        host, port = runner.addresses[0][:2]
        print(
            printable(f"http://{host}:{port}/retrieve answers from {len(corpus):,} passages"),
            flush=True,
        )
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="passages: .jsonl, .jsonl.xz or .jsonl.gz")
    add("--index", default="", help="module:make of another index than BM25")
    add("--topk", type=int, default=3, help="passages per query if a request does not say")
    add("--host", default="127.0.0.1", help="0.0.0.0 answers other machines too (%(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    options = parser.parse_args()
    if options.topk < 1:
        parser.error(f"--topk {options.topk} must be at least 1")
    try:
        corpus = load(options.corpus, options.index)
        asyncio.run(serve(corpus, host=options.host, port=options.port, topk=options.topk))
    except (ValueError, OSError) as error:
        raise SystemExit(printable(error)) from None
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    protect_terminal()
    main()
