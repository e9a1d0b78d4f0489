"""SQL over a run, also while it is being written. The same text serves a bare DuckDB shell:
`<run>/open.sql`.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb

from printable import printable
from store.catalog.snapshot import EXPORTS
from store.catalog.time_travel import read_as_of
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.reading import open_sql
from store.reading.manifest import export_nothing
from store.reading.mirror import mirror
from store.reading.open_sql import VIEWS_MARK, check_statements, compose, fixed, sql_literal
from store.untrusted.file_access import is_file, open_directory, open_file_in, read_text

PARQUET_MAGIC = b"PAR1"
# of the file that could not be opened
SAYS_NOTHING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
FOOTER_TAIL = 8  # bytes: the length of the footer, then the magic
# What DuckDB raises for a file that it cannot read. A plain Error comes from the decoder of a
# footer.
FILE_ERRORS = (duckdb.IOException, duckdb.InvalidInputException, duckdb.SerializationException)


def write_open_sql(layout: RunLayout, *, macros: Sequence[str], max_staleness: int) -> None:
    """Writes `<run>/open.sql`, the views and then `macros`, and an empty manifest for it to read
    until the first commit.
    """
    if not is_file(layout.manifest, root=layout.root):
        export_nothing(layout)
    open_sql.write(layout, compose(layout, macros=macros, max_staleness=max_staleness))


def connect(layout: RunLayout, *, as_of: int | None = None) -> duckdb.DuckDBPyConnection:
    """Return a DuckDB connection with the run's views as of now, or of the lsn `as_of`.

    It may do anything, and so may the run's open.sql: for a run of our own in tests. Readers open
    runs in the sandbox. Damaged segments that cannot be opened are left out, with one warning;
    `left_out` has its text. Raises as `show`.
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


def show(
    connection: duckdb.DuckDBPyConnection, layout: RunLayout, *, as_of: int | None, prefix: str
) -> None:
    """Execute the run's open.sql, which makes its views as of now, or of the lsn `as_of`.

    `prefix` leads its paths through a file system of the connection. What open.sql may do is
    settled before: the caller gives `connection` its limits and locks them. Raises FormatError if
    the run has no views yet, if open.sql has other statements than views need, or if the views
    cannot be made. Raises StoreError for files that `as_of` needs and that were removed, and if the
    memory limit is too low.
    """
    if not is_file(layout.open_sql, root=layout.root):
        raise FormatError(
            f"{layout.run_directory} has no open.sql; it was made by an incomplete start, start "
            "the run again"
        )
    # A run that no owner of today's format has opened yet brings its own, whole SQL: no mark, and
    # all of it is `sources`.
    sources, mark, views = read_text(layout.open_sql, root=layout.root, errors="replace").partition(
        VIEWS_MARK
    )
    if as_of is not None and not mark:
        raise FormatError(
            f"{layout.root} is of format 1, without snapshots; gigpo compact "
            f"{layout.root} upgrades it"
        )
    root = f"{prefix}{layout.root}"
    try:
        for text in (sources, views):
            check_statements(text)
        connection.execute(fixed(sources, root))
        if as_of is not None:
            _show_as_of(connection, layout, as_of, root=root)
        _leave_out(
            connection, lambda paths: _not_whole(paths, layout.root, prefix=prefix), prefix=prefix
        )
        try:
            connection.execute(views)
        # views of older code open every file; one that fails, and there would be no view
        except duckdb.Error as error:
            if not leave_out_unreadable(connection, error, prefix=prefix):
                raise
            connection.execute(views)
    except duckdb.OutOfMemoryException as error:
        limit = connection.execute("SELECT current_setting('memory_limit')").fetchall()[0][0]
        raise StoreError(
            f"the views of {layout.root} need more memory than they may have ({limit}); raise "
            "memory_limit if you trust the run"
        ) from error
    except (duckdb.Error, FormatError) as error:
        why = " ".join(str(error).split())
        raise FormatError(
            f"the views of {layout.run_directory} cannot be made ({why}); gigpo fsck "
            f"--repair {layout.run_directory}"
        ) from error


def left_out(connection: duckdb.DuckDBPyConnection, layout: RunLayout) -> str:
    """In one line, which segments `connect` could not open, so that the views lack their rows;
    empty if none.
    """
    broken, n_whole = connection.execute(
        "SELECT getvariable('left_out'), len(getvariable('segments'))"
    ).fetchall()[0]
    if not broken:
        return ""
    n_files = n_whole - 1 + len(broken)  # the first has no rows, only the columns
    some = f"{len(broken)} of {n_files} files cannot be read and are left out"
    return f"{some}: first {broken[0]}; gigpo fsck {layout.run_directory}"


def leave_out_unreadable(
    connection: duckdb.DuckDBPyConnection, error: duckdb.Error, *, prefix: str
) -> bool:
    """Leave out the segments that DuckDB cannot open, after a statement failed with `error`. Return
    whether there are any.

    Slow with many files, so errors that no file causes are not looked into.
    """
    if not isinstance(error, FILE_ERRORS) and type(error) is not duckdb.Error:
        return False

    def is_broken(path: str) -> bool:
        try:
            connection.execute(f"FROM read_parquet({sql_literal(path)}) LIMIT 0").fetchall()
        except duckdb.Error:
            return True
        return False

    return _leave_out(
        connection, lambda paths: {path for path in paths if is_broken(path)}, prefix=prefix
    )


def _leave_out(
    connection: duckdb.DuckDBPyConnection,
    broken_of: Callable[[Sequence[str]], set[str]],
    *,
    prefix: str,
) -> bool:
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


def _not_whole(paths: Sequence[str], root: Path, *, prefix: str) -> set[str]:
    """Return the files that are not there or do not end as Parquet does: much cheaper than reading
    their footers.

    DuckDB refuses paths that are not in the run, so they are not looked at here.
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
            broken.update(
                path
                for path in files
                if not _looks_whole(path.rpartition("/")[2], directory, Path(path))
            )
        finally:
            os.close(directory)
    return broken


def _looks_whole(name: str, directory: int, path: Path) -> bool:
    try:
        descriptor = open_file_in(directory, name, path=path)
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
    connection: duckdb.DuckDBPyConnection, layout: RunLayout, lsn: int, *, root: str
) -> None:
    """Replace what sources.sql took from the manifest by what the catalog says of `lsn`."""
    snapshot = read_as_of(layout, lsn)
    empty = connection.execute("SELECT getvariable('segments')[1]").fetchall()[0][0]
    files = [sql_literal(empty), *(sql_literal(f"{root}/{path}") for path in snapshot.segments)]
    connection.execute(f"SET VARIABLE segments = [{', '.join(files)}]")
    for name, table in snapshot.tables.items():
        connection.register("arriving", table)
        # A run that only older code has opened has no view of a newer table.
        connection.execute(
            f"DROP VIEW IF EXISTS exported.{name}; CREATE TABLE exported.{name} AS FROM arriving"
        )
        connection.unregister("arriving")
    # as they are now: the files that have them may go
    for name in EXPORTS.keys() - snapshot.tables.keys():
        if connection.execute("SELECT getvariable('parts')[?]", [name]).fetchall()[0][0]:
            made = f"CREATE TABLE exported.{name}_now AS FROM exported.{name}"
            connection.execute(
                f"{made}; DROP VIEW exported.{name}; ALTER TABLE exported.{name}_now RENAME TO "
                f"{name}"
            )
