"""Turn chat messages into prompt token ids, and keep the tokens of earlier exchanges.

    conversation = Conversation(tokenizer, chat_variables={}, max_characters=4096)
    prompt_ids = conversation.prompt(messages)
    reply = Message(role="assistant", content="It is 7.")
    conversation.record(messages, reply=reply, token_ids=prompt_ids + response_ids, ...)
    conversation.prompt((*messages, reply, question))    # begins with those token ids
    conversation.written(messages, reply=reply)          # response_ids, if nobody sampled them

A reply that a program sends back unchanged stands for its sampled tokens, even if its text would be
tokenised differently. For an edited reply there are no such tokens, so the whole prompt is made
from text. That is right too, because it is the prompt that the model was given.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.prompting.chat_template import Tokenizer
from actors.prompting.messages import Message, for_template

Tools = Sequence[Mapping[str, Any]]  # definitions of functions, as in an OpenAI request


class PromptTooLong(ValueError):
    """The prompt has more characters than a model of this size takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    token_ids: tuple[int, ...]  # prompt and response
    ended: bool  # the response has the model's end token


@dataclass(frozen=True, kw_only=True, slots=True)
class _Digested:
    messages: tuple[Message, ...]
    tools: Tools
    digests: tuple[bytes, ...]  # of the tools and the first n messages, for n = 1, 2, ...
    hasher: Any  # has read all of them


class Conversation:
    """Keep the exchanges of one episode: also of several conversations, and of their branches.

    A text of more than `max_characters` is never tokenised.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, chat_variables: Mapping[str, object], max_characters: int
    ) -> None:
        self._tokenizer, self._max_characters = tokenizer, max_characters
        self._variables = dict(chat_variables)
        # Replaces a reply where the template's text after it is looked for. Random, so that no
        # message holds it.
        self._stand_in = secrets.token_hex(16)
        # by the digest of all messages including the reply; of equal ones the newest
        self._exchanges: dict[bytes, _Exchange] = {}
        # of the newest prompt; each of its many replies is recorded after the same messages
        self._newest: _Digested | None = None

    def prompt(self, messages: tuple[Message, ...], *, tools: Tools = ()) -> tuple[int, ...]:
        """Return the token ids up to where the reply begins.

        Takes time in proportion to the characters. Raises PromptTooLong, and the errors of the chat
        template.
        """
        digested = self._newest = _digested(messages, tools=tools)
        for end, digest in reversed(list(enumerate(digested.digests, start=1))):
            exchange = self._exchanges.get(digest)
            if exchange is None:
                continue
            rest = self._tokens_after(messages, tools=tools, end=end, exchange=exchange)
            if rest is None:  # a template that hides one reply may hide all: try no other
                break
            return (*exchange.token_ids, *rest)
        return tuple(self._encode(self._render(messages, tools=tools)))

    def record(
        self,
        messages: tuple[Message, ...],
        *,
        reply: Message,
        token_ids: tuple[int, ...],
        ended: bool,
        tools: Tools = (),
    ) -> None:
        """Keep the `token_ids` of prompt and response.

        `ended` says that the last token is the model's end token, not cut off by a limit.
        """
        digested = self._newest
        if digested is None or digested.messages is not messages or digested.tools is not tools:
            digested = self._newest = _digested(messages, tools=tools)
        hasher = digested.hasher.copy()
        _add_message(hasher, reply)
        self._exchanges[hasher.digest()] = _Exchange(token_ids=token_ids, ended=ended)

    def written(
        self, messages: tuple[Message, ...], *, reply: Message, tools: Tools = ()
    ) -> tuple[int, ...]:
        """Return the token ids that a model would have to sample for `reply`, end token included.

        It is the text that the chat template writes for the reply. The end token is the special
        token that the template writes behind it, else the tokenizer's. Raises ValueError for a
        template that does not write the reply behind its prompt; PromptTooLong, and the errors of
        the template.
        """
        before = self._render(messages, tools=tools)
        whole = self._render((*messages, reply), tools=tools, generation=False)
        marked = (*messages, Message(role="assistant", content=self._stand_in))
        _, found, after = self._render(marked, tools=tools, generation=False).rpartition(
            self._stand_in
        )
        if not (found and whole.startswith(before) and whole.endswith(after)):
            raise ValueError("the chat template does not show the reply behind its own prompt")
        response = self._encode(whole[len(before) : len(whole) - len(after)])
        closing = self._encode(after)[:1]
        is_special = closing and not self._tokenizer.decode(closing, skip_special_tokens=True)
        return (*response, *(closing if is_special else [self._tokenizer.eos_token_id]))

    def _tokens_after(
        self, messages: tuple[Message, ...], *, tools: Tools, end: int, exchange: _Exchange
    ) -> list[int] | None:
        """Return the tokens that the chat template writes after the reply `messages[end - 1]`.

        Returns None if the template does not show where that is.
        """
        reply = Message(role="assistant", content=self._stand_in)
        replaced = (*messages[: end - 1], reply, *messages[end:])
        _, *rest = self._render(replaced, tools=tools).split(self._stand_in)
        if len(rest) != 1:
            return None
        # Some templates look for the calls of a reply when they write the answers of the tools.
        if messages[end - 1].tool_calls and not self._render(messages, tools=tools).endswith(
            rest[0]
        ):
            return None
        token_ids = self._encode(rest[0])
        # The template writes the end token. A response that ended by itself has it already.
        has_end = exchange.ended and token_ids[:1] == [exchange.token_ids[-1]]
        return token_ids[has_end:]

    def _render(self, messages: Sequence[Message], *, tools: Tools, generation: bool = True) -> str:
        offered = {"tools": list(tools)} if tools else {}
        text: str = self._tokenizer.apply_chat_template(
            [for_template(message) for message in messages],
            add_generation_prompt=generation,
            tokenize=False,
            return_dict=False,
            **offered,
            **self._variables,
        )
        return text

    def _encode(self, text: str) -> list[int]:
        if len(text) > self._max_characters:
            raise PromptTooLong(f"the prompt has {len(text)} characters")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _digested(messages: tuple[Message, ...], *, tools: Tools) -> _Digested:
    """Return the digests of the tools with the first messages. Reads each message once."""
    hasher = hashlib.blake2b(json.dumps(list(tools)).encode(), digest_size=16)
    digests = []
    for message in messages:
        _add_message(hasher, message)
        digests.append(hasher.digest())
    return _Digested(messages=messages, tools=tools, digests=tuple(digests), hasher=hasher)


def _add_message(hasher: Any, message: Message) -> None:
    texts = (message.role, message.content, *message.tool_texts)
    hasher.update(len(texts).to_bytes(8, "little"))
    for text in texts:
        data = text.encode(errors="surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
