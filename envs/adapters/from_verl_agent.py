"""Environment managers of verl-agent, a batch of one at a time.

Options: `manager` ("module:function", called with a seed and `kwargs`; returns an
EnvironmentManagerBase around one environment), `kwargs`, `shows` ("anchor": the bare observation,
for a prompt template and history of ours; "text": the whole prompt that the manager writes, for a
template that is only "{observation}" and `prompt.history_length=0`), `action` (how an action is
given to the manager's projection, such as "<think></think><action>{action}</action>": {action}
stands for it), `objective`, `train_seeds`, `heldout_seeds`.

A manager has no way to ask for one task: it plays the next one of an order that follows from its
seed. So every episode has a manager of its own, and plays the first. `won`, and `task_score` where
there is one, are its `infos`'; it does not say whether an episode ended or was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envs.adapters.common import SEEDS, adapter_options, seeded_tasks
from envs.base import Observation, Task, Transition
from envs.options import load_target

OPTIONS = ("manager", "kwargs", "shows", "action", "objective", *SEEDS)


class VerlAgentEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = adapter_options("verl_agent", options, OPTIONS)
        self._make = load_target("verl_agent", "manager", self._options["manager"])
        self._manager: Any = None

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        given = adapter_options("verl_agent", options, OPTIONS)
        return seeded_tasks("verl_agent", split, given, name=str(given["manager"]))

    def reset(self, task: Task) -> Observation:
        self.close()
        self._manager = self._make(task.seed, **self._options["kwargs"])
        observations, _ = self._manager.reset(kwargs=None)
        return self._observe(observations)

    def step(self, action: str) -> Transition:
        text = self._options["action"].replace("{action}", action)
        observations, rewards, dones, infos = self._manager.step([text])
        score = infos[0].get("task_score")
        return Transition(
            observation=self._observe(observations),
            reward=float(rewards[0]),
            terminated=bool(dones[0]),
            truncated=False,
            won=bool(infos[0]["won"]),
            valid=bool(infos[0]["is_action_valid"]),
            task_score=None if score is None else float(score),
        )

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _observe(self, observations: Mapping[str, Any]) -> Observation:
        anchor = str(observations["anchor"][0])
        text = anchor if self._options["shows"] == "anchor" else observations["text"][0]
        return Observation(text=text, objective=self._options["objective"], anchor=anchor)
