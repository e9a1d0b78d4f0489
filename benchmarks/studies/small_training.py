"""Train in a small world: the real learner, advantages and store rows, without processes.

    for step in learner_steps(engine, world, config, lag=0): ...     # step.success is exact

Batches are consumed `lag` versions after they were played: each with the staleness `lag`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from benchmarks.studies.small_world import World, play, success_of
from configs import Config
from learner.data.training_rows import RowSettings, rows_to_train, scored_rows
from learner.data.updates import cut_updates
from learner.step_times import LoadTimes
from learner.training.engine import Engine, train_batch
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
        rows, updates = train_on(engine, change(batches.popleft()), config, version=version)
        yield LearnerStep(
            number=version + 1, rows=rows, updates=updates, success=success_of(world, engine)
        )


def train_on(
    engine: Engine, rows: pa.Table, config: Config, *, version: int
) -> tuple[pa.Table, list[UpdateStats]]:
    """Train on a batch with the learner's own functions. Return all rows, scored, and the updates.

    `prepare_batch` in learner/data calls the same ones, and reads, refills and replays besides.
    """
    settings = RowSettings.of(config, ask_critic=engine.values)
    scored = scored_rows(rows, settings, times=LoadTimes())
    trained, _ = rows_to_train(scored, train_on=settings.train_on)
    learner_step = version + 1
    updates = cut_updates(
        trained, learner=config.learner, version=version, seed=config.seed + learner_step
    )
    stats, _ = train_batch(engine, updates, config=config, learner_step=learner_step)
    return scored.rows, stats


def weights_digest(engine: Engine) -> str:
    """Return the BLAKE2b of all weights, by name, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(engine.weights()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
