"""Define a page: its address, the question that it answers, the function that makes its panels."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa

from analysis.view.panel import Ask, Link, Panel
from analysis.view.sql_text import Tables, Value
from store import RunLayout


class BadAddressError(ValueError):
    """The address of a page has a parameter that means nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRequest:
    """The parameters of an address, and the snapshot to ask for its page."""

    parameters: Mapping[str, str]
    run: str  # the run's path as it was given
    run_number: int  # its place in the command line, from 0
    runs: Sequence[str]  # all runs, for pages that compare
    lsn: int  # of the snapshot that the page shows
    is_live: bool  # the address names no lsn, so it shows the newest
    is_foreign: bool  # a link on another site led here: no query in the address is asked
    ask: Ask
    ask_run: Callable[[int, str], pa.Table]  # another run, by its number, at `lsn_of` it
    lsn_of: Callable[[int], int]  # another run's moment: `as_of_NUMBER` of the address, or newest
    layout_of: Callable[[int], RunLayout]  # the run that was opened; raises StoreError for another
    has_left: Callable[[], bool]  # nobody waits for the page any more

    def rows(self, query: str, *, tables: Tables = ()) -> list[dict[str, Any]]:
        """Return a small answer that decides which panels the page has. Raises StoreError."""
        found: list[dict[str, Any]] = self.ask(query, tables=tables).to_pylist()
        return found

    def text(self, name: str) -> str | None:
        """Return a parameter of the address, None if it is missing or empty.

        Raises BadAddressError for a text that SQL cannot hold.
        """
        text = self.parameters.get(name) or None
        if text is not None and "\0" in text:
            raise BadAddressError(f"{name} has a null character, which SQL cannot hold")
        return text

    def integer(self, name: str) -> int | None:
        """Return a whole number of the address. Raises BadAddressError."""
        text = self.text(name)
        return None if text is None else as_integer(name, text)

    def number(self, name: str) -> float | None:
        """Return a number of the address. Raises BadAddressError."""
        text = self.text(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise BadAddressError(f"{name} is not a number") from None

    def uid(self, name: str) -> uuid.UUID | None:
        """Return a uid of the address. Raises BadAddressError."""
        text = self.text(name)
        return None if text is None else as_uid(name, text)

    def link(self, path: str, **parameters: Value) -> str:
        """Return the address of a page of this run, at the same moment if this page names one."""
        kept = {name: value for name, value in parameters.items() if value is not None}
        if self.run_number:
            kept["run"] = self.run_number
        if not self.is_live:
            kept["as_of"] = self.lsn
        return f"{path}?{urlencode(kept)}" if kept else path

    def row_link(self, path: str, columns: Mapping[str, str], **fixed: Value) -> Link:
        """Return the function that gives each row its address on a page of this run.

        `columns`: by parameter, the column of its value; `fixed`: parameters that all rows share. A
        row without one of the values has no address.
        """

        def link(row: Mapping[str, Any]) -> str | None:
            values = {name: row[column] for name, column in columns.items()}
            lacks = any(value in (None, "") for value in values.values())
            return None if lacks else self.link(path, **values, **fixed)

        return link


def as_integer(name: str, text: str) -> int:
    """Return the whole number in a text. `name` is the parameter's. Raises BadAddressError."""
    try:
        number = int(text)
    except ValueError:
        raise BadAddressError(f"{name} is not a whole number") from None
    if not -(2**63) <= number < 2**63:
        raise BadAddressError(f"{name} is too large")
    return number


def as_uid(name: str, text: str) -> uuid.UUID:
    """Return the uid in a text. `name` is the parameter's. Raises BadAddressError."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise BadAddressError(f"{name} is not a uid, such as a group_uid") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """One page. `panels` returns its panels in order.

    It asks the run only where the answer decides which panels there are.
    """

    path: str
    title: str
    question: str  # that the page answers, in one sentence
    panels: Callable[[PageRequest], Sequence[Panel]]
    is_start: bool = True  # it stands in the navigation: it needs no parameter
    compares: bool = False  # it shows other runs too: an address names their moments as well
    follows: bool = True  # it may be replaced by newer rows while somebody looks at it
    # Parameters with which a test opens the page, from one row of this query: {name: value}.
    example: str | None = None
