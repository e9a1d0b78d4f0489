"""Read a run's settings, and compare them with others or with the defaults.

What may be a secret is compared, and not shown: a report is made to be sent. No query may read the
settings, because every user of the machine may ask one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

import configs
from configs import Config
from store import RunLayout

UNSET = "–"
NOT_COMPARED = ("run_dir",)  # where a run lies is no setting of its training


def settings_of(layout: RunLayout) -> dict[str, object]:
    """Return the settings of a run's newest start, by dotted key. Raises ConfigError, StoreError.

    They are no part of a snapshot: they are as they are now.
    """
    parsed = configs.parse_saved(layout.newest_settings(), name="the run's settings")
    return dict(_flat(OmegaConf.to_container(parsed)))


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
            yield from _flat(below, f"{prefix}.{known}" if prefix else known)
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
