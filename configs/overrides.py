"""Read the `key=value` arguments of a command as settings."""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.dotted import dotted_settings
from configs.errors import ConfigError
from configs.schema import Config
from configs.settings_text import check_size, describe_error

RUN_DIR = "run_dir="  # an override that names the run's directory


def split_run_dir(overrides: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the run directory that the overrides name, None without one, and the other overrides.

    >>> split_run_dir(["seed=1", "run_dir=runs/a", "run_dir=runs/b"])
    ('runs/b', ('seed=1',))
    """
    given = [text.removeprefix(RUN_DIR) for text in overrides if text.startswith(RUN_DIR)]
    others = tuple(text for text in overrides if not text.startswith(RUN_DIR))
    return (given[-1] if given else None), others


def settings_of_overrides(overrides: Sequence[str]) -> DictConfig:
    """Return the settings of `key=value` texts. Raises ConfigError for a text that is none.

    `source=RUN@where` is taken literally, because an SQL condition is no YAML; several of them are
    several sources. `source=[...]` is YAML.
    """
    texts = [_quoted(text) for text in overrides]
    lists = [text for text in texts if text.startswith("source=[")]
    sources = [text for text in texts if text.startswith("source=") and text not in lists]
    if lists and len(sources) + len(lists) > 1:
        raise ConfigError(
            f"{' '.join([*sources, *lists])}: a list is all sources; give one list, or source=RUN "
            "several times"
        )
    if "${" in "".join(sources):
        raise ConfigError(
            f"{' '.join(sources)}: ${{ stands for another setting; write '$' || '{{' for these two "
            "characters"
        )
    others = [text for text in texts if text not in sources]
    for text in others:
        try:
            OmegaConf.from_dotlist([text])
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(f"{text}: not readable as YAML: {describe_error(error)}") from None
    settings = OmegaConf.from_dotlist(others)
    if sources:
        OmegaConf.update(settings, "source", [text.removeprefix("source=") for text in sources])
    check_size(settings, name=" ".join(overrides))
    return settings


def _quoted(text: str) -> str:
    """Return an override whose value YAML reads as the type of its setting."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"argument {text!r} is not key=value")
    is_text = isinstance(dict(dotted_settings(Config())).get(key), str)
    if is_text and value != "null" and not value.startswith(("'", '"')):
        # Quoted, because YAML would make 202611221855 of the run_dir 20261122_1855, and a section
        # of `a: b`.
        value = value.replace("'", "''")
        return f"{key}='{value}'"
    return text if value else f"{key}=''"  # OmegaConf would read null
