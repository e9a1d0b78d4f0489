"""Messages of a chat, as the OpenAI API has them, and their form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any


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


def for_template(message: Message) -> dict[str, Any]:
    """Return the message as chat templates read it: arguments are an object, no field is empty."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if text := getattr(message, name):
            fields[name] = text
    return fields


def seen_text(messages: Sequence[Message]) -> str:
    """Return the last message that is not the assistant's; several answers of tools, line by line.

    Messages user, assistant, tool "3", tool "4" give "3\n4".
    """
    last = [message for message in messages if message.role != "assistant"][-1:]
    if last and last[0].role == "tool":
        answers = takewhile(lambda message: message.role == "tool", reversed(messages))
        last = [*answers][::-1] or last
    return "\n".join(message.content for message in last)
