"""Play one episode of one task: the agent-environment loop. Knows no Ray, store or weights.

    context = EpisodeContext(environment=..., policy=policy, form=form, task=task, ids=ids, ...)
    trajectory = await play_episode(context, progress=AttemptProgress())

Episodes of agent programs (`endpoint/program_episode.py`) are made of the same `completion_of`, and
of the records of `step_records.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.policy import Completion, EngineLostError, Policy, Prompt
from actors.prompting.prompt import PromptForm
from actors.prompting.prompt_thread import LONG_PROMPTS, SHORT_PROMPTS
from actors.prompting.template import Turn
from actors.rollout.step_records import (
    EpisodeIds,
    SampledAnswer,
    StepOutcome,
    anchor_of,
    is_valid,
    step_of,
    trajectory_of,
)
from configs import Config
from envs import EnvironmentDied, EnvironmentPool, Observation, Task, Transition
from row_bounds import MAX_EPISODE_BYTES, MAX_REWARD
from store import Step, Trajectory, now_us


class AsyncEnvironment(Protocol):
    """Await an environment's answers, for example from another process."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, action: str) -> Transition: ...


@dataclass(kw_only=True, slots=True)
class AttemptProgress:
    """Count the steps, response tokens and bytes of one attempt."""

    begun_us: int = field(default_factory=now_us)  # UTC epoch
    n_steps: int = 0
    n_response_tokens: int = 0
    n_bytes: int = 0  # of texts, tokens and pixels, at most

    def add(self, step: Step) -> None:
        self.n_steps += 1
        self.n_response_tokens += len(step.response_ids)
        self.n_bytes += step.max_bytes

    @property
    def is_full(self) -> bool:
        """Return whether no step may follow: the store keeps an episode in one file."""
        return self.n_bytes >= MAX_EPISODE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    """The settings that bound the episodes of one lease, and that scale their rewards."""

    max_steps: int
    win_reward: float
    temperature: float
    invalid: str  # `prompt.invalid`
    turn_timeout_s: float  # for one response
    episode_timeout_s: float  # for the whole episode

    @classmethod
    def of(cls, config: Config, *, temperature: float) -> EpisodeRules:
        # A model server fails after endpoint.timeout_s, and a failure must not count as a truncated
        # episode. So the deadlines of the episode come later.
        server_s = config.endpoint.timeout_s if config.endpoint.url else 0.0
        return cls(
            max_steps=config.env.max_steps,
            win_reward=config.env.win_reward,
            temperature=temperature,
            invalid=config.prompt.invalid,
            turn_timeout_s=config.actors.turn_timeout_s + server_s,
            episode_timeout_s=config.actors.episode_timeout_s + config.env.max_steps * server_s,
        )

    def stored_reward(self, reward: float) -> float:
        """Return the reward to store. Raises EnvironmentDied if it is above MAX_REWARD in size."""
        stored = reward * self.win_reward
        if not abs(stored) <= MAX_REWARD:  # so that NaN is refused too
            raise EnvironmentDied(
                f"reward {reward:g} times env.win_reward={self.win_reward:g} is above "
                f"{MAX_REWARD:g} in size; scale it down in the environment, or set "
                "env.win_reward=1",
                at_fault=True,
            )
        return stored


class EpisodeOverdue(RuntimeError):
    """A deadline passed before the first action was carried out: there is nothing to keep."""


class EpisodeRunner(Protocol):
    """Play episodes of a config's environment, one call per episode."""

    async def start(self) -> None: ...

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        """Play one attempt at an episode, and count its steps in `progress`."""
        ...

    def waiting(self) -> tuple[str, float] | None:
        """Return the operation that has been pending longest, and for how many seconds."""

    def stuck(self) -> str | None:
        """Return an environment's call that goes on though it was cancelled; None if none does."""

    def answers(self) -> tuple[int, int]:
        """Return how often an environment was asked so far, and how many answers it remembered."""

    async def close(self) -> None: ...


class EnvironmentEpisodes:
    """Play episodes with environments of a pool, which is closed in the end."""

    def __init__(self, pool: EnvironmentPool, policy: Policy, *, form: PromptForm) -> None:
        self._pool = pool
        self._policy = policy
        self._form = form

    async def start(self) -> None:
        """Start nothing: the pool starts its processes when they are needed."""

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        async with self._pool.environment(task) as environment:
            context = EpisodeContext(
                environment=environment,
                policy=self._policy,
                form=self._form,
                task=task,
                ids=ids,
                rules=rules,
            )
            return await play_episode(context, progress=progress)

    def waiting(self) -> tuple[str, float] | None:
        return self._pool.oldest()

    def stuck(self) -> str | None:
        return self._pool.stuck()

    def answers(self) -> tuple[int, int]:
        return self._pool.answers()

    async def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeContext:
    """The environment, policy, task and rules that all steps of one episode share."""

    environment: AsyncEnvironment
    policy: Policy
    form: PromptForm
    task: Task
    ids: EpisodeIds
    rules: EpisodeRules


