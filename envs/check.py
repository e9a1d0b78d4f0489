"""What must hold of an environment before anything expensive starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.base import Task
from envs.registry import environment_class

SPLITS = ("train", "heldout")


class EnvironmentFailed(RuntimeError):
    """An environment cannot be used; the message is one line that names it, what it did, and what to change."""


def list_tasks(name: str, options: Mapping[str, object]) -> dict[str, Sequence[Task]]:
    """The tasks of every split, made now where they are generated.

    Raises EnvironmentFailed if the environment raises, if a split is empty, or if a task is in two splits.
    """
    try:
        make = environment_class(name)
    except ValueError as error:
        raise EnvironmentFailed(f"env.name: {error}") from None
    try:
        splits = {split: make.tasks(split, options) for split in SPLITS}
    except Exception as error:  # the border to a user's own code
        raise EnvironmentFailed(f"env.name={name}: listing its tasks failed: {_line(error)}") from error
    for split, tasks in splits.items():
        if not tasks:
            raise EnvironmentFailed(f"env.name={name} lists no {split} tasks; check env.options={dict(options)}")
    both = {task.id for task in splits["train"]} & {task.id for task in splits["heldout"]}
    if both:
        raise EnvironmentFailed(
            f"env.name={name}: task {min(both)!r} is in the train and in the heldout split; give each task one split"
        )
    return splits


def try_environment(name: str, options: Mapping[str, object], task: Task) -> None:
    """Starts the environment once and resets it to `task`. Raises EnvironmentFailed with its error."""
    try:
        environment = environment_class(name)(options)
        environment.reset(task)
        environment.close()
    except Exception as error:  # as above
        raise EnvironmentFailed(f"env.name={name} does not start with task {task.id!r}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
