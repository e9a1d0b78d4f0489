"""Check `environments`: names, weights, and the sections of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.checks.prompt import TEMPLATES
from configs.errors import ConfigError
from configs.per_environment import NAME, OF_THE_ENGINE, SECTIONS, environments, setting_names
from configs.schema import Config
from printable import did_you_mean


def checked_environments(config: Config) -> list[Config]:
    """Return the settings of every environment, after a look at what `environments` holds."""
    for name, given in config.environments.items():
        key = f"environments.{name}"
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{key} is no name for an environment; use lower-case letters, digits and _, as in "
                "rooms_2"
            )
        for part, value in given.items():
            if part == "weight":
                _check_weight(key, value, name=name)
            elif part in SECTIONS and isinstance(value, dict):
                _check_section(f"{key}.{part}", value, section=part)
            elif part in SECTIONS:
                raise ConfigError(
                    f"{key}.{part}={value} is no section; write its settings, for example "
                    f"{key}.env.name={value if part == 'env' else 'sokoban'}"
                )
            else:
                raise ConfigError(f"{key}.{part} is none of weight, env and prompt")
        template = given.get("prompt", {}).get("template", "think")
        if template not in TEMPLATES and not Path(str(template)).is_absolute():
            raise ConfigError(
                f"{key}.prompt.template={template!r} is not one of "
                f"{', '.join(map(repr, TEMPLATES))}; give an absolute path to a file of your own"
            )
    return list(environments(config).values())


def _check_weight(key: str, weight: object, *, name: str) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"{key}.weight={weight} is not a number")
    if not 0 < weight < math.inf:
        raise ConfigError(f"{key}.weight={weight} must be above 0; or leave {name} out")


def _check_section(key: str, given: Mapping[str, object], *, section: str) -> None:
    """Check the names and types of the settings that an environment has of its own."""
    for name in given:
        if section == "prompt" and name in OF_THE_ENGINE:
            raise ConfigError(
                f"{key}.{name}: one engine serves all environments; set prompt.{name} instead"
            )
        known = setting_names(section)
        if name not in known:
            raise ConfigError(
                f"unknown key '{key}.{name}'{did_you_mean(name, known)}; configs/schema.py lists "
                "every key"
            )
    try:
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SECTIONS[section]), given))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).partition(chr(10))[0]}") from None
