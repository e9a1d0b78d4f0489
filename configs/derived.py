"""Compute what follows from several settings: own and offline groups, workers, GPUs, updates."""

from __future__ import annotations

import math

from configs.per_environment import environments
from configs.schema import (
    ActorsConfig,
    Config,
    LearnerConfig,
    ModelConfig,
    TasksConfig,
    WorkerRange,
)

# The newest is used, and the one before it if the newest turns out to be damaged.
KEPT_CHECKPOINTS = 2
SHARE_ROUNDING = 1e-6  # of sums of GPU fractions; Ray counts GPUs in steps of 1e-4
# Estimators whose advantages are computed from a critic's values, as in gigpo/settings.py; plans of
# memory need them here.
WITH_CRITIC = ("turn_ppo", "ppo")
WITHOUT_ADVANTAGES = ("behaviour_cloning", "distillation")  # losses that read none


def has_critic(config: Config) -> bool:
    """Return whether the run trains a critic, whose values its advantages are computed from."""
    return config.algorithm.estimator in WITH_CRITIC


def used_group_filter(config: Config) -> str:
    """Return the filter of groups: "none", whatever is set, for a loss that reads no advantages."""
    reads_advantages = config.loss.policy not in WITHOUT_ADVANTAGES
    return config.algorithm.group_filter if reads_advantages else "none"


def is_served(teacher: str) -> bool:
    """Return whether `loss.teacher` is a server's URL, not a directory."""
    return teacher.startswith(("http://", "https://"))


def is_offline(config: Config) -> bool:
    """Return whether the run trains on groups of other runs only and plays nothing."""
    return bool(config.source) and config.offline.share >= 1.0


def draws_by_weight(config: Config) -> bool:
    """Return whether training tasks are drawn by weight, not in shuffled passes over all."""
    return config.tasks.order != TasksConfig().order


def groups_of_a_step(config: Config) -> tuple[int, int]:
    """Return how many own and how many offline groups every learner step has.

    This run plays its own groups. Example: 8 groups with offline.share 0.25 are 6 and 2. Without a
    source all are own ones.
    """
    n_groups = config.learner.groups_per_step
    n_offline = round(config.offline.share * n_groups) if config.source else 0
    return n_groups - n_offline, n_offline


def replayed_groups(config: Config) -> int:
    """Return how many earlier groups each batch replays the wins of, once there are so many.

    Example: replay.share 0.25 of 8 groups are 2. The 8 groups stay.
    """
    return round(config.replay.share * groups_of_a_step(config)[0])


def least_workers(actors: ActorsConfig) -> int:
    """Return the workers without which a run does not begin."""
    return actors.workers.min if isinstance(actors.workers, WorkerRange) else actors.workers


def most_workers(actors: ActorsConfig) -> int:
    """Return the workers that Ray is asked for once a run has begun."""
    return actors.workers.max if isinstance(actors.workers, WorkerRange) else actors.workers


def n_workers(config: Config) -> int:
    """Return the workers that training needs. An evaluation always needs `least_workers`."""
    return 0 if is_offline(config) else least_workers(config.actors)


def serves_adapters(model: ModelConfig) -> bool:
    """Return whether versions are LoRA adapters, which engines serve beside the base model."""
    return model.lora_rank > 0 and model.lora_serving == "adapter"


def max_model_tokens(config: Config) -> int:
    """Return the engine's context: the longest prompt and the longest response together."""
    return config.prompt.max_prompt_tokens + config.actors.max_response_tokens


def gpus_needed(config: Config, *, learns: bool) -> int:
    """Return the GPUs for the workers and, if the run `learns`, for the learner's ranks.

    A process with a fraction gets it from one card: three workers of 0.6 need three cards, four
    of 0.5 need two.
    """
    workers = n_workers(config) if learns else least_workers(config.actors)
    shares = [config.actors.gpus_per_worker] * workers
    if learns:
        shares += [config.learner.gpus_per_rank] * config.learner.ranks
    free: list[float] = []  # of each shared card
    for share in sorted((share for share in shares if 0 < share < 1), reverse=True):
        fitting = [card for card, left in enumerate(free) if left >= share - SHARE_ROUNDING]
        if fitting:
            free[fitting[0]] -= share
        else:
            free.append(1.0 - share)
    return round(sum(share for share in shares if share >= 1)) + len(free)


def sequence_groups(learner: LearnerConfig) -> int:
    """Return the number of micro-batches that the learner's ranks compute at the same time.

    Four ranks of which two share each micro-batch compute two.
    """
    return learner.ranks // learner.sequence_parallel


def most_steps(config: Config) -> int:
    """Return the largest number of actions in one episode, of any environment."""
    return max(own.env.max_steps for own in environments(config).values())


def most_updates(config: Config) -> float:
    """Return the largest number of optimizer updates in one learner step.

    Example: rows_per_update=256 with 16 groups of 8 episodes of at most 50 steps: 6,400 rows, so
    25 updates. Groups of other runs may have any size: with a source and rows_per_update the
    answer is math.inf.
    """
    learner = config.learner
    if not learner.rows_per_update:
        return learner.updates_per_step
    if config.source:
        return math.inf
    n_groups = learner.groups_per_step + replayed_groups(config)
    most_rows = n_groups * config.algorithm.group_size * most_steps(config)
    return math.ceil(most_rows / learner.rows_per_update)
