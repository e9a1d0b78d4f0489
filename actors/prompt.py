"""From an observation to prompt token ids, and from response token ids to an action. No I/O, no Ray, no vLLM.

    form = PromptForm(tokenizer, config.prompt)
    prompt = form.prompt(observation, history)        # history: Turns so far, oldest first
    answer = form.parse(completion.token_ids)         # Answer(action, well_formed)

prompt.style "window": every step is one single-turn chat, the template filled with the last `history_length` turns, as in the
paper. "chat": an episode is one conversation; a prompt is the tokens of the one before, its response, and the new message.
Too long a prompt loses its oldest turns first, then the middle of what is shown; both ends of the chat stay. Images of the
observation come first in its message, each as its tokens; earlier turns are told in words alone, and no image is ever cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from actors.chat import Chat, Tokenizer
from actors.images import ImageForm
from actors.parsing import Answer, parse_action
from actors.policy import Prompt
from actors.template import TEMPLATES, Template, Turn, find_template, longest_part, render, render_next, shortened
from configs import PromptConfig
from envs import Observation

__all__ = ["TEMPLATES", "Answer", "PromptForm", "Template", "Turn", "images_fault", "parse_action", "render", "turns_shown"]


class PromptForm:
    """The config's `prompt` with the tokenizer it is for. Pure: the same arguments give the same token ids.

    `images` is the model's way with them, None if it sees none. Raises ValueError for a template that cannot be read, a parser
    that has no rule for it, or an unusable chat template.
    """

    def __init__(self, tokenizer: Tokenizer, config: PromptConfig, *, images: ImageForm | None = None) -> None:
        self.config, self.tokenizer, self.images = config, tokenizer, images
        self.template = find_template(config.template)
        self.max_prompt_tokens = config.max_prompt_tokens
        self._chat = Chat(tokenizer, thinking=config.thinking)
        self._image_word = tokenizer.decode([self.images.image_token_id], skip_special_tokens=False) if self.images else ""
        if config.parser == "upstream" and self.template.upstream is None:
            raise ValueError(
                f"prompt.parser='upstream' has no rule for prompt.template={config.template!r}, which the paper's code lacks; "
                "use 'tags', or add `upstream` to a template of your own"
            )
        if config.style == "chat":
            self._chat.continued("", after=())  # refuses a chat template it is not possible with

    def prompt(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        """At most `max_prompt_tokens` token ids; what was left out for that is counted in the Prompt.

        Raises ValueError for an observation with images that this model, style or budget has no place for.
        """
        if fault := images_fault(observation, sees_images=self.images is not None, style=self.config.style):
            raise ValueError(fault)
        return self._in_chat(observation, history) if self.config.style == "chat" else self._in_window(observation, history)

    def parse(self, token_ids: Sequence[int]) -> Answer:
        parser = self.config.parser
        text = self.tokenizer.decode(token_ids, skip_special_tokens=parser != "tags")
        return parse_action(text, template=self.template, parser=parser, opening=self._chat.opening)

    def encode_answer(self, action: str) -> list[int]:
        text = answer_text(self.template, action, parser=self.config.parser)
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def _in_window(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        asked = kept = turns_shown(self.config.history_length, len(history))
        whole = token_ids = self._begun(observation, history, kept=asked)
        if self._too_long(whole):
            too_many = bisect_left(range(asked), True, key=lambda n: self._too_long(self._begun(observation, history, kept=n)))
            kept = max(too_many - 1, 0)
            token_ids = self._begun(observation, history, kept=kept)
        if self._too_long(token_ids):
            token_ids = self._squeezed(observation, history)
        return Prompt(
            token_ids=token_ids,
            actions=observation.actions,
            demonstrated=observation.demonstrated,
            n_dropped_turns=asked - kept,
            n_dropped_tokens=len(whole) - len(token_ids),
            images=observation.images,
        )

    def _in_chat(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        """The last prompt and response go on. Where they have grown too long, a new conversation begins, with as many of the
        latest turns as half the budget holds: the next prompts can then go on again, instead of each losing one more turn.
        """
        if not history:
            return self._in_window(observation, history)
        last = history[-1]
        assert last.prompt is not None, "a Turn of prompt.style=chat has its tokens"
        token_ids = last.prompt.token_ids + last.response_ids + self._continued(observation, history, turn=len(history))
        n_dropped_turns, n_dropped_tokens = last.prompt.n_dropped_turns, last.prompt.n_dropped_tokens
        if self._too_long(token_ids):
            n_whole = n_dropped_tokens + len(token_ids)
            token_ids, n_dropped_turns = self._restarted(observation, history)
            n_dropped_tokens = n_whole - len(token_ids)
        return Prompt(
            token_ids=token_ids,
            actions=observation.actions,
            demonstrated=observation.demonstrated,
            n_dropped_turns=n_dropped_turns,
            n_dropped_tokens=n_dropped_tokens,
        )

    def _restarted(self, observation: Observation, history: Sequence[Turn]) -> tuple[tuple[int, ...], int]:
        """(token ids, turns left out) of a conversation that begins later in the episode."""
        token_ids, first = self._squeezed(observation, history), len(history)
        later: tuple[int, ...] = ()
        while first:
            turn = first - 1
            later = history[turn].response_ids + self._continued(observation, history, turn=first) + later
            longer = self._begun(_seen(observation, history, turn), history[:turn], kept=0) + later
            if len(longer) > self.max_prompt_tokens // 2:
                break
            token_ids, first = longer, turn
        return token_ids, first

    def _continued(self, observation: Observation, history: Sequence[Turn], *, turn: int) -> tuple[int, ...]:
        """The message of `turn`, counted from 0, behind the response of the turn before."""
        text = render_next(self.template, _seen(observation, history, turn), step=turn + 1)
        return self._chat.continued(text, after=history[turn - 1].response_ids)

    def _begun(self, observation: Observation, history: Sequence[Turn], *, kept: int) -> tuple[int, ...]:
        message = render(self.template, observation, history, kept=kept)
        if self._image_word:  # an environment, or a sampled action, may write it; it stands for images alone
            message = message.replace(self._image_word, "")
        token_ids = self._chat.begun(message, n_images=len(observation.images))
        return self.images.expanded(token_ids, observation.images) if self.images and observation.images else token_ids

    def _squeezed(self, observation: Observation, history: Sequence[Turn]) -> tuple[int, ...]:
        """Without turns; every part of the observation is cut in its middle to equally many characters, the most that fit.

        A part shorter than that is whole. A template that alone is too long loses the middle of its own tokens.
        """

        def cut(limit: int) -> tuple[int, ...]:
            return self._begun(shortened(observation, limit), history, kept=0)

        whole = longest_part(observation)
        limit = bisect_left(range(whole + 1), True, key=lambda limit: self._too_long(cut(limit)))  # the first that is too much
        token_ids = cut(max(limit - 1, 0))
        if not limit and observation.images:
            raise ValueError(
                f"prompt.max_prompt_tokens={self.max_prompt_tokens} has no room for the template and the image, "
                f"{len(token_ids)} tokens; an image cannot be cut: raise it, or have smaller images drawn"
            )
        n_end = self.max_prompt_tokens // 2
        return token_ids if limit else token_ids[: self.max_prompt_tokens - n_end] + token_ids[len(token_ids) - n_end :]

    def _too_long(self, token_ids: Sequence[int]) -> bool:
        return len(token_ids) > self.max_prompt_tokens


def images_fault(observation: Observation, *, sees_images: bool, style: str) -> str:
    """Why a prompt of this `prompt.style` has no place for its images, in one line; "" if it has, or there are none."""
    if not observation.images:
        return ""
    if not sees_images:
        return (
            "the environment shows images, which the model does not see, or not in a way known here; take a Qwen2-VL or "
            "Qwen2.5-VL in model.path, or have the environment show text"
        )
    if len(observation.images) > 1:
        return f"an observation has {len(observation.images)} images; a prompt has place for one"
    if style == "chat":
        return "prompt.style='chat' would repeat the images of earlier turns; use 'window' with images"
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
    return Observation(text=past.observation, objective=observation.objective, actions=past.prompt.actions)
