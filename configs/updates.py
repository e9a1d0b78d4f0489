"""Optimizer updates of a learner step: how many there can be, and which settings of them cannot
work.
"""

from __future__ import annotations

import math

from configs.schema import Config, LearnerConfig


def most_updates(config: Config) -> float:
    """Return the largest number of optimizer updates that one learner step can have.

    Example: rows_per_update=256 with 16 groups of 8 episodes of at most 50 steps: 6,400 rows, so 25
    updates. Stored groups have the sizes of other runs, so with a source and rows_per_update there
    is no bound: math.inf.
    """
    learner = config.learner
    if not learner.rows_per_update:
        return learner.updates_per_step
    if config.source:
        return math.inf
    most_rows = learner.groups_per_step * config.algorithm.group_size * config.env.max_steps
    return math.ceil(most_rows / learner.rows_per_update)


def one_update(learner: LearnerConfig) -> str:
    """Name the setting that makes one update of every learner step."""
    name = "rows_per_update" if learner.rows_per_update else "updates_per_step"
    return f"learner.{name}={getattr(learner, name)}"


def updates_fault(config: Config) -> str:
    """Say in one line what is wrong with the updates and their learning rate; "" if nothing is."""
    learner = config.learner
    if learner.learning_rate > 1.0:
        return f"learner.learning_rate={learner.learning_rate:g} would wreck any model at once; use e.g. 1e-6"
    sized = f"learner.rows_per_update={learner.rows_per_update}"
    if learner.rows_per_update and learner.updates_per_step != LearnerConfig().updates_per_step:
        return f"{sized} and learner.updates_per_step={learner.updates_per_step} both cut a batch; leave one out"
    if learner.rows_per_update and learner.schedule == "linear":
        return (
            f"learner.schedule='linear' needs the run's number of updates, which {sized} leaves "
            "open; "
            "use learner.updates_per_step, or learner.schedule=constant"
        )
    n_updates = learner.steps * most_updates(config)
    if learner.warmup_updates > n_updates:
        return (
            f"learner.warmup_updates={learner.warmup_updates} would outlast the run's {n_updates} "
            "updates "
            f"(learner.steps={learner.steps} of at most {most_updates(config)} each), so "
            f"learner.learning_rate would never be reached; use at most {n_updates}"
        )
    return ""
