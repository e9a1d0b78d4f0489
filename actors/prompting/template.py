"""Read prompt templates, and fill in an observation and the turns before it.

A template is a YAML file: one of `actors/templates/`, or a file of yours; `prompt.template` names
it. Its keys are the fields of `Template`. Copy `templates/direct.yaml` to write one.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from actors.policy import Prompt
from bounded_yaml import MAX_CHARACTERS, TEXT_TAG, bounded_events
from envs import Observation
from printable import REASON_CHARACTERS, one_line

FOLDER = Path(__file__).parents[1] / "templates"
# Limits of a template's file. The largest of `templates/` has 50 YAML events, and depth 3.
MAX_EVENTS = 10_000
MAX_DEPTH = 8
MAX_NUMBER_CHARACTERS = 20
GAP = " ... "  # in place of the middle of a text
MESSAGE = {"objective", "observation", "actions", "step", "taken"}
PLACEHOLDERS = {  # allowed names in braces, by key
    "first": {*MESSAGE, "history", "shown"},  # the history is empty, and `{shown}` is 0
    "later": {*MESSAGE, "history", "shown"},
    "next": MESSAGE,
    "turn": {"observation", "action", "step", "result"},
    "turn_separator": set(),
    "result": {"result"},
    "action": {"action"},
    "action_separator": set(),
    "answer": {"action"},
}
# Keys that a template may leave out, with their values then.
OPTIONAL = {"upstream": None, "turn_separator": "", "action_separator": "", "result": "{result}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamRule:
    """The paper's rule for reading one environment's answers (prompt.parser=upstream)."""

    refuse_chinese: bool  # a Chinese character anywhere makes the answer ill-formed
    # the environment gets so many last characters of a reply without tags as the action
    unparsed_characters: int
    # The action is the first of these words that occurs between the tags, else the last word.
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """The texts of prompts. Names in braces are filled in; write `{{` for a brace.

    `{step}` is the number of the message's turn, from 1. `{taken}` is the number of steps before
    it, one less. `{shown}` is the number of turns in `{history}`. `{result}` of a turn is the
    observation after its action.
    """

    first: str  # the message of an episode's first turn, and of any turn that shows no history
    later: str  # the message with the latest turns as `{history}`
    next: str  # prompt.style=chat: the messages after the first
    turn: str  # one turn of `{history}`
    turn_separator: str  # between two turns
    result: str  # how `{result}` of a turn is written, unless it is empty
    action: str  # one action of `{actions}`
    action_separator: str  # between two actions
    answer: str  # a reply that chooses `{action}`, as a scripted policy writes it
    tags: tuple[str, ...]  # around the action; with several tags the action includes its tag
    thinks: bool  # a well-formed reply has <think>..</think> too
    upstream: UpstreamRule | None  # None: the paper's code has no rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One observation and the action after it.

    prompt.style=chat also needs its tokens: it repeats them, and never tokenises their text again.
    """

    observation: str
    action: str
    prompt: Prompt | None = None  # as sent
    response_ids: tuple[int, ...] = ()  # as sampled


def find_template(name: str) -> Template:
    """Return the template of a name in `templates/`, or of a YAML file. Raises ValueError."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not Path(name).is_file():
        known = ", ".join(map(repr, sorted(TEMPLATES)))
        raise ValueError(
            f"prompt.template={name!r} is not one of {known}, nor a file; docs/prompts.md says how "
            "to write one"
        )
    return read_template(Path(name))


def read_template(path: Path) -> Template:
    """Read the template of a YAML file, which is not trusted.

    Raises ValueError of one line, also for a missing or unknown key or name in braces.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        _check_size(text)
        values = yaml.safe_load(text)
    # The YAML library raises errors of many kinds: 2001-99-99 is a ValueError.
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        why = one_line(error)[:REASON_CHARACTERS]
        raise ValueError(f"template {path} is not readable as YAML: {why}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"template {path} has no keys; copy {FOLDER / 'direct.yaml'} and change it"
        )
    values = {**OPTIONAL, **values}
    wanted = {field.name for field in fields(Template)}
    if missing := sorted(wanted - values.keys()):
        raise ValueError(
            f"template {path} lacks {', '.join(missing)}; copy {FOLDER / 'direct.yaml'} and change "
            "it"
        )
    if unknown := sorted(map(str, values.keys() - wanted)):
        raise ValueError(
            f"template {path} has {', '.join(unknown)[:REASON_CHARACTERS]}, which is none of "
            f"{', '.join(sorted(wanted))}"
        )
    for key, allowed in PLACEHOLDERS.items():
        _check_braces(path, key=key, text=values[key], allowed=allowed)
    has_tags = _is_texts(values["tags"]) and values["tags"]
    if not has_tags or not isinstance(values["thinks"], bool):
        raise ValueError(
            f"template {path}: tags must be a list like [action], thinks true or false"
        )
    # `format` turns `{{` into `{`.
    separators = {key: values[key].format() for key in ("turn_separator", "action_separator")}
    tags, upstream = tuple(values["tags"]), _upstream(path, values["upstream"])
    return Template(**{**values, **separators, "tags": tags, "upstream": upstream})


