"""The agent-environment loop: one episode of one task. No Ray, no store, no weights.

trajectory = await play_episode(environment, policy, form, task=task, episode=ids, rules=rules)

`completion_of`, `step_of` and `trajectory_of` are also what the episodes of agent programs are made
with (`endpoint.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from actors.inference.vllm_engine import EngineLostError
from actors.policy import Completion, Policy, Prompt
from actors.prompting.chat_template import Tokenizer, where
from actors.prompting.prompt import Answer, PromptForm, Turn
from actors.rollout.attempts import Progress
from configs import Config
from envs import Observation, Task, Transition
from store import Step, StepImage, Trajectory, now_us, state_hash, uid

# For one prompt. The largest budgets take tens of seconds, as a prompt is tokenised again for every
# cut that is tried.
PROMPT_TIMEOUT_S = 300.0

T = TypeVar("T")


class PromptStuckError(RuntimeError):
    """A prompt is not made in time. Its thread cannot be ended: end the process, and start a new
    worker.
    """


class PromptThread:
    """Makes prompts in a thread, one after the other.

    The event loop goes on: it says that the worker is alive. A chat template is a program of
    whoever made the model, and a short text may make it loop too.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt")
        # since when the thread makes a prompt, and why that may not end
        self._at: tuple[float, str] | None = None

    async def make(self, prompt: Callable[[], T], *, tokenizer: Tokenizer, of: str) -> T:
        """Return `prompt()`; `of` names the episode in errors. Unblocked by the thread.

        Raises PromptStuckError if the prompt that the thread makes, this one or an earlier one,
        takes longer than PROMPT_TIMEOUT_S. Its place in line does not count.
        """

        def timed() -> T:
            self._at = (
                time.monotonic(),
                f"the prompt of {of} is not made after {PROMPT_TIMEOUT_S:g} s: the chat template "
                "of the "
                f"tokenizer in {where(tokenizer)} loops; put a chat_template.jinja that does not "
                "beside it",
            )
            try:
                return prompt()
            finally:
                self._at = None

        making = asyncio.wrap_future(self._thread.submit(timed))
        try:
            while True:
                at = self._at
                left_s = (
                    PROMPT_TIMEOUT_S if at is None else at[0] + PROMPT_TIMEOUT_S - time.monotonic()
                )
                done, _ = await asyncio.wait({making}, timeout=max(0.0, left_s))
                if done:
                    return making.result()
                if at is not None and at is self._at and left_s <= 0:
                    raise PromptStuckError(at[1])
        finally:
            making.cancel()


# A short prompt takes some milliseconds, and does not wait for a long one.
SHORT_PROMPTS, LONG_PROMPTS = PromptThread(), PromptThread()


