"""Write and check the text of `<run>/open.sql`: sources.sql, views.sql, and the run's macros."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path

import duckdb

from printable import one_line
from store.atomic_write import READ_WRITE, write_atomically
from store.errors import FormatError
from store.layout import RunLayout
from store.reading.manifest import export_nothing
from store.run_json import RUN_ID
from store.shown_lsn import shown_lsn
from store.untrusted.file_access import MAX_OPEN_SQL_BYTES, is_file, read_bytes, status

SOURCES = Path(__file__).with_name("sources.sql")
VIEWS = Path(__file__).with_name("views.sql")
RUN_LINE = "SET VARIABLE run = '.';"  # of sources.sql, before a run's directory is filled in
# The directory where duckdb was started if it is this run, which may have been moved there.
# Otherwise the directory where the run was started.
PLACED = """SET VARIABLE here = (SELECT list(file) FROM glob('./run.json'));
SET VARIABLE run = coalesce((
    SELECT if(getvariable('here') IS NULL, NULL,
              if(contains(content, '"run_id": "{run_id}"'), '.', NULL))
    FROM read_text(coalesce(getvariable('here'), [{run_json}]))), {root});
"""
PLACE = re.compile(
    # Without ^ each copy of the first words in one line would be followed to the line's end.
    rf"^(?:{re.escape(RUN_LINE)}\n|SET VARIABLE here = .*\nSET VARIABLE run = .*\n"
    r"    SELECT .*\n .*\n    FROM read_text\(.*;\n)",
    re.MULTILINE,
)
_LITERAL = r"'(?:[^'\n]|'')*'"  # an SQL string in one line
# The same lines as in an unchanged file, for any directory.
PLACE_UNCHANGED = re.compile(
    rf"{re.escape(RUN_LINE)}\n|"
    + re.escape(PLACED.format(run_id="RUN_ID", run_json="LITERAL", root="LITERAL"))
    .replace("RUN_ID", RUN_ID.pattern)
    .replace("LITERAL", _LITERAL)
)
STALENESS_LINE = "SET VARIABLE max_staleness = 0;"
BOUND = re.compile(r"SET VARIABLE max_staleness = (\d{1,9});")
CONFIGURED_BOUND = re.compile(r"^max_staleness: (\d{1,9})$", re.MULTILINE)
VIEWS_MARK = "-- The views."
MACROS_MARK = "-- The macros."
# A comment before a statement ends with its line. DuckDB ends a line at a carriage return too.
COMMENTS = r"(?:\s|--[^\r\n]*[\r\n])*"
ALLOWED_STATEMENT = re.compile(
    COMMENTS + r"(?:SET\s+VARIABLE|CREATE\s+(?:OR\s+REPLACE\s+)?(?:VIEW|MACRO|FUNCTION|SCHEMA))\s",
    re.IGNORECASE | re.ASCII,
)
MACRO = re.compile(
    COMMENTS + r"CREATE\s+(?:OR\s+REPLACE\s+)?(?:MACRO|FUNCTION)\s", re.IGNORECASE | re.ASCII
)
WRITTEN_MACRO = re.compile(COMMENTS + r"CREATE OR REPLACE MACRO advantages\(", re.ASCII)
SHOWN_CHARACTERS = 60  # of a refused statement


def write_open_sql(layout: RunLayout, *, macros: Sequence[str], max_staleness: int) -> None:
    """Write `<run>/open.sql`, and an empty manifest for it to read until the first commit.

    `macros` are statements, among them advantages(...). This package knows nothing of them.
    """
    # An older copy of the directory may lack the manifest: its catalog is behind the storage.
    if not is_file(layout.manifest, root=layout.root) and shown_lsn(layout, by_others=True) == 0:
        export_nothing(layout)
    write(layout, compose(layout, macros=macros, max_staleness=max_staleness))


def compose(layout: RunLayout, *, macros: Sequence[str], max_staleness: int) -> str:
    """Return the whole text of an open.sql."""
    sources = SOURCES.read_text().replace(
        STALENESS_LINE, f"SET VARIABLE max_staleness = {max_staleness};"
    )
    sources = placed(layout, sources)
    return "\n".join([sources, VIEWS_MARK, VIEWS.read_text(), MACROS_MARK, *macros])


def write(layout: RunLayout, text: str) -> None:
    """Write `<run>/open.sql`, and a copy of it into a remote storage."""
    write_atomically(layout.open_sql, text.encode(), mode=READ_WRITE, beneath=layout.root)
    if layout.info.storage_uri is not None:
        layout.storage.write(layout.open_sql.name, text.encode())


def placed(layout: RunLayout, text: str) -> str:
    """Return the text with the run's directory as it is now."""
    run_id = layout.info.run_id
    place = PLACED.format(
        run_id=run_id, root=sql_literal(layout.root), run_json=sql_literal(layout.run_json)
    )
    return PLACE.sub(lambda _: place, text, count=1)


