"""What a client may ask of POST /v1/chat/completions, from the JSON of its request. Pure.

Sampling is the run's own: log-probabilities are those of the temperature that is trained, so what a
request says about it counts for nothing. What would change the answer in a way that is not there is
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.endpoint.conversation import Message
from actors.prompting.chat_template import LONG_CHARACTERS

MAX_N = 128
MANY_MESSAGES = 1000  # take a noticeable time to tokenise, however short they are
SAID_CHARACTERS = 300  # of an error: it may quote what was asked, which may be as long as a body
MAX_STOPS = 4
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
OF_THE_RUN = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
}
WITHOUT_EFFECT = {
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
READ = {
    "messages",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logprobs",
    "stream",
    "stream_options",
    "anchor",
}
ONLY: Mapping[str, tuple[object, ...]] = {  # fields whose other values ask for what is not there
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}


class RequestError(Exception):
    """A request that is answered with an error, in OpenAI's form."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    messages: tuple[Message, ...]
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    include_usage: bool  # at the end of a stream
    anchor: str | None

    @property
    def takes_long(self) -> bool:
        """Return whether an event loop must not wait for the prompt of these messages."""
        n_characters = sum(len(message.content) for message in self.messages)
        return len(self.messages) > MANY_MESSAGES or n_characters > LONG_CHARACTERS

    @property
    def observation(self) -> str:
        """The newest message that is not the model's."""
        return next(
            (message.content for message in reversed(self.messages) if message.role != "assistant"),
            "",
        )


def parse_request(body: object) -> ChatRequest:
    """Raises RequestError with the field."""
    if not isinstance(body, dict):
        raise refused("the request must be a JSON object", None)
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise refused("the request is nested too deeply", None) from None
    # half a surrogate pair: no text, for the tokenizer and the store
    except UnicodeEncodeError as error:
        raise refused(
            "the request holds what is not Unicode text: "
            f"{error.object[error.start : error.end]!r}",
            None,
        ) from None
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in ONLY and value not in ONLY[name]:
            raise refused(f"{name}={value!r} is not supported by this endpoint; leave it out", name)
        if name not in READ | OF_THE_RUN | WITHOUT_EFFECT | ONLY.keys():
            raise refused(f"{name} is not a field that this endpoint knows; leave it out", name)
    longest = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise refused("stream_options must be an object", "stream_options")
    return ChatRequest(
        messages=_messages(given.get("messages")),
        n=_whole_number(given, "n", most=MAX_N) or 1,
        max_tokens=_whole_number(given, longest, most=None),
        stop=_stop(given.get("stop", [])),
        logprobs=_flag(given, "logprobs"),
        stream=_flag(given, "stream"),
        include_usage=_flag(options, "include_usage"),
        anchor=_anchor(given.get("anchor")),
    )


def refused(message: str, param: str | None) -> RequestError:
    if len(message) > SAID_CHARACTERS:
        message = f"{message[: SAID_CHARACTERS // 2]} ... {message[-SAID_CHARACTERS // 2 :]}"
    return RequestError(message, status=400, code="invalid_value", param=param)


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise refused("messages must be a list with at least one message", "messages")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(value))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise refused(f"{where} must be an object with role and content", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refused(f"{where}.role={role!r} is not one of {', '.join(ROLES)}", f"{where}.role")
    for calls in ("tool_calls", "function_call"):
        if value.get(calls):
            raise refused(
                f"{where}.{calls} is not supported by this endpoint: write what was called into "
                "the text",
                f"{where}.{calls}",
            )
    return Message(role=ROLES[role], content=_content(value.get("content"), f"{where}.content"))


def _content(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(f"{where} must be text or a list of parts", where)
    for number, part in enumerate(value):
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise refused(
                f"{where}[{number}] is no part of type text, which is all this endpoint takes",
                f"{where}[{number}]",
            )
    return "\n".join(part["text"] for part in value)


def _whole_number(given: Mapping[str, Any], name: str, *, most: int | None) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < 1
        or (most is not None and value > most)
    ):
        raise refused(
            f"{name}={value!r} must be a whole number, at least "
            f"1{f' and at most {most}' if most else ''}",
            name,
        )
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise refused(f"{name}={value!r} must be true or false", name)
    return value


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise refused(
            f"stop={value!r} must be a text or a list of at most {MAX_STOPS}, none of them empty",
            "stop",
        )
    return tuple(stops)


def _anchor(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise refused(f"anchor={value!r} must be text", "anchor")
    return value
