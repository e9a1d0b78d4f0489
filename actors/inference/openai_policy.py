"""Generate with a model behind an OpenAI-compatible server, for evaluation only.

    policy = ChatPolicy(config)
    completion = await policy.generate(prompt, seed=seed, temperature=0.4)
    await policy.close()

Prompts are chats of `codepoint_tokenizer.py`; token ids are characters. Few servers return
log-probabilities, so they are recorded as 0 and nothing can be trained on these episodes.

The `openai` client repeats a request while the server is busy, fails or cannot be reached, with
growing pauses. When that does not help, EndpointFailed ends the evaluation: a failing server must
not look like a model that loses. The server is not trusted: its answers are bounded, and no
redirect is followed, which would carry the prompt to another server.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from actors.concurrency import RequestGate
from actors.inference.codepoint_tokenizer import ids_of, messages_of
from actors.policy import Completion, Prompt
from actors.prompting.chat_template import SHORTEST_BOUND
from configs import Config, EndpointConfig
from envs import PendingOperations
from model_server import (
    MAX_ANSWER_BYTES,
    http_client,
    json_of,
    model_names,
    own_headers,
    quoted,
)
from printable import UserError, did_you_mean
from url_secrets import public_url

if TYPE_CHECKING:
    import httpx2
    import openai

CONNECT_TIMEOUT_S = 20.0  # for the list of the server's models; a reply has another deadline
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")  # of a request; endpoint.body may set them
MAX_NAMES_SHOWN = 10  # of the server's models
MAX_NAMES_COMPARED = 1000  # with a wrong one; more take seconds
RETRIED, NOT_RETRIED = 502, 400  # statuses for unusable answers; the client retries the first

# how the newest answer to this task's request failed, "" if it did not; and the answer's value
_fault: ContextVar[str] = ContextVar("_fault", default="")
_value: ContextVar[Any] = ContextVar("_value", default=None)


class EndpointFailed(UserError, RuntimeError):
    """The server cannot be used. The message is one line with its URL, without the API key."""


class ChatPolicy:
    """Ask the server at `endpoint.url`, which also unblocks it. For one event loop."""

    def __init__(self, config: Config) -> None:
        # Imported here: it takes more than a second, and only evaluations of a server need it.
        import openai

        self._endpoint, self._thinking = config.endpoint, config.prompt.thinking
        self._stop = tuple(config.prompt.stop)
        self._max_response_tokens = config.actors.max_response_tokens
        self._key = api_key(config.endpoint)
        self._gate = RequestGate(config.endpoint.requests)
        self._reading = asyncio.Lock()
        self.waits = PendingOperations()
        self._client = openai.AsyncOpenAI(
            base_url=config.endpoint.url,
            api_key=self._key or "none",
            max_retries=config.endpoint.attempts - 1,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),
            http_client=http_client(self._check),
        )
        self._options: Any = {"headers": own_headers(self._client, key=self._key)}

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        """Return the server's reply. Raises EndpointFailed."""
        body = self._body(messages_of(prompt.token_ids), seed=seed, temperature=temperature)
        text, finish_reason = await self._reply(self._client, body)
        # for a server that ignores the limit of tokens
        limits = [body[name] for name in LIMIT_FIELDS if isinstance(body.get(name), int)]
        max_characters = max([self._max_response_tokens, *limits]) * SHORTEST_BOUND
        if len(text) > max_characters:
            text, finish_reason = text[:max_characters], "length"
        token_ids = ids_of(text)
        return Completion(
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            finish_reason=finish_reason,
            version_min=0,
            version_max=0,
        )

    async def try_once(self, *, temperature: float) -> None:
        """Send one request like all later ones. Raises EndpointFailed, with the server's models."""
        from openai import APIStatusError

        if not self._endpoint.model:
            raise EndpointFailed(f"endpoint.model is missing{self._known(await self._models())}")
        messages = [{"role": "user", "content": "Say ready."}]
        body = self._body(messages, seed=0, temperature=temperature)
        try:
            await self._reply(self._client.with_options(max_retries=0), body)
        except EndpointFailed as error:
            cause = error.__cause__
            if isinstance(cause, APIStatusError) and cause.status_code in (400, 404):
                raise EndpointFailed(f"{error}{self._known(await self._models())}") from error
            raise

    async def close(self) -> None:
        await self._client.close()

    def _body(
        self, messages: Sequence[Mapping[str, str]], *, seed: int, temperature: float
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._endpoint.model,
            "messages": messages,
            "max_tokens": self._max_response_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        if self._stop:
            body["stop"] = list(self._stop)
        if self._thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._thinking}
        body |= self._endpoint.body
        return {name: value for name, value in body.items() if value is not None}

    async def _reply(self, client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, str]:
        """Return (text, finish reason). Raises EndpointFailed."""
        from httpx2 import Response
        from openai import OpenAIError

        _fault.set("")
        try:
            async with asyncio.timeout(self._endpoint.timeout_s), self._gate:
                with self.waits.on(f"a reply of {public_url(self._endpoint.url)}"):
                    await client.post(
                        "/chat/completions", body=body, cast_to=Response, options=self._options
                    )
        except TimeoutError:
            why = f"gave no reply within endpoint.timeout_s={self._endpoint.timeout_s:g}"
            if fault := _fault.get():
                why += f"; at last it {fault}"
            raise self._failed(why) from None
        except OpenAIError as error:
            raise self._failed(_reason(error, attempts=client.max_retries + 1)) from error
        return reply_of(_value.get(), stop=self._stop)

    async def _models(self) -> list[str]:
        """Return the names of the server's models; none if it does not tell.

        Raises EndpointFailed if the server cannot be reached or refuses the key.
        """
        from httpx2 import Response
        from openai import APIConnectionError, APIStatusError

        client = self._client.with_options(max_retries=0, timeout=CONNECT_TIMEOUT_S)
        _fault.set("")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.get("/models", cast_to=Response, options=self._options)
            return sorted(model_names(_value.get()))
        except APIConnectionError as error:
            raise self._failed(_reason(error, attempts=1)) from error
        except APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._failed(_reason(error, attempts=1)) from error
            return []
        except (TimeoutError, LookupError, TypeError):
            return []

    async def _check(self, response: httpx2.Response) -> None:
        """Give an unusable answer an error status, before the client sees it.

        The status decides whether the client repeats the request. The reason is kept in `_fault`,
        the value in `_value`.
        """
        body = response.content
        # json.loads keeps Python's lock for up to a second. With one answer after the other, the
        # event loop waits for one only.
        async with self._reading:
            value = None
            if len(body) <= MAX_ANSWER_BYTES:
                value = await asyncio.to_thread(json_of, body)
        _value.set(value)
        method = response.request.method
        response.status_code, fault = _judge(response.status_code, body, value, method=method)
        _fault.set(fault)
        if fault:
            response._content = b""

    def _known(self, names: Sequence[str]) -> str:
        if not names:
            return "; give the name of one of its models: endpoint.model=NAME"
        compared = [quoted(name) for name in names[:MAX_NAMES_COMPARED]]
        shown = ", ".join(compared[:MAX_NAMES_SHOWN])
        if len(names) > MAX_NAMES_SHOWN:
            shown += f" and {len(names) - MAX_NAMES_SHOWN} more"
        url = public_url(self._endpoint.url)
        return f"; {url} has {shown}{did_you_mean(self._endpoint.model, compared)}"

    def _failed(self, why: str) -> EndpointFailed:
        if why.startswith(("answered 401", "answered 403")):
            name = self._endpoint.api_key_env or "endpoint.api_key_env=NAME"
            why += f"; is the key in {name} right?"
        text = f"{public_url(self._endpoint.url)} {why}"
        return EndpointFailed(text.replace(self._key, "***") if self._key else text)


