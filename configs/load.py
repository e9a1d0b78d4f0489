"""Read YAML files and `key=value` overrides into one checked, frozen Config, and write it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bounded_yaml import (
    MAX_CHARACTERS,
    MAX_SETTINGS_DEPTH,
    MAX_SETTINGS_EVENTS,
    TEXT_TAG,
    bounded_events,
)
from configs.check import ConfigError, check, check_is_list, dotted_settings
from configs.interpolations import check_expansion, check_forms
from configs.schema import Config
from printable import did_you_mean, one_line

RUN_DIR = "run_dir="  # an override that names the run's directory
MAX_NODES = 100_000  # values that a YAML text stands for
MAX_NUMBER_CHARACTERS = 100  # YAML reads 1:1:1 to the base 60, in quadratic time
BASE = "base"  # key of a file: the file whose settings it changes
# The keys below these are not ours, or checked by OmegaConf (those of actors.workers).
# configs/check.py checks `environments`.
FREE_KEYS = (
    *("env.options", "endpoint.body.", "loss.numbers.", "environments."),
    *("actors.engine.", "actors.workers."),
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
# !!timestamp x is an AttributeError of the YAML library, !!int '' an IndexError
PARSE_ERRORS = (
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    LookupError,
)
# TypeError: a list where a section is wanted
MERGE_ERRORS = (OmegaConfBaseException, TypeError)
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


def split_run_dir(overrides: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the run directory that the overrides name, None without one, and the other overrides.

    >>> split_run_dir(["seed=1", "run_dir=runs/a", "run_dir=runs/b"])
    ('runs/b', ('seed=1',))
    """
    given = [text.removeprefix(RUN_DIR) for text in overrides if text.startswith(RUN_DIR)]
    others = tuple(text for text in overrides if not text.startswith(RUN_DIR))
    return (given[-1] if given else None), others


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the checked config of a YAML file, its `base` files and `key=value` overrides.

    Raises ConfigError for a missing file, an unknown key (with the nearest match), a wrong type, or
    a combination that `check` refuses.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory, not a config file; give a YAML file, e.g. "
            "configs/key_room.yaml"
        )
    if not path.is_file():
        known = ", ".join(sorted(p.name for p in Path(__file__).parent.glob("*.yaml")))
        raise ConfigError(f"config file {str(path)!r} does not exist; configs/ holds {known}")
    return _checked(_read_file(path, above=()), overrides, name=str(path))


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


def parse_saved(text: str, *, name: str) -> DictConfig:
    """Return the settings in a run's config, which may be untrusted, without checking their names.

    Raises ConfigError for text that is no YAML mapping, and for a value that stands for another,
    such as ${oc.env:HOME}. `as_yaml` writes none, and it would read the environment of whoever
    opens the run.
    """
    return _parse(text, name=name, is_saved=True)


def _read_file(path: Path, *, above: tuple[Path, ...]) -> DictConfig:
    """Return the settings of a file and its base; `above` are the files that build on it."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {_describe(error)}") from None
    content = OmegaConf.to_container(_parse(text, name=str(path), is_saved=False))
    assert isinstance(content, dict), "_parse returns a mapping"
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
    below = _read_file(path.parent / base, above=chain)
    name = OmegaConf.select(settings, "env.name")
    if name is not None and name != OmegaConf.select(below, "env.name"):
        OmegaConf.update(below, "env.options", {}, merge=False)  # another environment's options
    merged = OmegaConf.merge(below, settings)
    assert isinstance(merged, DictConfig), "both are mappings"
    _check_size(merged, name=str(path))
    return merged


def _saved_settings(text: str, *, name: str) -> DictConfig:
    settings = parse_saved(text, name=name)
    try:
        _check_keys(settings)
    except ConfigError as error:
        raise ConfigError(
            f"{name} does not fit this version of the code, which opens no runs of older ones: "
            f"{error}"
        ) from None
    return settings


def _parse(text: str, *, name: str, is_saved: bool) -> DictConfig:
    """Return the settings in a YAML text. Raises ConfigError, which calls the text `name`.

    No value of a saved text may stand for another. That is known before OmegaConf reads it: its
    parser takes the longer, the deeper such values are nested.
    """
    try:
        for _ in bounded_events(text, max_events=MAX_SETTINGS_EVENTS, max_depth=MAX_SETTINGS_DEPTH):
            pass
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:  # nothing but comments
            return OmegaConf.create({})
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{name} holds no settings; give `key: value` lines, as configs/key_room.yaml has "
                "them"
            )
        if (n_nodes := _expanded_nodes(root)) > MAX_NODES:
            raise ConfigError(
                f"{name} stands for {n_nodes:,} values; settings have at most {MAX_NODES:,}"
            )
        if is_saved and (interpolated := next(_interpolations(root), None)):
            raise ConfigError(
                f"{name}: {interpolated} stands for another value; a run's settings are written out"
            )
        for scalar in () if is_saved else _texts(root):
            check_forms(scalar)
        settings = OmegaConf.create(text)
        assert isinstance(settings, DictConfig), "its root is a mapping"
        check_expansion(settings)
    except ConfigError:
        raise
    except PARSE_ERRORS as error:
        raise ConfigError(f"{name}: not readable as YAML: {_describe(error)}") from None
    except RecursionError:
        raise ConfigError(
            f"{name}: not readable as YAML: its values are nested too deeply"
        ) from None
    return settings


def _texts(root: yaml.Node) -> Iterator[str]:
    """Yield each key and value of a YAML text that is no collection."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            waiting += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
        else:
            yield node.value


