"""Read YAML files and `key=value` overrides into one checked, frozen Config, and write it back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bounded_yaml import MAX_CHARACTERS
from configs.check import check
from configs.checks.values import check_is_list
from configs.dotted import dotted_settings
from configs.errors import ConfigError
from configs.overrides import settings_of_overrides
from configs.schema import Config
from configs.settings_text import (
    check_size,
    describe_error,
    error_message,
    parse_saved,
    parse_settings,
)
from printable import did_you_mean

BASE = "base"  # key of a file: the file whose settings it changes
# Beginnings of keys that configs/schema.py does not list. Others name them, but for those of
# `actors.workers`, which OmegaConf checks, and of `environments`, see checks/environments.py.
FREE_KEYS = (
    "actors.engine.",
    "actors.workers.",
    "endpoint.body.",
    "env.options",
    "environments.",
    "loss.numbers.",
)
# Settings of older versions, and what holds now.
REMOVED = {
    "actors.lease_s": "another worker gets a group after 120 s without a heartbeat",
    "actors.max_model_tokens": "it is prompt.max_prompt_tokens + actors.max_response_tokens",
    "learner.keep_checkpoints": "the newest two are kept; learner.keep_every keeps more",
    "learner.max_bad_updates": "three in a row are skipped",
    "learner.merge_steps": "steps are always merged",
    "model.lora_tf32": "adapters of a bfloat16 model multiply in TF32 on a GPU",
    "model.tiny.heads": "a head has 32 of model.tiny.hidden_size",
    "store.snapshot_window_s": "replaced files are kept for 900 s",
}
LIST_SETTINGS = ("source", "loss.corrections", "trackers")
# TypeError: a list where a section is wanted
MERGE_ERRORS = (OmegaConfBaseException, TypeError)


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    read: Callable[[Path], str] | None = None,
) -> Config:
    """Return the checked config of a YAML file, its `base` files and `key=value` overrides.

    `read` gives the text of each of the files, by default as `read_file`. Raises ConfigError for a
    missing file, an unknown key (with the nearest match), a wrong type, or a combination that
    `check` refuses.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory, not a config file; give a YAML file, e.g. "
            "configs/key_room.yaml"
        )
    if not path.exists():
        ours = Path(__file__).parent
        known = ", ".join(sorted(p.name for p in ours.glob("*.yaml")))
        raise ConfigError(f"config file {str(path)!r} does not exist; {ours} holds {known}")
    return _checked(_settings_of(path, above=(), read=read or read_file), overrides, name=str(path))


def load_saved(text: str, overrides: Sequence[str] = (), *, name: str) -> Config:
    """Return the checked config that a run keeps, with overrides. The text may be untrusted.

    Raises ConfigError as `load` does, and for text that `as_yaml` never writes. Errors call the
    text `name`.
    """
    return _checked(_saved_settings(text, name=name), overrides, name=name)


def from_yaml(text: str) -> Config:
    """Return the config that `as_yaml` wrote, unchecked. Raises ConfigError if it does not fit."""
    settings = _saved_settings(text, name="the run's config")
    return _merged(settings, OmegaConf.create({}), name="the run's config", overrides=())


def as_yaml(config: Config) -> str:
    """Return all settings, defaults included, as run.json keeps them."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def read_file(path: Path) -> str:
    """Return the text of a config file, cut where it is too long. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {describe_error(error)}") from None


