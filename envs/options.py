"""Check the options and the split that an environment is given."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

SPLITS = ("train", "heldout")


class OptionsError(ValueError):
    """An option is unknown, missing or wrong on every machine."""


class MissingOption(OptionsError, KeyError):
    """An environment asked for an option that the config lacks. It is a KeyError too."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show its repr


class Options(dict[str, Any]):
    """The options that an environment gets: a mapping that names a missing key in one line."""

    def __missing__(self, option: str) -> object:
        given = ", ".join(map(str, self)) or "no options"
        raise MissingOption(
            f"option {option!r} is missing (given: {given}); set env.options.{option}=..."
        )


def check_options(
    name: str, options: Mapping[str, object], known: Collection[str]
) -> dict[str, Any]:
    """Return the options if they are exactly the known ones. Raises OptionsError otherwise."""
    if set(options) != set(known):
        wrong = sorted(set(known).symmetric_difference(options))
        raise OptionsError(
            f"{name} options missing or unknown: {', '.join(wrong)}; it takes {sorted(known)}"
        )
    return dict(options)


def check_split(split: str) -> None:
    """Raise ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {sorted(SPLITS)}")


def whole_numbers(
    name: str, options: Mapping[str, Any], least_values: Mapping[str, int]
) -> dict[str, int]:
    """Return the named options. Raises OptionsError unless each is an int and not below its least.

    `least_values` maps the names of options to their least values.
    """
    for option, least in least_values.items():
        value = options[option]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionsError(
                f"{name} option {option}={value!r} must be a whole number, at least {least}"
            )
    return {option: options[option] for option in least_values}


def load_target(name: str, option: str, target: object) -> Any:
    """Import the object that an option names as `module:name`. Raises ValueError."""
    module_name, _, inner = str(target).partition(":")
    try:
        return getattr(importlib.import_module(module_name), inner)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} option {option}={target!r} cannot be loaded: {error}; write it module:name, "
            "with its folder on PYTHONPATH"
        ) from error
