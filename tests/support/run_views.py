"""A run's views on a DuckDB connection that nothing limits: readers open runs in the sandbox."""

from __future__ import annotations

import warnings

import duckdb

from printable import printable
from store import RunLayout, StoreError
from store.reading.mirror import mirror
from store.reading.query import left_out, show


def connect(layout: RunLayout, *, as_of: int | None = None) -> duckdb.DuckDBPyConnection:
    """Return a DuckDB connection with the run's views as of now, or of the lsn `as_of`.

    Segments that cannot be opened are left out, with one warning. Raises the errors of `show`.
    """
    layout = mirror(layout, as_of=as_of)
    connection = duckdb.connect()
    try:
        show(connection, layout, as_of=as_of, prefix="")
    except StoreError:
        connection.close()
        raise
    if text := left_out(connection, layout):
        warnings.warn(printable(text), stacklevel=2)
    return connection
