"""Chats of a model whose tokenizer we do not have: a token is a character, so what is recorded of
them is their text.

    form = PromptForm(CharacterTokenizer(), config.prompt)
    messages_of(form.prompt(observation, history).token_ids)     # [{"role": "user", "content": "You see a door."}]

The ids are Unicode's code points. Where a message begins and ends is marked by four that no text
has: Unicode keeps them for the inner use of programs.
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
REMOVED = dict.fromkeys(map(ord, [*ROLES, END]), "\ufffd")  # of a text that has them all the same
CHARACTERS_PER_TOKEN = 4  # of English, about: how a budget in tokens is kept without the tokenizer


class CharacterTokenizer:
    """Of `actors.chat.Tokenizer`, what a PromptForm and a scripted player need."""

    eos_token_id = ord(END)

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str | list[int]:
        said = "".join(
            f"{MARKS[message['role']]}{message['content'].translate(REMOVED)}{END}"
            for message in conversation
        )
        text = said + MARKS["assistant"] * add_generation_prompt
        return list(map(ord, text)) if tokenize else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token not in REMOVED)

    def get_vocab(self) -> dict[str, int]:
        return {}


def character_form(config: PromptConfig) -> PromptForm:
    """The same prompts as for a model of ours, with `max_prompt_tokens` counted as so many times
    CHARACTERS_PER_TOKEN.
    """
    budget = config.max_prompt_tokens * CHARACTERS_PER_TOKEN
    return PromptForm(CharacterTokenizer(), replace(config, max_prompt_tokens=budget))


def messages_of(prompt_ids: Sequence[int]) -> list[dict[str, str]]:
    """The messages of a prompt, as a chat client sends them; without the reply that it ends with
    the beginning of.
    """
    *messages, opening = "".join(map(chr, prompt_ids)).split(END)
    assert opening == MARKS["assistant"], "a prompt ends where the reply begins"
    return [{"role": ROLES[message[0]], "content": message[1:]} for message in messages]


def ids_of(reply: str) -> tuple[int, ...]:
    return tuple(map(ord, reply.translate(REMOVED)))