async def play_episode(context: EpisodeContext, *, progress: AttemptProgress) -> Trajectory:
    """Play until the environment ends, or `max_steps` actions were taken. An action is one Step.

    Each step is counted in `progress`, also if the episode fails later. When a deadline of its
    rules passes, or `progress` is full, the episode ends with its steps so far, the last one
    truncated. Raises:
      EpisodeOverdue    a deadline passed before the first step
      EnvironmentDied   from the environment, or no prompt can be made of its images
      EngineLostError   the policy's answer was aborted
      PromptStuckError  the chat template loops
      ValueError        no prompt can be made of an observation; names environment, task and step
    """
    task, rules = context.task, context.rules
    steps: list[Step] = []
    transition: Transition | None = None
    try:
        async with asyncio.timeout(rules.episode_timeout_s):
            observation = await context.environment.reset(task)
            history: list[Turn] = []
            while not steps or not (steps[-1].terminated or steps[-1].truncated):
                prompt = await _make_prompt(context.form, observation, history=history, task=task)
                step, transition = await _take_step(
                    context, prompt=prompt, observation=observation, step_index=len(steps)
                )
                progress.add(step)
                if progress.is_full and not step.terminated:
                    step = replace(step, truncated=True)
                steps.append(step)
                turn = Turn(
                    observation=observation.text,
                    action=step.action_text,
                    prompt=prompt,
                    response_ids=step.response_ids,
                )
                history.append(turn)
                observation = transition.observation
    except TimeoutError:
        if transition is None:
            raise EpisodeOverdue(
                f"no action within turn_timeout_s={rules.turn_timeout_s:g} and "
                f"episode_timeout_s={rules.episode_timeout_s:g}"
            ) from None
        steps[-1] = replace(steps[-1], truncated=True)
    assert transition is not None
    return trajectory_of(
        steps,
        task=task,
        ids=context.ids,
        won=transition.won,
        task_score=transition.task_score,
        final=transition.observation,
    )


async def _make_prompt(
    form: PromptForm, observation: Observation, *, history: Sequence[Turn], task: Task
) -> Prompt:
    label = f"{task.env_name} task {task.id!r}, step {len(history)}"
    past = tuple(history)
    try:
        takes_long = form.takes_long(observation, past)
        if not takes_long and (known := form.known_prompt(observation, past)) is not None:
            return known
        thread = LONG_PROMPTS if takes_long else SHORT_PROMPTS
        return await thread.make(
            lambda: form.prompt(observation, past), tokenizer=form.tokenizer, label=label
        )
    except ValueError as error:
        why = f"{label}: {error}"
        # The run's start tries one observation. An environment may show other images at any step.
        if observation.images:
            raise EnvironmentDied(why, at_fault=True) from error
        raise ValueError(why) from error


async def _take_step(
    context: EpisodeContext, *, prompt: Prompt, observation: Observation, step_index: int
) -> tuple[Step, Transition]:
    """Generate one action, parse it and carry it out. Return it with the tokens as sampled."""
    rules = context.rules
    started_us, started = now_us(), time.perf_counter()
    completion = await completion_of(
        context.policy, prompt, step_index=step_index, ids=context.ids, rules=rules
    )
    answered = time.perf_counter()
    answer = context.form.parse(completion.token_ids)
    transition = await context.environment.step(answer.action)
    is_last = step_index + 1 >= rules.max_steps
    finished = step_of(
        SampledAnswer(
            prompt=prompt,
            completion=completion,
            t_start_us=started_us,
            gen_us=round((answered - started) * 1e6),
        ),
        step_index=step_index,
        observation=observation,
        anchor=anchor_of(observation),
        action=answer.action,
        is_valid=is_valid(
            answer,
            completion,
            observation=observation,
            transition=transition,
            invalid=rules.invalid,
        ),
        outcome=StepOutcome(
            reward=rules.stored_reward(transition.reward),
            terminated=transition.terminated,
            truncated=not transition.terminated and (transition.truncated or is_last),
            env_us=round((time.perf_counter() - answered) * 1e6),
        ),
    )
    return finished, transition


async def completion_of(
    policy: Policy, prompt: Prompt, *, step_index: int, ids: EpisodeIds, rules: EpisodeRules
) -> Completion:
    """Return the policy's answer to the prompt of a step.

    Raises TimeoutError after `rules.turn_timeout_s`, the policy's own errors, and EngineLostError
    for an aborted answer: an engine that is closed aborts, and half an answer is no action.
    """
    async with asyncio.timeout(rules.turn_timeout_s):
        completion = await policy.generate(
            prompt, seed=request_seed(ids.traj_uid, step_index), temperature=rules.temperature
        )
    if completion.finish_reason == "abort":
        raise EngineLostError(
            "the engine aborted a response, as it does when it is closed; start a new policy"
        )
    return completion


def request_seed(traj_uid: bytes, step_index: int) -> int:
    """Return a 31-bit sampling seed of a trajectory's step.

    It depends on nothing else, so that a replay samples the same tokens.
    """
    digest = hashlib.blake2b(traj_uid + step_index.to_bytes(4, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