def _settings_of(path: Path, *, above: tuple[Path, ...], read: Callable[[Path], str]) -> DictConfig:
    """Return the settings of a file and its base; `above` are the files that build on it."""
    text = read(path)
    content = OmegaConf.to_container(parse_settings(text, name=str(path), may_refer=True))
    assert isinstance(content, dict), "parse_settings returns a mapping"
    base = content.pop(BASE, None)
    settings = OmegaConf.create(content)
    _check_keys(settings)
    if base is None:
        return settings
    if not isinstance(base, str) or not (path.parent / base).is_file():
        raise ConfigError(
            f"{path}: base={base} is no file; give the path of a YAML file, relative to {path}"
        )
    chain = (*above, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise ConfigError(f"{path}: base={base} is a circle: that file builds on {path.name}")
    below = _settings_of(path.parent / base, above=chain, read=read)
    name = OmegaConf.select(settings, "env.name")
    if name is not None and name != OmegaConf.select(below, "env.name"):
        OmegaConf.update(below, "env.options", {}, merge=False)  # another environment's options
    merged = OmegaConf.merge(below, settings)
    assert isinstance(merged, DictConfig), "both are mappings"
    check_size(merged, name=str(path))
    return merged


def _saved_settings(text: str, *, name: str) -> DictConfig:
    """Return the settings in a run's config. Refuse the names that this version does not know."""
    settings = parse_saved(text, name=name)
    try:
        _check_keys(settings)
    except ConfigError as error:
        raise ConfigError(
            f"{name} does not fit this version of the code, which opens no runs of older ones: "
            f"{error}"
        ) from None
    return settings


def _checked(settings: DictConfig, overrides: Sequence[str], *, name: str) -> Config:
    """Return the checked config of settings with overrides on top. Errors call them `name`."""
    given = settings_of_overrides(overrides)
    # another environment's options are not added to
    if any(text.startswith("env.options=") for text in overrides):
        OmegaConf.update(settings, "env.options", {}, merge=False)
    _check_keys(settings)
    _check_keys(given)
    config = _merged(settings, given, name=name, overrides=overrides)
    check(config)
    _check_names_of_environments(overrides, settings, name=name)
    return config


def _check_names_of_environments(
    overrides: Sequence[str], settings: DictConfig, *, name: str
) -> None:
    """Refuse an override of an environment that the file does not have."""
    written = list(settings.get("environments", {}))
    for text in overrides:
        section, _, rest = text.partition(".")
        new = re.split("[.=]", rest)[0]
        if section == "environments" and written and new not in written:
            raise ConfigError(
                f"{text}: {name} has no environment {new}, only {', '.join(written)}"
                f"{did_you_mean(new, written)}; a new one is written in the file"
            )


def _merged(
    settings: DictConfig, given: DictConfig, *, name: str, overrides: Sequence[str]
) -> Config:
    """Return the config. Raises ConfigError that names the file, or the override, at fault."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), settings)
    except MERGE_ERRORS as error:
        raise ConfigError(f"{name}: {describe_error(error)}") from None
    try:
        both = OmegaConf.merge(merged, given)
        assert isinstance(both, DictConfig), "both are mappings"
        check_size(both, name=name)
        config = OmegaConf.to_object(both)
    except MERGE_ERRORS as error:
        key = getattr(error, "full_key", None) or ""  # e.g. prompt.stop[0]
        at_fault = [
            text
            for text in overrides
            if re.match(rf"{re.escape(text.partition('=')[0])}([.\[]|$)", key)
        ]
        blamed = " ".join(at_fault[-1:] or overrides or [name])
        raise ConfigError(f"{blamed}: {error_message(error)}") from None
    assert isinstance(config, Config)
    return config


def _check_keys(settings: DictConfig) -> None:
    """Refuse keys that are no settings, and settings of another form than their key has."""
    known = [name for name, _ in dotted_settings(Config())]
    for key in _leaves(OmegaConf.to_container(settings)):
        if any(name.startswith(f"{key}.") for name in known):
            raise ConfigError(
                f"{key!r} is a section, not a setting; give {key}.<setting>=value, see "
                "configs/schema.py"
            )
        if key in REMOVED:
            raise ConfigError(f"{key} is no setting any more: {REMOVED[key]}; leave it out")
        if re.fullmatch(r"loss\.\w+\.\w+", key) and not key.startswith(FREE_KEYS):
            raise ConfigError(f"{key} is now loss.numbers.{key.removeprefix('loss.')}")
        if key not in known and not key.startswith(FREE_KEYS):
            raise ConfigError(
                f"unknown key {key!r}{did_you_mean(key, known)}; configs/schema.py lists every key"
            )
    for key in LIST_SETTINGS:
        check_is_list(key, OmegaConf.select(settings, key))
    environments = settings.get("environments", DictConfig({}))
    if not isinstance(environments, DictConfig) or not all(
        isinstance(one, DictConfig) for one in environments.values()
    ):
        raise ConfigError(
            "environments holds a section for each environment, under a name of your own: "
            "environments={rooms: {weight: 1, env: {name: sokoban}}}"
        )


def _leaves(tree: object, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of each value that is no mapping.

    >>> list(_leaves({"env": {"name": "a"}, "source": ["b"]}))
    ['env.name', 'source']
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}{key}.")
    elif prefix:
        yield prefix[:-1]
