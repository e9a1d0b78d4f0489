"""Read the tool calls in a reply with vLLM's parser of the model's family.

    parser = ToolCallParser(tokenizer, name="auto")
    content, calls = parser.read('<tool_call>{"name": "add", "arguments": {}}</tool_call>', tools)

A parser must read back what the model's own chat template writes for a call. So a wrong one, or a
template that shows no tools, is refused before a program depends on it. Some texts take a parser
exponential time: `ToolCallReader` bounds it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from actors.endpoint.conversation import Conversation, Tools
from actors.prompting.chat_template import Tokenizer, model_setting
from actors.prompting.messages import Message, ToolCall, parse_arguments

AUTO = "auto"
# Tried in this order. Others of vLLM are found by their name only.
FAMILIES = (
    "hermes",  # Qwen2.5, Qwen3, Hermes
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "granite",
    "phi4_mini_json",
    "deepseek_v3",
    "kimi_k2",
    "glm45",
    "pythonic",
)
# Types of the values in which a parser is looked at for what it remembers. granite4's has a bool.
PLAIN = (bool, int, str, list, set, type(None))
PROBE_CHARACTERS = 2**16  # more than any template writes around one tool
PROBED = ToolCall(id="123456789", name="probed_tool", arguments='{"number": 7}')
PROBE: Tools = (
    {
        "type": "function",
        "function": {
            "name": PROBED.name,
            "description": "Take a number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "The number."}},
                "required": ["number"],
            },
        },
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """vLLM's parser for some tools."""

    tools: Tools
    parser: Any
    request: Any  # that the parser wants to see
    memory: str  # before the first reply


class ToolCallParser:
    """Find the parser for a tokenizer, by its name in vLLM or by trying FAMILIES.

    Takes seconds: it imports vLLM. Raises ValueError, and the errors of the chat template.
    """

    def __init__(self, tokenizer: Tokenizer, *, name: str) -> None:
        # Imported here: only episodes with tools need it.
        from vllm.tool_parsers import ToolParserManager

        # vLLM logs a traceback for each malformed call. A policy that learns writes thousands.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._tokenizer = tokenizer
        # Kept from reply to reply: qwen3_coder needs 50 ms for a vocabulary of 150,000 tokens.
        self._reader: _Reader | None = None
        known = ToolParserManager.list_registered()
        if name not in (AUTO, *known):
            raise ValueError(
                f"prompt.tool_parser={name!r} is no parser of this vLLM; it has {', '.join(known)}"
            )
        written = _written_probe(tokenizer)
        for candidate in FAMILIES if name == AUTO else (name,):
            self._parser: Any = ToolParserManager.get_tool_parser(candidate)
            self._reader = None
            if self._reads_back(written):
                return
        fix = "name the one of the model's family" if name == AUTO else "use another"
        raise ValueError(
            f"prompt.tool_parser={name!r} does not read the call that the chat template of "
            f"{model_setting(tokenizer)} writes; {fix}: {', '.join(known)}"
        )

    def read(self, text: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text beside the calls, and the calls. A malformed call is text.

        `text` has special tokens, but not the end token.
        """
        reader, self._reader = self._reader, None
        if reader is None or reader.tools != tools:
            reader = self._make_reader(tools)
        try:
            found = reader.parser.extract_tool_calls(text, reader.request)
        except Exception:  # noqa: BLE001  a malformed call may raise anything, RecursionError too
            return text, ()
        # granite4's remembers a call that a reply left unfinished: the next reply gets a new one.
        if _memory(reader.parser) == reader.memory:
            self._reader = reader
        calls = tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in found.tool_calls
        )
        if not (found.tools_called and calls and all(map(_is_object, calls))):
            return text, ()
        return found.content or "", calls

    def _make_reader(self, tools: Tools) -> _Reader:
        # Imported here: see above.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[], model="", tools=list(tools))
        parser = self._parser(self._tokenizer, request.tools)
        request = parser.adjust_request(request)
        return _Reader(tools=tools, parser=parser, request=request, memory=_memory(parser))

    def _reads_back(self, written: str) -> bool:
        try:
            _, calls = self.read(written, PROBE)
        except Exception:  # noqa: BLE001  a parser of another family may raise anything
            return False
        return [(call.name, parse_arguments(call.arguments)) for call in calls] == [
            (PROBED.name, parse_arguments(PROBED.arguments))
        ]


def _memory(parser: Any) -> str:
    """Return what a parser may remember of the replies that it read."""
    return repr([one for one in vars(parser).items() if isinstance(one[1], PLAIN)])


def _written_probe(tokenizer: Tokenizer) -> str:
    """Return what the chat template writes for a call. Raises ValueError if it shows no tools."""
    conversation = Conversation(tokenizer, chat_variables={}, max_characters=PROBE_CHARACTERS)
    asked = (Message(role="user", content="Use the tool."),)
    prompt_ids = conversation.prompt(asked, tools=PROBE)
    if PROBED.name not in tokenizer.decode(prompt_ids, skip_special_tokens=False):
        raise ValueError(
            f"the chat template of {model_setting(tokenizer)} shows no tools; take a model "
            "made for tools, or put a chat_template.jinja beside its tokenizer"
        )
    reply = Message(role="assistant", content="", tool_calls=(PROBED,))
    token_ids = conversation.written(asked, reply=reply, tools=PROBE)
    return tokenizer.decode(token_ids[:-1], skip_special_tokens=False)


def _is_object(call: ToolCall) -> bool:
    """Return whether the arguments are a JSON object, which chat templates take."""
    try:
        parse_arguments(call.arguments)
    except ValueError:
        return False
    return True
