"""Play the episodes of a run with several environments, each by its own runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.rollout.episode import AttemptProgress, EpisodeRules, EpisodeRunner
from actors.rollout.step_records import EpisodeIds
from envs import Task, own_task
from store import Trajectory


class EpisodesByEnvironment:
    """Give each task to the runner of its environment, under the id that the environment knows."""

    def __init__(self, runners: Mapping[str, EpisodeRunner]) -> None:
        self._runners = runners

    async def start(self) -> None:
        for runner in self._runners.values():
            await runner.start()

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        runner = self._runners[task.env_name]
        trajectory = await runner.run(own_task(task), ids, rules, progress=progress)
        return replace(trajectory, task_id=task.id)

    def waiting(self) -> tuple[str, float] | None:
        waits = [wait for runner in self._runners.values() if (wait := runner.waiting())]
        return max(waits, key=lambda wait: wait[1], default=None)

    def stuck(self) -> str | None:
        return next(filter(None, (runner.stuck() for runner in self._runners.values())), None)

    def answers(self) -> tuple[int, int]:
        answers = [runner.answers() for runner in self._runners.values()]
        return sum(n for n, _ in answers), sum(n_remembered for _, n_remembered in answers)

    async def close(self) -> None:
        for runner in self._runners.values():
            await runner.close()
