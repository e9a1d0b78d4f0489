"""Read the option --quick of a benchmark, and show its figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping


def quick_parser(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser that knows --quick. `quick` says what is left out with it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def show_table(figures: Mapping[str, float | None], required: Mapping[str, str]) -> None:
    """Print the figures with what is required of them. None has not been measured."""
    print(f"{'figure':36} {'measured':>14}   required")
    for name, value in figures.items():
        measured = "-" if value is None else f"{value:,.3f}"
        print(f"{name:36} {measured:>14}   {required.get(name, '')}", flush=True)


def show_json(figures: Mapping[str, float | None], names: Iterable[str]) -> None:
    """Print the named figures as one line of JSON, the last line of a benchmark."""
    chosen = {name: figures[name] for name in names}
    print(json.dumps({name: value and round(value, 4) for name, value in chosen.items()}))
