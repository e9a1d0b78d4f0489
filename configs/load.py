"""Read a YAML file and `key=value` overrides into one checked, frozen Config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.check import ConfigError, check, check_is_list, flat, hint
from configs.schema import Config

MAX_CHARACTERS = 2**20  # of a YAML text; the largest of configs/ has 2,000
MAX_NODES = 100_000  # values that a YAML text stands for
MAX_NUMBER_CHARACTERS = 100  # YAML reads 1:1:1 to the base 60, in quadratic time
TEXT_TAG = "tag:yaml.org,2002:str"
UNREADABLE = (
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    LookupError,
)
MAY_CHANGE = {  # between two starts of one run, and all of `alarms` and `supervision`
    "run_dir",
    "env.processes",
    "env.answer_timeout_s",
    "env.attempts",
    "actors.workers",
    "actors.groups_in_flight",
    "actors.max_groups_in_flight",
    "actors.spare_members",
    "actors.gpus_per_worker",
    "actors.gpu_memory_utilization",
    "actors.kv_cache_gib",
    "actors.cpu_cores",
    "actors.engine_timeout_s",
    "actors.lease_s",
    "learner.steps",
    "learner.learning_rate",
    "learner.ranks",
    "learner.gpus_per_rank",
    "learner.zero_stage",
    "learner.offload",
    "learner.deterministic",
    "model.lora_tf32",
    "learner.micro_batch_tokens",
    "learner.max_bad_updates",
    "learner.step_timeout_s",
    "learner.starvation_timeout_s",
    "learner.checkpoint_every",
    "learner.keep_checkpoints",
    "learner.keep_every",
    "learner.keep_versions",
    "learner.threads",
    "learner.transfer",
    "evaluation.every",
    "evaluation.episodes_per_task",
    "evaluation.final_episodes_per_task",
    "endpoint.url",
    "endpoint.api_key_env",
    "endpoint.requests",
    "endpoint.attempts",
    "endpoint.timeout_s",
    "store.snapshot_window_s",
    "store.keep_days",
    "store.keep_versions",
    "stored.uses",
    "stored.train_on",
}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of `path` with `key=value` overrides on top, checked.

    Raises ConfigError for a missing file, an unknown key (with the nearest match), a wrong type, or
    a combination that `check` refuses.
    """
    if Path(path).is_dir():
        raise ConfigError(
            f"{path} is a directory, not a config file; give a YAML file, e.g. "
            "configs/key_room.yaml"
        )
    if not Path(path).is_file():
        known = ", ".join(sorted(p.name for p in Path(__file__).parent.glob("*.yaml")))
        raise ConfigError(f"config file {str(path)!r} does not exist; configs/ holds {known}")
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {_one_line(error)}") from None
    return _checked(parse_settings(text, name=str(path)), overrides, name=str(path))


def load_stored(text: str, overrides: Sequence[str] = (), *, name: str) -> Config:
    """Return the config that a run keeps, with `key=value` overrides on top. The text may be a
    stranger's.

    Raises ConfigError as `load` does, and for text that `to_yaml` never writes. Errors call the
    text `name`.
    """
    return _checked(parse_stored(text, name=name), overrides, name=name)


