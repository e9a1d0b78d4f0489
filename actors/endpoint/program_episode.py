"""One episode of an agent program: it is started, the endpoint records what it asks for, and that
becomes a trajectory.

trajectory = await play_program(pool, endpoint, task=task, episode=ids, rules=rules)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.endpoint.server import Endpoint, Recording
from actors.rollout.episode import EpisodeIds, EpisodeRules, trajectory_of
from envs import EnvironmentDied, Outcome, ProgramPool, Task, log_hint
from store import Step, Trajectory, now_us


async def play_program(
    pool: ProgramPool, endpoint: Endpoint, *, task: Task, episode: EpisodeIds, rules: EpisodeRules
) -> Trajectory:
    """Runs the program until it returns; every chat completion is one Step, and the last one gets
    the outcome's reward.

    A program that fails because it was refused a completion that would have been too many
    (`rules.max_steps`), too long for the model or too late was truncated: what it has done so far
    is the episode, not won. Raises EnvironmentDied, with program and task, if it fails in another
    way, has not ended `rules.episode_timeout_s` after its start, or asked for nothing; whatever the
    policy raised, if that failed; PromptStuckError for a chat template that loops. Cancelled, it
    kills the program.
    """
    of = f"program {pool.name!r} on task {task.split}/{task.id}"
    with endpoint.episode(episode, rules, of=of) as recording:
        outcome = await _outcome(pool, recording, task=task)
        ended_us = now_us()
        steps = recording.steps()
    if not steps:
        why = (
            recording.cut_off
            or "it made none; give client.base_url and client.api_key to the client it calls its model with"
        )
        message = f"{of} got no chat completion: {why}{log_hint(pool.log)}"
        raise EnvironmentDied(message, at_fault=True)
    return trajectory_of(
        _finished(steps, outcome, rules=rules, ended_us=ended_us),
        task=task,
        episode=episode,
        won=outcome is not None and outcome.won,
        task_score=None if outcome is None else outcome.task_score,
    )


async def _outcome(pool: ProgramPool, recording: Recording, *, task: Task) -> Outcome | None:
    """None: the program was cut off. Raises as `play_program`."""
    try:
        outcome = await pool.run(
            task, recording.client, deadline_s=recording.rules.episode_timeout_s
        )
    except EnvironmentDied:
        outcome = None
        if recording.failure is None and not recording.cut_off:
            raise
    # also if the program made the best of it: its replies were not the policy's
    if recording.failure is not None:
        raise recording.failure
    return outcome


def _finished(
    steps: Sequence[Step], outcome: Outcome | None, *, rules: EpisodeRules, ended_us: int
) -> tuple[Step, ...]:
    """With the program's time, from a reply to the next request (none where they overlapped), and
    the outcome.
    """
    next_us = [*(step.t_start_us for step in steps[1:]), ended_us]
    timed = [
        replace(step, env_us=max(0, until_us - step.t_start_us - step.gen_us))
        for step, until_us in zip(steps, next_us, strict=True)
    ]
    reward = 0.0 if outcome is None else outcome.reward * rules.win_reward
    last = replace(
        timed[-1], reward=reward, terminated=outcome is not None, truncated=outcome is None
    )
    return (*timed[:-1], last)
