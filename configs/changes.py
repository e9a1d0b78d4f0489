"""Compare the settings of a config with the defaults, and with those that a run was made with."""

from __future__ import annotations

from omegaconf import OmegaConf

from configs.dotted import dotted_settings
from configs.schema import Config

# Settings that may change between two starts of one run, besides `alarms` and `supervision`. Any
# other change would make it another run.
MAY_CHANGE = {
    "run_dir",
    "trackers",
    "metrics_port",
    "env.processes",
    "env.answer_timeout_s",
    "env.attempts",
    "actors.workers",
    "actors.groups_in_flight",
    "actors.max_groups_in_flight",
    "actors.extra_members",
    "actors.gpus_per_worker",
    "actors.gpu_memory_utilization",
    "actors.kv_cache_gib",
    "actors.engine",
    "actors.batch_invariant",
    "actors.cpu_cores",
    "actors.engine_timeout_s",
    "critic.learning_rate",
    "model.lora_serving",
    "learner.steps",
    "learner.learning_rate",
    "learner.ranks",
    "learner.sequence_parallel",
    "learner.gpus_per_rank",
    "learner.zero_stage",
    "learner.offload",
    "learner.deterministic",
    "learner.flash_attention",
    "learner.micro_batch_tokens",
    "learner.step_timeout_s",
    "learner.starvation_timeout_s",
    "learner.checkpoint_every",
    "learner.keep_every",
    "learner.keep_versions",
    "learner.threads",
    "learner.transfer",
    "tasks.order",
    "evaluation.every",
    "evaluation.episodes_per_task",
    "evaluation.final_episodes_per_task",
    "endpoint.url",
    "endpoint.api_key_env",
    "endpoint.requests",
    "endpoint.attempts",
    "endpoint.timeout_s",
    "store.keep_days",
    "store.keep_versions",
    "offline.uses",
    "offline.train_on",
}


def differences(config: Config) -> str:
    """Return the settings that are not at their defaults, as YAML."""
    defaults = dict(dotted_settings(Config()))
    changed = OmegaConf.create({})
    for key, value in dotted_settings(config):
        if value != defaults[key]:
            OmegaConf.update(changed, key, value)
    return OmegaConf.to_yaml(changed)


def forbidden_changes(recorded: Config, config: Config) -> list[str]:
    """Return `key: old -> new` for every setting that differs and would make it another run."""
    before, after = dict(dotted_settings(recorded)), dict(dotted_settings(config))
    return [
        f"{key}: {before[key]!r} -> {after[key]!r}"
        for key in sorted(before)
        if before[key] != after[key]
        and key not in MAY_CHANGE
        and not key.startswith(("alarms.", "supervision."))
    ]
