"""Train in a small world: the real learner, advantages and store rows, without processes.

    for step in learner_steps(engine, world, config, seed=0): ...     # step.success is exact

Batches are consumed `lag` versions after they were played: each with the staleness `lag`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.studies.small_world import World, play, success_of
from configs import Config, has_critic
from gigpo import TOKEN_LEVEL, AdvantageSettings, compute_advantages, filtered_groups
from learner.data.batch_loader import cut_updates
from learner.data.values import critic_values, with_token_advantages, with_token_values
from learner.training.engine import Engine
from learner.training.step_metrics import UpdateStats


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerStep:
    """A learner step, and what its weights can do."""

    number: int  # from 1
    rows: pa.Table  # all rows of the batch, with their advantages
    updates: list[UpdateStats]
    success: float  # probability of a win after the step


def learner_steps(
    engine: Engine,
    world: World,
    config: Config,
    *,
    lag: int = 0,
    change: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> Iterator[LearnerStep]:
    """Play and train `config.learner.steps` times. `change` sees the rows before the advantages."""
    batches: deque[pa.Table] = deque()
    n_groups, group_size = config.learner.groups_per_step, config.algorithm.group_size
    for version in range(config.learner.steps):
        while len(batches) <= lag:
            number = version + len(batches)
            batches.append(
                play(
                    engine,
                    world,
                    n_groups=n_groups,
                    group_size=group_size,
                    seed=(config.seed, number),
                    version=version,
                )
            )
        rows, updates = _train(engine, change(batches.popleft()), config, version=version)
        yield LearnerStep(
            number=version + 1, rows=rows, updates=updates, success=success_of(world, engine)
        )


def _train(
    engine: Engine, rows: pa.Table, config: Config, *, version: int
) -> tuple[pa.Table, list[UpdateStats]]:
    """Train on a batch as `learner/data/batch_loader.py` and `learner/rank_group.py` do."""
    settings, critic = AdvantageSettings.of(config.algorithm), has_critic(config)
    if critic:
        values_R, values_N = critic_values(rows, engine.values, learner=config.learner)
        rows = rows.append_column("value", pa.array(values_R))
    advantages = compute_advantages(rows, settings)
    filtered = filtered_groups(advantages, group_filter=config.algorithm.group_filter)
    for name in ("advantage", "anchor_size", *(["value_target"] if critic else [])):
        rows = rows.append_column(name, advantages[name])
    if settings.estimator in TOKEN_LEVEL:
        rows = with_token_values(rows, values_N)
        rows = with_token_advantages(rows, gae_lambda=settings.gae_lambda)
    uids = pa.array(list(filtered), rows.schema.field("group_uid").type)
    trained = rows.filter(pc.invert(pc.is_in(rows["group_uid"], uids)))
    seed = config.seed + version + 1
    updates = cut_updates(trained, learner=config.learner, version=version, seed=seed)
    batches = [update.micro_batches for update in updates]
    if critic:
        engine.train_critic(batches)
    if not batches or (critic and version < config.critic.warmup_steps):
        return rows, []
    return rows, engine.train(batches)


def weights_digest(engine: Engine) -> str:
    """Return the BLAKE2b of all weights, by name, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(engine.weights()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
