"""A retrieval server that speaks Search-R1's protocol (`client.py` shows it).

    python -m envs.search.server --corpus corpus.jsonl [--port 8000] [--topk 3] [--index my_module:make]

`make(corpus)` is called once with the path of the corpus and returns a `Lookup` (library.py);
without it the index is BM25.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
from pathlib import Path

from aiohttp import web

from envs.hosting.http_requests import (
    MAX_BODY_BYTES,
    guard,
    listen,
    read_json,
)
from envs.search.library import Library, Lookup, bm25_index
from envs.search.passages import Hit, read_corpus
from printable import ArgumentParser, printable, protect_terminal

MAX_QUERIES, MAX_TOPK = 4096, 1000  # of one request
MAX_HITS = 100_000  # queries times topk; each passage has about a kilobyte


def application(library: Library, *, topk: int) -> web.Application:
    """`topk` is for requests that do not say how many passages they want."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, wanted, with_scores = _parsed(await read_json(request), topk=topk)
        except ValueError as error:
            return web.json_response({"detail": str(error)}, status=422)
        found = await asyncio.to_thread(library.search, queries, wanted)
        return web.json_response(
            {"result": [[_item(hit, with_scores=with_scores) for hit in hits] for hits in found]}
        )

    # Search-R1's protocol has no key, and what the corpus holds is for everybody who can reach the
    # server.
    app = web.Application(
        middlewares=[guard("", error_field="detail")], client_max_size=MAX_BODY_BYTES
    )
    app.router.add_post("/retrieve", retrieve)
    return app


def _parsed(body: object, *, topk: int) -> tuple[list[str], int, bool]:
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
    return queries, wanted, bool(body.get("return_scores", False))


def _item(hit: Hit, *, with_scores: bool) -> dict[str, object]:
    document: dict[str, object] = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if with_scores else document


def load(corpus: Path, index: str) -> Library:
    """`index` is "" for BM25 or "module:make". ValueError, in one line, for a corpus or a name that
    is none.
    """
    passages = read_corpus(corpus)
    if not index:
        return Library(passages, bm25_index(passages))
    module_name, _, name = index.partition(":")
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--index {index!r}: {error}; it is module:function, with its folder on PYTHONPATH"
        ) from error
    made: Lookup = make(corpus)
    return Library(passages, made)


async def serve(library: Library, *, host: str, port: int, topk: int) -> None:
    """Until it is cancelled. Prints its URL when it answers; port 0 takes a free one."""
    runner = await listen(application(library, topk=topk), host, port)
    try:
        host, port = runner.addresses[0][:2]
        print(
            printable(f"http://{host}:{port}/retrieve answers from {len(library):,} passages"),
            flush=True,
        )
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="passages: .jsonl, .jsonl.xz or .jsonl.gz"
    )
    parser.add_argument("--index", default="", help="module:make of another index than BM25")
    parser.add_argument(
        "--topk", type=int, default=3, help="passages for a request that does not say how many"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 answers other machines too")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.topk < 1:
        parser.error(f"--topk {options.topk} must be at least 1")
    try:
        library = load(options.corpus, options.index)
        asyncio.run(serve(library, host=options.host, port=options.port, topk=options.topk))
    except (ValueError, OSError) as error:
        raise SystemExit(printable(error)) from None
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    protect_terminal()
    main()
