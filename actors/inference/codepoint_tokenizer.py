"""Represent chats with a model behind a URL, whose tokenizer is unknown: one token per character.

    form = codepoint_form(config.prompt)
    messages_of(form.prompt(observation, history).token_ids)   # [{"role": "user", "content": ...}]

A token id is a Unicode code point, so the stored tokens are the text. Four code points mark where a
message begins and ends. Unicode reserves them for internal use, so no text needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.prompting.prompt import PromptForm
from configs import PromptConfig

MARKS = {"system": "\ufdd0", "user": "\ufdd1", "assistant": "\ufdd2"}
ROLES = {mark: role for role, mark in MARKS.items()}
END = "\ufdd3"
REPLACED = dict.fromkeys(map(ord, [*ROLES, END]), "\ufffd")  # marks inside of a text
# about the mean of English; it turns a token budget into one of characters
CHARACTERS_PER_TOKEN = 4


class CodepointTokenizer:
    """Implement the part of `Tokenizer` that PromptForm and ScriptedPolicy use."""

    eos_token_id = ord(END)

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str | list[int]:
        text = "".join(
            f"{MARKS[message['role']]}{message['content'].translate(REPLACED)}{END}"
            for message in conversation
        )
        text += MARKS["assistant"] * add_generation_prompt
        return list(map(ord, text)) if tokenize else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token not in REPLACED)

    def get_vocab(self) -> dict[str, int]:
        return {}

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def codepoint_form(config: PromptConfig) -> PromptForm:
    """Return a PromptForm whose budget counts CHARACTERS_PER_TOKEN characters as one token."""
    budget = config.max_prompt_tokens * CHARACTERS_PER_TOKEN
    return PromptForm(CodepointTokenizer(), replace(config, max_prompt_tokens=budget))


def messages_of(prompt_ids: Sequence[int]) -> list[dict[str, str]]:
    """Return a prompt's messages in OpenAI's form, without the opening of the reply."""
    *messages, opening = "".join(map(chr, prompt_ids)).split(END)
    assert opening == MARKS["assistant"], "a prompt ends where the reply begins"
    return [{"role": ROLES[message[0]], "content": message[1:]} for message in messages]


def ids_of(reply: str) -> tuple[int, ...]:
    return tuple(map(ord, reply.translate(REPLACED)))
