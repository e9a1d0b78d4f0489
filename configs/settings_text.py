"""Read settings from a YAML text, within bounds: it may come with the run of a stranger.

    settings = parse_settings(text, name="a.yaml", may_refer=True)  # a file that a person gives
    settings = parse_settings(text, name="run.json", may_refer=False)  # a config that a run keeps

Names and types of the settings are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bounded_yaml import MAX_SETTINGS_DEPTH, MAX_SETTINGS_EVENTS, TEXT_TAG, bounded_events
from configs.errors import ConfigError
from configs.interpolations import check_expansion, check_forms
from printable import one_line

MAX_NODES = 100_000  # values that a YAML text stands for
MAX_NUMBER_CHARACTERS = 100  # YAML reads 1:1:1 to the base 60, in quadratic time
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


def parse_settings(text: str, *, name: str, may_refer: bool) -> DictConfig:
    """Return the settings in a YAML text. Raises ConfigError, which calls the text `name`.

    Without `may_refer`, no value may stand for another. That is checked before OmegaConf reads the
    text: its parser takes the longer, the deeper such values are nested.
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
        if not may_refer and (interpolated := next(_interpolations(root), None)):
            raise ConfigError(
                f"{name}: {interpolated} stands for another value; a run's settings are written out"
            )
        for scalar in _texts(root) if may_refer else ():
            check_forms(scalar)
        settings = OmegaConf.create(text)
        assert isinstance(settings, DictConfig), "its root is a mapping"
        check_expansion(settings)
    except ConfigError:
        raise
    except PARSE_ERRORS as error:
        raise ConfigError(f"{name}: not readable as YAML: {describe_error(error)}") from None
    except RecursionError:
        raise ConfigError(
            f"{name}: not readable as YAML: its values are nested too deeply"
        ) from None
    return settings


def parse_saved(text: str, *, name: str) -> DictConfig:
    """Return the settings in a run's config, which may be untrusted, without checking their names.

    Raises ConfigError for text that is no YAML mapping, and for a value that stands for another,
    such as ${oc.env:HOME}. `as_yaml` writes none, and it would read the environment of whoever
    opens the run.
    """
    return parse_settings(text, name=name, may_refer=False)


def check_size(settings: DictConfig, *, name: str) -> None:
    """Raise ConfigError if settings of several origins stand for too much together."""
    try:
        check_expansion(settings)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {describe_error(error)}") from None


def describe_error(error: Exception) -> str:
    """Return the message of an error in one line, with the key that OmegaConf names."""
    key = getattr(error, "full_key", None)
    return f"{key}: {error_message(error)}" if key else error_message(error)


def error_message(error: Exception) -> str:
    """Return the message of an error in one line, without OmegaConf's further lines."""
    text = str(error)
    if isinstance(error, OmegaConfBaseException):
        text = text.partition("\n")[0]  # the other lines repeat the place
        text = text.replace(
            "is incompatible with type hint 'Union[int, WorkerRange]'",
            "is no whole number, and no range such as {min: 2, max: 16}",
        )
        text = text.replace(
            "Structured config of type `WorkerRange` has missing mandatory value",
            "a range needs both ends, such as {min: 2, max: 16}; missing",
        )
    return one_line(text)


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
