"""What every environment asks of its options: all there, none unknown; and of the split that tasks
are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

SPLITS = ("train", "heldout")


class OptionsError(ValueError):
    """An option is unknown or missing, or has a value that none could have, whatever is or is not
    on this machine.
    """


class MissingOption(OptionsError, KeyError):
    """An environment asked for an option that the config does not have. `except KeyError` still
    catches it.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show its repr


class Options(dict[str, Any]):
    """Options as an environment gets them: a mapping whose missing keys are named in one line."""

    def __missing__(self, option: str) -> object:
        given = ", ".join(map(str, self)) or "no options"
        raise MissingOption(
            f"option {option!r} is missing (given: {given}); set env.options.{option}=..."
        )


def check_options(
    name: str, options: Mapping[str, object], known: Collection[str]
) -> dict[str, Any]:
    """All of `known`, and nothing else. Raises OptionsError, in one line that names what is missing
    or unknown.
    """
    if set(options) != set(known):
        wrong = sorted(set(known).symmetric_difference(options))
        raise OptionsError(
            f"{name} options missing or unknown: {', '.join(wrong)}; it takes {sorted(known)}"
        )
    return dict(options)


def check_split(split: str) -> None:
    """Raises ValueError if it is none of the two."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {sorted(SPLITS)}")


def whole_number(name: str, option: str, value: object, *, least: int) -> int:
    """Raises OptionsError, in one line, for anything else, also for true and false."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionsError(
            f"{name} option {option}={value!r} must be a whole number, at least {least}"
        )
    return value


def find(name: str, option: str, target: object) -> Any:
    """What `module:name` names. Raises ValueError, in one line that names the option."""
    module_name, _, inner = str(target).partition(":")
    try:
        return getattr(importlib.import_module(module_name), inner)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} option {option}={target!r} cannot be loaded: {error}; write it module:name"
        ) from error
