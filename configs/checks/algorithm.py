"""Check the section `algorithm`. gigpo checks its numbers by themselves."""

from __future__ import annotations

from configs.derived import WITHOUT_ADVANTAGES, has_critic, is_offline
from configs.errors import ConfigError
from configs.schema import Config


def check_algorithm(config: Config) -> None:
    """Refuse advantages that a run cannot compute, or that would be meaningless."""
    algorithm = config.algorithm
    if algorithm.anchor == "anchor_key":
        raise ConfigError(
            "algorithm.anchor='anchor_key' is not possible in a run, which records no such column; "
            "use 'state' or 'similar', or compare offline with gigpo.compute_advantages"
        )
    if algorithm.anchor_versions == "weighted":
        raise ConfigError(
            "algorithm.anchor_versions='weighted' is not possible in a run: weights need a forward "
            "pass that comes after the advantages; use 'window', or weigh offline"
        )
    if algorithm.refill_groups and algorithm.group_filter == "none":
        raise ConfigError(
            f"algorithm.refill_groups={algorithm.refill_groups} does nothing with "
            "group_filter=none; leave it out, or use group_filter=advantages or rewards or returns"
        )
    reads_advantages = config.loss.policy not in WITHOUT_ADVANTAGES
    if algorithm.group_size == 1 and reads_advantages and not has_critic(config):
        raise ConfigError(
            f"algorithm.group_size=1 with {algorithm.estimator} leaves nothing to compare an "
            "episode with, so no advantage would be meaningful; use at least 2 (the paper: 8)"
        )


def check_refill(config: Config) -> None:
    """Refuse a refill where no group is left out, or none is played."""
    n_groups = config.algorithm.refill_groups
    reads_advantages = config.loss.policy not in WITHOUT_ADVANTAGES
    if n_groups and (not reads_advantages or is_offline(config)):
        why = "offline.share=1" if reads_advantages else f"loss.policy={config.loss.policy}"
        raise ConfigError(
            f"algorithm.refill_groups={n_groups} does nothing with {why}: "
            f"{'no group is played' if reads_advantages else 'no group is left out'}; leave it out"
        )
