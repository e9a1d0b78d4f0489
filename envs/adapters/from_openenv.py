"""Environments of OpenEnv (openenv-core): a client of their server, which runs anywhere; one session is one environment.

Options: `url`, `action_field` (of the action the server takes: {action_field: text}), `text_field` (of the observation it
answers with), `objective`, `win_at` (an episode is won when it ends with a reward of at least this), `train_seeds`,
`heldout_seeds` (given to the environment's `reset`; one that does not heed them plays another task in each episode of a
group).

It waits for somebody else, so `reset` and `step` are coroutines. It does not say whether an episode ended or was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envs.adapters.common import SEEDS, check_options, close_soon, installed, seeded_tasks
from envs.base import Observation, Task, Transition

OPTIONS = ("url", "action_field", "text_field", "objective", "win_at", *SEEDS)


class OpenEnvEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = check_options("openenv", options, OPTIONS)
        self._client = installed("openenv", "openenv.core").GenericEnvClient(base_url=self._options["url"])

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        given = check_options("openenv", options, OPTIONS)
        return seeded_tasks("openenv", split, given, name=str(given["url"]))

    async def reset(self, task: Task) -> Observation:
        return self._observe(await self._client.reset(seed=task.seed))

    async def step(self, action: str) -> Transition:
        answer = await self._client.step({self._options["action_field"]: action})
        reward, done = float(answer.reward or 0.0), bool(answer.done)
        return Transition(
            observation=self._observe(answer),
            reward=reward,
            terminated=done,
            truncated=False,
            won=done and reward >= self._options["win_at"],
        )

    def close(self) -> None:
        close_soon(self._client.close())

    def _observe(self, answer: Any) -> Observation:
        field = self._options["text_field"]
        if field not in answer.observation:
            raise ValueError(f"openenv option text_field={field!r} is none of the observation's: {sorted(answer.observation)}")
        return Observation(text=str(answer.observation[field]), objective=self._options["objective"])
