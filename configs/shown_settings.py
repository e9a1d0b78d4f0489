"""Show settings to others, in a report, on a page or to a tracker: without what may be a secret.

shown_settings(config)                  # {"env.options.n_games": 3, ...}
shown("env.options", {"n_games": 3})    # one setting
holds_secrets(config)                   # whether others should not read the run's files
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from configs.dotted import dotted_settings
from configs.schema import Config
from url_secrets import IN_A_URL, SECRET_NAMES, public_url

# The content of these settings is not ours: any text in them may hold a key.
FREE_KEYS = ("env.options", "environments", "endpoint.body", "actors.workers")
SECRET = re.compile(SECRET_NAMES, re.IGNORECASE)
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SPACE = re.compile(r"(\s+)")
HIDDEN = "(not shown)"


def shown_settings(config: Config) -> dict[str, Any]:
    """Return every setting by its name, without what may be a secret."""
    pairs = (pair for key, value in dotted_settings(config) for pair in shown(key, value))
    return dict(pairs)


def shown(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a setting, or the settings inside it, without what may be a secret.

    Of an environment's options and a request's body only numbers and flags are shown. Elsewhere a
    URL loses its password and query.
    """
    inside = _numbers(value, key) if is_free(key) else [(key, value)]
    for name, each in inside:
        yield name, _without_password(each)


def shown_name(name: str) -> str:
    """Return a setting's own name, unless it may hold a secret, as `https://host?key=1` does."""
    return name if NAME.fullmatch(name) else HIDDEN


def is_free(key: str) -> bool:
    """Return whether a setting, or what it is inside of, may have any text."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)


def holds_secrets(config: Config) -> bool:
    """Return whether a text has the name of a secret, or is a URL with a password.

    A URL's query counts too in settings whose content is not ours. Elsewhere none may hold a key.
    """
    for key, value in dotted_settings(config):
        for name, text in _texts(value, key):
            is_secret = SECRET.search(name) or _without_password(text) != text
            if _has_password(text) or (is_free(key) and is_secret):
                return True
    return False


def _has_password(text: str) -> bool:
    servers = (rest.partition("/")[0] for rest in text.split(IN_A_URL)[1:])
    return any("@" in server for server in servers)


def _numbers(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and flags inside a value by their names, and hide the rest."""
    if isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(each, f"{key}.{shown_name(str(name))}")
    else:
        is_number = isinstance(value, int | float) and not SECRET.search(key)
        yield key, value if is_number else HIDDEN


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the texts inside a value by their names."""
    if isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(each, f"{key}.{name}")
    elif isinstance(value, str):
        yield key, value


def _without_password(value: Any) -> Any:
    """Return a value whose URLs have no name and password, no query and no fragment."""
    if isinstance(value, list | tuple):
        return [_without_password(each) for each in value]
    if not isinstance(value, str) or IN_A_URL not in value:
        return value
    return "".join(map(public_url, SPACE.split(value)))
