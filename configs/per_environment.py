"""Give each environment of a run its own settings.

    environments:
      rooms: {weight: 2, env: {name: key_room}}
      games: {env: {name: textworld, max_steps: 20}, prompt: {history_length: 4}}

Each takes the settings of `env` and `prompt` and changes some. A run without `environments` has one
environment, and its tasks keep their ids. Otherwise a task of `rooms` has an id `rooms/ID`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from configs.schema import Config, EnvConfig, PromptConfig

SEPARATOR = "/"  # between the environment's name and the id of its task
NAME = re.compile("[a-z][a-z0-9_]*")  # it stands in the names of metrics
SECTIONS: Mapping[str, type] = {"env": EnvConfig, "prompt": PromptConfig}
# One engine serves all environments: these stand in the section `prompt` itself.
OF_THE_ENGINE = ("max_prompt_tokens", "stop", "thinking")


def environments(config: Config) -> dict[str, Config]:
    """Return the settings of each environment by its name: `config` with its `env` and `prompt`."""
    if not config.environments:
        return {config.env.name: config}
    return {name: _own(config, given) for name, given in config.environments.items()}


def environment_weights(config: Config) -> dict[str, float]:
    """Return the weight of each environment by its name; a training group is of one."""
    return {
        name: float(config.environments.get(name, {}).get("weight", 1.0))
        for name in environments(config)
    }


def environment_config(config: Config, task_id: str) -> Config:
    """Return the settings of the environment that a task is of."""
    if not config.environments:
        return config
    return _own(config, config.environments[task_id.partition(SEPARATOR)[0]])


def _own(config: Config, given: Mapping[str, Any]) -> Config:
    env, prompt = given.get("env", {}), given.get("prompt", {})
    if "name" in env and env["name"] != config.env.name:
        env = {"options": {}, **env}  # those of `env` are another environment's
    return replace(
        config,
        environments={},
        env=replace(config.env, **env),
        prompt=replace(config.prompt, **prompt),
    )


def setting_names(section: str) -> list[str]:
    """Return the settings that an environment may have of its own in `env` or `prompt`."""
    names = [each.name for each in fields(SECTIONS[section])]
    return [name for name in names if section != "prompt" or name not in OF_THE_ENGINE]
