"""gigpo status, stop and workers: look at a run that is driven by another process, and steer it."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import AT_LEAST_1, Command, run_argument
from printable import plain_console


@click.command(cls=Command, epilog="Example: gigpo status runs/quickstart")
@run_argument
def status(run: Path) -> None:
    """Show how far a run is, and what each of its processes does."""
    import driver

    driver.status(run, plain_console(soft_wrap=True))


@click.command(cls=Command, epilog="Example: gigpo stop runs/quickstart")
@run_argument
def stop(run: Path) -> None:
    """Stop a run in order, and remove what a killed one left.

    Finished episodes are committed, and the learner writes a checkpoint. The command that started
    the run goes on with it.
    """
    import driver

    driver.stop(run, plain_console(soft_wrap=True))


@click.command(cls=Command, epilog="Example: gigpo workers runs/quickstart 4")
@run_argument
@click.argument("number", type=AT_LEAST_1)
def workers(run: Path, number: int) -> None:
    """Change the number of workers of a run that is training."""
    import driver

    driver.ask_for_workers(run, number)
    plain_console(soft_wrap=True).print(f"{run}: {number} workers from now on")
