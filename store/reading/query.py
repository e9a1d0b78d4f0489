"""Execute a run's open.sql on a DuckDB connection, also while the run is being written."""

from __future__ import annotations

import errno
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb

from printable import one_line
from store.catalog.snapshot import EXPORTS, read_as_of
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.reading.open_sql import (
    VIEWS_MARK,
    checked_statements,
    fixed,
    is_added_macro,
    read_open_sql,
    sql_literal,
)
from store.untrusted.file_access import is_file, open_directory, open_file_in

PARQUET_MAGIC = b"PAR1"
# Errors that say nothing about the file that could not be opened.
SAYS_NOTHING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
NAME_CHARACTERS = 200  # of a file that is left out
FOOTER_TAIL = 8  # bytes: the length of the footer, then the magic
# Errors of DuckDB for a file that it cannot read. A plain Error comes from decoding a footer.
FILE_ERRORS = (duckdb.IOException, duckdb.InvalidInputException, duckdb.SerializationException)


def show(
    connection: duckdb.DuckDBPyConnection, layout: RunLayout, *, as_of: int | None, prefix: str
) -> None:
    """Execute the run's open.sql, which makes its views as of now, or of the lsn `as_of`.

    `prefix` leads its paths through a file system of the connection. The caller limits `connection`
    first. Raises FormatError if the run has no views, or has statements that views do not need.
    Raises StoreError if files of `as_of` are gone, or if memory does not suffice.
    """
    if not is_file(layout.open_sql, root=layout.root):
        raise FormatError(
            f"{layout.run_directory} has no open.sql; it was made by an incomplete start, start "
            "the run again"
        )
    text = read_open_sql(layout)
    sources, mark, views = text.partition(VIEWS_MARK)
    root = f"{prefix}{layout.root}"
    try:
        makes_sources = checked_statements(fixed(sources, root))
        makes_views = checked_statements(views)
        if not mark:
            raise FormatError(f"it has no line {VIEWS_MARK!r}")
        for statement in makes_sources:
            connection.execute(statement)
        if as_of is not None:
            _show_as_of(connection, layout, lsn=as_of, root=root)
        damaged = functools.partial(_damaged, root=layout.root, prefix=prefix)
        _leave_out(connection, damaged, prefix=prefix)
        for statement in makes_views:
            connection.execute(statement)
    except duckdb.OutOfMemoryException as error:
        limit = connection.execute("SELECT current_setting('memory_limit')").fetchall()[0][0]
        raise StoreError(
            f"the views of {layout.root} need more memory than they may have ({limit}); raise "
            "memory_limit if you trust the run"
        ) from error
    except (duckdb.Error, FormatError) as error:
        raise FormatError(
            f"the views of {layout.run_directory} cannot be made ({one_line(error)}); "
            f"gigpo fsck --repair {layout.run_directory}"
        ) from error
    if any(is_added_macro(statement.query) for statement in (*makes_sources, *makes_views)):
        _check_macros(connection, layout)


def _check_macros(connection: duckdb.DuckDBPyConnection, layout: RunLayout) -> None:
    """Raise FormatError for a macro that takes the place of one of DuckDB's functions.

    Queries of ours bound what they ask for with such functions, by `len` and `count` for example.
    This query calls no function that a run can replace, and names DuckDB's own list in full.
    """
    rows = connection.execute(
        "SELECT function_name, internal FROM system.main.duckdb_functions()"
    ).fetchall()
    names_of_duckdb = {name.lower() for name, is_internal in rows if is_internal}
    names_of_run = {name.lower() for name, is_internal in rows if not is_internal}
    if found := sorted(names_of_duckdb & names_of_run):
        raise FormatError(
            f"{layout.open_sql} makes a macro {found[0]!r}, which is the name of a function of "
            "DuckDB; give it another name there"
        )


def left_out(connection: duckdb.DuckDBPyConnection, layout: RunLayout) -> str:
    """Say in one line which segments could not be opened, so that the views lack their rows."""
    # The run's own text may have set these variables: the parent gets no list, and a short name.
    n_broken, first, n_listed = connection.execute(
        f"""SELECT len(broken), broken[1][:{NAME_CHARACTERS}], len(getvariable('segments'))
            FROM (SELECT getvariable('left_out')::VARCHAR[] AS broken)"""
    ).fetchall()[0]
    if not n_broken:
        return ""
    n_files = n_listed - 1 + n_broken  # the first file has no rows, only the columns
    some = f"{n_broken} of {n_files} files cannot be read and are left out"
    return f"{some}: first {first}; gigpo fsck {layout.run_directory}"


