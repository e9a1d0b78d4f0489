"""Check the section `replay`."""

from __future__ import annotations

from configs.derived import WITHOUT_ADVANTAGES, groups_of_a_step, is_offline, replayed_groups
from configs.dotted import dotted_settings
from configs.errors import ConfigError
from configs.schema import Config, ReplayConfig


def check_replay(config: Config) -> None:
    """Check the share of replayed wins, and that they are still there."""
    replay, defaults = config.replay, ReplayConfig()
    share = f"replay.share={replay.share:g}"
    if not replay.share:
        for key, value in dotted_settings(replay):
            if value != getattr(defaults, key):
                raise ConfigError(
                    f"replay.{key}={value} does nothing with {share}; raise the share"
                )
        return
    if config.loss.policy in WITHOUT_ADVANTAGES or is_offline(config):
        raise ConfigError(
            f"{share} has nothing to compare a win with: loss.policy={config.loss.policy} reads no "
            "advantages, or offline.share=1 plays nothing; leave it out"
        )
    if replay.share > 1.0:
        raise ConfigError(f"{share} would replay more than is played; use at most 1, e.g. 0.25")
    if not replayed_groups(config):
        raise ConfigError(
            f"{share} of {groups_of_a_step(config)[0]} groups is none; use a larger share, or more "
            "learner.groups_per_step"
        )
    if 0 < config.store.keep_versions <= replay.max_age:
        raise ConfigError(
            f"store.keep_versions={config.store.keep_versions} would remove wins before they are "
            f"replay.max_age={replay.max_age} versions old; keep more versions than that"
        )
