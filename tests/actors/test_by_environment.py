"""Episodes of several environments: each is played by its own runner, under the id it knows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from actors.rollout.by_environment import EpisodesByEnvironment
from actors.rollout.episode import AttemptProgress, EpisodeRules
from actors.rollout.step_records import EpisodeIds
from envs import Task, of_environment
from store import Group, Trajectory
from tests.support.store_samples import make_trajectory


@dataclass
class Player:
    """Play nothing: keep the task, and give a trajectory of it."""

    n_answers: int
    tasks: list[Task] = field(default_factory=list)
    is_open: bool = False

    async def start(self) -> None:
        self.is_open = True

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        self.tasks.append(task)
        group = Group.imported(group_uid=ids.group_uid, task_id=task.id, size=2)
        return make_trajectory(group, ids.member)

    def waiting(self) -> tuple[str, float] | None:
        return ("reset", float(self.n_answers)) if self.n_answers else None

    def answers(self) -> tuple[int, int]:
        return self.n_answers, 1

    async def close(self) -> None:
        self.is_open = False


def test_a_task_goes_to_the_runner_of_its_environment() -> None:
    players = {"rooms": Player(2), "lakes": Player(5), "idle": Player(0)}
    episodes = EpisodesByEnvironment(players)
    task = Task(id="train/7", env_name="gymnasium", split="train", seed=7)
    rules = EpisodeRules(
        max_steps=1,
        win_reward=1.0,
        temperature=1.0,
        invalid="form",
        turn_timeout_s=1.0,
        episode_timeout_s=1.0,
    )

    async def play() -> Trajectory:
        await episodes.start()
        ids = EpisodeIds.of(b"g" * 16, 1)
        played = await episodes.run(
            of_environment(task, "lakes"), ids, rules, progress=AttemptProgress()
        )
        assert all(player.is_open for player in players.values())
        await episodes.close()
        return played

    played = asyncio.run(play())
    assert played.task_id == "lakes/train/7"
    assert [own.id for own in players["lakes"].tasks] == ["train/7"]
    assert not players["rooms"].tasks
    assert (episodes.waiting(), episodes.answers()) == (("reset", 5.0), (7, 3))
    assert not any(player.is_open for player in players.values())
