"""A world so small that a policy's success is known exactly, and an episode costs milliseconds.

    world = explored(Corridor, {"distance": 5}, max_steps=32, form=form)
    rows = play(engine, world, n_groups=8, group_size=8, seed=(0, 3), version=3)  # as stored
    success_of(world, engine)                              # probability of a win, without sampling

Every situation is explored once. The learner's own forward pass chooses each token, so recorded
log-probabilities are those that it trains with. What an environment says must identify its state,
and an answer that is no admissible command must change nothing: both hold in corridor.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from actors.policy import Completion, Prompt
from actors.prompting.prompt import PromptForm
from actors.prompting.template import TEMPLATES, render
from actors.rollout.step_records import (
    EpisodeIds,
    SampledAnswer,
    StepOutcome,
    anchor_of,
    step_of,
    trajectory_of,
)
from configs import (
    CriticConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    PromptConfig,
    TinyModelConfig,
)
from envs import Observation, Task
from learner import make_tiny_model, train_tokenizer, write_weights
from learner.data.micro_batch import micro_batches
from learner.model.packed_attention import packed_hidden
from learner.training.engine import Engine
from store import Step, to_table, uid

TEMPLATE = "compact"
PROMPT = PromptConfig(
    template=TEMPLATE, history_length=0, max_prompt_tokens=200, invalid="admissible"
)
SIZE = TinyModelConfig(vocabulary_size=300, hidden_size=64, layers=1)  # a run takes seconds
# The fewest updates, at a rate for so small a model, that give each admissible command about the
# same chance.
CLONE_UPDATES, CLONE_RATE = 60, 1e-2
MAX_RESPONSE_TOKENS = 12  # as configs/key_room.yaml
WIN_REWARD = 10.0  # as env.win_reward
FORWARD_TOKENS = 16384  # of one pass
WON, LOST = -1, -2  # in place of a situation


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An admissible command in a situation, and where it leads: a situation, WON or LOST."""

    situation: int
    command: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    leads_to: int


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """All situations of a panel of tasks, which differ only in where they start."""

    tasks: tuple[Task, ...]
    starts: tuple[int, ...]  # situation of each task
    observations: tuple[Observation, ...]  # of each situation
    choices: tuple[Choice, ...]
    form: PromptForm
    max_steps: int


