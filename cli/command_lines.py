"""The arguments of cli/train.py, cli/evaluate.py and cli/audit.py.

Each script reads its arguments here before it imports anything else, so that `--help` and mistakes
are answered at once. The imports of the scripts take seconds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from printable import ArgumentParser

# --learner.steps=5, --seed, --learner.steps
SETTING = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)*)(=.*)?", re.DOTALL)
# Played here, or stored by another run.
TRAINING = "split = 'train' OR group_uid IN (SELECT group_uid FROM groups WHERE source IS NOT NULL)"
TRAIN_NEEDS = (
    "give a config, e.g. configs/quickstart.yaml, or --resume, --fork, --status, --stop, --workers"
)


class Parser(ArgumentParser):
    """Refuse a setting that is written like an option, and say how it is written."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def parsed(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options, which may stand anywhere. Exit with status 2 for a mistake."""
        self.check_settings(arguments)
        return self.parse_intermixed_args(list(arguments))

    def check_settings(self, arguments: Sequence[str]) -> None:
        for place, word in enumerate(arguments):
            found = SETTING.fullmatch(word)
            if found is None or any(
                option.startswith(f"--{found[1]}") for option in self._option_string_actions
            ):
                continue
            following = arguments[place + 1] if place + 1 < len(arguments) else "VALUE"
            if found[2] is None and (following.startswith("-") or "=" in following):
                following = "VALUE"
            if found[2] is not None or "." in found[1]:
                name, value = found[1].replace("-", "_"), found[2] or f"={following}"
                self.wrong(f"{word}: settings are given without dashes, as {name}{value}")

    def wrong(self, message: str) -> NoReturn:
        """Print the message and end with status 2."""
        self.error(message)


def train_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of cli/train.py. Exit with status 2 for a mistake."""
    parser = Parser("Trains an agent; the same command continues a stopped run.")
    parser.add_argument("config", nargs="?", help="a YAML file, e.g. configs/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings on top of the file"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the config, placement, memory, disk and tasks; start nothing",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with a run, with its own settings; key=value changes some",
    )
    parser.add_argument(
        "--fork",
        metavar="RUN@STEP",
        help="a new run from a checkpoint of another; give its run_dir=...",
    )
    parser.add_argument(
        "--status",
        metavar="RUN",
        help="what every component of a run does, and when it was heard of",
    )
    parser.add_argument(
        "--stop", metavar="RUN", help="end a run in order, and remove what a killed one left behind"
    )
    parser.add_argument(
        "--workers", nargs=2, metavar=("RUN", "N"), help="N workers for a run, from now on"
    )
    add_trust(parser)
    options = parser.parsed(arguments)
    if not any(
        (
            options.config,
            options.resume,
            options.fork,
            options.status,
            options.stop,
            options.workers,
        )
    ):
        parser.wrong(TRAIN_NEEDS)
    return options


def evaluate_options(arguments: Sequence[str], *, description: str | None) -> argparse.Namespace:
    """Return the options of cli/evaluate.py. Exit with status 2 for a mistake."""
    parser = Parser(description)
    parser.add_argument(
        "weights", nargs="?", metavar="RUN[@STEP]|CONFIG", help="a run directory, or a YAML file"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top of it")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("RUN", "OTHER"),
        type=Path,
        help="two evaluations, task by task",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config and the tasks, ask a server once; no more",
    )
    add_trust(parser)
    options = parser.parsed(arguments)
    if not options.weights and not options.compare:
        parser.wrong("give a run, e.g. runs/quickstart, a config, or --compare")
    return options


def add_trust(parser: Parser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="follow the settings of a run that somebody else made; needed once",
    )


def audit_options(arguments: Sequence[str], *, description: str | None) -> argparse.Namespace:
    """Return the options of cli/audit.py. Exit with status 2 for a mistake."""
    parser = Parser(description)
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "settings", nargs="*", metavar="name=value", help="e.g. gamma=0.9 normalise=mean"
    )
    parser.add_argument(
        "--against",
        nargs="*",
        metavar="name=value",
        help="compare with these (none: the run's own)",
    )
    parser.add_argument(
        "--where",
        default=TRAINING,
        help="which steps to report, SQL over the columns of `steps`; computed from their whole groups; default: %(default)s",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the rows as Parquet; FILE must not exist"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="draw what is trained differently, by learner step",
    )
    return parser.parsed(arguments)
