"""Validate the body of POST /v1/chat/completions.

Fields about sampling are accepted and ignored: the run decides how to sample, because the stored
log-probabilities must be those of its temperature. A field that would change the answer in an
unsupported way is refused by name.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from actors.prompting.chat_template import LONG_CHARACTERS
from actors.prompting.messages import Message, ToolCall, parse_arguments
from bounded_json import MAX_VALUES, count_values

MAX_N = 128
MAX_MESSAGES = 2**16  # more take seconds of the event loop
MAX_PARTS = 2**14  # text parts, tool calls and tools of all messages together, for the same reason
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
    "top_logprobs": (0,),
}


class RequestError(Exception):
    """A request was refused. The client gets the message and its fields in OpenAI's form."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class _TextPart(BaseModel):
    type: Literal["text"]
    text: StrictStr


@dataclass(slots=True)
class _Count:
    """Count the messages, parts and values of one request while they are validated."""

    n_values: int = 0  # of the body, and of the JSON in its texts
    n_messages: int = 0  # whole ones, so the index of the message that is being validated
    n_parts: int = 0

    def add_parts(self, n: int, *, param: str) -> None:
        """Raise RequestError beyond MAX_PARTS.

        A ValueError would not do: pydantic would go on, and make Python's objects of the whole
        list for its ValidationError, which takes seconds.
        """
        self.n_parts += n
        if self.n_parts > MAX_PARTS:
            raise refused(
                f"{param}: more than {MAX_PARTS} text parts, tool calls and tools in all; "
                "send fewer",
                param,
            )

    def add_values(self, data: bytes, *, param: str | None) -> None:
        """Raise RequestError beyond MAX_VALUES, also for values of fields that are ignored."""
        self.n_values += count_values(data, max_values=MAX_VALUES)
        if self.n_values > MAX_VALUES:
            where = f"{param}: " if param else ""
            raise refused(
                f"{where}the request has more than {MAX_VALUES} values, those of lists, objects "
                "and arguments together; send fewer",
                param,
            )


def _counted_message(message: ChatMessage, info: ValidationInfo) -> ChatMessage:
    if isinstance(info.context, _Count):
        info.context.n_messages += 1
        if info.context.n_messages > MAX_MESSAGES:  # see add_parts
            raise refused(f"messages: more than {MAX_MESSAGES} of them; send fewer", "messages")
    return message


def _counted_call(call: _Call, info: ValidationInfo) -> _Call:
    """Count one call, so that no list is built of more than MAX_PARTS."""
    if isinstance(info.context, _Count):
        info.context.add_parts(1, param=f"messages[{info.context.n_messages}].tool_calls")
    return call


def _counted_tool(tool: _Tool, info: ValidationInfo) -> _Tool:
    if isinstance(info.context, _Count):
        info.context.add_parts(1, param="tools")
    return tool


def _as_parts(content: object, info: ValidationInfo) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and isinstance(info.context, _Count):
        param = f"messages[{info.context.n_messages}].content"
        info.context.add_parts(len(content), param=param)
    return content


# Longer or deeper values end in "...": the whole text would take seconds.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 6
_SHORT.maxlist = _SHORT.maxdict = 20
_SHORT.maxstring = _SHORT.maxlong = MAX_QUOTED_CHARACTERS
_BOUNDED = Field(max_length=MAX_PARTS, fail_fast=True)