def render(
    template: Template, observation: Observation, *, history: Sequence[Turn], kept: int
) -> str:
    """Return the user message with the last `kept` turns of `history`."""
    begin = len(history) - kept
    shown = history[begin:]
    results = [*(turn.observation for turn in shown[1:]), observation.text][:kept]
    turns = template.turn_separator.join(
        template.turn.format(
            observation=turn.observation,
            action=turn.action,
            step=number,
            result=template.result.format(result=result) if result else "",
        )
        for number, (turn, result) in enumerate(zip(shown, results, strict=True), start=begin + 1)
    )
    text = template.later if kept else template.first
    return text.format(
        **_filled(template, observation, step=len(history) + 1), history=turns, shown=kept
    )


def render_next(template: Template, observation: Observation, *, step: int) -> str:
    """Return the user message of turn `step`, from 2, in a continued conversation."""
    return template.next.format(**_filled(template, observation, step=step))


def shortened(observation: Observation, limit: int) -> Observation:
    """Cut objective, text and list of actions to `limit` characters each.

    A text loses its middle, the list whole actions from its middle.
    """
    actions = observation.actions
    return replace(
        observation,
        objective=_without_middle(observation.objective, limit),
        text=_without_middle(observation.text, limit),
        actions=None if actions is None else _ends(actions, limit),
    )


def longest_part(observation: Observation) -> int:
    """Return the characters of the longest part that `shortened` may cut."""
    return max(
        len(observation.objective),
        len(observation.text),
        sum(map(_weight, observation.actions or ())),
    )


def _filled(template: Template, observation: Observation, *, step: int) -> dict[str, object]:
    return {
        "objective": observation.objective,
        "observation": observation.text,
        "actions": template.action_separator.join(
            template.action.format(action=action) for action in observation.actions or ()
        ),
        "step": step,
        "taken": step - 1,
    }


def _without_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    kept = max(0, limit - len(GAP))
    return text[: kept - kept // 2] + GAP[:limit] + text[len(text) - kept // 2 :]


def _ends(actions: Sequence[str], limit: int) -> tuple[str, ...]:
    """Return the first and last actions that have `limit` characters together, in their order.

    Takes one from each end by turns, and reads no more than it keeps: a list may have a million.
    """
    first = 0
    last = len(actions)
    characters = 0
    while first < last:
        from_the_end = first > len(actions) - last
        characters += _weight(actions[last - 1 if from_the_end else first])
        if characters > limit:
            break
        first, last = (first, last - 1) if from_the_end else (first + 1, last)
    return (*actions[:first], *actions[last:])


def _weight(action: str) -> int:
    """Return the characters that an action counts for; an empty one takes a line too."""
    return max(1, len(action))


def _check_braces(path: Path, *, key: str, text: object, allowed: set[str]) -> None:
    if not isinstance(text, str):
        # A container may be large; other values are at most a line.
        is_container = isinstance(text, list | dict | set | bytes)
        shown = f"a {type(text).__name__}" if is_container else repr(text)
        raise ValueError(f"template {path}: {key} must be text, not {shown}; put it in quotes")
    try:
        filled = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ValueError(
            f"template {path}: {key}: {error}; write {{{{ for a brace of your own"
        ) from None
    names = {str(name) for name, _, _ in filled}
    if names - allowed:
        known = ", ".join(sorted(allowed)) or "those of this key: it has none"
        raise ValueError(
            f"template {path}: {key} has {{{min(names - allowed):.60}}}, which is none of {known}; "
            "write {{ for a brace of your own"
        )
    # A format could make a text of any length: {step:>2000000000}.
    if formatted := next((name for name, form, conversion in filled if form or conversion), None):
        raise ValueError(
            f"template {path}: {key} has a format behind `{formatted}`; write {{{formatted}}} "
            "without : or !"
        )


def _check_size(text: str) -> None:
    """Check that a YAML text expands to no more than it shows. Raises ValueError, YAMLError.

    An alias repeats a value. Ten aliases of a list of ten aliases, eight levels deep, make a
    hundred million values. So only a text may be repeated.
    """
    resolver = yaml.SafeLoader("")
    for event in bounded_events(text, max_events=MAX_EVENTS, max_depth=MAX_DEPTH):
        if isinstance(event, yaml.CollectionStartEvent) and event.anchor is not None:
            raise ValueError(
                "it has an anchor (&) of a list or a mapping; only a text may have one"
            )
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"it has the tag {event.tag:.60}; leave the tag out")
        is_long = isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_NUMBER_CHARACTERS
        if is_long and resolver.resolve(yaml.ScalarNode, event.value, event.implicit) != TEXT_TAG:
            n_characters = len(event.value)
            raise ValueError(
                f"it has a number or a date of {n_characters:,} characters; quote texts"
            )


def _is_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _upstream(path: Path, values: Any) -> UpstreamRule | None:
    if values is None:
        return None
    wanted = {field.name for field in fields(UpstreamRule)}
    if not isinstance(values, dict) or values.keys() != wanted:
        raise ValueError(
            f"template {path}: upstream must have exactly the keys {', '.join(sorted(wanted))}, or "
            "be left out"
        )
    if not (
        isinstance(values["refuse_chinese"], bool)
        and type(values["unparsed_characters"]) is int
        and _is_texts(values["words"])
    ):
        raise ValueError(
            f"template {path}: upstream must have refuse_chinese true or false, a whole number "
            "unparsed_characters, and words a list of texts"
        )
    return UpstreamRule(**{**values, "words": tuple(values["words"])})


TEMPLATES = {path.stem: read_template(path) for path in sorted(FOLDER.glob("*.yaml"))}
