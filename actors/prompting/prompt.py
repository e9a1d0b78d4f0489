"""From an observation to prompt token ids, and from response token ids to an action. No I/O, no
Ray, no vLLM.

    form = PromptForm(tokenizer, config.prompt)
    prompt = form.prompt(observation, history)        # history: Turns so far, oldest first
    answer = form.parse(completion.token_ids)         # Answer(action, well_formed)

prompt.style "window": every step is one single-turn chat, the template filled with the last
`history_length` turns, as in the paper. "chat": an episode is one conversation; a prompt is the
tokens of the one before, its response, and the new message. Too long a prompt loses its oldest
turns first, then the middle of what is shown; both ends of the chat stay. Images of the observation
come first in its message, each as its tokens; earlier turns are told in words alone, and no image
is ever cut.

A text may be of any length. One with more characters than the budget's tokens can stand for is too
long without being tokenised, so the work for a prompt is bounded by the budget and not by what an
environment returns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from actors.policy import Prompt
from actors.prompting.action_parser import Answer, parse_action
from actors.prompting.chat_template import LONG_CHARACTERS, Chat, Tokenizer, longest_token
from actors.prompting.images import ImageForm
from actors.prompting.template import (
    TEMPLATES,
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

__all__ = [
    "TEMPLATES",
    "Answer",
    "PromptForm",
    "Template",
    "Turn",
    "images_fault",
    "parse_action",
    "render",
    "turns_shown",
]


# of a prompt without a budget: its tokens are counted, those of a longer one estimated from below
COUNTED_CHARACTERS = 2**18


class PromptForm:
    """The config's `prompt` with the tokenizer it is for. Pure: the same arguments give the same
    token ids.

    `images` is the model's way with them, None if it sees none. Raises ValueError for a template
    that cannot be read, a parser that has no rule for it, or an unusable chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: PromptConfig, *, images: ImageForm | None = None
    ) -> None:
        self.config, self.tokenizer, self.images = config, tokenizer, images
        self.template = find_template(config.template)
        self.max_prompt_tokens = config.max_prompt_tokens
        self._longest_token = longest_token(tokenizer)
        # what is longer has too many tokens
        self._max_characters = config.max_prompt_tokens * self._longest_token
        self._chat = Chat(tokenizer, thinking=config.thinking)
        self._image_word = (
            tokenizer.decode([self.images.image_token_id], skip_special_tokens=False)
            if self.images
            else ""
        )
        if config.parser == "upstream" and self.template.upstream is None:
            raise ValueError(
                f"prompt.parser='upstream' has no rule for prompt.template={config.template!r}, "
                "which the paper's code lacks; "
                "use 'tags', or add `upstream` to a template of your own"
            )
        if config.style == "chat":
            self._chat.continued("", after=())  # refuses a chat template it is not possible with

    def prompt(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        """At most `max_prompt_tokens` token ids; what was left out for that is counted in the
        Prompt.

        Raises ValueError for an observation with images that this model, style or budget has no
        place for.
        """
        if fault := images_fault(
            observation, sees_images=self.images is not None, style=self.config.style
        ):
            raise ValueError(fault)
        return (
            self._in_chat(observation, history)
            if self.config.style == "chat"
            else self._in_window(observation, history)
        )

    def parse(self, token_ids: Sequence[int]) -> Answer:
        parser = self.config.parser
        text = self.tokenizer.decode(token_ids, skip_special_tokens=parser != "tags")
        return parse_action(text, template=self.template, parser=parser, opening=self._chat.opening)

    def encode_answer(self, action: str) -> list[int]:
        text = answer_text(self.template, action, parser=self.config.parser)
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def takes_long(self, observation: Observation, history: Sequence[Turn]) -> bool:
        """Return whether `prompt` works for long enough that an event loop must not wait for it."""
        shown = turns_shown(self.config.history_length, len(history))
        return self._n_characters(observation, history, kept=shown) > LONG_CHARACTERS

    def _in_window(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        asked = kept = turns_shown(self.config.history_length, len(history))
        token_ids, n_whole = self._whole(observation, history, kept=asked)
        if token_ids is None:
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

    def _whole(
        self, observation: Observation, history: Sequence[Turn], *, kept: int
    ) -> tuple[tuple[int, ...] | None, int]:
        """Return the token ids with `kept` turns, None if they are too many, and how many they are.

        The number of a message that is too long to be tokenised whole is the least that it can be.
        """
        message = self._message(observation, history, kept=kept)
        if len(message) > max(self._max_characters, COUNTED_CHARACTERS):
            return None, len(message) // self._longest_token
        token_ids = self._tokenised(message, observation)
        return (None if self._too_long(token_ids) else token_ids), len(token_ids)

    def _in_chat(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        """The last prompt and response go on. Where they have grown too long, a new conversation
        begins, with as many of the latest turns as half the budget holds: the next prompts can then
        go on again, instead of each losing one more turn.
        """
        if not history:
            return self._in_window(observation, history)
        last = history[-1]
        assert last.prompt is not None, "a Turn of prompt.style=chat has its tokens"
        before = last.prompt.token_ids + last.response_ids
        n_dropped_turns, n_dropped_tokens = (
            last.prompt.n_dropped_turns,
            last.prompt.n_dropped_tokens,
        )
        message, n_message = self._continued(observation, history, turn=len(history))
        token_ids = before if message is None else before + message
        if message is None or self._too_long(token_ids):
            n_whole = n_dropped_tokens + len(before) + n_message
            token_ids, n_dropped_turns = self._restarted(observation, history)
            n_dropped_tokens = n_whole - len(token_ids)
        return Prompt(
            token_ids=token_ids,
            actions=observation.actions,
            demonstrated=observation.demonstrated,
            n_dropped_turns=n_dropped_turns,
            n_dropped_tokens=n_dropped_tokens,
        )

    def _restarted(
        self, observation: Observation, history: Sequence[Turn]
    ) -> tuple[tuple[int, ...], int]:
        """(token ids, turns left out) of a conversation that begins later in the episode."""
        token_ids, first = self._squeezed(observation, history), len(history)
        later: tuple[int, ...] = ()
        while first:
            turn = first - 1
            message, _ = self._continued(observation, history, turn=first)
            begun = self._fitting(_seen(observation, history, turn), history[:turn], kept=0)
            if message is None or begun is None:  # the one or the other is too long for any prompt
                break
            later = history[turn].response_ids + message + later
            longer = begun + later
            if len(longer) > self.max_prompt_tokens // 2:
                break
            token_ids, first = longer, turn
        return token_ids, first

    def _continued(
        self, observation: Observation, history: Sequence[Turn], *, turn: int
    ) -> tuple[tuple[int, ...] | None, int]:
        """Return the message of `turn`, counted from 0, behind the response of the turn before, and
        its number of tokens.

        None, and the least number that they can be, for a message that is too long for any prompt.
        """
        text = render_next(self.template, _seen(observation, history, turn), step=turn + 1)
        if len(text) > max(self._max_characters, COUNTED_CHARACTERS):
            return None, len(text) // self._longest_token
        token_ids = self._chat.continued(text, after=history[turn - 1].response_ids)
        return token_ids, len(token_ids)

    def _fitting(
        self, observation: Observation, history: Sequence[Turn], *, kept: int
    ) -> tuple[int, ...] | None:
        """Return the token ids with `kept` turns; None if they are too many, which a long text
        tells by its characters.
        """
        message = self._message(observation, history, kept=kept)
        if len(message) > self._max_characters:
            return None
        token_ids = self._tokenised(message, observation)
        return None if self._too_long(token_ids) else token_ids

    def _begun(
        self, observation: Observation, history: Sequence[Turn], *, kept: int
    ) -> tuple[int, ...]:
        return self._tokenised(self._message(observation, history, kept=kept), observation)

    def _message(self, observation: Observation, history: Sequence[Turn], *, kept: int) -> str:
        message = render(self.template, observation, self._bounded(history, kept=kept), kept=kept)
        # an environment, or a sampled action, may write it; it stands for images alone
        if self._image_word:
            message = message.replace(self._image_word, "")
        return message

    def _bounded(self, history: Sequence[Turn], *, kept: int) -> Sequence[Turn]:
        """Cut observations of the last `kept` turns to one character more than a prompt can have.

        The prompt is too long with or without the cut, but all of them together may not fit into
        memory.
        """
        most = self._max_characters + 1
        if all(len(turn.observation) <= most for turn in history[len(history) - kept :]):
            return history
        return [replace(turn, observation=turn.observation[:most]) for turn in history]

    def _tokenised(self, message: str, observation: Observation) -> tuple[int, ...]:
        token_ids = self._chat.begun(message, n_images=len(observation.images))
        return (
            self.images.expanded(token_ids, observation.images)
            if self.images and observation.images
            else token_ids
        )

    def _n_characters(self, observation: Observation, history: Sequence[Turn], *, kept: int) -> int:
        """Return how many characters of the environment and the policy a prompt with `kept` turns
        is made of.
        """
        turns = history[len(history) - kept :]
        of_turns = sum(len(turn.observation) + len(turn.action) for turn in turns)
        actions = observation.actions or ()
        return (
            len(observation.objective)
            + len(observation.text)
            + sum(map(len, actions))
            + len(actions)
            + of_turns
        )

    def _squeezed(self, observation: Observation, history: Sequence[Turn]) -> tuple[int, ...]:
        """Without turns; every part of the observation is cut in its middle to equally many
        characters, the most that fit.

        A part shorter than that is whole. A template that alone is too long loses the middle of its
        own tokens.
        """

        def fits(limit: int) -> bool:
            return self._fitting(shortened(observation, limit), history, kept=0) is not None

        whole = longest_part(observation)
        # the first that is too much
        limit = bisect_left(range(whole + 1), True, key=lambda limit: not fits(limit))
        token_ids = self._begun(shortened(observation, max(limit - 1, 0)), history, kept=0)
        if not limit and observation.images:
            raise ValueError(
                f"prompt.max_prompt_tokens={self.max_prompt_tokens} has no room for the template "
                "and the image, "
                f"{len(token_ids)} tokens; an image cannot be cut: raise it, or have smaller "
                "images drawn"
            )
        n_end = self.max_prompt_tokens // 2
        return (
            token_ids
            if limit
            else token_ids[: self.max_prompt_tokens - n_end] + token_ids[len(token_ids) - n_end :]
        )

    def _too_long(self, token_ids: Sequence[int]) -> bool:
        return len(token_ids) > self.max_prompt_tokens


def images_fault(observation: Observation, *, sees_images: bool, style: str) -> str:
    """Why a prompt of this `prompt.style` has no place for its images, in one line; "" if it has,
    or there are none.
    """
    if not observation.images:
        return ""
    if not sees_images:
        return (
            "the environment shows images, which the model does not see, or not in a way known "
            "here; take a Qwen2-VL or "
            "Qwen2.5-VL in model.path, or have the environment show text"
        )
    if len(observation.images) > 1:
        return f"an observation has {len(observation.images)} images; a prompt has place for one"
    if style == "chat":
        return (
            "prompt.style='chat' would repeat the images of earlier turns; use 'window' with images"
        )
    return ""


def turns_shown(history_length: int, turns: int) -> int:
    """How many of the turns so far a window shows; -1 is all."""
    return turns if history_length < 0 else min(history_length, turns)


def answer_text(template: Template, action: str, *, parser: str) -> str:
    """A reply that chooses `action`, as a scripted player writes it."""
    return action if parser == "text" else template.answer.format(action=action)


def _seen(observation: Observation, history: Sequence[Turn], turn: int) -> Observation:
    """What was observed at `turn`, counted from 0; at the last one it is `observation`."""
    if turn == len(history):
        return observation
    past = history[turn]
    assert past.prompt is not None, "a Turn of prompt.style=chat has its tokens"
    return Observation(
        text=past.observation, objective=observation.objective, actions=past.prompt.actions
    )
