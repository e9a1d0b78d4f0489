"""Play one episode of an agent program: run it, and make its chat completions a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.endpoint.server import Endpoint, Recording
from actors.rollout.episode import AttemptProgress, EpisodeRules
from actors.rollout.step_records import EpisodeIds, trajectory_of
from envs import EnvironmentDied, Outcome, ProgramPool, Task, log_hint
from store import Step, Trajectory, now_us


class ProgramEpisodes:
    """Play episodes with programs of a pool, which call the model at `endpoint`."""

    def __init__(self, pool: ProgramPool, endpoint: Endpoint) -> None:
        self._pool, self._endpoint = pool, endpoint

    async def start(self) -> None:
        await self._endpoint.start()

    def answers(self) -> tuple[int, int]:
        """Return zeros: nothing that a program does is remembered."""
        return 0, 0

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        """Run the program until it returns. A chat completion is one Step; the last has the reward.

        A program that fails after it was refused a completion for length was truncated: the steps
        so far are the episode, not won. Refused for length are too many completions
        (`rules.max_steps`), too long a prompt, and too late a reply. A cancelled call kills the
        program. Raises:
          EnvironmentDied    it failed in another way, ran past `rules.episode_timeout_s`, or asked
                             for nothing; names program and task
          PromptStuckError   the chat template loops
          and the policy's error, if that failed.
        """
        pool = self._pool
        label = f"program {pool.name!r} on task {task.split}/{task.id}"
        with self._endpoint.episode(ids, rules, progress=progress, label=label) as recording:
            outcome = await _outcome(pool, recording, task=task)
            ended_us = now_us()
            steps = recording.steps()
        if not steps:
            why = recording.cut_off or (
                "it made none; give client.base_url and client.api_key to the client it calls its "
                "model with"
            )
            message = f"{label} got no chat completion: {why}{log_hint(pool.log)}"
            raise EnvironmentDied(message, at_fault=True)
        return trajectory_of(
            _finished(steps, outcome, rules=rules, ended_us=ended_us),
            task=task,
            ids=ids,
            won=outcome is not None and outcome.won,
            task_score=None if outcome is None else outcome.task_score,
            final=None,
        )

    def waiting(self) -> tuple[str, float] | None:
        return self._pool.oldest()

    def stuck(self) -> str | None:
        """Return None: a program that is late or given up is killed."""
        return None

    async def close(self) -> None:
        self._pool.close()
        await self._endpoint.close()


async def _outcome(pool: ProgramPool, recording: Recording, *, task: Task) -> Outcome | None:
    """Return the program's outcome, or None if it was cut off. Raises as `run` does."""
    outcome = None
    try:
        outcome = await pool.run(
            task, recording.client, deadline_s=recording.rules.episode_timeout_s
        )
    except EnvironmentDied:
        if recording.failure is None and not recording.cut_off:
            raise
    # A program may catch the policy's failure and return; its outcome is then not the policy's.
    if recording.failure is not None:
        raise recording.failure
    return outcome


def _finished(
    steps: Sequence[Step], outcome: Outcome | None, *, rules: EpisodeRules, ended_us: int
) -> tuple[Step, ...]:
    """Return the steps with the program's time and the outcome.

    The program's time of a step is that from its reply to the next request, or 0 if they overlap.
    """
    next_us = [*(step.t_start_us for step in steps[1:]), ended_us]
    timed = [
        replace(step, env_us=max(0, until_us - step.t_start_us - step.gen_us))
        for step, until_us in zip(steps, next_us, strict=True)
    ]
    reward = 0.0 if outcome is None else rules.stored_reward(outcome.reward)
    last = replace(
        timed[-1], reward=reward, terminated=outcome is not None, truncated=outcome is None
    )
    return (*timed[:-1], last)
