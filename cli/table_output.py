"""Write a query's result as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from decimal import Decimal
from typing import TYPE_CHECKING, TextIO

from printable import PrintableStream, one_line, printable, printable_json
from store import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

WIDTH_WITHOUT_TERMINAL = 250  # enough to be read by a program


def _print_table(table: pa.Table, out: TextIO) -> None:
    import duckdb

    if _is_plan(table):
        out.write(printable("\n".join(table["explain_value"].to_pylist()), lines=True) + "\n")
        return
    width = os.get_terminal_size(out.fileno()).columns if out.isatty() else WIDTH_WITHOUT_TERMINAL
    drawn = io.StringIO()
    try:
        with redirect_stdout(drawn):
            duckdb.from_arrow(_with_plain_names(table)).show(
                max_rows=max(1, table.num_rows), max_width=width
            )
    except duckdb.Error as error:
        raise StoreError(
            f"this result cannot be shown as a table ({one_line(error)}); add --format csv"
        ) from error
    out.write(printable(drawn.getvalue(), lines=True))


def _with_plain_names(table: pa.Table) -> pa.Table:
    """Return the table with fields of structures in whose names nothing is a line of its own.

    DuckDB escapes the names of columns, and not those that a type names.
    """
    import pyarrow as pa

    arrays = [
        pa.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)
        if (kind := _plain_type(column.type)) != column.type
        else column
        for column in table.columns
    ]
    return pa.table(arrays, names=table.column_names)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct(
            [
                field.with_name(printable(field.name)).with_type(_plain_type(field.type))
                for field in kind
            ]
        )
    if pa.types.is_union(kind):
        fields = [
            field.with_name(printable(field.name)).with_type(_plain_type(field.type))
            for field in kind
        ]
        return pa.union(fields, kind.mode, kind.type_codes)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    return kind


def _is_plan(table: pa.Table) -> bool:
    """Return whether DuckDB's EXPLAIN made the table. A run's views may use its names too."""
    import pyarrow as pa

    if table.column_names != ["explain_key", "explain_value"]:
        return False
    plan = table["explain_value"]
    return pa.types.is_string(plan.type) and not plan.null_count


def _print_csv(table: pa.Table, out: TextIO) -> None:
    """Write one row a line: nested values as JSON text, and NULL as no text.

    A file gets the exact text. A terminal gets control characters escaped.
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
    """Return the names with a number behind repeated ones, as an object has each key once.

    >>> _unique(["x", "x", "x_1"])
    ['x', 'x_2', 'x_1']
    """
    found: dict[str, None] = {}
    given = set(names)
    numbers: Counter[str] = Counter()  # the last one behind each name: many may be the same
    for name in names:
        unique = name
        while unique in found or (numbers[name] and unique in given):
            numbers[name] += 1
            unique = f"{name}_{numbers[name]}"
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


def _rows(table: pa.Table) -> Iterator[tuple[object, ...]]:
    for batch in table.to_batches():
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _jsonable(value: object, kind: pa.DataType) -> object:
    """Return the value as JSON has it: NaN as null, types that JSON lacks as text."""
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
    """Return the decimal as a number, or as text if no float has its exact value."""
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _key(value: object, kind: pa.DataType) -> str:
    """Return a map's key as an object's key: a nested one becomes JSON text."""
    return str(_cell(value, kind))


def _text(value: object) -> object:
    if value is None:
        return None
    return value.hex() if isinstance(value, bytes) else str(value)


WRITERS: Mapping[str, Callable[[pa.Table, TextIO], None]] = {
    "table": _print_table,
    "csv": _print_csv,
    "json": _print_json,
    "parquet": _write_parquet,
}