def _as_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _as_json(arguments: object) -> object:
    """Return the arguments as JSON: data sets have objects, and "" for none."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments or "{}"


def _checked_arguments(arguments: str, info: ValidationInfo) -> str:
    if isinstance(info.context, _Count):
        param = f"messages[{info.context.n_messages}].tool_calls"
        info.context.add_values(arguments.encode(errors="surrogatepass"), param=param)
    parse_arguments(arguments)
    return arguments


class _Function(BaseModel):
    name: StrictStr
    arguments: Annotated[
        StrictStr, BeforeValidator(_as_json), AfterValidator(_checked_arguments)
    ] = "{}"


class _Call(BaseModel):
    id: StrictStr | None = None
    type: Literal["function"] | None = None
    function: _Function


_CountedCall = Annotated[_Call, AfterValidator(_counted_call)]


class ChatMessage(BaseModel):
    """A valid message. An absent field and null both mean the default."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_TextPart], _BOUNDED, BeforeValidator(_as_parts)] | None = None
    tool_calls: Annotated[list[_CountedCall], _BOUNDED] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} has tool_calls")
        return self

    def plain(self) -> Message:
        return Message(
            role="system" if self.role == "developer" else self.role,
            content="\n".join(part.text for part in self.content or ()),
            tool_calls=tuple(
                ToolCall(
                    id=call.id or "", name=call.function.name, arguments=call.function.arguments
                )
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )


class _Definition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[StrictStr, Field(min_length=1)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Definition


_CountedTool = Annotated[_Tool, AfterValidator(_counted_tool)]


class _StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


class ChatRequest(BaseModel):
    """A valid request. An absent field and null both mean the default."""

    model_config = ConfigDict(extra="allow", frozen=True)

    # One error is enough: each would be an object of hundreds of bytes.
    messages: Annotated[
        list[Annotated[ChatMessage, AfterValidator(_counted_message)]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    ]
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
    tools: Annotated[list[_CountedTool], _BOUNDED] | None = None
    # "required" and one tool by name would force tokens, which the policy did not choose.
    tool_choice: Literal["none", "auto"] | None = None
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

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """Return the definitions of the tools, as the request has them."""
        return tuple(tool.model_dump(exclude_unset=True) for tool in self.tools or ())

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def conversation(self) -> tuple[Message, ...]:
        return tuple(message.plain() for message in self.messages)


def takes_long(messages: tuple[Message, ...]) -> bool:
    """Return whether tokenising the messages takes too long for an event loop to wait for it."""
    n_characters = sum(
        len(text) for message in messages for text in (message.content, *message.tool_texts)
    )
    return len(messages) > MANY_MESSAGES or n_characters > LONG_CHARACTERS


def parse_request(body: bytes) -> ChatRequest:
    """Return the request in a body. Raises RequestError with the wrong field."""
    count = _Count()
    count.add_values(body, param=None)
    try:
        request = ChatRequest.model_validate_json(body, context=count)
    except ValidationError as error:
        message, param = first_fault(error)
        raise refused(message, param) from None
    for name, value in (request.model_extra or {}).items():
        if value is None or name in IGNORED:
            continue
        if name not in UNSUPPORTED:
            raise refused(f"{name} is not a field that this endpoint knows; leave it out", name)
        if value not in UNSUPPORTED[name]:
            raise refused(
                f"{name}={_shown(value)} is not supported by this endpoint; leave it out", name
            )
    return request


def refused(message: str, param: str | None) -> RequestError:
    if len(message) > MAX_QUOTED_CHARACTERS:
        half = MAX_QUOTED_CHARACTERS // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return RequestError(message, status=400, code="invalid_value", param=param)


def first_fault(error: ValidationError) -> tuple[str, str | None]:
    """Return the first fault of an invalid value, and the field that has it, None for the whole."""
    first = error.errors(include_url=False)[0]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
    kind, param = first["type"], "".join(steps).removeprefix(".")
    if kind == "json_invalid":
        return f"it is not JSON: {first['msg']}", None
    if not param:
        return "it must be a JSON object", None
    if kind == "missing":
        return f"{param} is missing", param
    if param.endswith(".function_call"):
        return f"{param} is not supported: use tool_calls", param
    if param == "tool_choice":
        choice = "use 'auto' or 'none': a call that is forced is not the policy's own choice"
        return f"tool_choice={_shown(first['input'])} is not supported; {choice}", param
    return f"{param}={_shown(first['input'])}: {first['msg']}", param


def _shown(value: object) -> str:
    """Return the `repr` of a value, without what is too much to be quoted in an error."""
    return _SHORT.repr(value)
