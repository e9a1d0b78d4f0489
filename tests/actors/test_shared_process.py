"""A task that ends the environment process costs its own group, and no other one."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actors.rollout.episode import AttemptProgress, EpisodeRules
from actors.rollout.group import GroupRollout
from actors.rollout.step_records import EpisodeIds
from envs import EnvironmentPool, Task
from store import Trajectory
from tests.actors.test_group import Table, group_of, trajectory

N_STEPS = 4
ATTEMPTS = 3
FRAIL = """
import os, threading, time
from envs import Observation, Transition
class Frail:
    def __init__(self, options): pass
    def close(self): pass
    @classmethod
    def tasks(cls, split, options): return []
    def reset(self, task):
        self.task, self.n_steps = task.id, 0
        return Observation(text=task.id)
    def step(self, action):
        self.n_steps += 1
        if self.n_steps == 2 and self.task in ("exit", "hang", "exit later"):
            open("ENDS", "a").write("x")
            if self.task == "exit later":
                threading.Timer(0.05, os._exit, (3,)).start()
            else:
                time.sleep(3600) if self.task == "hang" else os._exit(3)
        return Transition(
            observation=Observation(text=self.task),
            reward=0.0, terminated=False, truncated=False, won=False)
"""


class Episodes:
    """Play every episode in one pool, N_STEPS actions each."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        async with self.pool.environment(task) as environment:
            await environment.reset(task)
            for _ in range(N_STEPS):
                await environment.step("go")
                await asyncio.sleep(0.1)  # the model answers
        return trajectory(ids.member)


def rollout(table: Table, task_id: str, *, size: int, episodes: Episodes) -> GroupRollout:
    group = group_of(table, size, attempts=ATTEMPTS)
    group.lease.task = replace(group.lease.task, id=task_id, env_name="frail")  # type: ignore[misc]
    group._episodes = episodes  # type: ignore[assignment]
    return group


@pytest.mark.parametrize("how", ["exit", "hang", "exit later"])
def test_tasks_that_end_the_process_do_not_use_up_the_attempts_of_the_others(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 40 tasks ended a run: each episode of their groups ended the process three times, and
    after 20 ends every group beside them was abandoned too. If a thread of theirs ended it, the
    groups beside them were blamed.
    """
    ends = tmp_path / "ends"
    ends.touch()
    (tmp_path / "frail_world.py").write_text(FRAIL.replace("ENDS", str(ends)))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("frail_world", None)
    bad, good = Table(), Table()

    async def play() -> None:
        pool = EnvironmentPool("frail_world:Frail", {}, processes=1, answer_timeout_s=2.0)
        episodes = Episodes(pool)
        try:
            await asyncio.gather(
                *(rollout(bad, how, size=8, episodes=episodes).run() for _ in range(2)),
                *(rollout(good, f"{n}", size=2, episodes=episodes).run() for n in range(4)),
            )
        finally:
            pool.close()

    asyncio.run(play())
    assert len(bad.abandoned) == 2 and f"task '{how}'" in bad.abandoned[0]
    if how != "exit later":  # before it, others begin the same
        assert 2 <= len(ends.read_text()) <= 2 * ATTEMPTS
    assert good.abandoned == [] and len(good.committed) == 8