def parse_settings(text: str, *, name: str) -> DictConfig:
    """Return the settings in a YAML text. Raises ConfigError, which calls the text `name`."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{name} has {len(text):,} characters; settings have at most {MAX_CHARACTERS:,}"
        )
    try:
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
        settings = OmegaConf.create(text)
    # !!timestamp x is an AttributeError of the YAML library, !!int '' an IndexError
    except UNREADABLE as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: not readable as YAML: {_one_line(error)}") from None
    except RecursionError:
        raise ConfigError(
            f"{name}: not readable as YAML: its values are nested too deeply"
        ) from None
    assert isinstance(settings, DictConfig), "its root is a mapping"
    return settings


def parse_stored(text: str, *, name: str) -> DictConfig:
    """Return the settings in the config of a run, which may be a stranger's.

    Raises ConfigError as `parse_settings` does, and for a value that stands for another, such as
    ${oc.env:HOME}: `to_yaml` writes none, and it would put the reader's environment into the
    settings.
    """
    settings = parse_settings(text, name=name)
    if interpolated := next(_interpolations(OmegaConf.to_container(settings)), None):
        raise ConfigError(
            f"{name}: {interpolated} stands for another value; a run's settings are written out"
        )
    return settings


def _expanded_nodes(root: yaml.Node) -> int:
    """Count the values that a YAML text stands for. An alias counts as much as what it repeats.

    Raises ValueError for a number that takes too long to be read.
    """
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) not in counts:
            is_number = isinstance(node, yaml.ScalarNode) and node.tag != TEXT_TAG
            if is_number and len(node.value) > MAX_NUMBER_CHARACTERS:
                raise ValueError(f"it has a number of {len(node.value):,} characters")
            counts[id(node)] = MAX_NODES + 1  # of a value that contains itself
            parts = (
                [part for pair in node.value for part in pair]
                if isinstance(node, yaml.MappingNode)
                else node.value
            )
            counts[id(node)] = 1 + (
                0 if isinstance(node, yaml.ScalarNode) else sum(map(count, parts))
            )
        return counts[id(node)]

    return count(root)


def _interpolations(content: object, prefix: str = "") -> Iterator[str]:
    """Yield the keys of the values that stand for another value."""
    pairs = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in pairs:
        if isinstance(value, str) and "${" in value:
            yield f"{prefix}{key}"
        yield from _interpolations(value, f"{prefix}{key}.")


def _checked(settings: DictConfig, overrides: Sequence[str], *, name: str) -> Config:
    """Return the config of these settings with the overrides on top. Raises ConfigError, which
    calls the settings `name`.
    """
    layers: list[DictConfig | ListConfig] = [_with_new_names(settings)]
    layers.append(_overrides([_checked_override(text) for text in overrides]))
    # another environment's options are not added to
    if any(text.startswith("env.options=") for text in overrides):
        OmegaConf.update(layers[0], "env.options", {}, merge=False)
    for layer in layers:
        for key in _leaves(OmegaConf.to_container(layer)):
            _check_key(key)
        for key in ("source", "loss.corrections"):
            check_is_list(key, OmegaConf.select(layer, key))
    config = _merged(*layers, name=name, overrides=overrides)
    check(config)
    return config


def to_yaml(config: Config) -> str:
    """The whole resolved config, defaults included, as stored in run.json."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> Config:
    """Return the config that `to_yaml` wrote. Raises ConfigError for one of another version of this
    code.
    """
    try:
        stored = _with_new_names(parse_stored(text, name="the stored config"))
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), stored))
    # TypeError: a list where a section is wanted
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(
            f"the stored config does not fit this version of the code: {_one_line(error)}"
        ) from None
    assert isinstance(config, Config)
    return config


def differences(old: Config, new: Config) -> list[str]:
    """`key: old -> new` for every setting that differs; where the run lies, its end and how long it
    keeps data are left out.

    A run may be continued for more steps, from a moved directory, on other devices, with more or
    less kept on disk, and with other alarms and deadlines; anything else would be another run.
    """
    before, after = dict(flat(old)), dict(flat(new))
    keys = sorted(before.keys() | after.keys())
    return [
        f"{k}: {before.get(k)!r} -> {after.get(k)!r}"
        for k in keys
        if not _may_change(k) and before.get(k) != after.get(k)
    ]


def _with_new_names(layer: DictConfig | ListConfig) -> DictConfig | ListConfig:
    """Translate `prompt.admissible_only` into `prompt.invalid`, so that runs made before the change
    go on.
    """
    prompt = layer.get("prompt") if isinstance(layer, DictConfig) else None
    if isinstance(prompt, DictConfig) and "admissible_only" in prompt:
        old = prompt.pop("admissible_only")
        prompt.setdefault("invalid", "admissible" if old else "environment")
    return layer


