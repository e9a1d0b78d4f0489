"""Define the contracts of environments and agent programs, and the records that they exchange.

An environment is stepped by the system, which calls the model between steps:

    env = environment_class("textworld")(options)
    observation = env.reset(task)
    while not done:
        transition = env.step(action)  # action is text
        done = transition.terminated or transition.truncated
    env.close()

An agent program calls a chat model itself, and is run once for each task:

    program = program_class("my_agent:Agent")(options)
    outcome = program.run(task, client)

Both play one episode at a time; others do the batching. They know no tokens, prompts or models.
Your own class is named `module:Class` in the config. `key_room.py` is an example to copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem to solve. The coordinator assigns it; an environment never draws its own."""

    id: str  # stable and unique within the environment, over all splits
    env_name: str
    split: str  # "train" or "heldout"
    seed: int  # all trajectories of a group get the same task, and so the same seed
    # such as the path of a game file; text only, so that it can be stored
    data: Mapping[str, str] = field(default_factory=dict)


def of_environment(task: Task, name: str) -> Task:
    """Return the task of a run with several environments: its id begins with the name of its own.

    >>> task = Task(id="3", env_name="key_room", split="train", seed=0)
    >>> of_environment(task, "rooms").id, own_task(of_environment(task, "rooms")).id
    ('rooms/3', '3')
    """
    return replace(task, id=f"{name}/{task.id}", env_name=name)


def own_task(task: Task) -> Task:
    """Return a task of `of_environment` under the id that its environment gave it."""
    return replace(task, id=task.id.partition("/")[2])


def task_to_json(task: Task) -> dict[str, Any]:
    """Return the fields of a Task for JSON."""
    return asdict(replace(task, data=dict(task.data)))  # any mapping may be its `data`


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Everything the agent sees before its next action."""

    text: str
    objective: str = ""  # what the agent shall do; the same in the whole episode
    # canonical text of the state: steps of a group with equal anchors are compared; None: `text`
    anchor: str | None = None
    actions: tuple[str, ...] | None = None  # admissible actions, None if they cannot be listed
    # an action that leads on to a win, if known; for the scripted policy, never shown to a model
    demonstrated: str | None = None
    # uint8 [height, width, 3] each, red green blue; a vision model sees them with `text`
    images: tuple[NDArray[np.uint8], ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """The result of one action."""

    observation: Observation
    reward: float  # the environment's own reward for this step
    terminated: bool  # the episode ended by its own rules
    truncated: bool  # the episode was cut off, for example by a limit of steps
    won: bool  # the task is solved
    valid: bool = True  # the environment understood the action
    # A grade at every step. The last one is the episode's. None if the environment has no grades.
    task_score: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptAnswers:
    """A folder for the answers to a task, and all that decides them beside the class's own code."""

    folder: Path  # made if it is not there
    # such as the game's file, options that matter, and versions of packages; other texts or bytes
    # are another task
    decided_by: tuple[str | bytes, ...]


@runtime_checkable
class Environment(Protocol):
    """A world that is stepped, constructed as `EnvironmentClass(options)` from `env.options`.

    `reset` and `step` may both be coroutines, for a world behind a network. They are then awaited
    on the worker's event loop instead of being called in a process of their own.

    A class may say `deterministic = True`: the task and the actions alone decide every answer, so
    answers are remembered. With it, `state_key`, `save_state`, `restore_state`, `understood` and
    `kept_answers` are optional (docs/your_environment.md).
    """

    def __init__(self, options: Mapping[str, object]) -> None: ...

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """Return all tasks of a split in a stable order.

        A class that creates files here has `makes_tasks = True`: a dry run then does not call it.
        """
        ...

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: str) -> Transition: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSettings:
    """Settings with which an agent program reaches the model, for any OpenAI client."""

    base_url: str  # such as http://127.0.0.1:40123/v1
    # tells the endpoint which episode a request belongs to; refused once that episode has ended
    api_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of an agent program's episode."""

    reward: float  # of the whole episode
    won: bool  # the task is solved
    task_score: float | None = None  # a grade, if the task has one


@runtime_checkable
class Program(Protocol):
    """An agent that calls the model itself, constructed as `ProgramClass(options)` per process."""

    def __init__(self, options: Mapping[str, object]) -> None: ...

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]: ...

    def run(self, task: Task, client: ClientSettings) -> Outcome:
        """Play one task; may be a coroutine.

        While it runs, OPENAI_BASE_URL and OPENAI_API_KEY are set in its process.
        """
        ...