def leave_out_unreadable(
    connection: duckdb.DuckDBPyConnection, error: duckdb.Error, *, prefix: str
) -> bool:
    """Leave out the segments that DuckDB cannot open, after a statement failed with `error`.

    Return whether there are any. This is slow with many files, so only errors that a file can cause
    are examined.
    """
    if not isinstance(error, FILE_ERRORS) and type(error) is not duckdb.Error:
        return False

    def is_broken(path: str) -> bool:
        try:
            connection.execute(f"FROM read_parquet({sql_literal(path)}) LIMIT 0").fetchall()
        except duckdb.Error:
            return True
        return False

    return _leave_out(connection, lambda paths: set(filter(is_broken, paths)), prefix=prefix)


def _leave_out(
    connection: duckdb.DuckDBPyConnection,
    broken_of: Callable[[Sequence[str]], set[str]],
    *,
    prefix: str,
) -> bool:
    """Remove the segments that `broken_of` returns from the views. Return whether there are any."""
    known, paths = connection.execute(
        "SELECT getvariable('left_out'), getvariable('segments')"
    ).fetchall()[0]
    broken = broken_of(paths or [])
    if broken:
        whole = [path for path in paths if path not in broken]
        named = [*(known or []), *(path.removeprefix(prefix) for path in paths if path in broken)]
        for name, some in (("segments", whole), ("left_out", named)):
            connection.execute(
                f"SET VARIABLE {name} = [{', '.join(map(sql_literal, some))}]::VARCHAR[]"
            )
    return bool(broken)


def _damaged(paths: Sequence[str], root: Path, *, prefix: str) -> set[str]:
    """Return the files that are missing or do not end as Parquet does. Their footers are not read.

    DuckDB refuses paths outside the run, so they are not examined here.
    """
    directories: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        plain = path.removeprefix(prefix)
        if plain.startswith(f"{root}/") and ".." not in plain.split("/"):
            directories[plain.rpartition("/")[0]].append(path)
    broken: set[str] = set()
    for parent, files in directories.items():
        try:
            directory = open_directory(Path(parent), root=root)
        except OSError as error:
            broken.update(files if error.errno not in SAYS_NOTHING else ())
            continue
        try:
            broken.update(path for path in files if not _looks_undamaged(path, directory))
        finally:
            os.close(directory)
    return broken


def _looks_undamaged(path: str, directory: int) -> bool:
    try:
        descriptor = open_file_in(directory, path.rpartition("/")[2], path=Path(path))
    except OSError as error:
        return error.errno in SAYS_NOTHING
    try:
        n_bytes = os.fstat(descriptor).st_size
        if n_bytes < FOOTER_TAIL + len(PARQUET_MAGIC):
            return False
        tail = os.pread(descriptor, FOOTER_TAIL, n_bytes - FOOTER_TAIL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    n_footer = int.from_bytes(tail[:4], "little")
    return tail[4:] == PARQUET_MAGIC and n_footer + FOOTER_TAIL + len(PARQUET_MAGIC) <= n_bytes


def _show_as_of(
    connection: duckdb.DuckDBPyConnection, layout: RunLayout, *, lsn: int, root: str
) -> None:
    """Replace the files and tables of the manifest by those that the catalog had at `lsn`."""
    snapshot = read_as_of(layout, lsn, in_place=True)  # here, in the sandbox
    empty = connection.execute("SELECT getvariable('segments')[1]").fetchall()[0][0]
    files = [sql_literal(empty), *(sql_literal(f"{root}/{path}") for path in snapshot.segments)]
    connection.execute(f"SET VARIABLE segments = [{', '.join(files)}]")
    for name, table in snapshot.tables.items():
        connection.register("arriving", table)
        made = f"CREATE TABLE exported.{name} AS FROM arriving"
        connection.execute(f"DROP VIEW exported.{name}; {made}")
        connection.unregister("arriving")
    # Tables without a history are kept as they are now, because their files may be removed.
    for name in EXPORTS.keys() - snapshot.tables.keys():
        if connection.execute("SELECT getvariable('parts')[?]", [name]).fetchall()[0][0]:
            connection.execute(
                f"""CREATE TABLE exported.{name}_now AS FROM exported.{name};
                    DROP VIEW exported.{name};
                    ALTER TABLE exported.{name}_now RENAME TO {name}"""
            )
