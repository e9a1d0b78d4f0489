"""Check an environment before a run starts, and everything that it returns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from numbers import Real
from typing import cast

import numpy as np
from numpy.typing import NDArray

from envs.base import Environment, Observation, Outcome, Program, Task, Transition
from envs.error_texts import describe_error, full_message, plain_text
from envs.errors import EnvironmentFailed
from envs.options import SPLITS, Options, OptionsError
from envs.registry import environment_class, is_program, program_class
from row_bounds import (
    MAX_NAME_CHARACTERS,
    MAX_OBSERVATION_CHARACTERS,
    MAX_PIXEL_BYTES,
    MAX_REWARD,
    MAX_SEED,
)

MAX_CHARACTERS = MAX_OBSERVATION_CHARACTERS  # of one observation
MAX_ACTIONS = 1_000_000  # an empty action has no characters to count, and takes memory all the same
SHOWN_CHARACTERS = 80  # of a wrong value in an error
# Errors of files, packages and servers that another machine may have. All others are mistakes in
# the code or the config.
MACHINE_ERRORS = (OSError, ImportError, ValueError)
COLOURS = 3  # red, green, blue
_MUST_BE = f"it must be a finite number, at most {MAX_REWARD:g} in size"


def planned_tasks(name: str, options: Mapping[str, object]) -> dict[str, Sequence[Task]] | None:
    """Return the tasks of every split without creating files. Raises EnvironmentFailed.

    Returns None if listing would create files. Then only the options are checked.
    """
    if not getattr(_load_class(name), "makes_tasks", False):
        return list_tasks(name, options)
    check_constructor(name, options)
    return None


def check_constructor(name: str, options: Mapping[str, object]) -> None:
    """Construct one object of the class. Raises EnvironmentFailed."""
    make = _load_class(name)
    try:
        make(Options(options))
    except (Exception, SystemExit) as error:  # the border to a user's own code
        context = f"env.name={name}: it cannot be made"
        raise _failure(context, error, called=make.__init__) from error


def list_tasks(name: str, options: Mapping[str, object]) -> dict[str, Sequence[Task]]:
    """Return the tasks of every split, creating files where the class does.

    Raises EnvironmentFailed if the class raises, if a task is malformed, if a split is empty, or if
    two tasks share an id.
    """
    make = _load_class(name)
    try:
        splits = {
            split: checked_tasks(make.tasks(split, Options(options)), split=split)
            for split in SPLITS
        }
    except (Exception, SystemExit) as error:  # the border to a user's own code
        context = f"env.name={name}: listing its tasks failed"
        raise _failure(context, error, called=make.tasks) from error
    for split, tasks in splits.items():
        if not tasks:
            raise EnvironmentFailed(
                f"env.name={name} lists no {split} tasks; check env.options={dict(options)}"
            )
        task_id, count = Counter(task.id for task in tasks).most_common(1)[0]
        if count > 1:
            raise EnvironmentFailed(
                f"env.name={name} lists {split} task {task_id!r} {count} times; give each an id of "
                "its own"
            )
    both = {task.id for task in splits["train"]} & {task.id for task in splits["heldout"]}
    if both:
        raise EnvironmentFailed(
            f"env.name={name}: task {min(both)!r} is in the train and in the heldout split; give "
            "each task one split"
        )
    return splits


def checked_tasks(answer: object, *, split: str) -> Sequence[Task]:
    """Return the tasks that `tasks(split, options)` returned. Raises TypeError, ValueError."""
    if isinstance(answer, str | Mapping) or not hasattr(answer, "__iter__"):
        raise TypeError(
            f"tasks({split!r}) returned {_shown(answer)}; it must return a list of Task"
        )
    # A sequence is not copied: it may make each task when it is asked for.
    tasks: Sequence[object] = answer if isinstance(answer, Sequence) else list(answer)
    for index, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(
                f"tasks({split!r}) has {_shown(task)} at index {index}; each must be an envs.Task"
            )
        fault = _fault_of_task(task, split=split, index=index)
        if fault:
            raise TypeError(f"tasks({split!r}) has {fault}")
        for text in (task.id, task.env_name, *task.data.values()):
            _check_encodable(plain_text(text), method=f"tasks({split!r})")
    return cast(Sequence[Task], tasks)


def _fault_of_task(task: Task, *, split: str, index: int) -> str:
    """Describe a field of the wrong type; return "" if there is none."""
    for name in ("id", "env_name", "split"):
        value = getattr(task, name)
        if not isinstance(value, str):
            return f"a task with {name}={value!r} at index {index}; it must be text"
        if (n_characters := len(plain_text(value))) > MAX_NAME_CHARACTERS:
            return (
                f"a task whose {name} has {n_characters:,} characters at index {index}; at most "
                f"{MAX_NAME_CHARACTERS:,} can be kept, use a short name"
            )
    if task.split != split:
        return f"task {task.id!r} with split={task.split!r}; it must be {split!r}"
    if isinstance(task.seed, bool) or not isinstance(task.seed, int):
        return f"task {task.id!r} with seed={task.seed!r}; it must be an int"
    if abs(task.seed) > MAX_SEED:
        return (
            f"task {task.id!r} with a seed of {task.seed.bit_length()} bits; it must be between "
            f"-{MAX_SEED} and {MAX_SEED}"
        )
    if not isinstance(task.data, Mapping):
        return f"task {task.id!r} with data={_shown(task.data)}; it must be a dict of text"
    for key, value in task.data.items():
        if not isinstance(key, str) or not isinstance(value, str):
            return f"task {task.id!r} with data[{key!r}]={value!r}; it must be text"
    return ""


def checked_answer(method: str, answer: object) -> Observation | Transition:
    """Return the answer of `reset` or `step`, made anew of Python's own texts, numbers and tuples.

    A subclass of them may answer a check and its later users differently, and a number of numpy's
    is no number for Arrow. Raises TypeError or ValueError for a malformed answer.
    """
    if method == "reset":
        return _checked_observation(answer, method)
    if not isinstance(answer, Transition):
        raise TypeError(f"step returned {_shown(answer)}; it must return a Transition")
    reward = answer.reward
    if isinstance(reward, bool):
        raise ValueError(f"step returned reward={reward}; {_MUST_BE}")
    return Transition(
        observation=_checked_observation(answer.observation, method),
        reward=_checked_number(reward, name="reward", method=method),
        terminated=_checked_flag(answer.terminated, name="terminated", method=method),
        truncated=_checked_flag(answer.truncated, name="truncated", method=method),
        won=_checked_flag(answer.won, name="won", method=method),
        valid=_checked_flag(answer.valid, name="valid", method=method),
        task_score=_checked_score(answer.task_score, method),
    )


def checked_outcome(answer: object) -> Outcome:
    """Return the answer of a program's `run`, made anew of Python's own numbers.

    Raises TypeError or ValueError for a malformed one.
    """
    if not isinstance(answer, Outcome):
        raise TypeError(f"run returned {type(answer).__name__}; it must return an envs.Outcome")
    return Outcome(
        reward=_checked_number(answer.reward, name="reward", method="run"),
        won=_checked_flag(answer.won, name="won", method="run"),
        task_score=_checked_score(answer.task_score, "run"),
    )


def checked_actions(listed: Iterable[object], method: str) -> tuple[str, ...]:
    """Return the actions that a method listed, as Python's own texts. Raises TypeError, ValueError.

    They may have any length.
    """
    actions = tuple(islice(listed, MAX_ACTIONS + 1))
    if len(actions) > MAX_ACTIONS:
        raise ValueError(
            f"{method} returned more than {MAX_ACTIONS} actions; return those that matter"
        )
    if isinstance(listed, str) or not all(isinstance(action, str) for action in actions):
        raise TypeError(
            f"{method} returned actions={_brief(listed)}; they must be a tuple of texts or None"
        )
    return tuple(map(plain_text, cast(tuple[str, ...], actions)))


def _checked_flag(flag: object, *, name: str, method: str) -> bool:
    if flag not in (True, False):
        raise TypeError(f"{method} returned {name}={_brief(flag)}; it must be True or False")
    return bool(flag)


def _checked_score(score: object, method: str) -> float | None:
    if score is None:
        return None
    return _checked_number(score, name="task_score", method=method)


def _checked_number(value: object, *, name: str, method: str) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:  # so that NaN is refused too
        or_none = ", or None" if name == "task_score" else ""
        raise ValueError(f"{method} returned {name}={_brief(value)}; {_MUST_BE}{or_none}")
    return number


def _brief(value: object) -> str:
    """Return a value as text, cut. A whole number of thousands of digits has no text."""
    try:
        text = repr(value)
    except ValueError:
        return f"{type(value).__name__} of very many digits"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _checked_observation(answer: object, method: str) -> Observation:
    if not isinstance(answer, Observation):
        raise TypeError(f"{method} returned {_shown(answer)}; it must return an Observation")
    text, objective, listed = answer.text, answer.objective, answer.actions
    if not isinstance(text, str) or not isinstance(objective, str):
        raise TypeError(
            f"{method} returned an Observation whose text or objective is no str: {_shown(answer)}"
        )
    seen = Observation(
        text=plain_text(text),
        objective=plain_text(objective),
        anchor=_text_or_none(answer.anchor, name="anchor", method=method),
        actions=None if listed is None else checked_actions(listed, method),
        demonstrated=_text_or_none(answer.demonstrated, name="demonstrated", method=method),
        images=_checked_images(answer.images, method),
    )
    texts = (seen.text, seen.objective, seen.anchor or "", seen.demonstrated or "")
    _check_texts(texts, method)
    _check_texts(seen.actions or (), method)
    return seen


def _text_or_none(value: object, *, name: str, method: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{method} returned {name}={_brief(value)}; it must be text or None")
    return None if value is None else plain_text(value)


def _checked_images(images: object, method: str) -> tuple[NDArray[np.uint8], ...]:
    """Return the images as plain arrays, uint8 [height, width, 3].

    Raises TypeError for others, ValueError for more than MAX_PIXEL_BYTES.
    """
    if not isinstance(images, tuple):
        raise TypeError(
            f"{method} returned images of type {type(images).__name__}; they must be a tuple of "
            "arrays"
        )
    checked = []
    for image in tuple.__iter__(images):
        # A subclass, such as a masked array, may answer with other pixels than it has.
        plain = np.asarray(image) if isinstance(image, np.ndarray) else image
        fault = _fault_of_image(plain)
        if fault:
            raise TypeError(f"{method} returned an image {fault}")
        checked.append(cast(NDArray[np.uint8], plain))
    n_bytes = sum(image.nbytes for image in checked)
    if n_bytes > MAX_PIXEL_BYTES:
        raise ValueError(
            f"{method} returned images of {n_bytes} bytes; at most {MAX_PIXEL_BYTES} can be kept, "
            "draw them smaller"
        )
    return tuple(checked)


def _fault_of_image(image: object) -> str:
    must_be = f"it must be a uint8 array [height, width, {COLOURS}]"
    if not isinstance(image, np.ndarray):
        return f"that is {type(image).__name__}; {must_be}"
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != COLOURS:
        return f"that is {image.dtype} {image.shape}; {must_be}"
    return "" if image.size else f"without a pixel, {image.shape}"


def _check_texts(texts: Sequence[str], method: str) -> None:
    n_characters = sum(map(len, texts))
    if n_characters > MAX_CHARACTERS:
        raise ValueError(
            f"{method} returned an Observation with {n_characters} characters; at most "
            f"{MAX_CHARACTERS} can be kept, return the part that matters"
        )
    for text in texts:
        _check_encodable(text, method=method)


def _check_encodable(text: str, *, method: str) -> None:
    """Raise ValueError for half of a surrogate pair, which no tokenizer and no file can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{method} returned text with {text[error.start]!r} in it, half of a character: "
            f"{_shown(text)}; decode what it is from with errors='replace'"
        ) from None


def _shown(answer: object) -> str:
    return f"{type(answer).__name__} {_brief(answer)}"


def _failure(
    context: str, error: BaseException, *, called: Callable[..., object]
) -> EnvironmentFailed:
    """Return the failure for an environment's own error, raised by the method `called`."""
    kind = type(error)  # a class may lie to `isinstance`
    is_option = issubclass(kind, OptionsError)
    text = full_message(error) if is_option else describe_error(error, called=called)
    failed = EnvironmentFailed(f"{context}: {text}")
    failed.may_work_elsewhere = issubclass(kind, MACHINE_ERRORS) and not is_option
    return failed


def _load_class(name: str) -> type[Environment] | type[Program]:
    try:
        return program_class(name) if is_program(name) else environment_class(name)
    except ValueError as error:
        raise EnvironmentFailed(f"env.name: {error}") from error.__cause__
