"""Refuse values and combinations that would hang, crash or mislead later, before a run starts.

This module has the choices and the signs of all settings. What a setting may be beside others is in
`checks/`, in the module of its section: `learner.keep_every` in checks/learner.py. A check of two
sections is with the setting that its message names first.
"""

from __future__ import annotations

import math

from configs.checks import (
    actors,
    alarms,
    algorithm,
    critic,
    endpoint,
    environments,
    learner,
    loss,
    model,
    offline,
    prompt,
    replay,
    trackers,
)
from configs.dotted import dotted_settings
from configs.errors import ConfigError
from configs.schema import Config
from printable import did_you_mean

# Key -> the meaning of 0, for the message about a negative value.
MAY_BE_ZERO = {
    "seed": "",
    "max_staleness": "; use 0 for synchronous training",
    "metrics_port": "; use 0 for no figures for Prometheus",
    "actors.gpus_per_worker": "; use 0 for a CPU engine",
    "actors.extra_members": "; use 0 for none",
    "algorithm.refill_groups": "; use 0 to train on smaller batches",
    "critic.warmup_steps": "; use 0 to train the policy from the first learner step on",
    "learner.weight_decay": "",
    "learner.warmup_updates": "",
    "learner.rows_per_update": "; use 0 to cut a batch by learner.updates_per_step",
    "learner.zero_stage": "",
    "learner.gpus_per_rank": "; use 0 for a CPU learner",
    "learner.keep_every": "; use 0 to keep the newest two only",
    "model.lora_rank": "; use 0 to train all weights",
    "alarms.ess_below": "; use 0 for no such alarm",
    "alarms.entropy_below": "; use 0 for no such alarm",
    "supervision.max_restarts": "; use 0 to end the run at the first death",
    "evaluation.every": "; use 0 for no evaluation between the start and the end",
    "evaluation.temperature": "; use 0 for greedy play",
    "replay.share": "; use 0 to replay nothing",
    "replay.warmup_steps": "; use 0 for the full weight from the beginning",
    "store.keep_days": "; use 0 to keep trajectories for ever",
    "store.keep_versions": "; use 0 to keep trajectories of all versions",
}
COUNTS_OF_GROUPS = ("algorithm.group_size", "algorithm.refill_groups")
MAX_WIN_REWARD = 1e6


def check(config: Config) -> None:
    """Raise ConfigError, in one line, with the value, its consequence and the fix."""
    # The first mistake is reported, so a check may rely on those before it.
    for own in environments.checked_environments(config):
        _check_choices(own)
        _check_numbers(own)
        prompt.check_prompt(own)
    actors.check_scripted(config)
    learner.check_retention(config)
    alarms.check_alarms(config)
    trackers.check_trackers(config)
    algorithm.check_algorithm(config)
    algorithm.check_refill(config)
    loss.check_cloning(config)
    critic.check_critic(config)
    learner.check_updates(config)
    model.check_precision(config)
    learner.check_offload(config)
    model.check_adapters(config)
    model.check_tiny_model(config)
    loss.check_norm(config)
    loss.check_teacher(config)
    actors.check_workers(config)
    learner.check_ranks(config)
    actors.check_engine(config)
    endpoint.check_endpoint(config)
    offline.check_offline(config)
    replay.check_replay(config)


def _check_choices(config: Config) -> None:
    choices = {
        "prompt.style": (config.prompt.style, ("window", "chat")),
        "prompt.parser": (config.prompt.parser, ("tags", "upstream", "text")),
        "prompt.invalid": (config.prompt.invalid, ("form", "environment", "admissible")),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "model.lora_serving": (config.model.lora_serving, ("adapter", "merged")),
        "learner.schedule": (config.learner.schedule, ("constant", "linear")),
        "learner.transfer": (config.learner.transfer, ("files", "broadcast")),
        "learner.zero_stage": (config.learner.zero_stage, (0, 1, 2, 3)),
        "learner.flash_attention": (config.learner.flash_attention, (2, 3)),
        "stragglers": (config.stragglers, ("drop", "wait")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(
                f"{key}={value!r} is not one of "
                f"{', '.join(map(repr, allowed))}{did_you_mean(value, allowed)}"
            )


def _check_numbers(config: Config) -> None:
    for key, number in dotted_settings(config):
        # gigpo knows the bounds of losses and advantages, and the driver asks it before a start
        is_gigpos = key.startswith(("loss.", "algorithm.")) and key not in COUNTS_OF_GROUPS
        # -1 turns are all turns
        has_own_bounds = is_gigpos or key == "prompt.history_length"
        if has_own_bounds or isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not math.isfinite(number):
            raise ConfigError(f"{key}={number} is not a number")
        if key in MAY_BE_ZERO and number < 0:
            raise ConfigError(f"{key}={number} is below 0{MAY_BE_ZERO[key]}")
        if key not in MAY_BE_ZERO and number <= 0:
            raise ConfigError(f"{key}={number} must be above 0")
        if key.endswith("env.win_reward") and number > MAX_WIN_REWARD:
            raise ConfigError(
                f"{key}={number:g} is above {MAX_WIN_REWARD:g}, and learning squares rewards; use "
                "e.g. 10"
            )
