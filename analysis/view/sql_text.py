"""Place values into a query, so that the query that is shown can be run as it is."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Sequence

Value = uuid.UUID | int | float | str | None
Tables = Sequence[tuple[str, str]]  # names and queries; a table may read those before it

PLACE = re.compile(r"\$([a-z_]+)")


def fill(query: str, **values: Value) -> str:
    """Return the query with each `$name` replaced by its value as SQL.

    >>> fill("FROM groups WHERE task_id = $task AND size > $size", task="it's", size=3)
    "FROM groups WHERE task_id = 'it''s' AND size > 3"

    Raises KeyError for a name without a value, ValueError for a text that SQL cannot hold.
    """
    return PLACE.sub(lambda found: literal(values[found[1]]), query)


def with_tables(tables: Tables, query: str) -> str:
    """Return the query after a WITH of the tables. It may go on with a comma and more tables."""
    if not tables:
        return query
    made = [f"{name} AS MATERIALIZED (\n{made_by.strip()})" for name, made_by in tables]
    return "WITH " + ",\n".join(made) + query


def literal(value: Value) -> str:
    """Return one value as SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, uuid.UUID):
        return f"'{value}'::UUID"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value!r}::DOUBLE" if math.isfinite(value) else f"'{value}'::DOUBLE"
    if "\0" in value or not value.isprintable():
        return _with_codes(value)
    return _quoted(value)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _with_codes(text: str) -> str:
    """Return a text with control characters as chr(CODE), so that it can be copied unharmed."""
    parts = []
    for plain, code in re.findall(r"([^\W\d_ -]|[ -~]+)|(.)", text, re.DOTALL):
        if code and ("\ud800" <= code <= "\udfff" or code == "\0"):
            raise ValueError("a text of SQL holds no NUL and no half of a character")
        parts.append(f"chr({ord(code)})" if code else _quoted(plain))
    return "(" + " || ".join(parts) + ")"
