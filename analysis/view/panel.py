"""Define a panel: a query, the way to show its answer, and one sentence for a newcomer.

    Panel(
        title="Staleness",
        explains="How many versions old the weights were that played what was trained on.",
        query=fill("SELECT ... FROM lineage WHERE learner_step > $step", step=10),
        show=partial(lines, x="learner_step", y=["oldest", "mean"]),
    )

A panel is shown as a table unless `show` says otherwise. `show` gets the answer, an Arrow table in
which times are text, and returns a chart (charts.py) or Markup (html.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

import pyarrow as pa
from markupsafe import Markup

from analysis.view.html import html, json_script, number
from analysis.view.nested_text import text_of
from analysis.view.sql_text import Tables, with_tables
from analysis.view.text import LONG_CHARACTERS, plain, visible
from printable import shell_word
from store import StoreError


class Ask(Protocol):
    """A function that answers a query, at most its first `n_rows` rows. Raises StoreError.

    `tables` stand before the query in a WITH, and are computed once for all that read the same.
    """

    def __call__(
        self, query: str, n_rows: int | None = None, *, tables: Tables = ()
    ) -> pa.Table: ...


TABLE_ROWS = 500  # of a panel; the query gives the rest
TABLE_CELLS = 10_000  # of a panel: a wide table shows fewer rows
CELL_CHARACTERS = 160  # that are shown at once
MAX_ADDRESS = 4_000  # of a link: a name in a forged run may have megabytes
MAX_CHARACTERS = 20_000_000  # of a panel: a forged run may have names of megabytes
MAX_ROWS = 200_000  # that a panel draws or counts; a run of weeks has fewer of each kind
ALL_CHARACTERS = 1_000_000  # of a table, with what "show all" shows
ERROR_MARK = '<p class="error">'  # in the HTML of a panel whose query failed
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # its first digits are shown
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?")  # as the reader writes them


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A Bokeh figure as data. The script of the page draws it."""

    item: Mapping[str, Any]
    summary: str  # in words, for those who cannot see it


def as_table(table: pa.Table) -> Markup:
    """Show an answer as a table."""
    return show_rows(table, links={})


Link = Callable[[Mapping[str, Any]], str | None]
Show = Callable[[pa.Table], Markup | Chart]


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One query of a page, and how its answer is shown."""

    title: str
    explains: str
    query: str = ""  # without one only `above` and `content` are shown
    content: Callable[[], Markup] | None = None  # what is read elsewhere than with SQL
    tables: Tables = ()  # that `query` reads, and other panels too; see with_tables
    show: Show = as_table
    empty: str = "There is nothing to show yet."  # instead of an answer without rows
    width: str = "half"  # or "full": of a page that is wide enough for two
    later: bool = False  # fetched after the page stands
    alone: bool = False  # asked of a process of its own: for queries that read all steps
    above: Markup | str = ""  # controls between the explanation and the answer
    combine: Callable[[pa.Table], pa.Table] | None = None  # adds another run's rows to the answer
    n_rows: int | None = None  # only so many are asked for; None: all
    # Further files that the rows can be saved as, by the ending of the name.
    files: Mapping[str, Callable[[pa.Table], bytes]] = field(default_factory=dict)
    # The HTML of an address at an lsn is kept. False: `show` looks elsewhere too.
    keeps: bool = True

    @property
    def sql(self) -> str:
        """Return the whole query, as it is shown."""
        return with_tables(self.tables, self.query).strip()

    @property
    def name(self) -> str:
        """Return the title as it stands in an address."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def render_panel(
    panel: Panel,
    ask: Ask,
    *,
    run: str = "RUN",
    lsn: int | None = None,
    downloads: Mapping[str, str] | None = None,
    template: str = "panel.html",
) -> Markup:
    """Return the panel's HTML. An error of the query stands in it as one line.

    `downloads`: addresses of the rows as files, by the name of the format.
    """
    body, error = Markup(""), ""
    try:
        if panel.content is not None:
            body = _bounded(panel.content())
        if panel.query:
            body = _body(panel, _rows(panel, ask))
    except Exception as reason:  # noqa: BLE001  a stranger's view may give values of any type
        error = why(reason)
    return html(
        template,
        panel=panel,
        body=body,
        error=error,
        lsn=lsn,
        downloads=downloads or {},
        query=panel.sql,
        command=command(panel.sql, run=run, lsn=lsn),
    )


