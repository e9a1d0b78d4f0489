"""Define the messages of a chat, as in the OpenAI API, and convert them for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

MAX_DEPTH = 100  # of the arguments of a call; Python's recursion ends at a thousand


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    role: str  # "system", "user", "assistant" or "tool"
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str = ""  # of a tool: the call that it answers
    name: str = ""

    @property
    def tool_texts(self) -> tuple[str, ...]:
        """Return all texts besides role and content; () if there are none."""
        of_calls = [
            text for call in self.tool_calls for text in (call.id, call.name, call.arguments)
        ]
        texts = (*of_calls, self.tool_call_id, self.name)
        return texts if any(texts) else ()


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call. Raises ValueError unless they are a JSON object.

    Also for one that is nested deeper than MAX_DEPTH: a policy may write brackets without an end.
    And for half a character, which JSON may escape and no tokenizer takes.
    """
    try:
        arguments = json.loads(text)
    except RecursionError:
        raise ValueError(f"the arguments of a call are nested deeper than {MAX_DEPTH}") from None
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are a JSON object")
    inner: list[object] = [arguments]
    for _ in range(MAX_DEPTH):
        if not inner:
            _check_characters(text, arguments)
            return arguments
        inner = [
            value
            for one in inner
            if isinstance(one, dict | list)
            for value in (one.values() if isinstance(one, dict) else one)
        ]
    raise ValueError(f"the arguments of a call are nested deeper than {MAX_DEPTH}")


def _check_characters(text: str, arguments: dict[str, Any]) -> None:
    if "\\ud" not in text.lower():  # the only way to write half a character
        return
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("the arguments of a call hold half of a character") from None


def for_template(message: Message) -> dict[str, Any]:
    """Return the message as chat templates read it: arguments are an object, no field is empty."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if text := getattr(message, name):
            fields[name] = text
    return fields


def seen_text(messages: Sequence[Message]) -> str:
    """Return the last message that is not the assistant's; several answers of tools, line by line.

    Messages user, assistant, tool "3", tool "4" give "3\\n4".
    """
    last = [message for message in messages if message.role != "assistant"][-1:]
    if last and last[0].role == "tool":
        answers = takewhile(lambda message: message.role == "tool", reversed(messages))
        last = [*answers][::-1] or last
    return "\n".join(message.content for message in last)
