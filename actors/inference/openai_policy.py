"""A policy behind an OpenAI-compatible server, which is anybody's model: `Policy`, as vLLM's is.

    policy = ChatPolicy(config)
    completion = await policy.generate(prompt, seed=seed, temperature=0.4)
    await policy.close()

Prompts are chats of `characters.py`; token ids are characters, and log-probabilities, which few
servers give, are recorded as 0: nothing can be trained from it. A server that is busy, fails or is
not there is asked again, later and later, within limits; then, and when it refuses a request,
EndpointFailed ends the evaluation: a silent server must not look like a model that loses.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors.inference.codepoint_tokenizer import ids_of, messages_of
from actors.inference.concurrency import RequestGate
from actors.policy import Completion, Prompt
from actors.prompting.chat_template import SHORTEST_BOUND
from configs import Config, EndpointConfig
from envs import PendingOperations
from printable import UserError, did_you_mean
from store import whole_text

if TYPE_CHECKING:
    import aiohttp

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between two attempts; doubled after each
CONNECT_TIMEOUT_S = 20.0
# of a server's answer: hundreds of times the longest reply that is asked for
MAX_ANSWER_BYTES = 16 * 2**20
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")  # of a request; endpoint.body may set them
SAID_CHARACTERS = 300  # of what a server says to an error
NAMES_SHOWN = 10  # of its models


class EndpointFailed(UserError, RuntimeError):
    """The server cannot be played with; the message is one line with its URL, and never the API
    key.
    """


class _Refused(Exception):
    """One attempt. `status` 0: there was no answer at all."""

    def __init__(self, why: str, *, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.retry_after_s = status, retry_after_s

    @property
    def is_passing(self) -> bool:
        return self.status in (0, 408, 429) or self.status >= 500


class ChatPolicy:
    """Unblocked by the server. Its connections are made where it is first used, on that event
    loop.
    """

    def __init__(self, config: Config) -> None:
        self._endpoint, self._thinking, self._stop = (
            config.endpoint,
            config.prompt.thinking,
            tuple(config.prompt.stop),
        )
        self._max_response_tokens = config.actors.max_response_tokens
        self._key = api_key(config.endpoint)
        self._gate = RequestGate(config.endpoint.requests)
        self.waits = PendingOperations()
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        """Raises EndpointFailed."""
        body = self._body(messages_of(prompt.token_ids), seed=seed, temperature=temperature)
        text, finish_reason = await self._reply(body, attempts=self._endpoint.attempts)
        if len(text) > (most := self._most_characters(body)):
            text, finish_reason = text[:most], "length"
        token_ids = ids_of(text)
        return Completion(
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            finish_reason=finish_reason,
            version_min=0,
            version_max=0,
        )

    async def try_once(self, *, temperature: float) -> None:
        """One question, asked as all others will be. Raises EndpointFailed, with the models that
        there are.
        """
        if not self._endpoint.model:
            raise EndpointFailed(f"endpoint.model is missing{self._known(await self._models())}")
        body = self._body(
            [{"role": "user", "content": "Say ready."}], seed=0, temperature=temperature
        )
        try:
            await self._reply(body, attempts=1)
        except EndpointFailed as error:
            if isinstance(error.__cause__, _Refused) and error.__cause__.status in (400, 404):
                raise EndpointFailed(f"{error}{self._known(await self._models())}") from error
            raise

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _body(
        self, messages: Sequence[Mapping[str, str]], *, seed: int, temperature: float
    ) -> dict[str, Any]:
        body = {
            "model": self._endpoint.model,
            "messages": messages,
            "max_tokens": self._max_response_tokens,
            "temperature": temperature,
            "seed": seed,
            **({"stop": list(self._stop)} if self._stop else {}),
            **(
                {}
                if self._thinking is None
                else {"chat_template_kwargs": {"enable_thinking": self._thinking}}
            ),
            **self._endpoint.body,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _most_characters(self, body: Mapping[str, Any]) -> int:
        """Return the bound of a reply's characters, for a server that heeds no limit of tokens."""
        asked = [body[name] for name in LIMIT_FIELDS if isinstance(body.get(name), int)]
        return max([self._max_response_tokens, *asked]) * SHORTEST_BOUND

    async def _reply(self, body: Mapping[str, Any], *, attempts: int) -> tuple[str, str]:
        """(text, finish reason). Raises EndpointFailed."""
        failures: list[_Refused] = []
        try:
            async with asyncio.timeout(self._endpoint.timeout_s), self._gate:
                with self.waits.on(f"a reply of {self._endpoint.url}"):
                    while len(failures) < attempts:
                        if failures:
                            await asyncio.sleep(
                                pause_s(len(failures), retry_after_s=failures[-1].retry_after_s)
                            )
                        try:
                            return reply_of(
                                await self._asked("POST", "/chat/completions", body),
                                stop=self._stop,
                            )
                        except _Refused as error:
                            failures.append(error)
                            if not error.is_passing:
                                raise self._failed(error) from error
        except TimeoutError:
            within = f"gave no reply within endpoint.timeout_s={self._endpoint.timeout_s:g}"
            raise self._failed(
                f"{within}; at last it {failures[-1]}" if failures else within
            ) from None
        raise self._failed(
            f"{failures[-1]} ({attempts} attempts)" if attempts > 1 else failures[-1]
        ) from failures[-1]

    async def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """The JSON of one answer. Raises _Refused."""
        import aiohttp  # here: only who plays with a server has a use for it

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=True)
        try:
            url = self._endpoint.url.rstrip("/") + path
            # A redirect would carry the prompt to another server.
            async with self._session.request(
                method, url, json=body, allow_redirects=False
            ) as response:
                if 300 <= response.status < 400:
                    why = f"answered {response.status}, a redirect, which is not followed; set endpoint.url to its end"
                    raise _Refused(why, status=response.status)
                text = (await _body_of(response)).decode(errors="replace")
                text = text.replace(self._key, "***") if self._key else text
                status, after = response.status, response.headers.get("Retry-After", "")
        # ValueError: a host that cannot be encoded
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Refused(
                f"cannot be reached ({_one_line(str(error)) or type(error).__name__})", status=0
            ) from error
        answer = _json(text)
        said = answer.get("error") if isinstance(answer, dict) else None
        if status == 200 and said:  # as some routers have it
            status = (
                said["code"]
                if isinstance(said, dict) and isinstance(said.get("code"), int)
                else 500
            )
        if status != 200:
            after_s = (
                min(float(after), self._endpoint.timeout_s)
                if after.isascii() and after.isdigit()
                else 0.0
            )
            raise _Refused(
                f"answered {status}: {_said(said, text)}", status=status, retry_after_s=after_s
            )
        if answer is None:
            raise _Refused(f"answered what is no JSON: {_said(None, text)}", status=status)
        return answer

    async def _models(self) -> list[str]:
        """Names; none where the server does not tell. Raises EndpointFailed if it is not there, or
        does not know the key.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                listed = await self._asked("GET", "/models", None)
            return sorted(str(model["id"]) for model in listed["data"])
        except _Refused as error:
            if error.status in (0, 401, 403):
                raise self._failed(error) from error
            return []
        except (TimeoutError, LookupError, TypeError):
            return []

    def _known(self, names: Sequence[str]) -> str:
        if not names:
            return "; give the name of one of its models: endpoint.model=NAME"
        shown = ", ".join(names[:NAMES_SHOWN]) + (
            f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        )
        return f"; {self._endpoint.url} has {shown}{did_you_mean(self._endpoint.model, names)}"

    def _failed(self, why: _Refused | str) -> EndpointFailed:
        refused_key = isinstance(why, _Refused) and why.status in (401, 403)
        key = (
            f"; is the key in {self._endpoint.api_key_env or 'endpoint.api_key_env=NAME'} right?"
            if refused_key
            else ""
        )
        text = f"{self._endpoint.url} {why}{key}"
        return EndpointFailed(text.replace(self._key, "***") if self._key else text)


def api_key(endpoint: EndpointConfig) -> str:
    """From the environment; "" where none is asked for. Raises EndpointFailed if it is not set."""
    if endpoint.api_key_env and not os.environ.get(endpoint.api_key_env):
        raise EndpointFailed(
            f"endpoint.api_key_env={endpoint.api_key_env} is not set in the environment; export it "
            "with the key"
        )
    return os.environ[endpoint.api_key_env].strip() if endpoint.api_key_env else ""


def pause_s(attempt: int, *, retry_after_s: float) -> float:
    """Seconds after the `attempt`th failure, from 1: doubled each time, not all at one moment, not
    before the server asks.
    """
    doubled = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
    return max(doubled * random.uniform(0.5, 1.0), retry_after_s)


def reply_of(answer: Any, *, stop: Sequence[str]) -> tuple[str, str]:
    """(text, finish reason) of a chat completion. The thought, where the server has it apart,
    stands before the rest again.

    A reason other than "stop" is "length": the reply is not whole. Raises _Refused, which is worth
    another attempt.
    """
    try:
        choice = answer["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        said = message.get("content") or ""
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        thought, said = "".join(thought), "".join(said)  # TypeError for what is no text
    except (LookupError, TypeError, AttributeError):  # of whatever it is
        raise _Refused(
            f"answered what is no chat completion: {_said(None, json.dumps(answer))}", status=500
        ) from None
    text, stopped = with_stop_text(
        said, stop=stop, at=choice.get("stop_reason"), is_whole=reason == "stop"
    )
    # which may quote what would stop it
    text = f"<think>{thought}</think>{text}" if thought else text
    return text, "stop" if reason == "stop" or stopped else "length"


def with_stop_text(
    text: str, *, stop: Sequence[str], at: object, is_whole: bool
) -> tuple[str, bool]:
    """The reply with the text of `stop` that ended it, which servers leave out, and whether one
    did.

    `at`: what the server says it was, as some do. Else it is the closing tag whose opening one came
    last and is still open.
    """
    ends = [text.find(one) + len(one) for one in stop if one in text]
    if ends:  # a server that goes on behind it, or leaves it in
        return text[: min(ends)], True
    if at in stop:
        return f"{text}{at}", True
    opened = {text.rfind(f"<{one[2:]}"): one for one in stop if one.startswith("</")}
    last = max(opened, default=-1)
    return (text + opened[last], True) if is_whole and last >= 0 else (text, False)


async def _body_of(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer, unpacked. Raises _Refused for more than MAX_ANSWER_BYTES."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            why = f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB; endpoint.url must be a server of chat completions"
            raise _Refused(why, status=400)
    return bytes(body)


def _json(text: str) -> Any:
    """Return the value of a JSON text, every text in it whole; None for what is no JSON, or nested
    too deeply.
    """
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # the one way to write half a character
            value = json.loads(whole_text(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    return value


def _said(error: object, text: str) -> str:
    """What the server says of an error: the message of OpenAI's form, else the beginning of all of
    it.
    """
    message = error.get("message") if isinstance(error, dict) else error
    line = _one_line(str(message or text))
    return line if len(line) <= SAID_CHARACTERS else f"{line[:SAID_CHARACTERS]} ..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
