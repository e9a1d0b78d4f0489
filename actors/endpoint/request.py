"""Validate the body of POST /v1/chat/completions.

Fields about sampling are accepted and ignored: the run decides how to sample, because the stored
log-probabilities must be those of its temperature. A field that would change the answer in an
unsupported way is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from actors.endpoint.conversation import Message
from actors.prompting.chat_template import LONG_CHARACTERS

MAX_N = 128
MAX_STOPS = 4
MANY_MESSAGES = 1000  # take a noticeable time to tokenise, however short they are
MAX_QUOTED_CHARACTERS = 300  # of an error, which may quote a value as long as the body
IGNORED = {
    # The run decides how to sample.
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    # These change no answer.
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# fields with the values that ask for nothing; other values are not supported
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
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
    """Answer a request with an error in OpenAI's form."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class _TextPart(BaseModel):
    type: Literal["text"]
    text: StrictStr


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[_TextPart], Field(fail_fast=True), BeforeValidator(_as_parts)]
    # The endpoint takes no tool calls; a program writes them into the text instead.
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    def plain(self) -> Message:
        role = "system" if self.role == "developer" else self.role
        return Message(role=role, content="\n".join(part.text for part in self.content))


class _StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


class ChatRequest(BaseModel):
    """Hold a valid request. An absent field and null both mean the default."""

    model_config = ConfigDict(extra="allow", frozen=True)

    # One error is enough: each would be an object of hundreds of bytes.
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stop: (
        Annotated[
            list[Annotated[StrictStr, Field(min_length=1)]],
            BeforeValidator(_as_list),
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    logprobs: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    anchor: StrictStr | None = None

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def conversation(self) -> tuple[Message, ...]:
        return tuple(message.plain() for message in self.messages)


def takes_long(messages: tuple[Message, ...]) -> bool:
    """Return whether tokenising the messages takes too long for an event loop to wait for it."""
    n_characters = sum(len(message.content) for message in messages)
    return len(messages) > MANY_MESSAGES or n_characters > LONG_CHARACTERS


def parse_request(body: bytes) -> ChatRequest:
    """Return the request in a body. Raises RequestError with the wrong field."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _first_fault(error) from None
    for name, value in (request.model_extra or {}).items():
        if value is None or name in IGNORED:
            continue
        if name not in UNSUPPORTED:
            raise refused(f"{name} is not a field that this endpoint knows; leave it out", name)
        if value not in UNSUPPORTED[name]:
            raise refused(f"{name}={value!r} is not supported by this endpoint; leave it out", name)
    return request


def refused(message: str, param: str | None) -> RequestError:
    if len(message) > MAX_QUOTED_CHARACTERS:
        half = MAX_QUOTED_CHARACTERS // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return RequestError(message, status=400, code="invalid_value", param=param)


def _first_fault(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
    kind, param = first["type"], "".join(steps).removeprefix(".")
    if kind == "json_invalid":
        return refused(f"the request is not JSON: {first['msg']}", None)
    if not param:
        return refused("the request must be a JSON object", None)
    if kind == "missing":
        return refused(f"{param} is missing", param)
    if param.endswith((".tool_calls", ".function_call")):
        why = f"{param} is not supported by this endpoint: write the call into the text"
        return refused(why, param)
    return refused(f"{param}={first['input']!r}: {first['msg']}", param)
