"""Adapt environments of SkyRL-gym. A task is a row of a data set: a first chat, and the solution.

Options:
    id, env_config  arguments of `skyrl_gym.make`
    imports         your modules that register environments
    train_file, heldout_file
                    JSON lines; `prompt` is a list of chat messages, other keys are extras
    action          text for an action, such as "<answer>{action}</answer>"; {action} is replaced
    win_at          an episode is won if its last reward is at least this

The chat is the objective. SkyRL-gym does not tell whether an episode terminated or was truncated,
nor whether it understood an action.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.adapters.common import BEGIN, adapter_options, import_all, import_package
from envs.base import Observation, Task, Transition
from envs.options import check_split

OPTIONS = ("id", "env_config", "imports", "train_file", "heldout_file", "action", "win_at")


class SkyRLGymEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = adapter_options("skyrl_gym", options, OPTIONS)
        self._make = import_package("skyrl_gym", "skyrl_gym").make
        import_all("skyrl_gym", self._options["imports"])
        self._env: Any = None

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        given = adapter_options("skyrl_gym", options, OPTIONS)
        check_split(split)
        return [
            Task(
                id=f"skyrl_gym-{given['id']}-{split}-{n}",
                env_name="skyrl_gym",
                split=split,
                seed=n,
                data={"row": line},
            )
            for n, line in enumerate(_rows(Path(given[f"{split}_file"])))
        ]

    def reset(self, task: Task) -> Observation:
        from omegaconf import OmegaConf  # its environments read settings as attributes

        self.close()
        extras = json.loads(task.data["row"])
        prompt = extras.pop("prompt")
        config = OmegaConf.create(self._options["env_config"])
        # the row is an argument of the environment's constructor
        self._env = self._make(self._options["id"], env_config=config, extras=extras)
        messages, _ = self._env.init(prompt)
        self._objective = _text(messages)
        return Observation(text=BEGIN, objective=self._objective)

    def step(self, action: str) -> Transition:
        answer = self._env.step(self._options["action"].replace("{action}", action))
        reward, done = float(answer["reward"]), bool(answer["done"])
        return Transition(
            observation=Observation(text=_text(answer["observations"]), objective=self._objective),
            reward=reward,
            terminated=done,
            truncated=False,
            won=done and reward >= self._options["win_at"],
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _rows(path: Path) -> Iterator[str]:
    """Yield the lines of the file. Raises ValueError for a line that is no row."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), list):
                raise ValueError(
                    f"skyrl_gym: {path} line {number} is no JSON object with a list `prompt`: "
                    f"{line[:60]!r}"
                )
            yield line


def _text(messages: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in messages)
