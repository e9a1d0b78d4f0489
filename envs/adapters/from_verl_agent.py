"""Adapt environment managers of verl-agent, with a batch of one.

Options:
    manager    "module:function", called with a seed and `kwargs`; returns an EnvironmentManagerBase
    kwargs
    shows      anchor: the bare observation, for a prompt template and history of ours.
               text: the manager's whole prompt, for a template that is only "{observation}" and
               `prompt.history_length=0`
    action     the text for the manager's projection, such as
               "<think></think><action>{action}</action>"; {action} is replaced
    objective
    train_seeds, heldout_seeds

A manager cannot be asked for a task: it plays an order that follows from its seed. So each episode
makes a manager and plays its first task. `won` and `task_score` come from its `infos`. It does not
tell whether an episode terminated or was truncated.
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
