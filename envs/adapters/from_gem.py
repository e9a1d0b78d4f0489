r"""Adapt environments of GEM (gem-llm), whose observations and actions are text.

Options:
    id, kwargs    arguments of `gem.make`
    imports       your modules that register games
    action        the text for an action, such as "\boxed{{action}}"; {action} is replaced
    anchor        suffix: the board with which some games end their text. Else observation
    win_at        an episode is won if its last reward is at least this
    train_seeds, heldout_seeds

A game's first text, its rules, is the objective. GEM does not tell whether it understood an action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envs.adapters.common import (
    BEGIN,
    SEEDS,
    adapter_options,
    import_all,
    import_package,
    seeded_tasks,
)
from envs.base import Observation, Task, Transition

OPTIONS = ("id", "kwargs", "imports", "action", "anchor", "win_at", *SEEDS)


class GemEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = adapter_options("gem", options, OPTIONS)
        make = import_package("gem", "gem").make
        import_all("gem", self._options["imports"])
        self._env = make(self._options["id"], **self._options["kwargs"])

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        given = adapter_options("gem", options, OPTIONS)
        return seeded_tasks("gem", split, given, name=str(given["id"]))

    def reset(self, task: Task) -> Observation:
        self._rules, info = self._env.reset(seed=task.seed)
        return self._observe("", info)

    def step(self, action: str) -> Transition:
        text, reward, terminated, truncated, info = self._env.step(
            self._options["action"].replace("{action}", action)
        )
        return Transition(
            observation=self._observe(text, info),
            reward=float(reward),
            # at the limit of turns, GEM's games set both
            terminated=bool(terminated) and not truncated,
            truncated=bool(truncated),
            won=bool(terminated or truncated) and float(reward) >= self._options["win_at"],
        )

    def close(self) -> None:
        pass

    def _observe(self, text: str, info: Mapping[str, Any]) -> Observation:
        # The text before a board counts the turns, which would make each state a new one.
        suffix = info.get("suffix")
        anchor = suffix if self._options["anchor"] == "suffix" else None
        return Observation(
            text="\n".join(filter(None, (text, suffix))) or BEGIN,
            objective=self._rules,
            anchor=anchor,
        )
