"""Make the records of played steps and episodes, as the store keeps them.

    step = step_of(sampled, step_index=0, observation=seen, anchor=anchor_of(seen), ...)
    trajectory = trajectory_of(steps, task=task, ids=ids, ...)

Environments, agent programs, chats that are imported, and studies all make theirs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.policy import Completion, Prompt
from actors.prompting.action_parser import Answer
from envs import Observation, Task, Transition
from store import FinalObservation, Step, StepImage, Trajectory, state_hash, uid


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeIds:
    """The names of an episode, fixed before its first token is sampled.

    A repeated attempt has the same ids, so that the store refuses it instead of keeping both.
    """

    group_uid: bytes
    traj_uid: bytes
    member: int

    @classmethod
    def of(cls, group_uid: bytes, member: int) -> EpisodeIds:
        return cls(group_uid=group_uid, traj_uid=uid(group_uid, member), member=member)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAnswer:
    """One answer with its prompt, and the time when it was sampled."""

    prompt: Prompt
    completion: Completion
    t_start_us: int  # UTC epoch
    gen_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The environment's part of a step."""

    reward: float
    terminated: bool
    truncated: bool
    env_us: int


NO_OUTCOME_YET = StepOutcome(reward=0.0, terminated=False, truncated=False, env_us=0)


def step_of(
    sampled: SampledAnswer,
    *,
    step_index: int,
    observation: Observation,
    anchor: str | None,
    action: str,
    is_valid: bool,
    outcome: StepOutcome = NO_OUTCOME_YET,
) -> Step:
    """Return a step. `outcome` may be left out until the environment has acted.

    `anchor` is `anchor_of(observation)`, or None if no other step can share the state.
    """
    prompt, completion = sampled.prompt, sampled.completion
    return Step(
        step_index=step_index,
        prompt_ids=prompt.token_ids,
        prompt_dropped_turns=prompt.n_dropped_turns,
        prompt_dropped_tokens=prompt.n_dropped_tokens,
        response_ids=completion.token_ids,
        response_logprobs=completion.logprobs,
        version_min=completion.version_min,
        version_max=completion.version_max,
        finish_reason=completion.finish_reason,
        obs_text=observation.text,
        anchor_text=anchor,
        state_hash=None if anchor is None else state_hash(anchor),
        admissible_actions=observation.actions,
        action_text=action,
        reward=outcome.reward,
        is_action_valid=is_valid,
        terminated=outcome.terminated,
        truncated=outcome.truncated,
        t_start_us=sampled.t_start_us,
        gen_us=sampled.gen_us,
        env_us=outcome.env_us,
        images=tuple(
            StepImage(height=image.shape[0], width=image.shape[1], pixels=image.tobytes())
            for image in prompt.images
        ),
    )


def trajectory_of(
    steps: Sequence[Step],
    *,
    task: Task,
    ids: EpisodeIds,
    won: bool,
    task_score: float | None,
    final: Observation | None,
) -> Trajectory:
    """Return a finished episode. `final` follows its last action; None if nobody saw it."""
    return Trajectory(
        traj_uid=ids.traj_uid,
        group_uid=ids.group_uid,
        member=ids.member,
        env_name=task.env_name,
        task_id=task.id,
        split=task.split,
        seed=task.seed,
        won=won,
        task_score=task_score,
        steps=tuple(steps),
        final_observation=None if final is None else _final_observation(final),
    )


def _final_observation(observation: Observation) -> FinalObservation:
    anchor = anchor_of(observation)
    return FinalObservation(
        text=observation.text,
        anchor_text=anchor,
        state_hash=state_hash(anchor),
        admissible_actions=observation.actions,
    )


def anchor_of(observation: Observation) -> str:
    """Return the text that identifies the state."""
    return observation.text if observation.anchor is None else observation.anchor


def is_valid(
    answer: Answer,
    completion: Completion,
    *,
    observation: Observation,
    transition: Transition,
    invalid: str,
) -> bool:
    """Return whether an action is valid by the setting `prompt.invalid`.

    No other code decides this for environments.
    """
    if invalid == "form":
        return answer.well_formed
    if not answer.well_formed or completion.finish_reason != "stop" or not transition.valid:
        return False
    is_listed = observation.actions is None or answer.action in observation.actions
    return invalid == "environment" or is_listed