@dataclass(kw_only=True, slots=True)
class Answers:
    """Distributions of the next token under one version of the weights, computed when asked for."""

    engine: Engine
    end_token: int
    known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def after(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each token sequence the log-probabilities [V] and their running sum [V]."""
        missing = list(dict.fromkeys(each for each in sequences if each not in self.known))
        while missing:
            n = max(1, FORWARD_TOKENS // max(map(len, missing)))
            part, missing = missing[:n], missing[n:]
            for sequence, logprobs_V in zip(part, _next_logprobs(self.engine, part), strict=True):
                total_V = np.exp(logprobs_V.astype(np.float64)).cumsum()
                self.known[sequence] = (logprobs_V, total_V / total_V[-1])
        return [self.known[each] for each in sequences]


def explored(
    env_class: Any, options: Mapping[str, object], *, max_steps: int, form: PromptForm
) -> World:
    """Try every command in every situation that the tasks can lead to."""
    env, tasks = env_class(options), tuple(env_class.tasks("train", options))
    numbers: dict[str, int] = {}
    observations: list[Observation] = []
    ways: list[tuple[Task, tuple[str, ...]]] = []  # how to get to each situation
    choices: list[Choice] = []

    def number(seen: Observation, task: Task, way: tuple[str, ...]) -> int:
        if seen.text not in numbers:
            numbers[seen.text] = len(observations)
            observations.append(seen)
            ways.append((task, way))
        return numbers[seen.text]

    starts = tuple(number(env.reset(task), task, ()) for task in tasks)
    for situation, (task, way) in enumerate(ways):  # grows meanwhile
        for command in observations[situation].actions or ():
            env.reset(task)
            *_, after = [env.step(each) for each in (*way, command)]
            if after.terminated:
                leads_to = WON if after.won else LOST
            else:
                leads_to = number(after.observation, task, (*way, command))
            choice = Choice(
                situation=situation,
                command=command,
                prompt_ids=form.prompt(observations[situation], ()).token_ids,
                answer_ids=tuple(form.encode_answer(command)),
                leads_to=leads_to,
            )
            choices.append(choice)
    return World(
        tasks=tasks,
        starts=starts,
        observations=tuple(observations),
        choices=tuple(choices),
        form=form,
        max_steps=max_steps,
    )


def make_worlds(
    env_class: Any, panels: Sequence[Mapping[str, object]], *, max_steps: Sequence[int], at: Path
) -> tuple[list[World], Path]:
    """Return the world of each panel, and one base model that plays them all at random.

    The model is made once, in `at`: every arm and seed of a study begins with the same weights.
    """
    texts = []
    for options in panels:
        env = env_class(options)
        for task in env_class.tasks("train", options):
            seen = env.reset(task)
            texts += [render(TEMPLATES[TEMPLATE], seen, history=(), kept=0), *(seen.actions or ())]
            texts += ["A key lies here. You hold the key. A locked door. take key. unlock door."]
    tokenizer = train_tokenizer(texts, vocabulary_size=SIZE.vocabulary_size)
    form = PromptForm(tokenizer, PROMPT)
    worlds = [
        explored(env_class, options, max_steps=limit, form=form)
        for options, limit in zip(panels, max_steps, strict=True)
    ]
    base = at / "base"
    if not base.is_dir():
        _make_base(worlds, base, tokenizer=tokenizer)
    return worlds, base


def _make_base(worlds: Sequence[World], base: Path, *, tokenizer: Any) -> None:
    """Clone a policy that takes each admissible command equally often."""
    work = base.with_name(f"base.{os.getpid()}")
    make_tiny_model(work / "untrained", tokenizer=tokenizer, config=SIZE, seed=0)
    engine = make_engine(
        work / "untrained",
        learner=LearnerConfig(learning_rate=CLONE_RATE, weight_decay=0.0),
        loss=LossConfig(policy="behaviour_cloning"),
    )
    choices = [choice for world in worlds for choice in world.choices]
    batches = micro_batches(as_rows(choices), micro_batch_tokens=FORWARD_TOKENS, ranks=1)
    for _ in range(CLONE_UPDATES):
        engine.train([batches])
    write_weights(engine.weights(), work / "policy", source_dir=work / "untrained")
    engine.close()
    try:
        os.rename(work / "policy", base)
    except OSError:  # another process made the same one meanwhile
        if not base.is_dir():
            raise
    shutil.rmtree(work)


def make_engine(
    path: Path, *, learner: LearnerConfig, loss: LossConfig, critic: CriticConfig | None = None
) -> Engine:
    return Engine(
        model_path=path,
        model=ModelConfig(),
        learner=learner,
        loss=loss,
        temperature=1.0,
        seed=0,
        critic=critic,
    )


def as_rows(choices: Sequence[Choice]) -> pa.Table:
    """Return what the learner reads of a row, for each choice once."""
    n = len(choices)
    answers = [list(choice.answer_ids) for choice in choices]
    prompts = [list(choice.prompt_ids) for choice in choices]
    zeros = [[0.0] * len(answer) for answer in answers]
    return pa.table(
        {
            "traj_uid": pa.array([row.to_bytes(16) for row in range(n)], pa.binary(16)),
            "step_index": pa.array([0] * n, pa.int32()),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(answers, pa.list_(pa.int32())),
            "response_logprobs": pa.array(zeros, pa.list_(pa.float32())),
            "advantage": pa.array([0.0] * n),
            "staleness": pa.array([0] * n),
        }
    )


def chances_of(world: World, engine: Engine) -> np.ndarray:
    """Return the probability of each choice in its situation, float64 [choices]."""
    batches = micro_batches(as_rows(world.choices), micro_batch_tokens=FORWARD_TOKENS, ranks=1)
    totals = np.zeros(len(world.choices))
    for batch, logprobs_N in zip(batches, engine.score(batches), strict=True):
        np.add.at(totals, batch.rows_N.numpy(), logprobs_N.numpy().astype(np.float64))
    return np.exp(totals)


def wins_of(world: World, chances: np.ndarray, *, gamma: float = 1.0) -> np.ndarray:
    """Return the worth of each situation by the steps left: float64 [max_steps + 1, situations].

    `chances` are those of `chances_of`. Worth is gamma ** (steps before the winning one), 0 without
    a win: with gamma=1 the probability of a win. By backward induction. The rest of the chances are
    answers that change nothing.
    """
    situations = np.array([choice.situation for choice in world.choices])
    leads_to = np.array([choice.leads_to for choice in world.choices])
    n_situations = len(world.observations)
    stay = 1.0 - np.bincount(situations, weights=chances, minlength=n_situations)
    worth = np.zeros((world.max_steps + 1, n_situations))
    for left in range(1, world.max_steps + 1):
        before = gamma * worth[left - 1]
        after = np.where(leads_to < 0, leads_to == WON, before[leads_to])
        moved = np.bincount(situations, weights=chances * after, minlength=n_situations)
        worth[left] = moved + stay * before
    return worth


def success_of(world: World, engine: Engine) -> float:
    """Return the probability of a win within max_steps, mean of the tasks."""
    worth = wins_of(world, chances_of(world, engine))
    return float(worth[world.max_steps][list(world.starts)].mean())


@dataclass(kw_only=True, slots=True)
class _Episode:
    """An episode in play. It begins in `situation` and ends at WON, LOST or max_steps."""

    task: Task
    situation: int
    rng: np.random.Generator
    steps: list[Step] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.steps) and (self.steps[-1].terminated or self.steps[-1].truncated)


def play(
    engine: Engine,
    world: World,
    *,
    n_groups: int,
    group_size: int,
    seed: tuple[int, ...],
    version: int,
) -> pa.Table:
    """Play groups of episodes with the engine's weights; return them as rows of the store.

    Group g plays task g modulo their number. Each episode has random numbers of its own, by `seed`,
    group and member: equal weights play equal episodes.
    """
    return play_tasks(
        answers_of(engine, world),
        world,
        tasks=[group % len(world.tasks) for group in range(n_groups)],
        group_size=group_size,
        seed=seed,
        version=version,
    )


def answers_of(engine: Engine, world: World) -> Answers:
    return Answers(engine=engine, end_token=world.form.tokenizer.eos_token_id)


def play_tasks(
    answers: Answers,
    world: World,
    *,
    tasks: Sequence[int],
    group_size: int,
    seed: tuple[int, ...],
    version: int,
) -> pa.Table:
    """Play a group of each of these tasks, by number, with the weights of `answers`."""
    leads_to = {(each.situation, each.command): each.leads_to for each in world.choices}
    prompt_ids = [world.form.prompt(seen, ()).token_ids for seen in world.observations]
    episodes = [
        _Episode(
            task=world.tasks[task],
            situation=world.starts[task],
            rng=np.random.default_rng([*seed, group, member]),
        )
        for group, task in enumerate(tasks)
        for member in range(group_size)
    ]
    while playing := [episode for episode in episodes if not episode.is_over]:
        prompts = [Prompt(token_ids=prompt_ids[each.situation], actions=None) for each in playing]
        completions = _sampled(
            answers,
            [prompt.token_ids for prompt in prompts],
            [episode.rng for episode in playing],
            version=version,
        )
        for episode, prompt, completion in zip(playing, prompts, completions, strict=True):
            sampled = SampledAnswer(prompt=prompt, completion=completion, t_start_us=1, gen_us=1)
            _take_step(episode, sampled, world=world, leads_to=leads_to)
    return to_table(
        [
            trajectory_of(
                episode.steps,
                task=episode.task,
                ids=EpisodeIds.of(uid(*seed, version, at // group_size), at % group_size),
                won=episode.situation == WON,
                task_score=None,
                final=None if episode.situation < 0 else world.observations[episode.situation],
            )
            for at, episode in enumerate(episodes)
        ]
    )


def _take_step(
    episode: _Episode,
    sampled: SampledAnswer,
    *,
    world: World,
    leads_to: Mapping[tuple[int, str], int],
) -> None:
    """Carry out the action of an answer. One that is not admissible changes nothing."""
    answer = world.form.parse(sampled.completion.token_ids)
    seen = world.observations[episode.situation]
    is_known = (episode.situation, answer.action) in leads_to
    after = leads_to.get((episode.situation, answer.action), episode.situation)
    is_whole = sampled.completion.finish_reason == "stop"
    step = step_of(
        sampled,
        step_index=len(episode.steps),
        observation=seen,
        anchor=anchor_of(seen),
        action=answer.action,
        is_valid=answer.well_formed and is_whole and is_known,
        outcome=StepOutcome(
            reward=WIN_REWARD * (after == WON),
            terminated=after < 0,
            truncated=after >= 0 and len(episode.steps) + 1 == world.max_steps,
            env_us=0,
        ),
    )
    episode.situation = after
    episode.steps.append(step)


def _sampled(
    answers: Answers,
    prompts: Sequence[tuple[int, ...]],
    rngs: Sequence[np.random.Generator],
    *,
    version: int,
) -> list[Completion]:
    """Sample an answer to each prompt, token by token, until its end token."""
    end = answers.end_token
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while going:
        distributions = answers.after([(*prompts[at], *ids[at]) for at in going])
        for at, (logprobs_V, total_V) in zip(going, distributions, strict=True):
            token = int(np.searchsorted(total_V, rngs[at].random(), side="right"))
            ids[at].append(token)
            logprobs[at].append(float(logprobs_V[token]))
        going = [at for at in going if ids[at][-1] != end and len(ids[at]) < MAX_RESPONSE_TOKENS]
    return [
        Completion(
            token_ids=tuple(ids[at]),
            logprobs=tuple(logprobs[at]),
            finish_reason="stop" if ids[at][-1] == end else "length",
            version_min=version,
            version_max=version,
        )
        for at in range(len(prompts))
    ]


def _next_logprobs(engine: Engine, sequences: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the log-probabilities of the token after each sequence, float32 [S, V]."""
    policy = engine.policy
    bounds_Sp1 = np.cumsum([0, *map(len, sequences)])
    last_S = torch.from_numpy(bounds_Sp1[1:] - 1)
    with torch.no_grad():
        hidden_SH = packed_hidden(
            policy.causal_lm,
            input_ids_T=torch.tensor([token for each in sequences for token in each]),
            position_ids_T=torch.cat([torch.arange(len(each)) for each in sequences]),
            bounds_Sp1=torch.from_numpy(bounds_Sp1.astype(np.int32)),
            positions_N=last_S if policy.is_trimmed else None,
        )
        if not policy.is_trimmed:
            hidden_SH = hidden_SH[last_S]
        logits_SV = policy.causal_lm.get_output_embeddings()(hidden_SH)
        return torch.log_softmax(logits_SV.float(), dim=-1).numpy()
