"""The text of `<run>/open.sql`: where the data is (sources.sql), the views over it (views.sql), then the run's macros."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import duckdb

from store.durable import READ_WRITE, write_atomically
from store.errors import FormatError
from store.layout import RunLayout

SOURCES = Path(__file__).with_name("sources.sql")
VIEWS = Path(__file__).with_name("views.sql")
RUN_LINE = "SET VARIABLE run = '.';"  # of sources.sql, and of runs that an older code started
# The directory where duckdb was started, if it is this run, which may have been moved there; else where the run was started.
PLACED = """SET VARIABLE here = (SELECT list(file) FROM glob('./run.json'));
SET VARIABLE run = coalesce((SELECT if(getvariable('here') IS NOT NULL AND contains(content, '"run_id": "{run_id}"'), '.', NULL)
    FROM read_text(coalesce(getvariable('here'), [{run_json}]))), {root});
"""
PLACE = re.compile(
    rf"{re.escape(RUN_LINE)}\n|SET VARIABLE here = .*\nSET VARIABLE run = .*\n    FROM read_text\(.*;\n", re.MULTILINE
)
STALENESS_LINE = "SET VARIABLE max_staleness = 0;"
BOUND = re.compile(r"SET VARIABLE max_staleness = (\d+);")
CONFIGURED_BOUND = re.compile(r"^max_staleness: (\d+)$", re.MULTILINE)
VIEWS_MARK = "-- The views."
MACROS_MARK = "-- The macros."
# A comment in front of a statement ends with its line: DuckDB takes a carriage return for the end too.
ALLOWED_STATEMENT = re.compile(
    r"(?:\s|--[^\r\n]*[\r\n])*"
    r"(?:SET\s+VARIABLE|CREATE\s+(?:OR\s+REPLACE\s+)?(?:VIEW|MACRO|FUNCTION|SCHEMA))\s",
    re.IGNORECASE | re.ASCII,
)
SHOWN_CHARACTERS = 60  # of a statement that is refused
FORMAT_1_VIEWS_END = "GROUP BY t.learner_step, t.begin_us, t.end_us;\n"


def compose(layout: RunLayout, *, macros: Sequence[str], max_staleness: int) -> str:
    """The whole text. `macros` are statements, among them advantages(...), which this package knows nothing of."""
    sources = SOURCES.read_text().replace(STALENESS_LINE, f"SET VARIABLE max_staleness = {max_staleness};")
    sources = placed(layout, sources)
    return "\n".join([sources, VIEWS_MARK, VIEWS.read_text(), MACROS_MARK, *macros])


def write(layout: RunLayout, text: str) -> None:
    """Write `<run>/open.sql`, and beside the segments if they are elsewhere."""
    write_atomically(layout.open_sql, text.encode(), mode=READ_WRITE)
    if layout.info.storage_uri is not None:
        layout.storage.write(layout.open_sql.name, text.encode())


def placed(layout: RunLayout, text: str) -> str:
    """Return the text with the run's directory as it is now."""
    run_id = layout.info.run_id
    place = PLACED.format(run_id=run_id, root=quoted(layout.root), run_json=quoted(layout.run_json))
    return PLACE.sub(lambda _: place, text, count=1)


def fixed(text: str, root: Path | str) -> str:
    """Return the text for a connection of ours, which reads this directory wherever it was started."""
    return PLACE.sub(lambda _: f"SET VARIABLE run = {quoted(root)};\n", text, count=1)


def check_statements(text: str) -> None:
    """Refuse any statement that a run's own SQL has no use for. Raises FormatError naming the first.

    The sandbox is the guard, whatever a statement does. This check gives the reader a reason, and leaves the sandbox less
    to guard: no database, file, extension, secret or setting is touched while a run is opened.
    """
    for statement in duckdb.extract_statements(text):
        if not ALLOWED_STATEMENT.match(statement.query):
            shown = " ".join(statement.query.split())[:SHOWN_CHARACTERS]
            raise FormatError(f"open.sql may only make views, macros and variables, not {shown}")


def move(layout: RunLayout) -> bool:
    """Write the run's directory into its open.sql. Return whether it was another one."""
    if not is_whole(layout):
        return False
    text = layout.open_sql.read_text()
    new = placed(layout, text)
    if new != text:
        write_atomically(layout.open_sql, new.encode(), mode=READ_WRITE)
    return new != text


def quoted(text: object) -> str:
    """Return the text as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def upgrade(layout: RunLayout) -> None:
    """Give a run of an older code today's views, with its own macros and bound; the catalog was upgraded already."""
    if not layout.open_sql.is_file():
        return
    text = layout.open_sql.read_text()
    macros = text.partition(MACROS_MARK if MACROS_MARK in text else FORMAT_1_VIEWS_END)[2]
    staleness = BOUND.search(text)
    new = compose(layout, macros=[macros.strip("\n")], max_staleness=int(staleness[1]) if staleness else 0)
    write(layout, new)


def is_whole(layout: RunLayout) -> bool:
    """Whether it is there with all its parts."""
    if not layout.open_sql.is_file():
        return False
    text = layout.open_sql.read_text(errors="replace")
    return PLACE.search(text) is not None and VIEWS_MARK in text and MACROS_MARK in text


def write_again(layout: RunLayout) -> None:
    """The views without macros, which only the run's next start knows; the bound is that of the run, if anything tells it."""
    left = layout.open_sql.read_text(errors="replace") if layout.open_sql.is_file() else ""
    staleness = BOUND.search(left) or CONFIGURED_BOUND.search(layout.info.config_yaml)
    write(layout, compose(layout, macros=(), max_staleness=int(staleness[1]) if staleness else 0))