def why(error: Exception) -> str:
    """Return an error in one line, led by its class where its text is not meant for people."""
    text = " ".join(str(error).split())
    named = (
        text if isinstance(error, StoreError | ValueError) else f"{type(error).__name__}: {text}"
    )
    return plain(named, at_most=600)


def render_placeholder(panel: Panel, address: str) -> Markup:
    """Return a panel that the page's script fetches from the address."""
    return html("later.html", panel=panel, address=address)


def command(query: str, *, run: str, lsn: int | None) -> str:
    """Return the command that asks the same in a shell."""
    at = "" if lsn is None else f" --as-of {lsn}"
    return f"gigpo sql {shell_word(run)}{at} {shell_word(query.strip(), lines=True)}"


def show_rows(
    table: pa.Table,
    *,
    links: Mapping[str, Link],
    hints: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> Markup:
    """Show an answer as a table.

    `links`: by column, the address that a row's cell leads to. Columns in `hidden` are only there
    for the links.
    """
    columns = [name for name in table.column_names if name not in hidden][:TABLE_CELLS]
    n_rows = min(table.num_rows, TABLE_ROWS, TABLE_CELLS // max(len(columns), 1))
    share = ALL_CHARACTERS // max(n_rows * len(columns), 1)
    at_most_all = min(max(share, CELL_CHARACTERS), LONG_CHARACTERS)
    rows = []
    for place in range(n_rows):  # one at a time: a cell may have megabytes
        row = {
            name: _value(column[place], at_most=at_most_all)
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
        rows.append([_cell(row, name, links.get(name), at_most_all) for name in columns])
    return html(
        "table.html",
        columns=columns,
        hints=hints or {},
        rows=rows,
        n_rows=table.num_rows,
        n_shown=len(rows),
    )


def _rows(panel: Panel, ask: Ask) -> pa.Table:
    table = ask(panel.query, panel.n_rows, tables=panel.tables)
    return table if panel.combine is None or table.num_rows > MAX_ROWS else panel.combine(table)


def _body(panel: Panel, table: pa.Table) -> Markup:
    if not table.num_rows:
        return Markup('<p class="empty">{}</p>').format(panel.empty)
    if table.num_rows > MAX_ROWS:
        return _too_large(f"{table.num_rows:,} rows")
    shown = panel.show(table)
    if isinstance(shown, Chart):
        shown = Markup('<div class="chart" role="img" aria-label="{}">{}</div>').format(
            plain(shown.summary, at_most=300), json_script(shown.item, kind="chart-data")
        )
    return _bounded(shown)


def _bounded(shown: Markup) -> Markup:
    return _too_large(f"{len(shown):,} characters") if len(shown) > MAX_CHARACTERS else shown


def _too_large(what: str) -> Markup:
    text = f"It has {what}, too many for a page; the query gives the rows."
    return Markup('<p class="empty">{}</p>').format(text)


def _value(value: pa.Scalar, *, at_most: int) -> Any:
    return text_of(value, at_most=at_most) if pa.types.is_nested(value.type) else value.as_py()


def _cell(
    row: Mapping[str, Any], column: str, link: Link | None, at_most_all: int
) -> Mapping[str, Any]:
    """Return what the template shows of a cell."""
    value = row[column]
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None:
        shown = Markup('<span class="null">–</span>')
    elif is_number:
        shown = Markup("{}").format(_number_cell(value, column))
    elif isinstance(value, str) and UID.fullmatch(value):
        shown = Markup('<span class="mono" title="{}">{}</span>').format(value, value[:8])
    elif isinstance(value, str) and TIME.fullmatch(value):
        shown = Markup('<time title="{} UTC">{}</time>').format(value, value[:19])
    else:
        shown = visible(value, at_most=CELL_CHARACTERS, at_most_all=at_most_all)
    address = (link(row) if link and value is not None else None) or ""
    return {
        "shown": shown,
        "is_number": is_number,
        "link": address if len(address) <= MAX_ADDRESS else "",
    }


def _number_cell(value: float, column: str) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    is_name = column.endswith(("step", "version", "lsn", "seed", "_id", "version_min"))
    return str(value) if is_name and isinstance(value, int) else number(value)
