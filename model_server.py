"""Ask an OpenAI-compatible server that is not trusted, through the `openai` client.

    client = openai.AsyncOpenAI(base_url=url, api_key=key or "none", http_client=http_client())
    options = {"headers": own_headers(client, key=key)}     # of each request
    response = await client.get("/models", cast_to=httpx2.Response, options=options)
    json_of(response.content)

`endpoint.url` and `loss.teacher` name such servers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from http.cookiejar import CookieJar
from typing import TYPE_CHECKING, Any

from bounded_json import check_values, whole_number
from linear_h11 import use_linear_patterns
from printable import one_line

if TYPE_CHECKING:
    import httpx2
    import openai

# hundreds of times the longest reply that is asked for; log-probabilities of 200,000 tokens
MAX_ANSWER_BYTES = 16 * 2**20
MAX_ERROR_BYTES = 2**16  # the client itself reads the JSON of an error, whatever its values
MAX_ANSWER_VALUES = 2**21  # log-probabilities have about five values for each token
MAX_QUOTED_CHARACTERS = 300  # of an answer, in an error


def own_headers(client: openai.AsyncOpenAI, *, key: str) -> dict[str, Any]:
    """Return headers for a request's options that send nothing of the environment but `key`.

    The client takes headers of any name from OPENAI_CUSTOM_HEADERS, and its own key, organization
    and project, all of them meant for openai.com.
    """
    # Imported here: it takes more than a second, and few commands ask a server.
    from openai import Omit

    headers: dict[str, Any] = {name.lower(): Omit() for name in client.default_headers}
    headers |= {"accept": "application/json", "content-type": "application/json"}
    headers |= {"accept-encoding": "identity"}  # `_bound_answer` takes no compressed answer
    headers |= {"user-agent": client.user_agent}
    return {**headers, "authorization": f"Bearer {key}" if key else Omit()}


def http_client(*hooks: Callable[[httpx2.Response], Awaitable[None]]) -> httpx2.AsyncClient:
    """Make a client that follows no redirect, and reads a bounded answer in linear time.

    It keeps no cookies: each answer could add some, and all later requests would carry them. Each
    of `hooks` gets an answer that was read.
    """
    import openai

    use_linear_patterns()
    return openai.DefaultAsyncHttpxClient(
        follow_redirects=False,
        cookies=_NoCookies(),
        event_hooks={"response": [_bound_answer, *hooks]},
    )


class _NoCookies(CookieJar):
    def extract_cookies(self, response: object, request: object) -> None:
        """Keep none, and parse none."""


async def _bound_answer(response: httpx2.Response) -> None:
    """Read an answer before the client does, and stop when it is longer than MAX_ANSWER_BYTES.

    Of a longer answer one byte more is kept, so that its length tells. An error has at most
    MAX_ERROR_BYTES. A compressed answer is not unpacked: a few kilobytes can stand for terabytes of
    nothing, which no limit of bytes would see. Raises httpx2.DecodingError for one.
    """
    from httpx2 import DecodingError

    most = MAX_ANSWER_BYTES + 1 if response.is_success else MAX_ERROR_BYTES
    # The client would build a request to the new address, and fail if it is none.
    response.headers.pop("location", None)
    # Among the character sets that Python knows is zlib, which has no limit.
    response.headers.pop("content-type", None)
    encoding = response.headers.pop("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        await response.aclose()
        response._content = b""
        if response.is_success:
            raise DecodingError(
                f"the answer has Content-Encoding {quoted(encoding)}, and none was asked for",
                request=response.request,
            )
        return
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) >= most:
            await response.aclose()
            break
    response._content = bytes(body[:most])  # as `aread` does, which has no limit


def json_of(data: bytes) -> Any:
    """Return the value of a JSON text, with lone surrogates replaced.

    Returns None if it cannot be read, or has more than MAX_ANSWER_VALUES values.
    """
    text = data.decode(errors="replace")
    try:
        check_values(data, max_values=MAX_ANSWER_VALUES)
        value = json.loads(text, parse_int=whole_number)
        if "\\ud" in text.lower():  # the only way to write a lone surrogate
            units = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(units.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None
    return value


def model_names(listed: Any) -> list[str]:
    """Return the names in a server's answer to /models. Raises LookupError or TypeError for others.

    A name that is no text is refused: Python cannot write one that is nested deeply.
    """
    names = [model["id"] for model in listed["data"]]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a model's id is no text")
    return names


def quoted(said: object) -> str:
    """Return a server's words in one line of bounded length."""
    try:
        text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    except RecursionError:
        text = "an error of too many levels"
    line = one_line(text)
    if len(line) > MAX_QUOTED_CHARACTERS:
        return f"{line[:MAX_QUOTED_CHARACTERS]} ..."
    return line
