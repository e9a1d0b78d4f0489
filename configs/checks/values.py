"""Check values that several sections have: lists, URLs, names of variables."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from configs.errors import ConfigError

VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def check_is_list(key: str, value: object) -> None:
    """Raise ConfigError for a single name, which would be read letter by letter."""
    if isinstance(value, str):
        raise ConfigError(f"{key}={value} is not a list; use {key}=[{value}]")


def check_url(key: str, url: str) -> None:
    """Raise ConfigError for a URL with a password, or one that is no URL of a server."""
    if "@" in url:  # a password would be written into the run directory
        remedy = "leave them out"
        if key == "endpoint.url":
            remedy += ", and name a variable with the key: endpoint.api_key_env"
        raise ConfigError(f"{key} has a name or password in it; {remedy}")
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url) or not _has_host(url):
        raise ConfigError(f"{key}={url!r} is no URL like http://localhost:8000/v1")


def _has_host(url: str) -> bool:
    """Return whether a URL names a host, and a port below 65,536 if any."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # an address with one bracket, or a port that is no number
        return False