def api_key(endpoint: EndpointConfig) -> str:
    """Return the key from the environment; "" if none is asked for. Raises EndpointFailed."""
    if endpoint.api_key_env and not os.environ.get(endpoint.api_key_env):
        raise EndpointFailed(
            f"endpoint.api_key_env={endpoint.api_key_env} is not set in the environment; export it "
            "with the key"
        )
    return os.environ[endpoint.api_key_env].strip() if endpoint.api_key_env else ""


def reply_of(answer: Any, *, stop: Sequence[str]) -> tuple[str, str]:
    """Return (text, finish reason) of a chat completion. Raises TypeError, LookupError for others.

    A thought that the server returns separately is put before the text again. A reason other than
    "stop" becomes "length": the reply is not complete.
    """
    choice = answer["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    content = message.get("content") or ""
    if not isinstance(content, str) or not isinstance(thought, str):
        raise TypeError("a message is text")
    # The thought may quote a stop text, so only the rest is searched.
    text, stopped = with_stop_text(
        content, stop=stop, at=choice.get("stop_reason"), has_ended=reason == "stop"
    )
    text = f"<think>{thought}</think>{text}" if thought else text
    return text, "stop" if reason == "stop" or stopped else "length"


def with_stop_text(
    text: str, *, stop: Sequence[str], at: object, has_ended: bool
) -> tuple[str, bool]:
    """Return the reply with the stop text that ended it, and whether one did.

    Most servers leave that text out. Some name it: `at`. Else it is the closing tag of the last tag
    that is still open.
    """
    ends = [text.find(one) + len(one) for one in stop if one in text]
    if ends:  # the server left it in, or ignored it
        return text[: min(ends)], True
    if at in stop:
        return f"{text}{at}", True
    opened = {text.rfind(f"<{one[2:]}"): one for one in stop if one.startswith("</")}
    last = max(opened, default=-1)
    return (text + opened[last], True) if has_ended and last >= 0 else (text, False)


def _judge(status: int, body: bytes, answer: Any, *, method: str) -> tuple[int, str]:
    """Return the status that an answer deserves, and what is wrong with it; "" if nothing is.

    `answer` is the value of its JSON.
    """
    if 300 <= status < 400:
        why = "a redirect, which is not followed; set endpoint.url to its end"
        return status, f"answered {status}, {why}"
    if len(body) > MAX_ANSWER_BYTES:
        return NOT_RETRIED, (
            f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB; endpoint.url must be a server "
            "of chat completions"
        )
    error = answer.get("error") if isinstance(answer, dict) else None
    if status == 200 and error:  # some routers report errors so
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
    if status != 200:
        message = error.get("message") if isinstance(error, dict) else error
        fault = f"answered {status}: {quoted(message or body)}"
        return RETRIED if status < 300 else status, fault  # the client takes 204 for a reply
    if answer is None:
        return NOT_RETRIED, f"answered what is no JSON: {quoted(body)}"
    if method == "POST":
        try:
            reply_of(answer, stop=())
        except (LookupError, TypeError, AttributeError):
            return RETRIED, f"answered what is no chat completion: {quoted(body)}"
    return status, ""


def _reason(error: Exception, *, attempts: int) -> str:
    """Return what went wrong with a request that the client gave up."""
    import openai

    if not isinstance(error, openai.APIStatusError):
        cause = error.__cause__ or error
        reason = f"cannot be reached ({quoted(str(cause)) or type(cause).__name__})"
    else:
        reason = _fault.get()
        if error.status_code not in (408, 409, 429) and error.status_code < 500:
            return reason
    return f"{reason} ({attempts} attempts)" if attempts > 1 else reason
