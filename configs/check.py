"""What is refused before anything starts: values and combinations that would hang, crash or mislead later."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.schema import Config

MAY_BE_ZERO = {  # key -> what 0 means, said when somebody goes below it
    "seed": "",
    "max_staleness": "; use 0 for synchronous training",
    "prompt.history_length": "; use 0 for no history",
    "actors.gpus_per_worker": "; use 0 for a CPU engine",
    "algorithm.gamma": "; the paper uses 0.95",
    "algorithm.omega": "; use 0 for no step advantage",
    "algorithm.invalid_penalty": "; use 0 for no penalty",
    "loss.kl_coef": "; use 0 for no reference model",
    "loss.entropy_coef": "",
    "learner.weight_decay": "",
    "learner.warmup_updates": "",
    "learner.zero_stage": "",
    "learner.gpus": "; use 0 for a CPU learner",
    "evaluation.every": "; use 0 to evaluate at the end only",
    "evaluation.temperature": "; use 0 for greedy play",
}


class ConfigError(ValueError):
    """A mistake in a config; the message is one line that names the value and the fix."""


def check(config: Config) -> None:
    """Raises ConfigError, in one line, with the value, what it would have done, and the fix."""
    _check_choices(config)
    _check_positive(config)
    _check_staleness(config)
    _check_algorithm(config)
    _check_cores(config)
    _check_precision(config)
    _check_loss(config)
    _check_tiny_model(config)
    _check_lengths(config)


def _check_choices(config: Config) -> None:
    a = config.algorithm
    choices = {
        "algorithm.estimator": (a.estimator, ("gigpo", "grpo")),
        "algorithm.normalise": (a.normalise, ("mean", "mean_std")),
        "algorithm.weighting": (a.weighting, ("steps", "trajectories")),
        "prompt.template": (config.prompt.template, ("compact", "direct", "think")),
        "loss.policy": (config.loss.policy, ("ppo_clip", "behaviour_cloning")),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "learner.schedule": (config.learner.schedule, ("constant", "linear")),
        "learner.zero_stage": (config.learner.zero_stage, (0, 1, 2)),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{key}={value!r} is not one of {', '.join(map(repr, allowed))}{hint(value, allowed)}")


def _check_positive(config: Config) -> None:
    for key, number in flat(config):
        if isinstance(number, int | float) and not isinstance(number, bool):
            if not math.isfinite(number):
                raise ConfigError(f"{key}={number} is not a number")
            if key in MAY_BE_ZERO and number < 0:
                raise ConfigError(f"{key}={number} is below 0{MAY_BE_ZERO[key]}")
            if key not in MAY_BE_ZERO and number <= 0:
                raise ConfigError(f"{key}={number} must be above 0")


def _check_staleness(config: Config) -> None:
    learner = config.learner
    if learner.keep_checkpoints < 2:
        raise ConfigError("learner.keep_checkpoints=1 leaves none if the newest turns out to be damaged; keep at least 2")
    if learner.keep_versions < config.max_staleness + 2:
        raise ConfigError(
            f"learner.keep_versions={learner.keep_versions} could delete weights that an actor is about to load; "
            f"with max_staleness={config.max_staleness} keep at least {config.max_staleness + 2}"
        )


def _check_algorithm(config: Config) -> None:
    a = config.algorithm
    if a.gamma > 1.0:
        raise ConfigError(f"algorithm.gamma={a.gamma} is outside [0, 1]; the paper uses 0.95")
    if a.group_size == 1 and config.loss.policy != "behaviour_cloning":
        raise ConfigError(
            f"algorithm.group_size=1 with {a.estimator} leaves nothing to compare an episode with, so no advantage "
            "would be meaningful; use at least 2 (the paper: 8)"
        )
    if config.loss.policy == "behaviour_cloning" and not config.actors.scripted:
        raise ConfigError("loss.policy=behaviour_cloning would clone the model from itself; set actors.scripted=true")
    if config.actors.scripted and config.loss.policy != "behaviour_cloning":
        raise ConfigError(f"actors.scripted=true needs loss.policy=behaviour_cloning, not {config.loss.policy!r}")


def _check_cores(config: Config) -> None:
    cores = config.actors.cpu_cores
    if cores != "auto" and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cores):
        raise ConfigError(f"actors.cpu_cores={cores!r} is not 'auto' or a list of cores like '0' or '0,2-3'")


def _check_precision(config: Config) -> None:
    if config.model.dtype == "bfloat16" and config.learner.zero_stage == 0:
        raise ConfigError(
            "model.dtype='bfloat16' with learner.zero_stage=0 keeps no float32 master weights, so small updates would be "
            "rounded away; set learner.zero_stage=1"
        )


def _check_loss(config: Config) -> None:
    loss = config.loss
    if loss.clip_low > 1.0:
        raise ConfigError(
            f"loss.clip_low={loss.clip_low} is above 1, so no ratio would ever be clipped from below; the usual is 0.2"
        )
    if loss.dual_clip <= 1.0:
        raise ConfigError(
            f"loss.dual_clip={loss.dual_clip} must be above 1, or on-policy tokens would not learn; the usual is 3"
        )
    if loss.tis_cap < 1.0:
        raise ConfigError(f"loss.tis_cap={loss.tis_cap} is below 1, so it would shrink on-policy tokens too; the usual is 2")


def _check_tiny_model(config: Config) -> None:
    tiny = config.model.tiny
    if tiny.hidden_size % tiny.heads or tiny.hidden_size // tiny.heads not in (32, 64, 128):
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} over model.tiny.heads={tiny.heads} must give heads of 32, 64 or 128, "
            "the sizes vLLM has kernels for"
        )


def _check_lengths(config: Config) -> None:
    actors = config.actors
    room = actors.max_model_tokens - actors.max_response_tokens
    if room < config.prompt.max_prompt_tokens:
        raise ConfigError(
            f"prompt.max_prompt_tokens={config.prompt.max_prompt_tokens} and actors.max_response_tokens="
            f"{actors.max_response_tokens} do not fit into actors.max_model_tokens={actors.max_model_tokens}; "
            f"raise the last to {config.prompt.max_prompt_tokens + actors.max_response_tokens}"
        )


def check_model_path(config: Config) -> None:
    """A model has to be on disk before a run starts; a dry run does without. Raises ConfigError."""
    path = config.model.path
    if path and not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={path!r} is not a Hugging Face model directory (no config.json in it); download the model "
            f"first, e.g. `hf download {path} --local-dir models/{Path(path).name}`, and give that directory"
        )


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(`a.b.c`, value) for every setting of a config."""
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from flat(getattr(value, item.name), f"{prefix}{item.name}.")
    else:
        yield prefix[:-1], value


def hint(value: object, allowed: Sequence[object]) -> str:
    """`, did you mean ...?` with the nearest of the allowed names, or nothing."""
    names = [str(name) for name in allowed]
    near = difflib.get_close_matches(str(value), names, n=1) or difflib.get_close_matches(
        str(value).rpartition(".")[2], [name.rpartition(".")[2] for name in names], n=1
    )
    full = [name for name in names if near and (name == near[0] or name.endswith("." + near[0]))]
    return f", did you mean {full[0]!r}?" if full else ""
