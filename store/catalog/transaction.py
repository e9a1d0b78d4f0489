"""Change the catalog in one transaction, and know its lsn."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from store.hashing import valid_text
from url_secrets import without_secrets

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Transaction:
    """Execute the statements of one transaction, and know its lsn."""

    def __init__(
        self, connection: sqlite3.Connection, *, run_id: str, epoch: int, lsn: int, now_us: int
    ) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.lsn = lsn  # of this transaction, if it touches an exported table
        self.now_us = now_us
        self.touched: set[str] = set()
        self._connection = connection

    def touch(self, *tables: str) -> None:
        """Note that these exported tables change."""
        self.touched.update(tables)

    def run(self, sql: str, **parameters: Any) -> int:
        """Execute one statement. Return the number of rows it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def insert(self, table: str, **values: Any) -> int:
        """Execute one INSERT. Return the rowid it made."""
        return self._connection.execute(_insert(table, values), values).lastrowid or 0

    def insert_many(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows with the same columns. The interpreter lock is released only once."""
        if rows:
            self._connection.executemany(_insert(table, rows[0]), rows)

    def rows(self, sql: str, **parameters: Any) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        return self._connection.execute(sql, parameters).fetchall()

    def row(self, sql: str, **parameters: Any) -> sqlite3.Row | None:
        """Return the first row of a query, None if there is none."""
        row: sqlite3.Row | None = self._connection.execute(sql, parameters).fetchone()
        return row

    def value(self, sql: str, **parameters: Any) -> Any:
        """Return the first cell of a query that gives one row."""
        return self._connection.execute(sql, parameters).fetchone()[0]

    def change_all(self) -> None:
        """Make this transaction's lsn the catalog's, at which every table changed."""
        for name in self.touched:
            self.run("INSERT OR IGNORE INTO changed (name, lsn) VALUES (:name, 0)", name=name)
        self.run("UPDATE changed SET lsn = :lsn", lsn=self.lsn)
        self.run("UPDATE meta SET lsn = :lsn", lsn=self.lsn)

    def log(self, *, component: str, what: str, detail: str) -> None:
        """Append a line to the events view."""
        self.insert(
            "event",
            lsn=self.lsn,
            at_us=self.now_us,
            component=component,
            what=valid_text(what),
            # An error may quote what a program or a server wrote, or the URL that was asked.
            detail=without_secrets(valid_text(detail)),
        )
        self.touch("events")


def pick(row: Mapping[str, Any] | sqlite3.Row, names: Iterable[str]) -> dict[str, Any]:
    """Return some columns of a row by name."""
    return {name: row[name] for name in names}


def columns_of(record: Any) -> dict[str, Any]:
    """Return the fields of a slotted record by name, without copying their values."""
    return {name: getattr(record, name) for name in record.__slots__}


def _insert(table: str, columns: Iterable[str]) -> str:
    values = ", ".join(f":{name}" for name in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values})"


def one_transaction(
    function: Callable[Concatenate[Transaction, Given], Result],
) -> Callable[Concatenate[Any, Given], Result]:
    """Return a method that calls `function` in one transaction of `self._database`."""

    @functools.wraps(function)
    def method(self: Any, *given: Given.args, **named: Given.kwargs) -> Result:
        with self._database.transaction() as tx:
            return function(tx, *given, **named)

    return method
