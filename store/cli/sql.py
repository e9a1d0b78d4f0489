"""python -m store sql RUN "SELECT ...": one SELECT over a run, as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from printable import PrintableStream, printable, printable_json
from store.cli._arguments import seconds_above_zero, whole
from store.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_ROWS = 100  # shown of a table
WIDTH_WITHOUT_TERMINAL = 250  # enough to be read by a program
DEFAULT_TIMEOUT_S = 60.0
DESCRIPTION = """Asks a run one SELECT, also while it is training.

The query runs in a process of its own that can only read, and only the run. On Linux from 5.13 the kernel enforces this
(Landlock): no write, no other file, no TCP, whatever the statement does. Elsewhere DuckDB's file system is replaced by one
that cannot write or leave the run, which holds as long as DuckDB keeps to it. Loading extensions and changing settings are
off in both. Ctrl-C and the time limit end the process. A bare DuckDB shell has none of this: there, only the permissions of
the files protect a run.

Exit status: 0 answered, 2 refused or failed, 3 answered without files that cannot be read (a warning names the first)."""
INCOMPLETE = 3


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "sql",
        help="one SELECT over steps, trajectories, groups, anchor_groups, lineage, metrics, ...",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("query", metavar="QUERY", help="one SELECT; - reads it from standard input")
    parser.add_argument("--format", choices=("table", "csv", "json", "parquet"), default="table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a new file outside the run; parquet needs it")
    parser.add_argument(
        "--limit",
        type=whole(at_least=0, at_most=None),
        metavar="N",
        help=f"the first N rows (a table: {DEFAULT_ROWS}; the others: all)",
    )
    parser.add_argument(
        "--timeout", type=seconds_above_zero, default=DEFAULT_TIMEOUT_S, metavar="S", help="seconds (default: %(default)g)"
    )
    parser.add_argument(
        "--as-of", type=whole(at_least=0), metavar="LSN", help="the run as it was then, while its files are still there"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from store.reading.reader import open_run  # and with it DuckDB and Arrow

    if options.output is not None:
        _check_output(options.output, run_dir=options.run_dir)
    elif options.format == "parquet":
        raise StoreError("parquet is not for a terminal; add --output FILE")
    query = sys.stdin.read() if options.query == "-" else options.query
    limit = options.limit if options.limit is not None else DEFAULT_ROWS if options.format == "table" else None
    with open_run(options.run_dir, as_of=options.as_of, warn=False) as reader:
        if limit is None:
            table, more = reader.sql(query, timeout_s=options.timeout), False
        else:
            table, more = reader.first(query, n_rows=limit, timeout_s=options.timeout)
    with _destination(options.output) as out:
        PRINT[options.format](table, out)
    if more:
        print(printable(f"only the first {limit} rows; --limit shows more"), file=sys.stderr)
    if reader.left_out:
        print(printable(f"warning: {reader.left_out}"), file=sys.stderr)
        return INCOMPLETE
    return 0


def _print_table(table: pa.Table, out: TextIO) -> None:
    import duckdb

    if table.column_names == ["explain_key", "explain_value"]:
        out.write(printable("\n".join(table["explain_value"].to_pylist()), lines=True) + "\n")
        return
    width = os.get_terminal_size(out.fileno()).columns if out.isatty() else WIDTH_WITHOUT_TERMINAL
    drawn = io.StringIO()
    with redirect_stdout(drawn):
        duckdb.from_arrow(table).show(max_rows=max(1, table.num_rows), max_width=width)
    out.write(printable(drawn.getvalue(), lines=True))


def _print_csv(table: pa.Table, out: TextIO) -> None:
    """Write nested values as JSON text, no value as no text.

    The text is exact, unless a terminal shows it: there control characters are escaped.
    """
    writer = csv.writer(PrintableStream(out), lineterminator="\n") if out.isatty() else csv.writer(out)
    writer.writerow(table.column_names)
    for row in _rows(table):
        writer.writerow(
            [
                json.dumps(_jsonable(cell), ensure_ascii=False) if isinstance(cell, list | tuple | dict) else _text(cell)
                for cell in row
            ]
        )


def _print_json(table: pa.Table, out: TextIO) -> None:
    """One object a line."""
    for row in _rows(table):
        cells = dict(zip(table.column_names, map(_jsonable, row), strict=True))
        out.write(printable_json(json.dumps(cells, ensure_ascii=False)) + "\n")


def _write_parquet(table: pa.Table, out: TextIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(table, out.buffer, compression="zstd")
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise StoreError(f"Parquet cannot hold this result ({error}); cast the column in the query") from error


PRINT: Mapping[str, Callable[[pa.Table, TextIO], None]] = {
    "table": _print_table,
    "csv": _print_csv,
    "json": _print_json,
    "parquet": _write_parquet,
}


def _rows(table: pa.Table) -> Iterator[tuple[object, ...]]:
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        if pa.types.is_temporal(field.type) and getattr(field.type, "unit", None) == "ns":  # finer than Python's own types
            table = table.set_column(place, field.name, table.column(place).cast(pa.string()))
    for batch in table.to_batches():
        yield from zip(*(column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns), strict=True)


def _jsonable(value: object) -> object:
    """As JSON has it: no NaN, whole numbers of any size as numbers, what it has no type for as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | None) else _text(value)


def _text(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value if value is None else str(value)


def _check_output(output: Path, *, run_dir: Path) -> None:
    if output.resolve().is_relative_to(run_dir.resolve()):
        raise StoreError(f"{output} is inside the run, which belongs to its writers; write it elsewhere")
    if os.path.lexists(output):
        raise StoreError(f"{output} exists; choose another name or remove it first")


@contextmanager
def _destination(output: Path | None) -> Iterator[TextIO]:
    """Standard output, or a new file that is removed again if it was not finished."""
    if output is None:
        yield sys.stdout
        return
    try:
        with output.open("x", newline="", encoding="utf-8") as out:
            try:
                yield out
            except BaseException:
                output.unlink()
                raise
    except OSError as error:
        raise StoreError(f"{output} cannot be written: {error.strerror}; choose another place") from error
