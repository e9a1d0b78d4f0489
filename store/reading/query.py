"""SQL over a run, also while it is being written. The same text serves a bare DuckDB shell: `<run>/open.sql`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb

from store.durable import READ_WRITE, write_atomically
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.reading.manifest import export_nothing

VIEWS = Path(__file__).with_name("views.sql")
RUN_LINE = "SET VARIABLE run = '.';"
STALENESS_LINE = "SET VARIABLE max_staleness = 0;"
READING_STATEMENTS = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)


def write_open_sql(layout: RunLayout, *, macros: Sequence[str], max_staleness: int) -> None:
    """Writes `<run>/open.sql`, the views and then `macros`, and an empty manifest for it to read until the first commit."""
    views = VIEWS.read_text().replace(STALENESS_LINE, f"SET VARIABLE max_staleness = {max_staleness};")
    if not layout.manifest.exists():
        export_nothing(layout)
    write_atomically(layout.open_sql, "\n".join([views, *macros]).encode(), mode=READ_WRITE)


def open_reader(run: Path) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the run's views, as of now. It can read the run's files and nothing else.

    Raises FormatError if `run` is no run directory. Take a new reader to see newer data.
    """
    layout = RunLayout.open(run)
    if not layout.open_sql.is_file():
        raise FormatError(f"{layout.root} has no open.sql; it was made by an incomplete start, start the run again")
    root = str(layout.root).replace("'", "''")
    connection = duckdb.connect()
    connection.execute(layout.open_sql.read_text().replace(RUN_LINE, f"SET VARIABLE run = '{root}';"))
    connection.execute(f"SET allowed_directories = ['{root}']")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def run_sql(run: Path, sql: str) -> duckdb.DuckDBPyRelation:
    """The result of one SELECT over the run's views. Raises StoreError for anything else, and with DuckDB's reason for bad SQL.

    This keeps mistakes from changing a run, not attackers: DuckDB's statement types do not tell everything that writes.
    """
    try:
        statements = duckdb.extract_statements(sql)
        if len(statements) != 1 or statements[0].type not in READING_STATEMENTS:
            raise StoreError("SQL: ask one query that only reads; begin with SELECT, FROM, WITH, DESCRIBE or EXPLAIN")
        return open_reader(run).sql(sql)
    except duckdb.Error as error:
        raise StoreError(f"SQL: {' '.join(str(error).split())}") from error
