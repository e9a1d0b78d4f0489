"""Check the section `critic`."""

from __future__ import annotations

from configs.derived import WITH_CRITIC, WITHOUT_ADVANTAGES, has_critic, most_updates
from configs.dotted import dotted_settings
from configs.errors import ConfigError
from configs.schema import Config, CriticConfig


def check_critic(config: Config) -> None:
    """Refuse settings of a critic that is not trained, or that could not be."""
    critic, defaults = config.critic, CriticConfig()
    algorithm = config.algorithm
    estimator = f"algorithm.estimator={algorithm.estimator}"
    if not has_critic(config):
        for key, value in dotted_settings(critic):
            if value != getattr(defaults, key):
                raise ConfigError(
                    f"critic.{key}={value} does nothing with {estimator}; "
                    f"leave it out, or use {' or '.join(WITH_CRITIC)}"
                )
        return
    if config.loss.policy in WITHOUT_ADVANTAGES:
        raise ConfigError(
            f"{estimator} would train a critic for loss.policy="
            f"{config.loss.policy}, which reads no advantages; use algorithm.estimator=grpo"
        )
    if config.replay.share:
        raise ConfigError(
            f"replay.share={config.replay.share:g} with {estimator} would "
            "train on wins whose states the critic has not valued; leave it out"
        )
    if critic.learning_rate > 1.0:
        raise ConfigError(
            f"critic.learning_rate={critic.learning_rate:g} would wreck any critic at once; use "
            "e.g. 1e-5"
        )
    if critic.clip != defaults.clip and most_updates(config) == 1:
        raise ConfigError(
            f"critic.clip={critic.clip:g} does nothing with one update per learner step, before "
            "which no value has moved; leave it out, or set learner.updates_per_step to 2 or more"
        )
    if critic.warmup_steps >= config.learner.steps:
        raise ConfigError(
            f"critic.warmup_steps={critic.warmup_steps} of learner.steps={config.learner.steps} "
            "would leave no step for the policy; use fewer"
        )
    if algorithm.group_size == 1 and algorithm.group_filter in ("rewards", "returns"):
        raise ConfigError(
            f"algorithm.group_filter={algorithm.group_filter!r} leaves out every group of "
            "algorithm.group_size=1; use 'none' or 'advantages'"
        )
