"""Check a catalog's format, its schema and its row of `meta` before any other query.

A view, a trigger, a generated column or an index on an expression is a program that SQLite
executes. In a stranger's catalog it may never end, and Ctrl-C does not interrupt SQLite. So each
object is compared with those of schema.sql. A missing object is harmless: fsck reports it later.
"""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing
from functools import cache
from pathlib import Path

from store.errors import ForeignSchemaError
from store.run_json import other_format

# In the header of each catalog: reading it executes nothing. Another format needs another number.
APPLICATION_ID = int.from_bytes(b"gig3", "big")
# Read on import: a sandboxed query cannot read the file later.
SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID};\n"
    f"{Path(__file__).with_name('schema.sql').read_text()}"
)
# SQLite makes this index for a key or a UNIQUE constraint, and stores no text for it.
INDEX_OF_A_KEY = b"sqlite_autoindex_"
# No run counts its transactions, owners or rows so far, and readers of JSON hold no more exactly.
LARGEST_COUNTER = 2**53
LARGEST_NUMBER = 2**62  # of an epoch or lsn that is read at all: fsck names what is between the two
# Column of `meta` -> whether its cell is what code reads as a text or a number. NULL is not.
CELLS_OF_META = {"id": "id = 1", "run_id": "typeof(run_id) = 'text'"} | {
    name: f"typeof({name}) = 'integer' AND {name} BETWEEN 0 AND {LARGEST_NUMBER}"
    for name in ("epoch", "lsn", "horizon_lsn")
}
SCHEMA_READ_S = 5.0  # ours is read in a millisecond
# With the schema SQLite reads its table of statistics, which we never make. A stranger's may have
# generated columns, so it is a program that runs before any check, and nothing interrupts it
# within a row. Within these limits a row took milliseconds with each function that was tried. The
# longest object of ours has 1.5 KB, and our query of the schema 16 steps.
LIMITS_OF_THE_SCHEMA = {
    sqlite3.SQLITE_LIMIT_LENGTH: 8 * 1024,  # of a text, a blob or a row, in bytes
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1,  # of GLOB too: a search takes the square of it
    sqlite3.SQLITE_LIMIT_VDBE_OP: 50,  # steps of a program
}
STEPS_BETWEEN_SIGNALS = 1_000_000  # of SQLite's machine: some 20 ms
# Length of a stranger's statement over ours, in bytes. Comments may make it longer, and each
# comment is searched to the statement's end.
MAX_RATIO = 4
SHOWN_CHARACTERS = 60  # of a name that a stranger chose

# Bytes, because a stranger's text may be no UTF-8.
OBJECTS = """SELECT CAST(type AS BLOB), CAST(name AS BLOB), CAST(tbl_name AS BLOB),
                    CAST(sql AS BLOB) FROM main.sqlite_schema"""
# White space, a comment, or one token as SQLite reads it. Any other character is a token.
TOKEN = re.compile(
    r"""[ \t\n\f\r]+|--[^\n]*|/\*.*?\*/|('(?:[^']|'')*'|"(?:[^"]|"")*"|[A-Za-z0-9_]+|.)""",
    re.DOTALL,
)

Key = tuple[bytes | None, bytes | None, bytes | None]  # type, name, and name of the table


def check_schema(connection: sqlite3.Connection, *, path: Path) -> None:
    """Raise an error for a catalog that this version must not use. A new, empty file is accepted.

    Raises OtherFormatError for another format, ForeignSchemaError naming an object that this code
    never makes, sqlite3.DatabaseError for a damaged file.
    """
    try:
        objects = _read_objects(connection)
    except UnicodeDecodeError as error:  # SQLite's message quotes the schema that it could not read
        raise sqlite3.DatabaseError(f"malformed database schema ({error})") from error
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    is_catalog = any(name == b"meta" for _, name, _, _ in objects)  # each format has this table
    if is_catalog and application_id != APPLICATION_ID:
        raise other_format(str(path), f"application_id {application_id}")
    for kind, name, table, sql in objects:
        # SQLite would read the text up to the NUL, without the constraints behind it.
        if b"\0" in (sql or b"") or not _is_known((kind, name, table), sql):
            shown = [
                (part or b"").decode(errors="replace")[:SHOWN_CHARACTERS] for part in (kind, name)
            ]
            raise ForeignSchemaError(
                f"{path}: its {shown[0]} {shown[1]!r} is none that this code makes, and nothing of "
                "it was executed; make a new catalog without it: "
                f"gigpo rebuild --force {path.parent}"
            )
    if is_catalog:
        _check_meta(connection)


def _read_objects(connection: sqlite3.Connection) -> list[tuple[bytes | None, ...]]:
    """Return the rows of the schema. Raise sqlite3.DatabaseError if they do not end.

    Pages of the schema itself may share their children, and no check of pages begins before
    SQLite has read the schema. For a program that is too long, SQLite reports a lack of memory.
    """
    limits = {name: connection.setlimit(name, most) for name, most in LIMITS_OF_THE_SCHEMA.items()}
    deadline = time.monotonic() + SCHEMA_READ_S
    is_late = False

    def stop() -> bool:
        nonlocal is_late
        is_late = time.monotonic() > deadline
        return is_late

    connection.set_progress_handler(stop, 1)  # after each row, which may take long
    try:
        return connection.execute(OBJECTS).fetchall()
    except MemoryError as error:
        raise sqlite3.DatabaseError("malformed database schema (it is too large)") from error
    except sqlite3.OperationalError as error:
        if is_late:
            raise sqlite3.DatabaseError("malformed database schema (it does not end)") from error
        raise
    finally:
        for name, most in limits.items():
            connection.setlimit(name, most)
        let_ctrl_c_end_queries(connection)


def let_ctrl_c_end_queries(connection: sqlite3.Connection) -> None:
    """Return to Python now and then: pages that share their children can make a query endless."""
    connection.set_progress_handler(lambda: 0, STEPS_BETWEEN_SIGNALS)


def _check_meta(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError for a cell of `meta` of a wrong type or size.

    The table's own checks take no such value. A file that was damaged or edited may have it.
    """
    rows = connection.execute(f"SELECT {', '.join(CELLS_OF_META.values())} FROM meta LIMIT 2")
    for number, cells in enumerate(rows):
        if number > 0:
            raise sqlite3.DatabaseError("malformed table meta: it has more than one row")
        for name, is_sound in zip(CELLS_OF_META, cells, strict=True):
            if not is_sound:
                raise sqlite3.DatabaseError(
                    f"malformed table meta: its {name} has a wrong type or size"
                )


def _is_known(key: Key, sql: bytes | None) -> bool:
    """Return whether schema.sql or SQLite itself makes this object."""
    kind, name, _ = key
    if sql is None:
        return kind == b"index" and name is not None and name.startswith(INDEX_OF_A_KEY)
    ours = _our_objects().get(key)
    if ours is None or len(sql) > MAX_RATIO * len(ours):
        return False
    return ours == sql or _tokens(ours) == _tokens(sql)


@cache
def _our_objects() -> dict[Key, bytes]:
    """Return the text of each object that schema.sql makes."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        objects = connection.execute(OBJECTS).fetchall()
    return {(kind, name, table): sql for kind, name, table, sql in objects if sql is not None}


def _tokens(sql: bytes) -> list[str]:
    """Split a statement as SQLite does, without white space and comments."""
    return [token for token in TOKEN.findall(sql.decode(errors="replace")) if token]