def fixed(text: str, root: Path | str) -> str:
    """Return the text for a connection of ours, which reads this directory from anywhere."""
    return PLACE.sub(lambda _: f"SET VARIABLE run = {sql_literal(root)};\n", text, count=1)


def checked_statements(text: str) -> list[duckdb.Statement]:
    """Return the statements. Raise FormatError naming the first that a run's SQL does not need.

    The sandbox guards against every statement. This check gives the reader a reason, and leaves the
    sandbox less to guard: opening a run touches no database, file, extension, secret or setting.
    """
    statements = duckdb.extract_statements(text)
    for statement in statements:
        if not ALLOWED_STATEMENT.match(statement.query):
            shown = one_line(statement.query)[:SHOWN_CHARACTERS]
            raise FormatError(f"open.sql may only make views, macros and variables, not {shown}")
    return statements


def is_added_macro(statement: str) -> bool:
    """Return whether a checked statement makes another macro than this code writes."""
    return MACRO.match(statement) is not None and WRITTEN_MACRO.match(statement) is None


def move(layout: RunLayout) -> bool:
    """Write the run's directory into its open.sql. Return whether it was another one."""
    text = _text(layout)
    new = placed(layout, text)
    is_elsewhere = is_complete(layout) and new != text
    if is_elsewhere:
        write_atomically(layout.open_sql, new.encode(), mode=READ_WRITE, beneath=layout.root)
    return is_elsewhere


def sql_literal(text: object) -> str:
    """Return the text as an SQL string."""
    return "'" + str(text).replace("'", "''") + "'"


def sql_identifier(name: str) -> str:
    """Return any name of a column or field as SQL."""
    return '"' + name.replace('"', '""') + '"'


def restore_views(layout: RunLayout) -> bool:
    """Write the views of this code into open.sql. Return whether the run's macros could be kept.

    The staleness bound is that of the old text, or of the run's settings.
    """
    left = _text(layout)
    has_macros = is_complete(layout)
    macros = [left.partition(MACROS_MARK)[2].strip("\n")] if has_macros else []
    staleness = BOUND.search(left) or CONFIGURED_BOUND.search(layout.info.config_yaml)
    max_staleness = int(staleness[1]) if staleness else 0
    write(layout, compose(layout, macros=macros, max_staleness=max_staleness))
    return has_macros


def is_complete(layout: RunLayout) -> bool:
    """Return whether open.sql is there with its sources, views and macros."""
    text = _text(layout)
    return PLACE.search(text) is not None and VIEWS_MARK in text and MACROS_MARK in text


def is_unchanged(layout: RunLayout) -> bool:
    """Return whether its sources and views are those of this code. The macros are the run's own."""
    return _comparable(_text(layout)) == _comparable(compose(layout, macros=(), max_staleness=0))


def read_open_sql(layout: RunLayout) -> str:
    """Return the text of a run's open.sql. Raises OSError, UnsafePathError if it is too long."""
    data = read_bytes(layout.open_sql, root=layout.root, at_most=MAX_OPEN_SQL_BYTES)
    return data.decode(errors="replace")


def _text(layout: RunLayout) -> str:
    """Return the text of a run's open.sql, empty if it has none or one that no run wrote."""
    seen = status(layout.open_sql, root=layout.root)
    if seen is None or not stat.S_ISREG(seen.st_mode) or seen.st_size > MAX_OPEN_SQL_BYTES:
        return ""
    return read_open_sql(layout)


def _comparable(text: str) -> str:
    """Return the text up to the macros, without the parts that differ between runs."""
    return BOUND.sub("", PLACE_UNCHANGED.sub("", text.partition(MACROS_MARK)[0], count=1), count=1)
