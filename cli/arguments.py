"""Define the arguments and options that several commands share, and check them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

LARGEST_NUMBER = 2**63 - 1  # that the catalog can hold
MAX_SECONDS = 1e9  # 30 years
MAX_DAYS = 1e6  # 2,700 years
ALL_NEEDS = "--all shows settings; give it with --dry-run"


class Command(click.Command):
    """A command that refuses an option given twice. Click would silently use the last one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for parameter in {id(each): each for each in order}.values():
                repeats = not (parameter.multiple or isinstance(parameter, click.Argument))
                if repeats and order.count(parameter) > 1:
                    raise click.UsageError(f"{parameter.opts[0]}: given twice; give it once", ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, within a limit of memory if it reads a run of somebody else."""
        places: list[Path] = []
        for parameter in self.params:
            if isinstance(parameter.type, RunPath):
                places += parameter.type.places(ctx.params.get(str(parameter.name)))
        if not places or ctx.params.get("trust"):
            return super().invoke(ctx)

        from store import limited_memory

        with limited_memory(places):
            return super().invoke(ctx)


class RunPath(click.Path):
    """A run that a command reads, or with `has_step` RUN@STEP, or a directory or URI with one.

    With `may_be_config` it may be the config of an evaluation instead.
    """

    def __init__(
        self, *, path_type: type, has_step: bool = False, may_be_config: bool = False
    ) -> None:
        super().__init__(path_type=path_type)
        self.has_step, self.may_be_config = has_step, may_be_config

    def places(self, given: Any) -> list[Path]:
        """Return the directories in a parsed value: in none, in one, or in a tuple of several.

        Whether one is a file is not looked at: its owner could put a run there before it is read.
        """
        if given is None:
            return []
        texts = [str(value) for value in (given if isinstance(given, tuple) else (given,))]
        if self.may_be_config:
            from driver import is_config

            texts = [text for text in texts if not is_config(text)]
        if self.has_step:
            texts = [_without_step(text) for text in texts]
        return [Path(text) for text in texts if "://" not in text]  # a URI is no directory here


def _without_step(text: str) -> str:
    """Return the run of `RUN@STEP`. A text without an @ is a run."""
    run, _, rest = text.rpartition("@")
    return run or rest


class Settings(click.Argument):
    """`key=value` settings after the other arguments."""


class Amount(click.ParamType):
    """A finite number from 0, or above 0, to `at_most`."""

    def __init__(self, unit: str, *, at_most: float, above_zero: bool) -> None:
        self.name = unit
        self.at_most = at_most
        self.above_zero = above_zero

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value[:40]!r} is not a number of {self.name}", param, ctx)
        if not (math.isfinite(number) and 0 <= number <= self.at_most):
            limit = f"from 0 to {self.at_most:g}"
            self.fail(f"{value} is not a number of {self.name} {limit}", param, ctx)
        if self.above_zero and number == 0:
            self.fail(f"{self.name} must be above 0; leave it out for the default", param, ctx)
        return number


class WholeNumber(click.ParamType):
    """A whole number of at least `at_least`, and at most `at_most` if that is not None."""

    name = "number"

    def __init__(self, *, at_least: int, at_most: int | None = LARGEST_NUMBER) -> None:
        self.at_least, self.at_most = at_least, at_most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value[:40]!r} is not a whole number", param, ctx)
        if number < self.at_least or (self.at_most is not None and number > self.at_most):
            limit = "or more" if self.at_most is None else f"to {self.at_most}"
            self.fail(f"{value} is not a whole number of {self.at_least} {limit}", param, ctx)
        return number


SECONDS = Amount("seconds", at_most=MAX_SECONDS, above_zero=False)
SECONDS_ABOVE_ZERO = Amount("seconds", at_most=MAX_SECONDS, above_zero=True)
DAYS_ABOVE_ZERO = Amount("days", at_most=MAX_DAYS, above_zero=True)
AT_LEAST_0 = WholeNumber(at_least=0)
AT_LEAST_1 = WholeNumber(at_least=1)

run_argument = click.argument("run", type=RunPath(path_type=Path))
settings_argument = click.argument("settings", cls=Settings, nargs=-1, metavar="[KEY=VALUE]...")
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Follow the settings of a run that somebody else made. It is remembered, also after "
    "--dry-run.",
)
as_of_option = click.option(
    "--as-of", type=AT_LEAST_0, metavar="LSN", help="Show the run as it was at this log number."
)
all_option = click.option(
    "--all",
    "all_settings",
    is_flag=True,
    help="With --dry-run: show every setting, not only those that differ from the defaults.",
)
where_option = click.option(
    "--where", metavar="SQL", help="Select trajectories by this condition (default: all)."
)
