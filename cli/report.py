"""gigpo report: what a run showed, as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import Command, as_of_option, run_argument
from printable import printable

EPILOG = """\b
Examples:
  gigpo report runs/a                        writes runs/a/report.html
  gigpo report runs/a --output a.html --as-of 2974
"""


@click.command(cls=Command, epilog=EPILOG)
@run_argument
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write this file.  [default: RUN/report.html]",
)
@click.option("--overwrite", is_flag=True, help="Replace the file also if it is no report.")
@as_of_option
def report(*, run: Path, output: Path | None, overwrite: bool, as_of: int | None) -> None:
    """Write what a run showed into one HTML file, to keep or to send.

    Did it learn, is it stable, what limits it, what was dropped and why, where it still goes wrong,
    with the queries behind each figure. The file needs no network and no server. Every training
    writes it at its end. The run may be training meanwhile.
    """
    from analysis import write_report_file

    print(printable(write_report_file(run, output=output, as_of=as_of, overwrites=overwrite)))
