"""Draw charts with one look, for light and dark pages: lines with an interval, bars, steps.

    show=partial(lines, x="learner_step", y=["success"], low="low", high="high")

Each takes the answer of a query and names of its columns, and returns a Chart. Colours can be told
apart by people who are colour-blind (Okabe and Ito). Texts of a run become visible escapes. Bokeh
reads a tooltip as a template with names of columns in it, so a column is called c0, c1, ... there.
"""

from __future__ import annotations

import atexit
import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice, pairwise
from typing import Any, TypeVar

import pyarrow as pa
from bokeh.embed import json_item
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    PlainText,
    Range1d,
    WheelZoomTool,
)
from bokeh.models.annotations import Legend
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from bokeh.settings import settings as bokeh_settings

from analysis.view.panel import Chart
from analysis.view.text import plain

Row = TypeVar("Row")
COLOURS = ("#3b7dd8", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
INK = "#7d8590"  # of texts and axes: legible on white and on black
GRID = "#8b949e"
HEIGHT = 230  # pixels of a chart
INTERVAL_ALPHA = 0.18  # of an interval: its contrast with white is 1.25; at half 1.12, hardly seen
MAX_POINTS = 5_000  # of a chart; more are thinned evenly
# Making a chart takes 60 ms of a core. Bokeh's check of it is a sixth of that, and only warns.
bokeh_settings.perform_document_validation = False
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"


def warm_up() -> None:
    """Draw a chart that nobody sees. The first one takes half a second of a core, for imports.

    What is there afterwards stays: the garbage collection need not look at it at every chart.
    """
    lines(pa.table({"x": [0.0], "y": [0.0]}), x="x", y=["y"])
    gc.freeze()
    atexit.register(gc.unfreeze)  # DuckDB complains at exit of what was not collected


def lines(
    table: pa.Table,
    *,
    x: str,
    y: Sequence[str],
    low: str | None = None,
    high: str | None = None,
    names: Mapping[str, str] | None = None,
    points: Sequence[str] = (),
    whiskers: Mapping[str, tuple[str, str]] | None = None,
    is_fraction: bool = False,
    height: int = HEIGHT,
) -> Chart:
    """Draw columns `y` over column `x`, with an interval from `low` to `high` around the first.

    Columns in `points` are drawn as points: values that are there now and then. `whiskers`: the
    columns of their intervals. `names`: how columns are called in the legend.
    """
    table, key, names = _numbered(table, names)
    x = key[x]
    y, points = [key[name] for name in y], [key[name] for name in points]
    low = None if low is None else key[low]
    high = None if high is None else key[high]
    whiskers = {
        key[name]: (key[lowest], key[highest])
        for name, (lowest, highest) in (whiskers or {}).items()
    }
    data = columns_of(table, x=x)
    drawn = new_figure(x=names[x], height=height, is_fraction=is_fraction)
    source = ColumnDataSource(_with_gaps(data, [*y, *filter(None, (low, high))]))
    if low and high:
        drawn.varea(
            x=x,
            y1=low,
            y2=high,
            source=source,
            fill_color=COLOURS[0],
            fill_alpha=INTERVAL_ALPHA,
            level="underlay",
        )
    for column, colour in zip([*y, *points], colours(len(y) + len(points)), strict=True):
        label, ends = names[column], whiskers.get(column, ())
        if column in points:
            there = [at for at, value in enumerate(data[column]) if value is not None]
            some = ColumnDataSource(rows_at(data, there, (x, column, *ends)))
            marks = _draw_points(drawn, some, x=x, y=column, ends=ends, colour=colour, label=label)
        else:
            marks = _draw_line(drawn, source, x=x, y=column, colour=colour, label=label)
        tips = [(names[x], f"@{x}"), (label, f"@{column}{_digits(is_fraction)}")]
        between = (low, high) if low and high and column == y[0] else ends
        if between:
            digits = _digits(is_fraction)
            tips.append(("95 % interval", f"@{between[0]}{digits} to @{between[1]}{digits}"))
        drawn.add_tools(HoverTool(renderers=[marks], tooltips=tips, mode="mouse"))
    named = " and ".join(names[each] for each in [*y, *points])
    return finish(drawn, f"{named} over {names[x]}, {len(data[x])} points")


def _draw_points(
    drawn: figure,
    source: ColumnDataSource,
    *,
    x: str,
    y: str,
    ends: Sequence[str],
    colour: str,
    label: str,
) -> GlyphRenderer:
    """Draw a column as points, with whiskers between the two columns `ends`, if there are any."""
    if ends:
        drawn.segment(x0=x, x1=x, y0=ends[0], y1=ends[1], source=source, color=colour, line_width=2)
    return drawn.scatter(
        x=x, y=y, source=source, size=8, color=colour, marker="diamond", legend_label=label
    )


def _draw_line(
    drawn: figure, source: ColumnDataSource, *, x: str, y: str, colour: str, label: str
) -> GlyphRenderer:
    """Draw a column as a line. Return its points, of which the pointer shows the values."""
    drawn.line(x=x, y=y, source=source, line_width=2, color=colour, legend_label=label)
    return drawn.scatter(x=x, y=y, source=source, size=4, color=colour, legend_label=label)


def bars(
    table: pa.Table,
    *,
    x: str,
    y: Sequence[str],
    names: Mapping[str, str] | None = None,
    is_fraction: bool = False,
) -> Chart:
    """Draw columns `y` as stacked bars for each value of column `x`, which may be a text."""
    table, key, names = _numbered(table, names)
    x, y = key[x], [key[each] for each in y]
    data = columns_of(table, x=x)
    factors = [plain(value, at_most=30) for value in data[x]]
    numeric = all(isinstance(value, int | float) for value in data[x])
    if not numeric:
        factors = _distinct(factors)
        data = {**data, x: factors}
    drawn = new_figure(
        x=names[x],
        is_fraction=is_fraction,
        x_range=None if numeric else FactorRange(factors=factors),
    )
    for each in y:
        data[each] = [value or 0 for value in data[each]]
    source = ColumnDataSource(data)
    labels = [names[each] for each in y]
    gaps = [after - before for before, after in pairwise(data[x])] if numeric else []
    width = 0.8 * min((gap for gap in gaps if gap > 0), default=1)
    drawn.vbar_stack(
        list(y),
        x=x,
        width=width,
        source=source,
        color=colours(len(y)),
        legend_label=labels,
    )
    tips = [(names[x], f"@{x}")]
    tips += [
        (label, f"@{each}{_digits(is_fraction)}") for label, each in zip(labels, y, strict=True)
    ]
    drawn.add_tools(HoverTool(tooltips=tips))
    if not is_fraction:
        drawn.y_range = DataRange1d(start=0)
    if not numeric and len(factors) > 6:
        drawn.xaxis.major_label_orientation = 0.8
    return finish(drawn, f"{' and '.join(labels)} by {names[x]}, {len(data[x])} bars")


def steps(
    table: pa.Table,
    *,
    x: str,
    y: Sequence[str],
    names: Mapping[str, str] | None = None,
) -> Chart:
    """Draw columns `y` as lines that hold their value until the next `x`."""
    table, key, names = _numbered(table, names)
    x, y = key[x], [key[each] for each in y]
    data = columns_of(table, x=x)
    drawn = new_figure(x=names[x])
    source = ColumnDataSource(_with_gaps(data, y))
    for column, colour in zip(y, colours(len(y)), strict=True):
        label = names[column]
        drawn.step(
            x=x,
            y=column,
            source=source,
            mode="after",
            line_width=2,
            color=colour,
            legend_label=label,
        )
        marks = drawn.scatter(
            x=x, y=column, source=source, size=4, color=colour, legend_label=label
        )
        tips = [(names[x], f"@{x}"), (label, f"@{column}{_digits(False)}")]
        drawn.add_tools(HoverTool(renderers=[marks], tooltips=tips))
    named = " and ".join(names[each] for each in y)
    return finish(drawn, f"{named} over {names[x]}, {len(data[x])} points")


def intervals(
    table: pa.Table,
    *,
    x: str,
    y: str,
    names: Mapping[str, str] | None = None,
    height: int = HEIGHT,
) -> Chart:
    """Draw fractions `y` over `x` as points, each with a whisker from column low to column high."""
    table, key, names = _numbered(table, names)
    x, y, low, high = key[x], key[y], key["low"], key["high"]
    data = columns_of(table, x=x)
    drawn = new_figure(x=names[x], height=height, is_fraction=True)
    source = ColumnDataSource(data)
    drawn.segment(x0=x, x1=x, y0=low, y1=high, source=source, color=COLOURS[0], line_width=2)
    drawn.line(x=x, y=y, source=source, color=COLOURS[0], line_alpha=0.4)
    marks = drawn.scatter(x=x, y=y, source=source, size=8, color=COLOURS[0])
    digits = _digits(True)
    tips = [
        (names[x], f"@{x}"),
        (names[y], f"@{y}{digits}"),
        ("95 % interval", f"@{low}{digits} to @{high}{digits}"),
    ]
    drawn.add_tools(HoverTool(renderers=[marks], tooltips=tips, mode="mouse"))
    return finish(drawn, f"{names[y]} over {names[x]}, {len(data[x])} points")


def _numbered(
    table: pa.Table, names: Mapping[str, str] | None
) -> tuple[pa.Table, dict[str, str], dict[str, str]]:
    """Return the table with columns c0, c1, ..., their keys by name, and their labels by key."""
    keys = [f"c{number}" for number in range(table.num_columns)]
    key = dict(zip(table.column_names, keys, strict=True))
    return table.rename_columns(keys), key, {key[one]: (names or {}).get(one, one) for one in key}


def colours(n: int) -> list[str]:
    """Return `n` of the COLOURS, which repeat after the last."""
    return list(islice(cycle(COLOURS), n))


def columns_of(table: pa.Table, *, x: str) -> dict[str, list[Any]]:
    """Return the columns as lists, by `x` if it is a number, thinned to MAX_POINTS rows.

    Decimals become floats.
    """
    if not pa.types.is_string(table.schema.field(x).type):
        table = table.sort_by(x)
    if table.num_rows > MAX_POINTS:
        table = table.take(list(thinned(range(table.num_rows))))
    values = [list(map(_plain_value, column.to_pylist())) for column in table.columns]
    return dict(zip(table.column_names, values, strict=True))


def thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """Return at most MAX_POINTS of the rows, evenly."""
    if len(rows) <= MAX_POINTS:
        return rows
    return [rows[at * len(rows) // MAX_POINTS] for at in range(MAX_POINTS)]


def rows_at(
    data: Mapping[str, Sequence[Any]], chosen: Sequence[int], names: Iterable[str]
) -> dict[str, list[Any]]:
    """Return the columns `names` with the rows that are chosen only."""
    found = {}
    for name in names:
        found[name] = [data[name][row] for row in chosen]
    return found


def _with_gaps(data: dict[str, list[Any]], columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return the data with NaN for what is missing: a browser draws null as 0."""
    found = dict(data)
    for name in columns:
        found[name] = [math.nan if value is None else value for value in data[name]]
    return found


def _plain_value(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value, at_most=60)
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return plain(value, at_most=60)


def new_figure(
    *, x: str, height: int = HEIGHT, is_fraction: bool = False, x_range: Any = None
) -> figure:
    """Return an empty figure with the look of all charts. `x` is the text below its axis.

    `is_fraction`: its values are from 0 to 1 and are shown as percent.
    """
    drawn = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="pan,box_zoom,reset",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        min_border_left=8,
        **({} if x_range is None else {"x_range": x_range}),
    )
    drawn.add_tools(WheelZoomTool(modifiers={"ctrl": True}))  # a wheel alone scrolls the page
    for axis in drawn.axis:
        axis.axis_line_color = GRID
        axis.axis_line_alpha = 0.5
        axis.major_tick_line_color = None
        axis.minor_tick_line_color = None
        axis.major_label_text_color = INK
        axis.major_label_text_font = FONT
        axis.axis_label_text_color = INK
        axis.axis_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "12px"
        axis.major_label_text_font_size = "11px"
    drawn.xgrid.grid_line_color = None
    drawn.ygrid.grid_line_color = GRID
    drawn.ygrid.grid_line_alpha = 0.25
    drawn.xaxis.axis_label = PlainText(text=plain(x))  # $$...$$ would be drawn as TeX
    if is_fraction:
        drawn.y_range = Range1d(start=-0.02, end=1.04)
    if x_range is None:
        drawn.xaxis.ticker = BasicTicker(min_interval=1)
    drawn.yaxis.formatter = NumeralTickFormatter(format="0 %" if is_fraction else "0,0.[000]")
    return drawn


def finish(drawn: figure, summary: str) -> Chart:
    """Return a figure that `new_figure` began as a Chart. `summary` is its text for the blind.

    A legend stands above the figure; one with a single entry is hidden.
    """
    for legend in drawn.legend:
        if len(legend.items) < 2:
            legend.visible = False
        else:
            drawn.add_layout(legend, "above")
            _style(legend)
    item: Mapping[str, Any] = json_item(drawn)
    return Chart(item=item, summary=summary)


def _style(legend: Legend) -> None:
    n_entries = len(legend.items)
    legend.orientation = "horizontal"
    legend.background_fill_alpha = 0
    legend.border_line_color = None
    legend.label_text_color = INK
    legend.label_text_font = FONT
    legend.label_text_font_size = "12px"
    legend.glyph_height = 14
    legend.glyph_width = 14
    legend.click_policy = "hide"
    legend.ncols = 2 if n_entries > 3 else n_entries  # a narrow page has room for two


def _digits(is_fraction: bool) -> str:
    return "{0.0 %}" if is_fraction else "{0,0.[000]}"


def _distinct(factors: Sequence[str]) -> list[str]:
    """Return the names with numbers after repeated ones, as an axis needs them."""
    seen: dict[str, int] = {}
    found = []
    for factor in factors:
        seen[factor] = seen.get(factor, 0) + 1
        found.append(factor if seen[factor] == 1 else f"{factor} ({seen[factor]})")
    return found
