"""Define the error of a config, for all modules that refuse a setting."""

from __future__ import annotations

from printable import UserError


class ConfigError(UserError, ValueError):
    """A mistake in a config; the message is one line that names the value and the fix."""
