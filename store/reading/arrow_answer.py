"""Send what a query gives as Arrow batches, within the bounds that were asked for."""

from __future__ import annotations

import socket

import duckdb
import pyarrow as pa
from duckdb.sqltypes import DuckDBPyType

from store.errors import StoreError
from store.reading import wire
from store.reading.open_sql import sql_identifier

BATCH_ROWS = 16_384  # of an Arrow batch, in which a result is sent
MAX_SCHEMA_BYTES = 1 << 20  # some ten thousand columns; each batch has the names of all of them
# Counted for each value in a list or a struct: some take no byte in Arrow, and each one in Python.
NESTED_BYTES = 8
# Types that Arrow cannot carry: it would give other values, or bytes that nobody can read.
NOT_FOR_ARROW = frozenset(
    {"bit", "bignum", "geometry", "time with time zone", "type", "uhugeint", "variant"}
)
# Types with values that Python does not have: infinities, years before 1 and after 9999, 24:00:00,
# nanoseconds.
TEMPORAL = frozenset({"date", "interval", "time", "time_ns"})
# One text of Arrow stands for all rows of an ENUM, and becomes one text in each row in Python.
ENUM = "enum"
NESTED = ("list", "array", "struct", "tuple", "map")
TIMESTAMP = "timestamp"  # the beginning of the names of its kinds


def for_arrow(relation: duckdb.DuckDBPyRelation, *, times_as_text: bool) -> duckdb.DuckDBPyRelation:
    """Return the relation with values that Arrow cannot carry as DuckDB's text."""
    casts = [_cast(kind, times_as_text=times_as_text) for kind in relation.types]
    if not any(casts):
        return relation
    columns = []
    for number, (name, kind) in enumerate(zip(relation.columns, casts, strict=True), start=1):
        cast = "" if kind is None else f"::{kind}"
        columns.append(f"#{number}{cast} AS {sql_identifier(name)}")  # a name may be there twice
    return relation.project(", ".join(columns))


def _cast(kind: DuckDBPyType, *, times_as_text: bool) -> str | None:
    """Return the type to cast `kind` to, as SQL. Return None if it can stay as it is.

    >>> import duckdb
    >>> _cast(duckdb.sqltype("STRUCT(a BIT, b INTEGER)[]"), times_as_text=False)
    'STRUCT("a" VARCHAR, "b" INTEGER)[]'
    """
    family = str(kind.id)
    if family in NOT_FOR_ARROW or family == ENUM:
        return "VARCHAR"
    if times_as_text and (family in TEMPORAL or family.startswith(TIMESTAMP)):
        return "VARCHAR"
    if family not in (*NESTED, "union"):
        return None
    children = [(name, child) for name, child in kind.children if isinstance(child, DuckDBPyType)]
    inner = [_cast(child, times_as_text=times_as_text) for _, child in children]
    if family == "union":  # its members cannot be cast one by one
        nested = any(str(child.id) in NESTED for _, child in children)
        return "VARCHAR" if any(inner) or (times_as_text and nested) else None
    if not any(inner):
        return None
    types = [cast or str(child) for (_, child), cast in zip(children, inner, strict=True)]
    if family == "map" and inner[0] and "VARIANT" in str(children[0][1]):
        return "VARCHAR"  # 1 and '1' would become one key, and DuckDB aborts
    if family == "list":
        return f"{types[0]}[]"
    if family == "array":
        return f"{types[0]}[{dict(kind.children)['size']}]"
    if family == "struct":
        names = [sql_identifier(name) for name, _ in children]
        return f"STRUCT({', '.join(map(' '.join, zip(names, types, strict=True)))})"
    return f"{family.upper()}({', '.join(types)})"


def send_rows(channel: socket.socket, batches: pa.RecordBatchReader, *, asked: dict) -> bool:
    """Send small Arrow streams, first one without rows. Return whether there are more rows."""
    max_rows, max_bytes = asked["max_rows"], asked["max_bytes"]
    schema_bytes = batches.schema.serialize().size
    if schema_bytes > MAX_SCHEMA_BYTES:
        raise StoreError(
            f"SQL: the names and types of the columns take {schema_bytes:,} bytes, more than "
            f"{MAX_SCHEMA_BYTES:,}; ask for fewer columns, or shorter names"
        )
    _send_batch(channel, schema=batches.schema, batch=None)
    n_rows = n_bytes = 0
    for batch in batches:
        n_nested = sum(map(_n_nested, batch.columns))
        n_bytes += schema_bytes + max(batch.nbytes, NESTED_BYTES * n_nested)
        if n_bytes > max_bytes:
            raise StoreError(
                f"SQL: the result is over {max_bytes:,} bytes; ask for fewer columns or rows, or "
                "raise max_bytes"
            )
        if n_rows + batch.num_rows > max_rows:
            if not asked["cut"]:
                raise StoreError(
                    f"SQL: the result has more than {max_rows:,} rows; aggregate, add LIMIT or "
                    "raise max_rows"
                )
            _send_batch(channel, schema=batch.schema, batch=batch.slice(0, max_rows - n_rows))
            return True
        n_rows += batch.num_rows
        _send_batch(channel, schema=batch.schema, batch=batch)
    return False


def _n_nested(array: pa.Array) -> int:
    """Return the number of values that stand in lists, structs, maps and unions of an array.

    >>> _n_nested(pa.array([[None, None], [], [None]]))
    3
    """
    kind = array.type
    if pa.types.is_map(kind):
        children = [array.keys, array.items]
    elif (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        children = [array.flatten()]
    elif pa.types.is_struct(kind) or pa.types.is_union(kind):
        children = [array.field(at) for at in range(kind.num_fields)]
    else:
        return 0
    return sum(len(child) + _n_nested(child) for child in children)


def _send_batch(channel: socket.socket, *, schema: pa.Schema, batch: pa.RecordBatch | None) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        if batch is not None:
            writer.write_batch(batch)
    wire.send(channel, wire.ROWS, memoryview(sink.getvalue()))
