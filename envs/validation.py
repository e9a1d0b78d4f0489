"""What must hold of an environment before anything expensive starts, and of everything it
answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from envs.base import Environment, Observation, Task, Transition
from envs.errors import one_line
from envs.images import check_images
from envs.options import SPLITS, Options, OptionsError
from envs.registry import environment_class, is_program, program_class
from printable import UserError

if TYPE_CHECKING:
    from envs.hosting.program_pool import Program  # whose process checks its answers with this file


# Errors of files, packages and servers that may be present on the machine of the run. All others
# are mistakes in the code.
OF_THIS_MACHINE = (OSError, ImportError, ValueError)


# of one observation; every step of an episode keeps its own until the episode is written
MAX_CHARACTERS = 64 * 2**20
# Of one observation. An empty action has no characters to count, but a place in memory all the
# same.
MAX_ACTIONS = 1_000_000


class EnvironmentFailed(UserError, RuntimeError):
    """An environment cannot be used; the message is one line that names it, what it did, and what
    to change.

    `may_work_elsewhere`: something is missing that another machine may have, so a dry run only says
    it.
    """

    may_work_elsewhere = False

    @classmethod
    def because(
        cls, what: str, error: BaseException, *, called: Callable[..., Any] | None
    ) -> EnvironmentFailed:
        """Return the failure that an environment's own `error` is. `called` is the method that
        raised it.
        """
        text = str(error) if isinstance(error, OptionsError) else one_line(error, called=called)
        failed = cls(f"{what}: {text}")
        failed.may_work_elsewhere = isinstance(error, OF_THIS_MACHINE) and not isinstance(
            error, OptionsError
        )
        return failed


def planned_tasks(name: str, options: Mapping[str, object]) -> dict[str, Sequence[Task]] | None:
    """Return the tasks of every split; None where listing would make them, and then only check the
    options.
    """
    make = _made_by(name)
    if not getattr(make, "makes_tasks", False):
        return list_tasks(name, options)
    check_can_be_made(name, options)
    return None


def check_can_be_made(name: str, options: Mapping[str, object]) -> None:
    """Make one object of the class. Raises EnvironmentFailed."""
    make = _made_by(name)
    try:
        make(Options(options))
    except (Exception, SystemExit) as error:  # the border to a user's own code
        raise EnvironmentFailed.because(
            f"env.name={name}: it cannot be made", error, called=make.__init__
        ) from error


def list_tasks(name: str, options: Mapping[str, object]) -> dict[str, Sequence[Task]]:
    """The tasks of every split, made now where they are generated.

    Raises EnvironmentFailed if the environment raises, if something is no task, if a split is
    empty, or if a task is there twice or in two splits.
    """
    make = _made_by(name)
    try:
        splits = {
            split: _checked_tasks(make.tasks(split, Options(options)), split=split)
            for split in SPLITS
        }
    except (Exception, SystemExit) as error:  # the border to a user's own code
        what = f"env.name={name}: listing its tasks failed"
        raise EnvironmentFailed.because(what, error, called=make.tasks) from error
    for split, tasks in splits.items():
        if not tasks:
            raise EnvironmentFailed(
                f"env.name={name} lists no {split} tasks; check env.options={dict(options)}"
            )
        task_id, n = Counter(task.id for task in tasks).most_common(1)[0]
        if n > 1:
            raise EnvironmentFailed(
                f"env.name={name} lists {split} task {task_id!r} {n} times; give each an id of its "
                "own"
            )
    both = {task.id for task in splits["train"]} & {task.id for task in splits["heldout"]}
    if both:
        raise EnvironmentFailed(
            f"env.name={name}: task {min(both)!r} is in the train and in the heldout split; give "
            "each task one split"
        )
    return splits


def _checked_tasks(answer: object, *, split: str) -> Sequence[Task]:
    """Return the tasks that `tasks(split, options)` returned. Raises TypeError: what is wrong with
    them.
    """
    if isinstance(answer, str | Mapping) or not hasattr(answer, "__iter__"):
        raise TypeError(
            f"tasks({split!r}) returned {_shown(answer)}; it must return a list of Task"
        )
    # A sequence is kept: it may make its tasks when they are asked for.
    tasks: Sequence[object] = answer if isinstance(answer, Sequence) else list(answer)
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(
                f"tasks({split!r}) has {_shown(task)} at index {number}; each must be an envs.Task"
            )
        for field in ("id", "env_name", "split"):
            if not isinstance(value := getattr(task, field), str):
                raise TypeError(
                    f"tasks({split!r}) has a task with {field}={value!r} at index {number}; it "
                    "must be text"
                )
        if task.split != split:
            raise TypeError(
                f"tasks({split!r}) has task {task.id!r} with split={task.split!r}; it must be "
                f"{split!r}"
            )
        if isinstance(task.seed, bool) or not isinstance(task.seed, int):
            raise TypeError(
                f"tasks({split!r}) has task {task.id!r} with seed={task.seed!r}; it must be an int"
            )
        if not isinstance(task.data, Mapping):
            raise TypeError(
                f"tasks({split!r}) has task {task.id!r} with data={_shown(task.data)}; it must be "
                "a dict of text"
            )
        for key, value in task.data.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(
                    f"tasks({split!r}) has task {task.id!r} with data[{key!r}]={value!r}; it must "
                    "be text"
                )
        for text in (task.id, task.env_name, *task.data.values()):
            _check_encodable(text, what=f"tasks({split!r})")
    return cast(Sequence[Task], tasks)


def checked_answer(method: str, answer: object) -> Observation | Transition:
    """What `reset` or `step` returned, its numbers as Python's own (numpy's pass). TypeError,
    ValueError: what is wrong.
    """
    if method == "reset":
        return _checked_observation(answer, what="reset")
    if not isinstance(answer, Transition):
        raise TypeError(f"step returned {_shown(answer)}; it must return a Transition")
    if (
        isinstance(answer.reward, bool)
        or not isinstance(answer.reward, Real)
        or not math.isfinite(answer.reward)
    ):
        raise ValueError(f"step returned reward={answer.reward!r}; it must be a finite number")
    score = answer.task_score
    if score is not None and (not isinstance(score, Real) or not math.isfinite(score)):
        raise ValueError(f"step returned task_score={score!r}; it must be a finite number or None")
    flags = {}
    for name in ("terminated", "truncated", "won", "valid"):
        flag = getattr(answer, name)
        if flag not in (True, False):
            raise TypeError(f"step returned {name}={flag!r}; it must be True or False")
        flags[name] = bool(flag)
    return replace(
        answer,
        observation=_checked_observation(answer.observation, what="step"),
        reward=float(answer.reward),
        task_score=None if score is None else float(score),
        **flags,
    )


def _checked_observation(answer: object, *, what: str) -> Observation:
    if not isinstance(answer, Observation):
        raise TypeError(f"{what} returned {_shown(answer)}; it must return an Observation")
    if not isinstance(answer.text, str) or not isinstance(answer.objective, str):
        raise TypeError(
            f"{what} returned an Observation whose text or objective is no str: {_shown(answer)}"
        )
    if answer.anchor is not None and not isinstance(answer.anchor, str):
        raise TypeError(f"{what} returned anchor={answer.anchor!r}; it must be text or None")
    if answer.demonstrated is not None and not isinstance(answer.demonstrated, str):
        raise TypeError(
            f"{what} returned demonstrated={answer.demonstrated!r}; it must be text or None"
        )
    check_images(answer.images, what=what)
    _check_length(
        answer.text, answer.objective, answer.anchor or "", answer.demonstrated or "", what=what
    )
    for text in (answer.text, answer.objective, answer.anchor or "", answer.demonstrated or ""):
        _check_encodable(text, what=what)
    if answer.actions is None:
        return answer
    actions = tuple(islice(answer.actions, MAX_ACTIONS + 1))
    if len(actions) > MAX_ACTIONS:
        raise ValueError(
            f"{what} returned an Observation with more than {MAX_ACTIONS} actions; return those "
            "that matter"
        )
    if isinstance(answer.actions, str) or not all(isinstance(action, str) for action in actions):
        raise TypeError(
            f"{what} returned actions={answer.actions!r}; they must be a tuple of texts or None"
        )
    _check_length(*actions, what=what)
    for action in actions:
        _check_encodable(action, what=what)
    return replace(answer, actions=actions)


def _check_length(*texts: str, what: str) -> None:
    n_characters = sum(map(len, texts))
    if n_characters > MAX_CHARACTERS:
        raise ValueError(
            f"{what} returned an Observation with {n_characters} characters; at most "
            f"{MAX_CHARACTERS} can be kept, "
            "return the part that matters"
        )


def _check_encodable(text: str, *, what: str) -> None:
    """Python's text may hold halves of characters, which no tokenizer takes and no file can
    keep.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} returned text with {text[error.start]!r} in it, half of a character: "
            f"{_shown(text)}; "
            "decode what it is from with errors='replace'"
        ) from None


def _shown(answer: object) -> str:
    text = repr(answer)
    return f"{type(answer).__name__} {text if len(text) <= 80 else text[:80] + '...'}"


def _made_by(name: str) -> type[Environment] | type[Program]:
    try:
        return program_class(name) if is_program(name) else environment_class(name)
    except ValueError as error:
        raise EnvironmentFailed(f"env.name: {error}") from error.__cause__
