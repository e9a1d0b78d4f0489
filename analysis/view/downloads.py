"""Give an answer as a file: CSV, Arrow, or a format of the panel's own."""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.csv
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from analysis.view.nested_text import text_of
from store import StoreError

# Of all files that are being sent. A client may take an hour for a large one.
MAX_SENT_BYTES = 1 << 30
SMALL_BYTES = 1 << 20  # as much as a page: such files are not refused
MAX_NESTED_TEXT = 1 << 28  # characters of lists and records: each repeats the names of its fields
BYTES_AS_TEXT = 3  # for each byte of a table, if it is of numbers
DOWNLOADS = {"csv": "text/csv; charset=utf-8", "arrow": "application/vnd.apache.arrow.stream"}


def download(
    table: pa.Table,
    kind: str,
    *,
    name: str,
    lsn: int,
    write: Callable[[pa.Table], bytes] | None = None,
) -> Response:
    """Return the rows as a file to save.

    Raises StoreError for rows that CSV cannot hold, and while too many files are being sent.
    `write` gives the bytes of a kind that is not in DOWNLOADS.
    """
    n_bytes = table.nbytes * (1 if kind == "arrow" else BYTES_AS_TEXT)
    _being_sent.add(n_bytes)
    try:
        return _File(
            _written(table, kind, write=write),
            n_bytes=n_bytes,
            media_type=DOWNLOADS.get(kind, "application/octet-stream"),
            headers={
                "content-disposition": f'attachment; filename="{name}-lsn{lsn}.{kind}"',
                "x-lsn": str(lsn),
            },
        )
    except BaseException as error:
        _being_sent.remove(n_bytes)
        if isinstance(error, pa.ArrowException):
            raise StoreError(f"these rows do not fit into {kind}: {error}") from error
        raise


def _written(table: pa.Table, kind: str, *, write: Callable[[pa.Table], bytes] | None) -> bytes:
    if write is not None:
        return write(table)
    sink = io.BytesIO()
    if kind == "csv":
        pyarrow.csv.write_csv(_flat(table), sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


class _BeingSent:
    """Count the bytes of all files that are being sent. Each stays in memory until it is."""

    def __init__(self) -> None:
        self._n_bytes, self._lock = 0, threading.Lock()

    def add(self, n_bytes: int) -> None:
        """Raise StoreError if there are too many; a small file always passes."""
        with self._lock:
            if n_bytes > SMALL_BYTES and self._n_bytes + n_bytes > MAX_SENT_BYTES:
                raise StoreError(
                    f"other files with {self._n_bytes >> 20:,} MiB are being sent, and together "
                    f"they may have {MAX_SENT_BYTES >> 20:,} MiB; ask again when they are, or: "
                    "gigpo sql RUN QUERY --format csv"
                )
            self._n_bytes += n_bytes

    def remove(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes -= n_bytes


_being_sent = _BeingSent()


class _File(Response):
    """An answer whose bytes are counted until it is sent, or its client has left."""

    def __init__(self, body: bytes, *, n_bytes: int, **options: Any) -> None:
        super().__init__(body, **options)
        # Its client may leave before anything is sent. Nobody calls it then.
        self._remove = weakref.finalize(self, _being_sent.remove, n_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._remove()


def _flat(table: pa.Table) -> pa.Table:
    """Return the table with lists and records as text: CSV has none."""
    columns, left = [], MAX_NESTED_TEXT
    for column in table.columns:
        if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
            texts = []
            for value in column:
                text = text_of(value, at_most=left) if value.is_valid else None
                left -= len(text or "")
                if left <= 0:
                    raise StoreError(
                        f"the lists and records of these rows have more than {MAX_NESTED_TEXT:,} "
                        "characters; download Arrow"
                    )
                texts.append(text)
            columns.append(pa.array(texts, pa.string()))
        else:
            columns.append(column)
    return pa.table(columns, names=table.column_names)
