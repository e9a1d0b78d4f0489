"""Check the section `offline`."""

from __future__ import annotations

from configs.derived import draws_by_weight, groups_of_a_step, is_offline
from configs.dotted import dotted_settings
from configs.errors import ConfigError
from configs.schema import Config, OfflineConfig


def check_offline(config: Config) -> None:
    """Check the share of offline groups, and what a run without own groups leaves out."""
    offline, defaults = config.offline, OfflineConfig()
    if not config.source:
        for key, value in dotted_settings(offline):
            if value != getattr(defaults, key):
                raise ConfigError(
                    f"offline.{key}={value} does nothing without source=RUN; add that"
                )
        return
    share = f"offline.share={offline.share:g}"
    if offline.share > 1.0:
        raise ConfigError(f"{share} is more than all of a batch; use 1 for offline groups only")
    n_own, n_offline = groups_of_a_step(config)
    if n_offline == 0 or (n_own == 0 and not is_offline(config)):
        raise ConfigError(
            f"{share} of learner.groups_per_step={config.learner.groups_per_step} is {n_offline} "
            f"offline and {n_own} own groups; use 1 for offline ones only, leave source out for "
            "own ones only, or take more groups"
        )
    if is_offline(config) and draws_by_weight(config):
        raise ConfigError(
            f"tasks.order={config.tasks.order} does nothing with offline.share=1, which plays no "
            "tasks; leave it out, or choose groups by offline.order"
        )
    if is_offline(config) and config.actors.scripted:
        raise ConfigError("actors.scripted=true plays nothing with offline.share=1; leave it out")
    if config.loss.proximal == "interpolated":
        raise ConfigError(
            "loss.proximal='interpolated' needs the staleness of every token, and the versions of "
            "an offline group are another run's; use 'recomputed' or 'none'"
        )
