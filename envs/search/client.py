"""Asking a retrieval server that speaks Search-R1's protocol; ours is `server.py`.

POST URL    {"queries": ["..."], "topk": 3, "return_scores": true}
200         {"result": [[{"document": {"id": "...", "contents": "\\"Title\\"\\ntext"}, "score":
0.9}, ...]]}

The outer list has a list for every query; without `return_scores` documents stand in it as they
are.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp

from envs.hosting.http_requests import read_bounded
from envs.search.passages import Hit, Passage

REQUEST_TIMEOUT_S = 30.0  # of one answer
MAX_ANSWER_BYTES = 16 * 2**20  # of one answer, unpacked; 1000 passages have a megabyte or two
# before another attempt, where there was no connection: a server starts in that time
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)

ANSWERED: set[str] = set()  # servers that have, in this process


def has_answered(url: str) -> bool:
    return url in ANSWERED


async def ask_server(url: str, query: str, *, topk: int) -> list[Hit]:
    """The best passages for a query.

    ConnectionError: it could not be reached, in several attempts, or did not answer; ValueError: it
    answered something else. Each in one line that names the URL and what to do.
    """
    pauses_s = iter(PAUSES_S)
    while True:
        try:
            hits = _hits(
                url, await _post(url, {"queries": [query], "topk": topk, "return_scores": True})
            )
            ANSWERED.add(url)
            return hits
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise ConnectionError(
                    f"no retrieval server at {url} in {len(PAUSES_S) + 1} attempts over "
                    f"{sum(PAUSES_S):g} s ({error}); "
                    "start it: python -m envs.search.server --corpus FILE, or change "
                    "env.options.retriever"
                ) from error
        await asyncio.sleep(pause_s)


async def _post(url: str, body: dict[str, object]) -> str:
    try:
        # A session of its own, as `Environment.close` cannot wait for one to end; connecting is
        # cheap beside searching.
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
            ) as session,
            # A redirect could lead to a machine that only this one can reach.
            session.post(url, json=body, allow_redirects=False) as response,
        ):
            answer = await _read(url, response)
            if response.status != 200:
                said = " ".join(answer[:200].split())
                raise ValueError(
                    f"the retrieval server at {url} answered {response.status}: {said}; its log "
                    "may say why"
                )
            return answer
    except TimeoutError:
        raise ConnectionError(  # no TimeoutError, by which the pool means its own
            f"the retrieval server at {url} did not answer within {REQUEST_TIMEOUT_S:g} s; it may "
            "need more cores"
        ) from None


async def _read(url: str, response: aiohttp.ClientResponse) -> str:
    try:
        return (await read_bounded(response, max_bytes=MAX_ANSWER_BYTES)).decode()
    except ValueError as error:  # too long, or no UTF-8
        raise ValueError(
            f"the retrieval server at {url} answered something unreadable: {error}"
        ) from None


def _hits(url: str, answer: str) -> list[Hit]:
    try:
        (found,) = json.loads(answer)["result"]
        return [
            Hit(
                passage=Passage(
                    id=str(item["document"].get("id", "")),
                    contents=str(item["document"]["contents"]),
                ),
                score=float(item["score"]),
            )
            for item in found
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(
            f"the retrieval server at {url} answered {answer[:120]!r}, not Search-R1's "
            '{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}; docs/search.md has the protocol'
        ) from None
