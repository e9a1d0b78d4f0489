"""The text of `<run>/open.sql`: where the data is (sources.sql), the views over it (views.sql),
then the run's macros.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import duckdb

from store.atomic_write import READ_WRITE, write_atomically
from store.errors import FormatError
from store.layout import RUN_ID, RunLayout
from store.untrusted.file_access import is_file, read_text

SOURCES = Path(__file__).with_name("sources.sql")
VIEWS = Path(__file__).with_name("views.sql")
RUN_LINE = "SET VARIABLE run = '.';"  # of sources.sql, and of runs that an older code started
# The directory where duckdb was started, if it is this run, which may have been moved there; else
# where the run was started.
PLACED = """SET VARIABLE here = (SELECT list(file) FROM glob('./run.json'));
SET VARIABLE run = coalesce((SELECT if(getvariable('here') IS NOT NULL AND contains(content, '"run_id": "{run_id}"'), '.', NULL)
    FROM read_text(coalesce(getvariable('here'), [{run_json}]))), {root});
"""
PLACE = re.compile(
    rf"{re.escape(RUN_LINE)}\n|SET VARIABLE here = .*\nSET VARIABLE run = .*\n    FROM read_text\(.*;\n",
    re.MULTILINE,
)
_LITERAL = r"'(?:[^'\n]|'')*'"  # of SQL, in one line
# The same lines as they are in an unchanged file, whatever directory they name.
PLACE_UNCHANGED = re.compile(
    rf"{re.escape(RUN_LINE)}\n|"
    + re.escape(PLACED.format(run_id="RUN_ID", run_json="LITERAL", root="LITERAL"))
    .replace("RUN_ID", RUN_ID.pattern)
    .replace("LITERAL", _LITERAL)
)
STALENESS_LINE = "SET VARIABLE max_staleness = 0;"
BOUND = re.compile(r"SET VARIABLE max_staleness = (\d+);")
CONFIGURED_BOUND = re.compile(r"^max_staleness: (\d+)$", re.MULTILINE)
VIEWS_MARK = "-- The views."
MACROS_MARK = "-- The macros."
# A comment in front of a statement ends with its line: DuckDB takes a carriage return for the end
# too.
ALLOWED_STATEMENT = re.compile(
    r"(?:\s|--[^\r\n]*[\r\n])*"
    r"(?:SET\s+VARIABLE|CREATE\s+(?:OR\s+REPLACE\s+)?(?:VIEW|MACRO|FUNCTION|SCHEMA))\s",
    re.IGNORECASE | re.ASCII,
)
SHOWN_CHARACTERS = 60  # of a statement that is refused


def compose(layout: RunLayout, *, macros: Sequence[str], max_staleness: int) -> str:
    """The whole text. `macros` are statements, among them advantages(...), which this package knows
    nothing of.
    """
    sources = SOURCES.read_text().replace(
        STALENESS_LINE, f"SET VARIABLE max_staleness = {max_staleness};"
    )
    sources = placed(layout, sources)
    return "\n".join([sources, VIEWS_MARK, VIEWS.read_text(), MACROS_MARK, *macros])


def write(layout: RunLayout, text: str) -> None:
    """Write `<run>/open.sql`, and beside the segments if they are elsewhere."""
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
    """Return the text for a connection of ours, which reads this directory wherever it was
    started.
    """
    return PLACE.sub(lambda _: f"SET VARIABLE run = {sql_literal(root)};\n", text, count=1)


def check_statements(text: str) -> None:
    """Refuse any statement that a run's own SQL has no use for. Raises FormatError naming the
    first.

    The sandbox is the guard, whatever a statement does. This check gives the reader a reason, and
    leaves the sandbox less to guard: no database, file, extension, secret or setting is touched
    while a run is opened.
    """
    for statement in duckdb.extract_statements(text):
        if not ALLOWED_STATEMENT.match(statement.query):
            shown = " ".join(statement.query.split())[:SHOWN_CHARACTERS]
            raise FormatError(f"open.sql may only make views, macros and variables, not {shown}")


def move(layout: RunLayout) -> bool:
    """Write the run's directory into its open.sql. Return whether it was another one."""
    if not is_whole(layout):
        return False
    text = read_text(layout.open_sql, root=layout.root, errors="replace")
    new = placed(layout, text)
    if new != text:
        write_atomically(layout.open_sql, new.encode(), mode=READ_WRITE, beneath=layout.root)
    return new != text


def sql_literal(text: object) -> str:
    """Return the text as an SQL string."""
    return "'" + str(text).replace("'", "''") + "'"


def sql_identifier(name: str) -> str:
    """Return the name of a column or field as SQL takes any name."""
    return '"' + name.replace('"', '""') + '"'


def restore_views(layout: RunLayout) -> None:
    """Write the views of this code into an open.sql. Its macros and its bound stay."""
    text = read_text(layout.open_sql, root=layout.root, errors="replace")
    macros = text.partition(MACROS_MARK)[2]
    staleness = BOUND.search(text)
    new = compose(
        layout, macros=[macros.strip("\n")], max_staleness=int(staleness[1]) if staleness else 0
    )
    write(layout, new)


def is_whole(layout: RunLayout) -> bool:
    """Whether it is there with all its parts."""
    if not is_file(layout.open_sql, root=layout.root):
        return False
    text = read_text(layout.open_sql, root=layout.root, errors="replace")
    return PLACE.search(text) is not None and VIEWS_MARK in text and MACROS_MARK in text


def is_unchanged(layout: RunLayout) -> bool:
    """Return whether its sources and views are the text that this code writes. The macros are the
    run's own.
    """
    text = read_text(layout.open_sql, root=layout.root, errors="replace")
    return _comparable(text) == _comparable(compose(layout, macros=(), max_staleness=0))


def _comparable(text: str) -> str:
    """Return the text up to the macros, without what differs between runs."""
    return BOUND.sub("", PLACE_UNCHANGED.sub("", text.partition(MACROS_MARK)[0], count=1), count=1)


def write_again(layout: RunLayout) -> None:
    """The views without macros, which only the run's next start knows; the bound is that of the
    run, if anything tells it.
    """
    left = ""
    if is_file(layout.open_sql, root=layout.root):
        left = read_text(layout.open_sql, root=layout.root, errors="replace")
    staleness = BOUND.search(left) or CONFIGURED_BOUND.search(layout.info.config_yaml)
    write(layout, compose(layout, macros=(), max_staleness=int(staleness[1]) if staleness else 0))
