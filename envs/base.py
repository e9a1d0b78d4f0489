"""The environment contract. One environment object plays one episode at a time; batching is the
runner's business.

    env = environment_class("textworld")(options)
    observation = env.reset(task)
    while not done:
        transition = env.step(action)          # action is text
        done = transition.terminated or transition.truncated
    env.close()

An environment knows no tokens, prompts or models. It says what its anchor state is, because only it
can. A user's own environment is one class with `tasks`, `reset`, `step` and `close`, named
`module:Class` in the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is to be solved. Assigned explicitly by the coordinator, never drawn inside an
    environment.
    """

    id: str  # stable and unique within the environment, over all splits
    env_name: str
    split: str  # "train" or "heldout"
    seed: int  # every member of a group gets the same task and so the same seed
    # e.g. the path of a game file; text only, so it can be stored
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    text: str
    objective: str = ""  # what the agent is asked to do; constant over the episode
    anchor: str | None = None  # canonical text of the anchor state; None means "use `text`"
    # admissible actions, None where the environment cannot list them
    actions: tuple[str, ...] | None = None
    # what leads on to a win, where that is known; for the scripted player, no model sees it
    demonstrated: str | None = None
    images: tuple[NDArray[np.uint8], ...] = field(
        default=(), compare=False
    )  # each [height, width, 3], red green blue; what a vision model sees with `text`


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    observation: Observation
    reward: float  # the environment's own reward for this step
    terminated: bool  # the episode ended by its own rules
    truncated: bool  # it was cut off (step limit)
    won: bool  # the task is solved
    valid: bool = True  # the environment understood the action
    # A graded score, at every step: the last one is the episode's. None where the environment has
    # no grades.
    task_score: float | None = None


@runtime_checkable
class Environment(Protocol):
    """Constructed as `EnvironmentClass(options)`; `options` is the config's `env.options` mapping.

    `reset` and `step` may both be coroutines ("async def"), for a world behind a network: they are
    then awaited on the worker's event loop instead of being called in a process of their own.
    """

    def __init__(self, options: Mapping[str, object]) -> None: ...

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """All tasks of a split, in a stable order; may generate and cache game files on the first
        call.

        A class that does has `makes_tasks = True`, and a dry run leaves it alone.
        """
        ...

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: str) -> Transition: ...

    def close(self) -> None: ...