class AsyncEnvironment(Protocol):
    """An environment whose calls are awaited, e.g. one that lives in another process."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, action: str) -> Transition: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeIds:
    """Fixed before the first token is generated, so that a repeated attempt collides in the store
    instead of doubling.
    """

    group_uid: bytes
    traj_uid: bytes
    member: int
    progress: Progress = field(default_factory=Progress, compare=False)  # of this attempt

    @classmethod
    def of(cls, group_uid: bytes, member: int, *, progress: Progress | None = None) -> EpisodeIds:
        """Return the ids of a member. `progress` counts its steps, where the caller needs them."""
        return cls(
            group_uid=group_uid,
            traj_uid=uid(group_uid, member),
            member=member,
            progress=progress or Progress(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    max_steps: int
    win_reward: float
    temperature: float
    invalid: str  # `prompt.invalid`
    turn_timeout_s: float  # of one response
    episode_timeout_s: float  # of all of it

    @classmethod
    def of(cls, config: Config, *, temperature: float) -> EpisodeRules:
        elsewhere_s = config.endpoint.timeout_s if config.endpoint.url else 0.0
        return cls(
            max_steps=config.env.max_steps,
            win_reward=config.env.win_reward,
            temperature=temperature,
            invalid=config.prompt.invalid,
            # A server of others has failed after endpoint.timeout_s, and that is no truncated
            # episode: so never before it.
            turn_timeout_s=config.actors.turn_timeout_s + elsewhere_s,
            episode_timeout_s=config.actors.episode_timeout_s + config.env.max_steps * elsewhere_s,
        )


class EpisodeOverdue(RuntimeError):
    """A deadline passed before the first action was carried out: there is nothing to keep."""


async def play_episode(
    environment: AsyncEnvironment,
    policy: Policy,
    form: PromptForm,
    *,
    task: Task,
    episode: EpisodeIds,
    rules: EpisodeRules,
) -> Trajectory:
    """Plays until the environment ends or `max_steps` actions were taken; every action is one Step.

    Where a deadline of `rules` passes the episode ends with the steps it has, the last one
    truncated. EpisodeOverdue if it has none; EnvironmentDied, as the environment raises it;
    EngineLostError, where the policy's answer was aborted; PromptStuckError, where a prompt's chat
    template loops; ValueError, which names environment, task and step, for an observation that no
    prompt can be made of.
    """
    steps: list[Step] = []
    transition: Transition | None = None
    try:
        async with asyncio.timeout(rules.episode_timeout_s):
            observation = await environment.reset(task)
            history: list[Turn] = []
            while not steps or not (steps[-1].terminated or steps[-1].truncated):
                prompt = await _prompt(form, observation, history, task=task)
                step, transition = await _act(
                    *(environment, policy, form),
                    prompt=prompt,
                    observation=observation,
                    number=len(steps),
                    episode=episode,
                    rules=rules,
                )
                steps.append(step)
                episode.progress.add(step)
                history.append(
                    Turn(
                        observation=observation.text,
                        action=step.action_text,
                        prompt=prompt,
                        response_ids=step.response_ids,
                    )
                )
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
        steps, task=task, episode=episode, won=transition.won, task_score=transition.task_score
    )


async def _prompt(
    form: PromptForm, observation: Observation, history: Sequence[Turn], *, task: Task
) -> Prompt:
    of = f"{task.env_name} task {task.id!r}, step {len(history)}"
    try:
        thread = LONG_PROMPTS if form.takes_long(observation, history) else SHORT_PROMPTS
        past = tuple(history)
        return await thread.make(
            lambda: form.prompt(observation, past), tokenizer=form.tokenizer, of=of
        )
    except ValueError as error:  # mostly of images, which an environment may show at any step
        raise ValueError(f"{of}: {error}") from error


def trajectory_of(
    steps: Sequence[Step], *, task: Task, episode: EpisodeIds, won: bool, task_score: float | None
) -> Trajectory:
    return Trajectory(
        traj_uid=episode.traj_uid,
        group_uid=episode.group_uid,
        member=episode.member,
        env_name=task.env_name,
        task_id=task.id,
        split=task.split,
        seed=task.seed,
        won=won,
        task_score=task_score,
        steps=tuple(steps),
    )


async def completion_of(
    policy: Policy, prompt: Prompt, *, number: int, episode: EpisodeIds, rules: EpisodeRules
) -> Completion:
    """The policy's answer to an episode's `number`th prompt. TimeoutError after
    `rules.turn_timeout_s`; what the policy raises.

    EngineLostError where the answer was aborted, as is done by an engine that is closed: half an
    answer is nobody's action.
    """
    async with asyncio.timeout(rules.turn_timeout_s):
        completion = await policy.generate(
            prompt, seed=request_seed(episode.traj_uid, number), temperature=rules.temperature
        )
    if completion.finish_reason == "abort":
        raise EngineLostError(
            "the engine aborted a response, as it does when it is closed; start a new policy"
        )
    return completion


async def _act(
    environment: AsyncEnvironment,
    policy: Policy,
    form: PromptForm,
    *,
    prompt: Prompt,
    observation: Observation,
    number: int,
    episode: EpisodeIds,
    rules: EpisodeRules,
) -> tuple[Step, Transition]:
    """One action: generated, parsed, carried out, and recorded with the tokens and
    log-probabilities it was sampled with.
    """
    started_us, started = now_us(), time.perf_counter()
    completion = await completion_of(policy, prompt, number=number, episode=episode, rules=rules)
    answered = time.perf_counter()
    answer = form.parse(completion.token_ids)
    transition = await environment.step(answer.action)
    step = step_of(
        completion,
        number=number,
        prompt=prompt,
        observation=observation,
        action=answer.action,
        is_valid=is_valid(answer, completion, observation, transition, rules=rules),
        t_start_us=started_us,
        gen_us=round((answered - started) * 1e6),
    )
    finished = replace(
        step,
        reward=transition.reward * rules.win_reward,
        terminated=transition.terminated,
        truncated=not transition.terminated
        and (transition.truncated or number + 1 >= rules.max_steps),
        env_us=round((time.perf_counter() - answered) * 1e6),
    )
    return finished, transition


def step_of(
    completion: Completion,
    *,
    number: int,
    prompt: Prompt,
    observation: Observation,
    action: str,
    is_valid: bool,
    t_start_us: int,
    gen_us: int,
) -> Step:
    """What is known when the policy has answered: it ended nothing, was worth nothing, and cost no
    time of the environment.
    """
    anchor = observation.text if observation.anchor is None else observation.anchor
    return Step(
        step_index=number,
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
        state_hash=state_hash(anchor),
        admissible_actions=observation.actions,
        action_text=action,
        reward=0.0,
        is_action_valid=is_valid,
        terminated=False,
        truncated=False,
        t_start_us=t_start_us,
        gen_us=gen_us,
        env_us=0,
        images=tuple(
            StepImage(height=image.shape[0], width=image.shape[1], pixels=image.tobytes())
            for image in prompt.images
        ),
    )


def is_valid(
    answer: Answer,
    completion: Completion,
    observation: Observation,
    transition: Transition,
    *,
    rules: EpisodeRules,
) -> bool:
    """Return whether an action is valid by `prompt.invalid`. No other code decides it for
    environments.
    """
    if rules.invalid == "form":
        return answer.well_formed
    if not answer.well_formed or completion.finish_reason != "stop" or not transition.valid:
        return False
    return (
        rules.invalid == "environment"
        or observation.actions is None
        or answer.action in observation.actions
    )


def request_seed(traj_uid: bytes, step_index: int) -> int:
    """A 31-bit sampling seed that depends on nothing but the trajectory and the step, so that a
    replay samples alike.
    """
    digest = hashlib.blake2b(traj_uid + step_index.to_bytes(4, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