def _may_change(key: str) -> bool:
    return key in MAY_CHANGE or key.startswith(("alarms.", "supervision."))


def _merged(
    file: DictConfig | ListConfig,
    given: DictConfig | ListConfig,
    *,
    name: str,
    overrides: Sequence[str],
) -> Config:
    """Raises ConfigError with what is to blame: the file, or the override of the key that OmegaConf
    names.
    """
    unfit = (OmegaConfBaseException, TypeError)  # TypeError: a list where a section is wanted
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), file)
    except unfit as error:
        raise ConfigError(f"{name}: {_one_line(error)}") from None
    try:
        config = OmegaConf.to_object(OmegaConf.merge(merged, given))
    except unfit as error:
        key = getattr(error, "full_key", None) or ""  # e.g. prompt.stop[0]
        blamed = [
            text
            for text in overrides
            if re.match(rf"{re.escape(text.partition('=')[0])}([.\[]|$)", key)
        ]
        raise ConfigError(
            f"{' '.join(blamed[-1:] or overrides or [name])}: {_said(error)}"
        ) from None
    assert isinstance(config, Config)
    return config


def _overrides(texts: Sequence[str]) -> DictConfig:
    """`source=RUN@where` as it is, since a condition is no YAML: several are several sources. A
    list in brackets is YAML.
    """
    given = [
        text for text in texts if text.startswith("source=") and not text.startswith("source=[")
    ]
    lists = [text for text in texts if text.startswith("source=[")]
    if lists and len(given) + len(lists) > 1:
        raise ConfigError(
            f"{' '.join([*given, *lists])}: a list is all sources; give one list, or source=RUN "
            "several times"
        )
    if "${" in "".join(given):
        raise ConfigError(
            f"{' '.join(given)}: ${{ stands for another setting; write '$' || '{{' for these two "
            "characters"
        )
    others = [text for text in texts if text not in given]
    for text in others:
        try:
            OmegaConf.from_dotlist([text])
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(f"{text}: not readable as YAML: {_one_line(error)}") from None
    layer = OmegaConf.from_dotlist(others)
    if given:
        OmegaConf.update(layer, "source", [text.removeprefix("source=") for text in given])
    return layer


def _checked_override(text: str) -> str:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"argument {text!r} is not key=value")
    is_text = isinstance(dict(flat(Config())).get(key), str)
    if is_text and value != "null" and not value.startswith(("'", '"')):
        # Quoted, because YAML would make 202611221855 of the run_dir 20261122_1855, and a section
        # of `a: b`.
        value = value.replace("'", "''")
        return f"{key}='{value}'"
    return text if value else f"{key}=''"  # OmegaConf would read null


def _check_key(key: str) -> None:
    known = [name for name, _ in flat(Config())]
    if any(name.startswith(f"{key}.") for name in known):
        raise ConfigError(
            f"{key!r} is a section, not a setting; give {key}.<setting>=value, see "
            "configs/schema.py"
        )
    if key not in known and not key.startswith(("env.options", "endpoint.body.")):
        raise ConfigError(
            f"unknown key {key!r}{hint(key, known)}; configs/schema.py lists every key"
        )


def _leaves(tree: object, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}{key}.")
    elif prefix:
        yield prefix[:-1]


def _one_line(error: Exception) -> str:
    """What is wrong, and with which key."""
    key = getattr(error, "full_key", None)
    return f"{key}: {_said(error)}" if key else _said(error)


def _said(error: Exception) -> str:
    """Of OmegaConf's lines the first, as the others say where in words of its own."""
    return " ".join(
        (
            str(error).partition("\n")[0]
            if isinstance(error, OmegaConfBaseException)
            else str(error)
        ).split()
    )
