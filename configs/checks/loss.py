"""Check the section `loss`. gigpo checks its numbers by themselves."""

from __future__ import annotations

from pathlib import Path

from configs.checks.values import check_url
from configs.derived import is_offline, is_served
from configs.errors import ConfigError
from configs.schema import Config

DR_GRPO = "sequence_mean_token_sum_norm"  # its aggregation


def check_cloning(config: Config) -> None:
    """Refuse to clone the model from itself."""
    clones = config.loss.policy == "behaviour_cloning"
    if clones and not config.actors.scripted and not is_offline(config):
        raise ConfigError(
            "loss.policy=behaviour_cloning would clone the model from itself; set "
            "actors.scripted=true, or clone another run: source=RUN with offline.share=1"
        )


def check_norm(config: Config) -> None:
    """Check the divisor of the aggregation of Dr.GRPO."""
    response = config.actors.max_response_tokens
    norm = config.loss.numbers.get(DR_GRPO, {}).get("norm_tokens")
    if config.loss.aggregation == DR_GRPO and norm != response:
        raise ConfigError(
            f"loss.aggregation='{DR_GRPO}' divides by the longest response, as Dr.GRPO does; set "
            f"loss.numbers.{DR_GRPO}.norm_tokens={response}, which is actors.max_response_tokens"
            + ("" if norm is None else f", not {norm:g}")
        )


def check_teacher(config: Config) -> None:
    """Check the teacher of a distillation, and that only a distillation has one."""
    teacher, distils = config.loss.teacher, config.loss.policy == "distillation"
    if distils and not teacher:
        raise ConfigError(
            "loss.policy='distillation' has no teacher; give the directory of one, or the URL of "
            "its server: loss.teacher=DIR"
        )
    if is_served(teacher):
        check_url("loss.teacher", teacher)
        if config.actors.temperature != 1.0:
            raise ConfigError(
                f"loss.teacher={teacher} gives log-probabilities at temperature 1, and not at "
                f"actors.temperature={config.actors.temperature:g}; use 1, or the teacher's "
                "directory"
            )
    elif teacher and not (Path(teacher) / "config.json").is_file():
        raise ConfigError(
            f"loss.teacher={teacher!r} is not a Hugging Face model directory (no config.json in it)"
        )
    if teacher and not config.model.path:
        raise ConfigError(
            f"loss.teacher={teacher!r} needs a model with the same tokenizer; give model.path=DIR"
        )
    if teacher and not distils:
        raise ConfigError(
            f"loss.teacher={teacher!r} does nothing with loss.policy={config.loss.policy!r}; add "
            "loss.policy=distillation"
        )
