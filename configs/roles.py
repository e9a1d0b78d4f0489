"""What of a run is live and what is stored: groups of a learner step, and who has to be there."""

from __future__ import annotations

from configs.schema import Config


def is_offline(config: Config) -> bool:
    """Whether nothing is played: the run trains on groups of other runs alone."""
    return bool(config.source) and config.offline.share >= 1.0


def groups_of_a_step(config: Config) -> tuple[int, int]:
    """(live, stored) groups of every learner step: 8 groups with a share of 0.25 are 6 and 2;
    without a source all are live.
    """
    n_groups = config.learner.groups_per_step
    n_stored = round(config.offline.share * n_groups) if config.source else 0
    return n_groups - n_stored, n_stored


def n_workers(config: Config) -> int:
    """Those that training needs; an evaluation needs `actors.workers` in any case."""
    return 0 if is_offline(config) else config.actors.workers
