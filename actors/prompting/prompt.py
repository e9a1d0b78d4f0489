"""Turn an observation into prompt token ids, and response token ids into an action.

    form = PromptForm(tokenizer, config.prompt)
    prompt = form.prompt(observation, history)        # history: Turns so far, oldest first
    answer = form.parse(completion.token_ids)         # Answer(action, well_formed)

With prompt.style "window" every step is a chat of one message: the template filled with the last
`history_length` turns, as in the paper. With "chat" an episode is one conversation: a prompt is the
tokens of the prompt before it, its response, and a new message.

Too long a prompt loses its oldest turns first, then the middle of each part of the observation.
Beginning and end of the chat always stay. Images of the observation come first in its message; an
image is never cut, and earlier turns are shown without theirs.

A text may be of any length. A text with more characters than the budget's tokens can stand for is
too long without being tokenised. So the work for a prompt is bounded by the budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from actors.policy import Prompt
from actors.prompting.action_parser import Answer, parse_action
from actors.prompting.chat_template import LONG_CHARACTERS, Chat, Tokenizer, longest_token
from actors.prompting.images import ImageForm
from actors.prompting.template import (
    Template,
    Turn,
    find_template,
    longest_part,
    render,
    render_next,
    shortened,
)
from configs import PromptConfig
from envs import Observation

# A prompt of at most so many characters is tokenised to report how many tokens were left out. The
# tokens of a longer one are estimated from below.
COUNTED_CHARACTERS = 2**18
# Parsed answers that are kept, because most short answers come again. With 500 tokens each they
# take 20 MB.
KEPT_ANSWERS = 1024


class PromptForm:
    """Make prompts and parse answers by the config's `prompt`, for one tokenizer.

    Pure: equal arguments give equal token ids. `images` is None for a model that sees no images.
    Raises ValueError for a template that cannot be read, a parser that has no rule for it, or an
    unusable chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: PromptConfig, *, images: ImageForm | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.images = images
        self.template = find_template(config.template)
        self.max_prompt_tokens = config.max_prompt_tokens
        self._longest_token = longest_token(tokenizer)
        # A longer message certainly has too many tokens.
        self._max_characters = config.max_prompt_tokens * self._longest_token
        self._chat = Chat(tokenizer, thinking=config.thinking)
        self._kept_parse = lru_cache(KEPT_ANSWERS)(self._parse)
        self._image_word = ""
        if images is not None:
            self._image_word = tokenizer.decode([images.image_token_id], skip_special_tokens=False)
        if config.parser == "upstream" and self.template.upstream is None:
            raise ValueError(
                f"prompt.parser='upstream' has no rule for prompt.template={config.template!r}, "
                "which the paper's code lacks; use 'tags', or add `upstream` to a template of your "
                "own"
            )
        if config.style == "chat":
            self._chat.continued("", after=())  # refuses a chat template that cannot continue

    def prompt(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        """Return at most `max_prompt_tokens` token ids, with the count of those left out.

        Raises ValueError for images that this model, style or budget cannot take.
        """
        sees_images = self.images is not None
        if fault := images_fault(observation, sees_images=sees_images, style=self.config.style):
            raise ValueError(fault)
        if self.config.style == "chat" and history:
            return self._continue_chat(observation, history)
        return self._make_window(observation, history)

    def known_prompt(self, observation: Observation, history: Sequence[Turn]) -> Prompt | None:
        """Return `prompt` at once if the tokens of its message are kept; None otherwise."""
        if observation.images or (self.config.style == "chat" and history):
            return None
        kept = turns_shown(self.config.history_length, len(history))
        token_ids = self._chat.known(self._message(observation, history, kept=kept))
        if token_ids is None or len(token_ids) > self.max_prompt_tokens:
            return None
        return Prompt(
            token_ids=token_ids,
            actions=observation.actions,
            demonstrated=observation.demonstrated,
        )

    def parse(self, token_ids: Sequence[int]) -> Answer:
        return self._kept_parse(tuple(token_ids))

    def _parse(self, token_ids: tuple[int, ...]) -> Answer:
        parser = self.config.parser
        if token_ids[-1:] == (self.tokenizer.eos_token_id,):  # ends the reply, and is no part of it
            token_ids = token_ids[:-1]
        # The tags are special tokens in some vocabularies.
        text = self.tokenizer.decode(token_ids, skip_special_tokens=parser != "tags")
        return parse_action(text, template=self.template, parser=parser, opening=self._chat.opening)

    def encode_answer(self, action: str, at_most: int | None = None) -> list[int]:
        """Return the token ids of an answer, end token included.

        Of one with more than `at_most` only a beginning is returned, which has more than `at_most`.
        """
        text = answer_text(self.template, action, parser=self.config.parser)
        if at_most is not None:
            text = text[: (at_most + 1) * self._longest_token]
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def takes_long(self, observation: Observation, history: Sequence[Turn]) -> bool:
        """Return whether `prompt` takes too long for an event loop to wait for it.

        Counts the characters that come from the environment and the policy.
        """
        shown = turns_shown(self.config.history_length, len(history))
        turns = history[len(history) - shown :]
        n_of_turns = sum(len(turn.observation) + len(turn.action) for turn in turns)
        actions = observation.actions or ()
        n_of_actions = sum(map(len, actions)) + len(actions)
        n_of_texts = len(observation.objective) + len(observation.text)
        return n_of_texts + n_of_actions + n_of_turns > LONG_CHARACTERS

    def _make_window(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        asked = kept = turns_shown(self.config.history_length, len(history))
        token_ids: tuple[int, ...] | None
        message = self._message(observation, history, kept=asked)
        if self._is_countable(message):
            token_ids = self._tokenised(message, observation)
            n_whole = len(token_ids)
        else:
            token_ids, n_whole = None, self._least_tokens(message)
        if token_ids is None or len(token_ids) > self.max_prompt_tokens:
            too_many = bisect_left(
                range(asked),
                True,
                key=lambda n: self._fitting(observation, history, kept=n) is None,
            )
            kept = max(too_many - 1, 0)
            token_ids = self._fitting(observation, history, kept=kept)
        if token_ids is None:
            token_ids = self._squeezed(observation, history)
        return Prompt(
            token_ids=token_ids,
            actions=observation.actions,
            demonstrated=observation.demonstrated,
            n_dropped_turns=asked - kept,
            n_dropped_tokens=n_whole - len(token_ids),
            images=observation.images,
        )

    def _continue_chat(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        """Append a message to the last prompt and response, or begin a new conversation.

        A new one begins when they have grown too long. It holds as many of the latest turns as fit
        into half the budget, so that the next prompts can be appended again.
        """
        last = history[-1]
        assert last.prompt is not None, "a Turn of prompt.style=chat has its tokens"
        before = last.prompt.token_ids + last.response_ids
        n_dropped_turns = last.prompt.n_dropped_turns
        n_dropped_tokens = last.prompt.n_dropped_tokens
        message, n_message = self._next_message(observation, history, turn=len(history))
        token_ids = before + (message or ())
        if message is None or len(token_ids) > self.max_prompt_tokens:
            n_whole = n_dropped_tokens + len(before) + n_message
            token_ids, n_dropped_turns = self._new_conversation(observation, history)
            n_dropped_tokens = n_whole - len(token_ids)
        return Prompt(
            token_ids=token_ids,
            actions=observation.actions,
            demonstrated=observation.demonstrated,
            n_dropped_turns=n_dropped_turns,
            n_dropped_tokens=n_dropped_tokens,
        )

    def _new_conversation(
        self, observation: Observation, history: Sequence[Turn]
    ) -> tuple[tuple[int, ...], int]:
        """Return (token ids, turns left out) of a conversation that begins later in the episode."""
        token_ids, first = self._squeezed(observation, history), len(history)
        later: tuple[int, ...] = ()
        while first:
            turn = first - 1
            message, _ = self._next_message(observation, history, turn=first)
            begun = self._fitting(
                _observation_at(turn, newest=observation, history=history), history[:turn], kept=0
            )
            if message is None or begun is None:  # one of them is too long for any prompt
                break
            later = history[turn].response_ids + message + later
            longer = begun + later
            if len(longer) > self.max_prompt_tokens // 2:
                break
            token_ids, first = longer, turn
        return token_ids, first

    def _next_message(
        self, observation: Observation, history: Sequence[Turn], *, turn: int
    ) -> tuple[tuple[int, ...] | None, int]:
        """Return the tokens of the message of `turn`, counted from 0, and their number.

        They follow the response of the turn before. For a message that is too long for any prompt,
        return None and the smallest number of tokens that it can have.
        """
        seen = _observation_at(turn, newest=observation, history=history)
        text = self._without_image_word(render_next(self.template, seen, step=turn + 1))
        if not self._is_countable(text):
            return None, self._least_tokens(text)
        token_ids = self._chat.continued(text, after=history[turn - 1].response_ids)
        return token_ids, len(token_ids)

    def _squeezed(self, observation: Observation, history: Sequence[Turn]) -> tuple[int, ...]:
        """Return the longest prompt without turns whose parts are cut to equally many characters.

        A shorter part stays whole. A template that is too long by itself loses the middle of its
        own tokens.
        """

        def is_too_long(limit: int) -> bool:
            return self._fitting(shortened(observation, limit), history, kept=0) is None

        first_too_long = bisect_left(range(longest_part(observation) + 1), True, key=is_too_long)
        cut = shortened(observation, max(first_too_long - 1, 0))
        token_ids = self._tokenised(self._message(cut, history, kept=0), cut)
        if first_too_long:
            return token_ids
        if observation.images:
            raise ValueError(
                f"prompt.max_prompt_tokens={self.max_prompt_tokens} has no room for the template "
                f"and the image, {len(token_ids)} tokens; an image cannot be cut: raise it, or "
                "have smaller images drawn"
            )
        n_end = self.max_prompt_tokens // 2
        return token_ids[: self.max_prompt_tokens - n_end] + token_ids[len(token_ids) - n_end :]

    def _fitting(
        self, observation: Observation, history: Sequence[Turn], *, kept: int
    ) -> tuple[int, ...] | None:
        """Return the token ids with `kept` turns; None if they are too many."""
        message = self._message(observation, history, kept=kept)
        if len(message) > self._max_characters:
            return None
        token_ids = self._tokenised(message, observation)
        return token_ids if len(token_ids) <= self.max_prompt_tokens else None

    def _is_countable(self, message: str) -> bool:
        return len(message) <= max(self._max_characters, COUNTED_CHARACTERS)

    def _least_tokens(self, text: str) -> int:
        """Return the smallest number of tokens that a text can have.

        Rounded up, so that a text of more than `_max_characters` has too many for a prompt.
        """
        return math.ceil(len(text) / self._longest_token)

    def _message(self, observation: Observation, history: Sequence[Turn], *, kept: int) -> str:
        # Cut each turn to one character more than a prompt can have: the prompt is too long with or
        # without the cut, but all turns together may not fit into memory.
        most = self._max_characters + 1
        if any(len(turn.observation) > most for turn in history[len(history) - kept :]):
            history = [replace(turn, observation=turn.observation[:most]) for turn in history]
        return self._without_image_word(
            render(self.template, observation, history=history, kept=kept)
        )

    def _without_image_word(self, message: str) -> str:
        """Put a space in place of the image token's text, which only images may stand for.

        What is left and right of it might make the same text again.
        """
        return message.replace(self._image_word, " ") if self._image_word else message

    def _tokenised(self, message: str, observation: Observation) -> tuple[int, ...]:
        token_ids = self._chat.begun(message, n_images=len(observation.images))
        if self.images is None or not observation.images:
            return token_ids
        return self.images.expanded(token_ids, observation.images)


def images_fault(observation: Observation, *, sees_images: bool, style: str) -> str:
    """Return in one line why a prompt cannot show the observation's images; "" if it can."""
    if not observation.images:
        return ""
    if not sees_images:
        return (
            "the environment shows images, which the model does not see, or not in a way known "
            "here; take a Qwen2-VL or Qwen2.5-VL in model.path, or have the environment show text"
        )
    if len(observation.images) > 1:
        return f"an observation has {len(observation.images)} images; a prompt has place for one"
    if style == "chat":
        return (
            "prompt.style='chat' would repeat the images of earlier turns; use 'window' with images"
        )
    return ""


def turns_shown(history_length: int, turns: int) -> int:
    """Return how many of the turns so far a window shows; `history_length` -1 shows all."""
    return turns if history_length < 0 else min(history_length, turns)


def answer_text(template: Template, action: str, *, parser: str) -> str:
    """Return a reply that chooses `action`, as a scripted policy writes it."""
    return action if parser == "text" else template.answer.format(action=action)


def _observation_at(turn: int, *, newest: Observation, history: Sequence[Turn]) -> Observation:
    """Return the observation of `turn`, counted from 0; that of the last turn is `newest`."""
    if turn == len(history):
        return newest
    past = history[turn]
    assert past.prompt is not None, "a Turn of prompt.style=chat has its tokens"
    return Observation(
        text=past.observation, objective=newest.objective, actions=past.prompt.actions
    )
