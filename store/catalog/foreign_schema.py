"""Refuse a catalog whose schema holds what this code never made.

A view, a trigger, a generated column or an index on an expression is a program that SQLite
executes. In a stranger's catalog it may never end, and Ctrl-C does not interrupt SQLite. So each
object is compared with those of schema.sql, of today and of the older formats, before any other
question. A missing object is no danger: fsck names it later.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

from store.catalog.migrate import SCHEMA_TEXT, newer_format
from store.errors import ForeignSchemaError
from store.layout import FORMAT_VERSION

# Objects and columns with another text in older formats. All others have today's, perhaps with the
# columns in another order.
OLDER = """
    DROP INDEX batch_group_once;
    DROP TRIGGER grp_changed;
    CREATE UNIQUE INDEX batch_group_once ON batch_group (group_uid) WHERE live = 1;  -- formats 1 and 2
    CREATE TRIGGER grp_changed AFTER UPDATE OF state, reason, n_members, n_steps ON grp BEGIN  -- format 2
        UPDATE grp SET changed_lsn = (SELECT lsn + 1 FROM meta) WHERE group_uid = NEW.group_uid;
    END;
"""
OLDER_COLUMNS = {b"grp": "split TEXT NOT NULL CHECK (split IN ('train', 'heldout'))"}  # format 1
# SQLite makes it for a key or UNIQUE, and stores no text of it
INDEX_OF_A_KEY = b"sqlite_autoindex_"
SHOWN_CHARACTERS = 60  # of a name that a stranger chose

OBJECTS = """SELECT CAST(type AS BLOB), CAST(name AS BLOB), CAST(tbl_name AS BLOB), CAST(sql AS BLOB)
             FROM main.sqlite_schema"""  # bytes: a stranger's text may be no UTF-8
# white space, a comment, or one token as SQLite reads it; any other character is a token of its own
TOKEN = re.compile(
    r"""[ \t\n\f\r]+|--[^\n]*|/\*.*?\*/|('(?:[^']|'')*'|"(?:[^"]|"")*"|[A-Za-z0-9_]+|.)""",
    re.DOTALL,
)

Tokens = tuple[str, ...]
Key = tuple[bytes | None, bytes | None, bytes | None]  # type, name, and name of the table


def check_schema(connection: sqlite3.Connection, *, path: Path) -> None:
    """Raise ForeignSchemaError naming an object that this code never made, FormatError if newer
    code made the catalog.
    """
    ours = _texts()
    foreign: Key | None = None
    meta: Tokens = ()
    try:
        objects = connection.execute(OBJECTS)
    except UnicodeDecodeError as error:  # SQLite's message quotes the schema that it could not read
        raise sqlite3.DatabaseError(f"malformed database schema ({error})") from error
    for kind, name, table, sql in objects:
        if name == b"meta" and sql is not None:
            meta = _tokens(sql)
        if (
            foreign is None
            and (sql is None or ours.get((kind, name, table)) != sql)
            and not _is_known((kind, name, table), sql)
        ):
            foreign = (kind, name, table)
    if foreign is None:
        return
    # reading it executes no expression
    if meta[:3] == ("CREATE", "TABLE", "meta") and "AS" not in map(str.upper, meta):
        row = connection.execute("SELECT format_version FROM main.meta").fetchone()
        if row is not None and isinstance(row[0], int) and row[0] > FORMAT_VERSION:
            raise newer_format(path, row[0])
    kind, name = ((part or b"").decode(errors="replace")[:SHOWN_CHARACTERS] for part in foreign[:2])
    raise ForeignSchemaError(
        f"{path}: its {kind} {name!r} is none that this code makes, and nothing of it was "
        "executed; "
        f"make a new catalog without it: gigpo rebuild --force {path.parent}"
    )


def _is_known(key: Key, sql: bytes | None) -> bool:
    """Return whether an older format, an upgrade from one, or SQLite itself makes this object."""
    kind, name, _ = key
    if sql is None:
        return kind == b"index" and name is not None and name.startswith(INDEX_OF_A_KEY)
    tokens = _tokens(sql)
    known = _known().get(key, frozenset())
    if kind != b"table":
        return tokens in known
    columns, options = _definitions(tokens)
    return any(
        columns <= its_columns and options == its_options
        for its_columns, its_options in map(_definitions, known)
    )


@cache
def _texts() -> dict[Key, bytes]:
    """Return the text of each object that schema.sql makes."""
    return _made_by(SCHEMA_TEXT)


@cache
def _known() -> dict[Key, frozenset[Tokens]]:
    """Return the texts that each object has, or had in an older format; those of a table with the
    columns of all formats.
    """
    found = {key: {_tokens(sql)} for key, sql in _texts().items()}
    for key, sql in _made_by(SCHEMA_TEXT + OLDER).items():
        found[key].add(_tokens(sql))
    for name, column in OLDER_COLUMNS.items():
        (today,) = found[b"table", name, name]
        body = today.index("(") + 1
        found[b"table", name, name] = {
            (*today[:body], *_tokens(column.encode()), ",", *today[body:])
        }
    return {key: frozenset(texts) for key, texts in found.items()}


def _made_by(script: str) -> dict[Key, bytes]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        objects = connection.execute(OBJECTS).fetchall()
    return {(kind, name, table): sql for kind, name, table, sql in objects if sql is not None}


def _tokens(sql: bytes) -> Tokens:
    """Split a statement as SQLite does, without white space and comments."""
    return tuple(token for token in TOKEN.findall(sql.decode(errors="replace")) if token)


def _definitions(tokens: Tokens) -> tuple[frozenset[Tokens], Tokens]:
    """Split CREATE TABLE into its columns and constraints, and what stands around them.

    `CREATE TABLE t (a INT, b TEXT) STRICT` has the columns `a INT` and `b TEXT`, and around them
    `CREATE TABLE t ( ) STRICT`.
    """
    columns: set[Tokens] = set()
    around: list[str] = []
    column: list[str] = []
    depth = 0
    for token in tokens:
        depth -= token == ")"
        if depth == 0 or (depth == 1 and token == ","):
            columns.add(tuple(column))
            column = []
        if depth == 0:
            around.append(token)
        elif depth > 1 or token != ",":
            column.append(token)
        depth += token == "("
    return frozenset(columns - {()}), tuple(around)
