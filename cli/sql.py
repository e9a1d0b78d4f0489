"""python -m store sql RUN "SELECT ...": one SELECT over a run, as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cli.store_arguments import seconds_above_zero, whole
from printable import PrintableStream, printable, printable_json
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
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="a new file outside the run; parquet needs it"
    )
    parser.add_argument(
        "--limit",
        type=whole(at_least=0, at_most=None),
        metavar="N",
        help=f"the first N rows (a table: {DEFAULT_ROWS}; the others: all)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds_above_zero,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--as-of",
        type=whole(at_least=0),
        metavar="LSN",
        help="the run as it was then, while its files are still there",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from store.reading.reader import open_run  # and with it DuckDB and Arrow

    if options.output is not None:
        _check_output(options.output, run_dir=options.run_dir)
    elif options.format == "parquet":
        raise StoreError("parquet is not for a terminal; add --output FILE")
    query = sys.stdin.read() if options.query == "-" else options.query
    as_text = options.format in ("csv", "json")  # Parquet and DuckDB's tables have types for times
    limit = (
        options.limit
        if options.limit is not None
        else DEFAULT_ROWS
        if options.format == "table"
        else None
    )
    with open_run(options.run_dir, as_of=options.as_of, warn=False) as reader:
        if limit is None:
            table, more = reader.sql(query, timeout_s=options.timeout, times_as_text=as_text), False
        else:
            table, more = reader.first(
                query, n_rows=limit, timeout_s=options.timeout, times_as_text=as_text
            )
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
    try:
        with redirect_stdout(drawn):
            duckdb.from_arrow(table).show(max_rows=max(1, table.num_rows), max_width=width)
    except duckdb.Error as error:
        why = " ".join(str(error).split())
        raise StoreError(
            f"this result cannot be shown as a table ({why}); add --format csv"
        ) from error
    out.write(printable(drawn.getvalue(), lines=True))


def _print_csv(table: pa.Table, out: TextIO) -> None:
    """Write nested values as JSON text, and NULL as no text.

    The text is exact, unless a terminal shows it: there control characters are escaped.
    """
    writer = (
        csv.writer(PrintableStream(out), lineterminator="\n") if out.isatty() else csv.writer(out)
    )
    writer.writerow(table.column_names)
    for row in _rows(table):
        writer.writerow(
            [_cell(value, kind) for value, kind in zip(row, table.schema.types, strict=True)]
        )


def _cell(value: object, kind: pa.DataType) -> object:
    """Return the text of one CSV cell."""
    if isinstance(value, list | tuple | dict):
        return json.dumps(_jsonable(value, kind), ensure_ascii=False)
    return _text(value)


def _print_json(table: pa.Table, out: TextIO) -> None:
    """Write one object a line."""
    names = _unique(table.column_names)
    for row in _rows(table):
        values = [
            _jsonable(value, kind) for value, kind in zip(row, table.schema.types, strict=True)
        ]
        out.write(
            printable_json(json.dumps(dict(zip(names, values, strict=True)), ensure_ascii=False))
            + "\n"
        )


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number behind those that are there already: an object has each key
    once.

    >>> _unique(["x", "x", "x_1"])
    ['x', 'x_2', 'x_1']
    """
    found: dict[str, None] = {}
    given = set(names)
    for name in names:
        unique, number = name, 0
        while unique in found or (number and unique in given):
            number += 1
            unique = f"{name}_{number}"
        found[unique] = None
    return list(found)


def _write_parquet(table: pa.Table, out: TextIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(table, out.buffer, compression="zstd")
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise StoreError(
            f"Parquet cannot hold this result ({error}); cast the column in the query"
        ) from error


PRINT: Mapping[str, Callable[[pa.Table, TextIO], None]] = {
    "table": _print_table,
    "csv": _print_csv,
    "json": _print_json,
    "parquet": _write_parquet,
}


def _rows(table: pa.Table) -> Iterator[tuple[object, ...]]:
    for batch in table.to_batches():
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _jsonable(value: object, kind: pa.DataType) -> object:
    """Return the value as JSON has it: no NaN, whole numbers of any size as numbers, values of
    other types as text.
    """
    import pyarrow as pa

    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, list) and pa.types.is_map(kind):
        pairs = [(_key(key, kind.key_type), _jsonable(item, kind.item_type)) for key, item in value]
        return dict(
            zip(_unique([key for key, _ in pairs]), [item for _, item in pairs], strict=True)
        )
    if isinstance(value, list):
        return [_jsonable(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {name: _jsonable(item, kind.field(name).type) for name, item in value.items()}
    return value if isinstance(value, str | int | float | None) else _text(value)


def _number(value: Decimal) -> int | float | str:
    """Return the decimal as a number; as text where the nearest float is another one."""
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _key(value: object, kind: pa.DataType) -> str:
    """Return the key of a map as the key of an object: JSON text where it is nested."""
    return str(_cell(value, kind))


def _text(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value if value is None else str(value)


def _check_output(output: Path, *, run_dir: Path) -> None:
    if output.resolve().is_relative_to(run_dir.resolve()):
        raise StoreError(
            f"{output} is inside the run, which belongs to its writers; write it elsewhere"
        )
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
        raise StoreError(
            f"{output} cannot be written: {error.strerror}; choose another place"
        ) from error
