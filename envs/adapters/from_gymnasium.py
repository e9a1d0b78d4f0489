"""Adapt Gymnasium environments whose actions are discrete, each with a name, or text.

Options:
    id, kwargs    arguments of `gymnasium.make`
    task_kwargs   "module:function" that returns more arguments for a task's seed; "" for none
    render        the text of an observation: observation, ansi, or "module:function" of environment
                  and observation
    actions       a name for each discrete action, in order; [] for text
    objective
    win_at        an episode is won if it terminates with at least this reward
    train_seeds, heldout_seeds
    deterministic whether seed and actions alone decide what happens, so that answers can be
                  remembered; false if it is left out

An action that is no name, or that `info["action_mask"]` forbids, changes nothing and is invalid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.adapters.common import SEEDS, adapter_options, import_package, seeded_tasks
from envs.base import Observation, Task, Transition
from envs.options import load_target

OPTIONS = (
    "id", "kwargs", "task_kwargs", "render", "actions", "objective", "win_at", "deterministic",
    *SEEDS,
)  # fmt: skip
# "ansi" marks the player with a colour. The search for an end stops where another colour begins:
# a line of many beginnings would be read again for each.
HIGHLIGHTED = re.compile(r"\x1b\[[\d;]*m([^\x1b\n]*)\x1b\[0m")


class GymnasiumEnv:
    deterministic = True  # an object may say otherwise

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = _checked(options)
        self.deterministic = self._options["deterministic"]
        self._gymnasium = import_package("gymnasium", "gymnasium")
        self._render: Any = None
        if self._options["render"] not in ("observation", "ansi"):
            self._render = load_target("gymnasium", "render", self._options["render"])
        self._task_kwargs: Any = None
        if self._options["task_kwargs"]:
            self._task_kwargs = load_target(
                "gymnasium", "task_kwargs", self._options["task_kwargs"]
            )
        self._env: Any = None
        self._made_for: int | None = None  # seed

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        given = _checked(options)
        return seeded_tasks("gymnasium", split, given, name=str(given["id"]))

    def reset(self, task: Task) -> Observation:
        if self._env is None or (self._task_kwargs is not None and self._made_for != task.seed):
            self.close()
            self._env, self._made_for = self._make(task.seed), task.seed
            self._check_spaces()
        state, info = self._env.reset(seed=task.seed)
        return self._observe(state, info)

    def step(self, action: str) -> Transition:
        names = self._options["actions"]
        if names and action not in (self._seen.actions or ()):
            return Transition(
                observation=self._seen,
                reward=0.0,
                terminated=False,
                truncated=False,
                won=False,
                valid=False,
            )
        given = self._env.action_space.start + names.index(action) if names else action
        state, reward, terminated, truncated, info = self._env.step(given)
        return Transition(
            observation=self._observe(state, info),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            won=bool(terminated) and float(reward) >= self._options["win_at"],
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _make(self, seed: int) -> Any:
        kwargs = dict(self._options["kwargs"])
        if self._task_kwargs is not None:
            kwargs |= self._task_kwargs(seed)
        if self._options["render"] == "ansi":
            kwargs["render_mode"] = "ansi"
        return self._gymnasium.make(self._options["id"], **kwargs)

    def _check_spaces(self) -> None:
        spaces = self._gymnasium.spaces
        names = self._options["actions"]
        name = self._options["id"]
        space, seen = self._env.action_space, self._env.observation_space
        if isinstance(space, spaces.Discrete):
            if len(names) != space.n:
                raise ValueError(
                    f"gymnasium option actions={names}: {name} has {space.n} actions; give each a "
                    "name"
                )
        elif not isinstance(space, spaces.Text):
            raise ValueError(
                f"gymnasium environment {name} has actions {space}; wrap it so that they are "
                "Discrete or Text"
            )
        elif names:
            raise ValueError(
                f"gymnasium option actions={names}: the actions of {name} are any text; use []"
            )
        if self._options["render"] == "observation" and not isinstance(
            seen, spaces.Discrete | spaces.Text
        ):
            raise ValueError(
                f"gymnasium option render=observation: {name} observes {seen}, no text; use ansi "
                "or module:function"
            )

    def _observe(self, state: Any, info: Mapping[str, Any]) -> Observation:
        names, mask = self._options["actions"], info.get("action_mask")
        allowed = tuple(name for i, name in enumerate(names) if mask is None or mask[i])
        anchor = None
        if isinstance(self._env.observation_space, self._gymnasium.spaces.Discrete):
            anchor = str(state)  # the text may tell more than the state, such as the last move
        self._seen = Observation(
            text=self._text(state),
            objective=self._options["objective"],
            anchor=anchor,
            actions=allowed if names else None,
        )
        return self._seen

    def _text(self, state: Any) -> str:
        if self._render is not None:
            return str(self._render(self._env.unwrapped, state))
        if self._options["render"] == "ansi":
            return HIGHLIGHTED.sub(r"[\1]", self._env.render()).strip("\n")
        return str(state)


def _checked(options: Mapping[str, object]) -> dict[str, Any]:
    return adapter_options("gymnasium", {"deterministic": False, **options}, OPTIONS)
