"""Give an answer as a file: CSV, Arrow, or a format of the panel's own."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyarrow as pa
import pyarrow.csv
from starlette.responses import Response

from store import StoreError

DOWNLOADS = {"csv": "text/csv; charset=utf-8", "arrow": "application/vnd.apache.arrow.stream"}


def download(
    table: pa.Table,
    kind: str,
    *,
    name: str,
    lsn: int,
    write: Callable[[pa.Table], bytes] | None = None,
) -> Response:
    """Return the rows as a file to save. Raises StoreError for rows that CSV cannot hold.

    `write` gives the bytes of a kind that is not in DOWNLOADS.
    """
    sink = io.BytesIO()
    try:
        if write is not None:
            sink.write(write(table))
        elif kind == "csv":
            pyarrow.csv.write_csv(_flat(table), sink)
        else:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    except pa.ArrowException as error:
        raise StoreError(f"these rows do not fit into {kind}: {error}") from error
    return Response(
        sink.getvalue(),
        media_type=DOWNLOADS.get(kind, "application/octet-stream"),
        headers={
            "content-disposition": f'attachment; filename="{name}-lsn{lsn}.{kind}"',
            "x-lsn": str(lsn),
        },
    )


def _flat(table: pa.Table) -> pa.Table:
    """Return the table with lists and records as text: CSV has none."""
    columns = []
    for column in table.columns:
        if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
            texts = [None if value is None else str(value) for value in column.to_pylist()]
            columns.append(pa.array(texts, pa.string()))
        else:
            columns.append(column)
    return pa.table(columns, names=table.column_names)
