"""Read a run's settings, and compare them with others or with the defaults.

What may be a secret is compared, and not shown: a report is made to be sent. No query may read the
settings, because every user of the machine may ask one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from omegaconf import OmegaConf

import configs
from configs import Config, ConfigError
from store import CONFIG_FILE, RunLayout, StoreError

MAX_CHARACTERS = 1 << 16  # that a page reads; most runs have 5,000
MAX_PLACE_CHARACTERS = 300  # of a dotted key: nested names of a forged run have thousands
UNSET = "–"
NOT_COMPARED = ("run_dir",)  # where a run lies is no setting of its training


Settings = TypeVar("Settings")
_parsing = threading.Lock()  # a stranger's text may take seconds of all threads' time


def settings_of(
    layout: RunLayout, *, has_left: Callable[[], bool] = lambda: False
) -> Mapping[str, object]:
    """Return the settings of a run's newest start, by dotted key. Raises ConfigError, StoreError.

    They are no part of a snapshot: they are as they are now. `has_left` says that nobody waits for
    them any more.
    """
    return _parsed(layout, _flat_settings, has_left=has_left)


def viewed_config(layout: RunLayout, *, has_left: Callable[[], bool]) -> Config:
    """Return the settings of a run's newest start. Raises as `settings_of`."""
    return _parsed(layout, _config, has_left=has_left)


def _parsed(
    layout: RunLayout,
    parse: Callable[[str], Settings | ConfigError],
    *,
    has_left: Callable[[], bool],
) -> Settings:
    text = layout.newest_settings()
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"the run's settings have {len(text):,} characters, more than {MAX_CHARACTERS:,}; "
            f"read them in {CONFIG_FILE}"
        )
    with _parsing:
        if has_left():
            raise StoreError("nobody waits for the settings any more")
        found = parse(text)
    if isinstance(found, ConfigError):
        raise ConfigError(str(found))
    return found


# Errors are kept too: each request would parse the text again.
@lru_cache(maxsize=8)
def _flat_settings(text: str) -> Mapping[str, object] | ConfigError:
    try:
        parsed = configs.parse_saved(text, name="the run's settings")
    except ConfigError as error:
        return error.with_traceback(None)
    return dict(_flat(OmegaConf.to_container(parsed)))


@lru_cache(maxsize=8)
def _config(text: str) -> Config | ConfigError:
    try:
        return configs.from_yaml(text)
    except ConfigError as error:
        return error.with_traceback(None)


def default_settings() -> dict[str, object]:
    """Return every setting at its default, by dotted key."""
    return dict(_flat(OmegaConf.to_container(OmegaConf.structured(Config()))))


def differing(
    first: Mapping[str, object], second: Mapping[str, object]
) -> list[tuple[str, str, str]]:
    """Return (key, value in the first, value in the second) where they differ, by key."""
    keys = sorted({*first, *second} - {*NOT_COMPARED})
    return [
        (key, _shown(first, key), _shown(second, key))
        for key in keys
        if _comparable(first.get(key)) != _comparable(second.get(key))
    ]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            known = configs.shown_name(str(name))
            place = f"{prefix}.{known}" if prefix else known
            yield from _flat(below, place[:MAX_PLACE_CHARACTERS])
    else:
        yield prefix, value


def _comparable(value: object) -> object:
    """Return a text in which 1 and 1.0 are the same, and nothing set is the same as nothing."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    return None if value in (None, "", [], {}) else repr(value)


def _shown(settings: Mapping[str, object], key: str) -> str:
    value = settings.get(key)
    if value in (None, "", [], {}):
        return UNSET
    inside = [each for _, each in configs.shown(key, value)]
    return ", ".join(map(str, inside))
