"""gigpo study: run the studies of `benchmarks/studies`, and write their pages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from cli.arguments import AT_LEAST_1, Command
from printable import UserError, printable, say

ROOT = Path(__file__).resolve().parents[1]
EPILOG = """\b
Examples:
  gigpo study                               the studies, and how much of each is done
  gigpo study horizon --dry-run             its arms, what is missing, what that costs
  gigpo study horizon --jobs 2              run what is missing, then write the page
  gigpo study horizon --page                the page again, from the stored results
"""


@click.command(cls=Command, epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--jobs", type=AT_LEAST_1, default=1, help="Processes at the same time.")
@click.option("--seeds", type=AT_LEAST_1, help="Seeds to run, 0 to N-1 (default: the study's).")
@click.option("--dry-run", is_flag=True, help="Show the arms, what is missing, and its cost.")
@click.option("--page", is_flag=True, help="Only write the page, from the stored results.")
def study(*, name: str | None, jobs: int, seeds: int | None, dry_run: bool, page: bool) -> None:
    """Run a study: many short runs that answer one question with intervals.

    Safe to stop at any time: the same command goes on. Results are committed, so --page writes the
    same page without running anything. Works in a checkout only.
    """
    if not name:
        for each in _module("study").NAMES:
            _show(_module("study").load(each), seeds=None)
        return
    found = _module("study").load(name)
    if dry_run:
        _show(found, seeds=seeds, arms=True)
        return
    if not page:
        _module("runner").run_missing(found, seeds=seeds or found.seeds, jobs=jobs)
    say(f"the page: {_module('page').write_page(found)}")
    _module("index").write_index()


def _module(name: str) -> Any:
    if not (ROOT / "benchmarks" / "studies").is_dir():
        raise UserError(f"{ROOT} has no benchmarks/studies; run gigpo study from a checkout")
    if str(ROOT) not in sys.path:  # `benchmarks` is in no installed package
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"benchmarks.studies.{name}")


def _show(found: Any, *, seeds: int | None, arms: bool = False) -> None:
    seeds = seeds or found.seeds
    todo = _module("runner").missing(found, seeds=seeds)
    n_missing = sum(len(each) for _, each in todo)
    hours = n_missing * found.run_cpu_s / 3600
    say(
        f"{found.name}: {found.title}. {len(found.arms)} arms x {seeds} seeds, {n_missing} runs "
        f"missing, about {hours:.1f} core-hours"
    )
    for arm in found.arms if arms else ():
        settings = ", ".join(f"{key}={value}" for key, value in arm.settings.items())
        print(printable(f"  {arm.name}: {settings}"))
