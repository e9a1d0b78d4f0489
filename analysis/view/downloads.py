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
    sink = _CountedBytes()
    try:
        if write is not None:
            sink.write(write(table))
        elif kind == "csv":
            pyarrow.csv.write_csv(_flat(table), sink)
        else:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        return _File(
            sink.getvalue(),
            n_counted=sink.n_counted,
            media_type=DOWNLOADS.get(kind, "application/octet-stream"),
            headers={
                "content-disposition": f'attachment; filename="{name}-lsn{lsn}.{kind}"',
                "x-lsn": str(lsn),
            },
        )
    except BaseException as error:
        _being_sent.remove(sink.n_counted)
        if isinstance(error, pa.ArrowException):
            raise StoreError(f"these rows do not fit into {kind}: {error}") from error
        raise


class _BeingSent:
    """Count the bytes of all files that are being sent. Each stays in memory until it is."""

    def __init__(self) -> None:
        self._n_bytes, self._lock = 0, threading.Lock()

    def add(self, n_bytes: int, *, before: int) -> None:
        """Count more bytes of a file that has `before`.

        Raises StoreError if there are too many; a small file always passes.
        """
        with self._lock:
            is_small = before + n_bytes <= SMALL_BYTES
            if not is_small and self._n_bytes + n_bytes > MAX_SENT_BYTES:
                raise StoreError(
                    f"other files with {self._n_bytes - before >> 20:,} MiB are being sent, and "
                    f"together they may have {MAX_SENT_BYTES >> 20:,} MiB; ask again when they "
                    "are, or: gigpo sql RUN QUERY --format csv"
                )
            self._n_bytes += n_bytes

    def remove(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes -= n_bytes


_being_sent = _BeingSent()


class _CountedBytes(io.BytesIO):
    """A file in memory, counted as it grows.

    The rows do not tell how long it will be: one bit is the text `false`, and a byte can be the
    number of a long text.
    """

    n_counted = 0

    def write(self, data: Any, /) -> int:
        """Append bytes. Raises StoreError while too many are being sent."""
        n_bytes = memoryview(data).nbytes
        _being_sent.add(n_bytes, before=self.n_counted)
        self.n_counted += n_bytes
        return super().write(data)


class _File(Response):
    """An answer whose bytes are counted until it is sent, or its client has left."""

    def __init__(self, body: bytes, *, n_counted: int, **options: Any) -> None:
        super().__init__(body, **options)
        # Its client may leave before anything is sent. Nobody calls it then.
        self._remove = weakref.finalize(self, _being_sent.remove, n_counted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.body = b""  # whatever keeps this answer, its bytes are not kept
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
