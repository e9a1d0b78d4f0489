"""gigpo sql: one SELECT over a run."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from cli.arguments import SECONDS_ABOVE_ZERO, Command, WholeNumber, as_of_option, run_argument
from cli.output_file import check_new_file, write_new_file
from cli.table_output import WRITERS
from printable import printable
from store import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_ROWS = 100  # of a table
DEFAULT_TIMEOUT_S = 60.0  # of a query
INCOMPLETE = 3  # exit status of an answer that lacks unreadable files
EPILOG = """\b
Examples:
  gigpo sql runs/a "SELECT learner_step, value FROM metrics WHERE name = 'train/success'"
  gigpo sql runs/a "FROM trajectories" --format parquet --output trajectories.parquet
  gigpo sql runs/a - < query.sql
\b
Exit status: 0 answered, 2 refused or failed, 3 answered without files that cannot be read.
"""


@click.command(cls=Command, epilog=EPILOG)
@run_argument
@click.argument("query")
@click.option(
    "--format",
    type=click.Choice(list(WRITERS)),
    default="table",
    show_default=True,
    help="How the rows are written; json is one object a line.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write a new file outside the run. Parquet needs it.",
)
@click.option(
    "--limit",
    type=WholeNumber(at_least=0, at_most=None),
    help=f"Show the first rows only (a table: {DEFAULT_ROWS} unless told otherwise).",
)
@click.option(
    "--timeout",
    type=SECONDS_ABOVE_ZERO,
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="End the query after so many seconds.",
)
@as_of_option
def sql(
    *,
    run: Path,
    query: str,
    format: str,
    output: Path | None,
    limit: int | None,
    timeout: float,
    as_of: int | None,
) -> int:
    """Ask a run one SELECT, also while it is training. QUERY - reads standard input.

    Views: steps, trajectories, groups, anchor_groups, lineage, versions, metrics and more.

    The query runs in a child process that can only read, and only the run. On Linux from 5.13 the
    kernel enforces this (Landlock). Elsewhere DuckDB's file system is replaced by one that cannot
    write or leave the run. Extensions and settings are off. Ctrl-C and the time limit end the
    process. A bare DuckDB shell has none of this protection.
    """
    from store import open_run

    check_new_file("--output", output, run=run)
    if output is None and format == "parquet":
        raise StoreError("parquet is not for a terminal; add --output FILE")
    if query == "-":
        query = sys.stdin.read()
    if limit is None and format == "table":
        limit = DEFAULT_ROWS
    as_text = format in ("csv", "json")  # Parquet and DuckDB's tables have types for times
    with open_run(run, as_of=as_of, warn=False) as reader:
        if limit is None:
            table = reader.sql(query, timeout_s=timeout, times_as_text=as_text)
            is_cut = False
        else:
            table, is_cut = reader.first(
                query, n_rows=limit, timeout_s=timeout, times_as_text=as_text
            )
    if output is None:
        WRITERS[format](table, sys.stdout)
    else:
        write_new_file(
            "--output", output, write=lambda file: _write(table, file, format=format), run=run
        )
    if is_cut:
        print(printable(f"only the first {limit} rows; --limit shows more"), file=sys.stderr)
    if reader.left_out:
        print(printable(f"warning: {reader.left_out}"), file=sys.stderr)
        return INCOMPLETE
    return 0


def _write(table: pa.Table, file: BinaryIO, *, format: str) -> None:
    out = io.TextIOWrapper(file, encoding="utf-8", newline="")
    WRITERS[format](table, out)
    out.detach()  # it flushes, and leaves the file open
