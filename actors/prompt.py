"""From an observation to prompt token ids, and from response token ids to an action. No I/O, no Ray, no vLLM.

    form = PromptForm(tokenizer, template="think", history_length=2, max_prompt_tokens=2048)
    prompt = form.prompt(observation, history)        # history: Turns so far, oldest first
    answer = form.parse(completion.token_ids)         # Answer(action, well_formed)

Every step is one single-turn chat: the template filled with the objective, the last `history_length` turns, the
observation and the admissible actions, as in the paper. Templates are data: add one to TEMPLATES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.policy import Prompt
from envs import Observation

UNPARSED_CHARACTERS = 30  # what an environment gets to see of a response without action tags, as in the authors' code


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    observation: str
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    action: str
    well_formed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """`{objective} {history} {observation} {actions} {step}` are filled in; `turn` and `action` are repeated."""

    text: str
    turn: str
    action: str
    answer: str  # how a scripted player writes `{action}`
    thinks: bool  # a well-formed answer needs <think>..</think> too


TEMPLATES = {
    "think": Template(
        text=(
            "You act in a text world, one command at a time.\nYour goal: {objective}\n"
            "What you saw and did in your latest turns:\n{history}\n"
            "This is turn {step}. You now see:\n{observation}\n\nCommands that are possible now:\n{actions}\n\n"
            "Reason about the goal inside <think> </think>. Then give exactly one of the possible commands "
            "inside <action> </action>."
        ),
        turn="[saw: '{observation}', did: '{action}']\n",
        action="'{action}'\n",
        answer="<think></think><action>{action}</action>",
        thinks=True,
    ),
    "direct": Template(
        text=(
            "You act in a text world, one command at a time.\nYour goal: {objective}\n{history}"
            "You now see:\n{observation}\n\nPossible commands:\n{actions}\n"
            "Reply with one possible command inside <action> </action> and nothing else, "
            "for example <action>go east</action>."
        ),
        turn="You did: {action}\n",
        action="{action}\n",
        answer="<action>{action}</action>",
        thinks=False,
    ),
    "compact": Template(
        text="{objective}\n{history}{observation}\n{actions}",
        turn="> {action}\n",
        action="- {action}\n",
        answer="<action>{action}</action>",
        thinks=False,
    ),
}


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token_id: int

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class PromptForm:
    """A template with the tokenizer it is written for. Pure: the same arguments give the same token ids."""

    def __init__(self, tokenizer: Tokenizer, *, template: str, history_length: int, max_prompt_tokens: int) -> None:
        if template not in TEMPLATES:
            raise ValueError(f"prompt.template={template!r} is not one of {', '.join(map(repr, sorted(TEMPLATES)))}")
        self.tokenizer = tokenizer
        self.template = TEMPLATES[template]
        self.history_length = history_length
        self.max_prompt_tokens = max_prompt_tokens

    def prompt(self, observation: Observation, history: Sequence[Turn]) -> Prompt:
        """Token ids of the prompt. Too long a prompt loses its oldest turns first, then its own beginning."""
        for kept in range(min(self.history_length, len(history)), -1, -1):
            text = render(self.template, observation, history, kept=kept)
            token_ids = self._encode_chat(text)
            if len(token_ids) <= self.max_prompt_tokens:
                break
        return Prompt(token_ids=tuple(token_ids[-self.max_prompt_tokens :]), actions=observation.actions)

    def parse(self, token_ids: Sequence[int]) -> Answer:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return parse_action(text, thinks=self.template.thinks)

    def encode_answer(self, action: str) -> list[int]:
        text = self.template.answer.format(action=action)
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def _encode_chat(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def render(template: Template, observation: Observation, history: Sequence[Turn], *, kept: int) -> str:
    """The user message: template text with the last `kept` turns of `history`."""
    turns = history[len(history) - kept :]
    return template.text.format(
        objective=observation.objective,
        history="".join(template.turn.format(observation=turn.observation, action=turn.action) for turn in turns),
        observation=observation.text,
        actions="".join(template.action.format(action=action) for action in observation.actions or ()),
        step=len(history) + 1,
    )


def parse_action(text: str, *, thinks: bool) -> Answer:
    """The text between the first <action> and the first </action> after it, lower-cased and stripped.

    Without both tags the action is the end of the response and the answer is not well formed; nor is it where `thinks`
    asks for <think> and </think> and one is missing. Whether the action is admissible is not asked here.
    """
    _, opened, rest = text.partition("<action>")
    action, closed, _ = rest.partition("</action>")
    if not (opened and closed):
        return Answer(action=text[-UNPARSED_CHARACTERS:].strip().lower(), well_formed=False)
    has_thought = not thinks or ("<think>" in text and "</think>" in text)
    return Answer(action=action.strip().lower(), well_formed=has_thought)
