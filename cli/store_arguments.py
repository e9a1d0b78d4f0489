"""What the commands' arguments have in common: numbers with bounds, and no option that silently
replaces an earlier one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeVar

from printable import ArgumentParser

LARGEST = 2**63 - 1  # that the catalog can hold
MAX_SECONDS = 1e9
MAX_DAYS = 1e6
Number = TypeVar("Number", int, float)


class Parser(ArgumentParser):
    """Refuses an option that is given twice: argparse would forget the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("action", None, _Once)


class _Once(argparse.Action):
    _given = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if self._given and option_string is not None:
            raise argparse.ArgumentError(self, "given twice; give it once")
        self._given = True
        setattr(namespace, self.dest, values)


def whole(*, at_least: int, at_most: int | None = LARGEST) -> Callable[[str], int]:
    """For `type=`: a whole number."""

    def parse(text: str) -> int:
        number = _parsed(int, text, what="a whole number")
        if number < at_least or (at_most is not None and number > at_most):
            most = f" to {at_most}" if at_most is not None else " or more"
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of {at_least}{most}")
        return number

    return parse


def seconds(text: str) -> float:
    """For `type=`: 0 or more."""
    return _between(text, at_most=MAX_SECONDS, what="seconds")


def seconds_above_zero(text: str) -> float:
    """For `type=`."""
    return _above_zero(seconds(text), what="seconds")


def days_above_zero(text: str) -> float:
    """For `type=`."""
    return _above_zero(_between(text, at_most=MAX_DAYS, what="days"), what="days")


def _between(text: str, *, at_most: float, what: str) -> float:
    number = _parsed(float, text, what="a number")
    if not (math.isfinite(number) and 0 <= number <= at_most):
        raise argparse.ArgumentTypeError(f"{text} is not a number of {what} from 0 to {at_most:g}")
    return number


def _above_zero(number: float, *, what: str) -> float:
    if number == 0:
        raise argparse.ArgumentTypeError(f"{what} must be above 0; leave it out for the default")
    return number


def _parsed(kind: Callable[[str], Number], text: str, *, what: str) -> Number:
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}") from error
