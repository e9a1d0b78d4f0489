"""Ask a retrieval server that speaks Search-R1's protocol, such as `server.py`.

    POST URL  {"queries": ["..."], "topk": 3, "return_scores": true}
    200       {"result": [[{"document": {"id": "...", "contents": "\\"Title\\"\\ntext"},
                            "score": 0.9}, ...]]}

The outer list has a list for each query. Without `return_scores` it holds bare documents.
"""

from __future__ import annotations

import asyncio

import aiohttp

from bounded_json import read_value
from envs.hosting.http_requests import read_bounded
from envs.search.corpus import Hit, Passage
from printable import one_line
from url_secrets import public_url

REQUEST_TIMEOUT_S = 30.0  # of one answer
MAX_ANSWER_BYTES = 16 * 2**20  # unpacked; an answer of 1000 passages has a megabyte or two
MAX_ANSWER_VALUES = 2**18  # in it; 1000 passages have some 4000
# Pauses before another attempt if there is no connection. A server starts in this time.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)

ANSWERED: set[str] = set()  # URLs of servers that have answered this process


async def ask_server(url: str, query: str, *, topk: int) -> list[Hit]:
    """Return the best passages for a query.

    Raises ConnectionError if the server cannot be reached or is late, and ValueError for any other
    answer than passages. Both name the URL and the fix in one line.
    """
    pauses_s = iter(PAUSES_S)
    while True:
        try:
            answer = await _post(url, {"queries": [query], "topk": topk, "return_scores": True})
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise ConnectionError(
                    f"no retrieval server at {public_url(url)} in {len(PAUSES_S) + 1} attempts "
                    f"over {sum(PAUSES_S):g} s ({error}); start it: python -P -m "
                    "envs.search.server --corpus FILE, or change env.options.retriever"
                ) from error
            await asyncio.sleep(pause_s)
        else:
            hits = _parse_hits(url, answer)
            ANSWERED.add(url)
            return hits


def _server(url: str) -> str:
    """Name the server in an error, which becomes an event: without a password."""
    return f"the retrieval server at {public_url(url)}"


async def _post(url: str, body: dict[str, object]) -> bytes:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    try:
        # A session for each request, because `Environment.close` cannot wait for one to end.
        # Connecting is cheap compared with searching. A redirect is refused: it could lead to a
        # machine that only this one can reach.
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=body, allow_redirects=False) as response,
        ):
            answer = await _read(url, response)
    except TimeoutError:
        raise ConnectionError(  # no TimeoutError: the pool would take it for its own
            f"{_server(url)} did not answer within {REQUEST_TIMEOUT_S:g} s; it may need more cores"
        ) from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):  # they quote it with its password
        raise ValueError(f"{_server(url)} has no valid URL; change env.options.retriever") from None
    except aiohttp.ClientResponseError as error:  # what came is no HTTP
        raise ValueError(
            f"{_server(url)} gave no readable answer: {one_line(error.message)[:200]}"
        ) from None
    if response.status != 200:
        beginning = " ".join(answer[:200].decode(errors="replace").split())
        raise ValueError(
            f"{_server(url)} answered {response.status}: {beginning}; its log may say why"
        )
    return answer


async def _read(url: str, response: aiohttp.ClientResponse) -> bytes:
    try:
        return await read_bounded(response, max_bytes=MAX_ANSWER_BYTES)
    except ValueError as error:
        raise ValueError(f"{_server(url)} gave no readable answer: {error}") from None


def _parse_hits(url: str, answer: bytes) -> list[Hit]:
    try:
        (found,) = read_value(answer, max_values=MAX_ANSWER_VALUES)["result"]
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
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        beginning = answer[:120].decode(errors="replace")
        raise ValueError(
            f"{_server(url)} answered {beginning!r}, not Search-R1's "
            '{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}; docs/search.md '
            "has the protocol"
        ) from None
