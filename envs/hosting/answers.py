"""Prepare requests to an environment object, and record its answers with its state.

action = prepared(environment, argument)
answer = answer_of(environment, "step", environment.step(action))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envs.base import Observation, Task, Transition
from envs.error_texts import plain_text
from envs.validation import checked_actions, checked_answer

KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFrom:
    """The argument of a request to restore a state and take a step from there."""

    task: Task
    saved: bytes
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Understood:
    """The actions that may change a state, and the answer to every other action."""

    actions: tuple[str, ...]
    otherwise: Transition


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state after an answer, as a deterministic environment describes it."""

    key: bytes | None  # digest; equal keys of one task are equal states; None if it gives none
    saved: bytes | None  # for `restore_state`; None if it cannot be restored
    understood: Understood | None  # None if every action has to be asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of an environment, and its state; None if it is not deterministic."""

    result: Observation | Transition
    state: State | None


def task_of(argument: object) -> Task | None:
    """Return the task that a request begins or goes on with; None for an action alone."""
    if isinstance(argument, StepFrom):
        return argument.task
    return argument if isinstance(argument, Task) else None


def prepared(environment: Any, argument: object) -> object:
    """Restore the state that a request names. Return the argument of `reset` or `step`."""
    if isinstance(argument, StepFrom):
        environment.restore_state(argument.task, argument.saved)
        return argument.action
    return argument


def is_deterministic(make: type) -> bool:
    """Return whether a class says so itself. What it inherits was said of other code."""
    return vars(make).get("deterministic") is True


def answer_of(environment: Any, method: str, result: object) -> Answer:
    """Check what a method returned, and add the state. Raises TypeError, ValueError."""
    checked = checked_answer(method, result)
    if not (is_deterministic(type(environment)) and environment.deterministic):
        return Answer(result=checked, state=None)
    key = _optional(environment, "state_key", (str, bytes))
    if key is not None:
        key = key.encode() if isinstance(key, str) else key
        key = hashlib.blake2b(key, digest_size=KEY_BYTES).digest()  # it may describe a whole page
    saved = _optional(environment, "save_state", (bytes,))
    ends = isinstance(checked, Transition) and (checked.terminated or checked.truncated)
    understood = None if ends else _understood(environment)
    return Answer(result=checked, state=State(key=key, saved=saved, understood=understood))


def _understood(environment: Any) -> Understood | None:
    answer = _optional(environment, "understood", (tuple,))
    if answer is None:
        return None
    actions, otherwise = answer
    checked = checked_answer("step", otherwise)
    assert isinstance(checked, Transition)
    return Understood(actions=checked_actions(actions, "understood"), otherwise=checked)


def _optional(environment: Any, method: str, types: tuple[type, ...]) -> Any:
    """Return the answer of a method that an environment may have; None without it.

    A text or bytes are Python's own, not a subclass.
    """
    ask: Callable[[], object] | None = getattr(environment, method, None)
    if ask is None:
        return None
    answer = ask()
    if not isinstance(answer, types):
        names = " or ".join(kind.__name__ for kind in types)
        raise TypeError(f"{method} returned {type(answer).__name__}; it must return {names}")
    if isinstance(answer, bytes):
        return bytes.__getitem__(answer, slice(None))
    return plain_text(answer) if isinstance(answer, str) else answer
