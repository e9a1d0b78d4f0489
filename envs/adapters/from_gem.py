r"""Environments of GEM (gem-llm): Gymnasium's five answers, with text for observations and actions.

Options: `id`, `kwargs` (as `gem.make` takes them), `imports` (modules that register games of their
own), `action` (how an action is given to the game, such as "\boxed{{action}}": {action} stands for
it), `anchor` ("suffix" for games that end what they say with their board, which is then what tells
states apart; else "observation"), `win_at` (an episode is won when it ends with a reward of at
least this), `train_seeds`, `heldout_seeds`.

What a game says at its beginning, its rules, is the objective. It does not say whether it
understood an action.
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
            # at their limit of turns its games say both
            terminated=bool(terminated) and not truncated,
            truncated=bool(truncated),
            won=bool(terminated or truncated) and float(reward) >= self._options["win_at"],
        )

    def close(self) -> None:
        pass  # it has nothing to close

    def _observe(self, text: str, info: Mapping[str, Any]) -> Observation:
        # What stands before a board counts the turns, and would make every state another.
        suffix = info.get("suffix")
        anchor = suffix if self._options["anchor"] == "suffix" else None
        return Observation(
            text="\n".join(filter(None, (text, suffix))) or BEGIN,
            objective=self._rules,
            anchor=anchor,
        )