def _check_size(settings: DictConfig, *, name: str) -> None:
    """Raise ConfigError if settings of several origins stand for too much together."""
    try:
        check_expansion(settings)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {_describe(error)}") from None


def _expanded_nodes(root: yaml.Node) -> int:
    """Count the values that a YAML text stands for; an alias counts like the value it repeats.

    Raises ValueError for a number that takes too long to be read.
    """
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) in counts:
            return counts[id(node)]
        counts[id(node)] = MAX_NODES + 1  # for a value that contains itself
        if isinstance(node, yaml.MappingNode):
            n_inside = sum(count(key) + count(value) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            n_inside = sum(map(count, node.value))
        else:
            n_inside = 0
            if node.tag != TEXT_TAG and len(node.value) > MAX_NUMBER_CHARACTERS:
                raise ValueError(f"it has a number of {len(node.value):,} characters")
        counts[id(node)] = 1 + n_inside
        return counts[id(node)]

    return count(root)


def _interpolations(node: yaml.Node, prefix: str = "") -> Iterator[str]:
    """Yield the keys of the texts that stand for another value."""
    pairs: list[tuple[Any, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _interpolations(key, f"{prefix}(key).")
            pairs.append((str(key.value)[:MAX_NUMBER_CHARACTERS], value))
    elif isinstance(node, yaml.SequenceNode):
        pairs = list(enumerate(node.value))
    elif "${" in node.value:
        yield prefix[:-1]
    for name, value in pairs:
        yield from _interpolations(value, f"{prefix}{name}.")


def _checked(settings: DictConfig, overrides: Sequence[str], *, name: str) -> Config:
    """Return the checked config of settings with overrides on top. Errors call them `name`."""
    given = _overrides([_checked_override(text) for text in overrides])
    _check_size(given, name=" ".join(overrides))
    # another environment's options are not added to
    if any(text.startswith("env.options=") for text in overrides):
        OmegaConf.update(settings, "env.options", {}, merge=False)
    _check_keys(settings)
    _check_keys(given)
    config = _merged(settings, given, name=name, overrides=overrides)
    check(config)
    written = list(settings.get("environments", {}))
    for text in overrides:
        section, _, rest = text.partition(".")
        new = re.split("[.=]", rest)[0]
        if section == "environments" and written and new not in written:
            raise ConfigError(
                f"{text}: {name} has no environment {new}, only {', '.join(written)}"
                f"{did_you_mean(new, written)}; a new one is written in the file"
            )
    return config


def _merged(
    settings: DictConfig, given: DictConfig, *, name: str, overrides: Sequence[str]
) -> Config:
    """Return the config. Raises ConfigError that names the file, or the override, at fault."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), settings)
    except MERGE_ERRORS as error:
        raise ConfigError(f"{name}: {_describe(error)}") from None
    try:
        both = OmegaConf.merge(merged, given)
        assert isinstance(both, DictConfig), "both are mappings"
        _check_size(both, name=name)
        config = OmegaConf.to_object(both)
    except MERGE_ERRORS as error:
        key = getattr(error, "full_key", None) or ""  # e.g. prompt.stop[0]
        at_fault = [
            text
            for text in overrides
            if re.match(rf"{re.escape(text.partition('=')[0])}([.\[]|$)", key)
        ]
        blamed = " ".join(at_fault[-1:] or overrides or [name])
        raise ConfigError(f"{blamed}: {_message(error)}") from None
    assert isinstance(config, Config)
    return config


def _overrides(texts: Sequence[str]) -> DictConfig:
    """Return the settings of `key=value` texts.

    `source=RUN@where` is taken literally, because an SQL condition is no YAML; several of them are
    several sources. `source=[...]` is YAML.
    """
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
            raise ConfigError(f"{text}: not readable as YAML: {_describe(error)}") from None
    settings = OmegaConf.from_dotlist(others)
    if sources:
        OmegaConf.update(settings, "source", [text.removeprefix("source=") for text in sources])
    return settings


def _checked_override(text: str) -> str:
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


def _check_keys(settings: DictConfig) -> None:
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
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}{key}.")
    elif prefix:
        yield prefix[:-1]


def _describe(error: Exception) -> str:
    """Return the message of an error in one line, with the key that OmegaConf names."""
    key = getattr(error, "full_key", None)
    return f"{key}: {_message(error)}" if key else _message(error)


def _message(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OmegaConfBaseException):
        text = text.partition("\n")[0]  # the other lines repeat the place
        text = text.replace(
            "is incompatible with type hint 'Union[int, WorkerRange]'",
            "is no whole number, and no range such as {min: 2, max: 16}",
        )
    return one_line(text)
