"""Show the timeline: what each part of the run did at each moment, with waits and overlap.

Steps are read of one window only. The groups that were open in it say which versions played it, and
these spare the other files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from bokeh.models import (
    ColumnDataSource,
    DatetimeTicker,
    DatetimeTickFormatter,
    HoverTool,
    OpenURL,
    PlainText,
    Range1d,
    TapTool,
)
from markupsafe import Markup

from analysis.view.charts import COLOURS, GRID, finish, new_figure
from analysis.view.html import html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.panel import Chart, Panel, show_rows
from analysis.view.sql_text import fill
from analysis.view.text import plain
from analysis.view.timeline_trace import to_trace

WINDOW_S = 120  # unless the address says more
MOST_S = 3600  # of a window: one hour
FIRST_YEAR, LAST_YEAR = 1000, 9000  # of moments that are shown
BINS = 240  # of a window, in which requests are counted
DRAWN_SLICES = 20_000  # they take a second, and 20 MB of the page
LISTED_SLICES = 200  # rows of the table
MOST_SLICES = 200_000  # of a trace
TRACE = "perfetto.json"
NO_VERSIONS = -1  # instead of the versions of a window without a slice

ENDS = """
SELECT (SELECT max(entered_at) FROM ledger) AS last_at,
       (SELECT min(opened_at) FROM groups WHERE split <> 'imported') AS first_at
"""
STEP_AT = """
SELECT min(claimed_at) AS claimed_at, max(trained_at) AS trained_at FROM lineage
WHERE batch_state = 'trained' AND live AND learner_step = $step
"""
# Learner steps that the window touches may begin before it and end after it.
REACH = """
SELECT least($begin::TIMESTAMP, min(claimed_at)) AS begin_at,
       greatest($end::TIMESTAMP, max(trained_at)) AS end_at
FROM lineage WHERE batch_state = 'trained' AND claimed_at < $end::TIMESTAMP
  AND trained_at > $begin::TIMESTAMP
"""
VERSIONS = """
WITH given_up AS (
    SELECT group_uid, max(entered_at) AS left_at FROM ledger
    WHERE state IN ('stale', 'abandoned') GROUP BY group_uid)
SELECT min(version_min) AS oldest, max(version_max) AS newest
FROM groups LEFT JOIN given_up USING (group_uid)
WHERE split <> 'imported' AND opened_at < $end::TIMESTAMP
  AND coalesce(completed_at, left_at, 'infinity'::TIMESTAMP) > $begin::TIMESTAMP
"""


def _query(*names: str) -> str:
    """Return the tables of these files beside this one as one query.

    Each file is a list of tables for a WITH. The last one also has the SELECT.
    """
    return "WITH " + ",\n".join(
        Path(__file__).with_name(f"timeline_{name}.sql").read_text().rstrip() for name in names
    )


LANES = _query("requests", "slices", "lanes")
OVERLAP = _query("requests", "overlap")
TRACED = _query("requests", "slices", "trace")
FIRST_LANES = ("learner", "publishing", "checkpoints", "evaluation", "engine", "environments")
COUNTED_LANES = ("engine", "environments")  # their height says how many ran at once
AXIS_PX, LANE_PX = 70, 46  # heights
# Within a lane, which is 1 high.
SLICE_HEIGHT, COUNTED_HEIGHT = 0.7, 0.84
MIDDLE = 0.4  # where its name stands
BELOW_LANES = 0.15  # free space below the lowest lane
US_PER_MS = 1e3  # Bokeh's times are in ms
EVENT, EVENT_COLOUR = "event", "#b3261e"
COLOUR_OF = {
    "trains": COLOURS[0],
    "waits": "#b9bec5",
    "publishes": COLOURS[2],
    "saves": COLOURS[4],
    "evaluates": COLOURS[3],
    "train": COLOURS[5],
    "heldout": COLOURS[3],
    "pauses": COLOURS[1],
}
MEANING_OF = {
    "trains": "trains",
    "waits": "waits for groups",
    "publishes": "publishes weights",
    "saves": "saves a checkpoint",
    "evaluates": "held-out evaluation",
    "train": "requests at once",
    "pauses": "pause to load weights",
}


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of one window."""
    begin, end, first, last = window(asked)
    reach = asked.rows(fill(REACH, begin=str(begin), end=str(end)))[0]
    reach_begin, reach_end = reach["begin_at"] or str(begin), reach["end_at"] or str(end)
    found = asked.rows(fill(VERSIONS, begin=reach_begin, end=reach_end))[0]
    ask = partial(
        fill,
        begin=str(begin),
        end=str(end),
        reach_begin=reach_begin,
        reach_end=reach_end,
        oldest=NO_VERSIONS if found["oldest"] is None else found["oldest"],
        newest=NO_VERSIONS if found["newest"] is None else found["newest"],
        bins=BINS,
        slices=MOST_SLICES,
    )
    seconds = int((end - begin).total_seconds())
    address = asked.link(
        "/timeline", until=str(end), seconds=seconds, panel="slices", download=TRACE
    )
    if asked.is_live:
        address += f"&as_of={asked.lsn}"
    return [
        Panel(
            title="Lanes",
            explains="A lane is a part of the run, from left to right is time (UTC). The heights "
            "of engine and environments say how many requests and actions ran at once.",
            query=ask(LANES),
            show=partial(show_lanes, asked, begin=begin, end=end),
            above=_form(asked, begin=begin, end=end, first=first, last=last, trace=address),
            empty="Nothing happened in this window.",
            width="full",
        ),
        Panel(
            title="Overlap",
            explains="How much of the learner's time, from claim to settlement, the engine went on "
            "generating: the view generation_overlap, for the learner steps of this window.",
            query=ask(OVERLAP),
            show=partial(show_overlap, asked),
            later=True,
        ),
        Panel(
            title="Slices",
            explains="Every slice of the window, request by request. The trace opens in "
            "ui.perfetto.dev or chrome://tracing.",
            query=ask(TRACED),
            show=partial(show_slices, asked),
            empty="Nothing happened in this window.",
            n_rows=LISTED_SLICES,
            files={TRACE: to_trace},
            later=True,
        ),
    ]


def window(asked: PageRequest) -> tuple[datetime, datetime, datetime, datetime]:
    """Return the window that the address names, and the run's first and last moment.

    Without one: the last minutes, or those around a learner step.
    """
    seconds = asked.integer("seconds")
    seconds = WINDOW_S if seconds is None else seconds
    if not 1 <= seconds <= MOST_S:
        raise BadAddressError(f"seconds is from 1 to {MOST_S}")
    length = timedelta(seconds=seconds)
    ends = asked.rows(ENDS)[0]
    last = _time(ends["last_at"]) if ends["last_at"] else datetime(1970, 1, 2)
    first = _time(ends["first_at"]) if ends["first_at"] else last - length
    step, until = asked.integer("learner_step"), asked.text("until")
    end = last + timedelta(seconds=1)
    if until is not None:
        end = _time(until)
    elif step is not None:
        at = asked.rows(fill(STEP_AT, step=step))[0]
        if at["claimed_at"] is None:
            raise BadAddressError(f"no learner step {step} was trained at this moment")
        middle = _time(at["claimed_at"])
        end = middle + (_time(at["trained_at"]) - middle) / 2 + length / 2
    end = end.replace(microsecond=0) + timedelta(seconds=bool(end.microsecond))
    return end - length, end, first, last


def show_lanes(
    asked: PageRequest, table: pa.Table, *, begin: datetime, end: datetime
) -> Chart | Markup:
    """Draw a lane for each part, the engine's and the environments' with their height."""
    if table.num_rows > DRAWN_SLICES:
        text = f"{table.num_rows:,} slices are too many to draw; choose a shorter window."
        return Markup('<p class="empty">{}</p>').format(text)
    rows = table.to_pylist()
    names = {row["lane"] for row in rows}
    workers = sorted(names - {*FIRST_LANES, "events"})
    lanes = [name for name in (*FIRST_LANES, *workers, "events") if name in names]
    drawn = new_figure(
        x="time (UTC)",
        height=AXIS_PX + LANE_PX * len(lanes),
        x_range=Range1d(start=_ms(begin), end=_ms(end)),
    )
    _draw_slices(drawn, _slices(asked, rows, lanes))
    _label_lanes(drawn, lanes)
    return finish(drawn, f"{len(lanes)} lanes from {begin} to {end}")


def _slices(
    asked: PageRequest, rows: Sequence[Mapping[str, Any]], lanes: Sequence[str]
) -> dict[str, dict[str, list[Any]]]:
    """Return the rectangles and their tips, as columns, by kind. Lanes are 1 apart, from above."""
    base = {name: float(len(lanes) - 1 - number) for number, name in enumerate(lanes)}
    highest = {}
    for lane in COUNTED_LANES:
        at_once = (row["at_once"] for row in rows if row["lane"] == lane)
        highest[lane] = max(at_once, default=0) or 1.0
    # Both splits of a bin stand on one another.
    foot: dict[tuple[str, int], float] = {}
    found: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        lane, step = row["lane"], row["learner_step"]
        low = base[lane]
        if lane in highest:
            low += foot.get((lane, row["begin_us"]), 0.0)
            height = COUNTED_HEIGHT * row["at_once"] / highest[lane]
            foot[lane, row["begin_us"]] = low - base[lane] + height
            more = f"{row['at_once']:.1f} at once, at most {highest[lane]:.0f}"
        else:
            height, more = SLICE_HEIGHT, plain(row["detail"] or "", at_most=160)
        what = plain(MEANING_OF.get(row["what"], row["what"]), at_most=60)
        slice_ = {
            "left": row["begin_us"] / US_PER_MS,
            "right": row["end_us"] / US_PER_MS,
            "bottom": low,
            "top": low + height,
            "what": what if step is None else f"{what}, learner step {step}",
            "took": f"{(row['end_us'] - row['begin_us']) / 1e6:,.3f} s",
            "more": more,
            "link": "" if step is None else asked.link("/lineage", learner_step=step),
        }
        columns = found.setdefault(row["what"] if row["what"] in COLOUR_OF else EVENT, {})
        for name, value in slice_.items():
            columns.setdefault(name, []).append(value)
    return found


def _draw_slices(drawn: Any, slices: Mapping[str, Mapping[str, list[Any]]]) -> None:
    """Draw the slices of each kind with tips and links."""
    linked: list[Any] = []
    for kind, colour in {**COLOUR_OF, EVENT: EVENT_COLOUR}.items():
        if kind not in slices:
            continue
        source = ColumnDataSource(dict(slices[kind]))
        label: dict[str, Any] = (
            {} if kind == "heldout" else {"legend_label": MEANING_OF.get(kind, kind)}
        )
        marks: Any
        if kind == EVENT:
            marks = drawn.scatter(
                x="left",
                y="top",
                source=source,
                marker="inverted_triangle",
                size=8,
                color=colour,
                **label,
            )
        else:
            marks = drawn.quad(
                left="left",
                right="right",
                bottom="bottom",
                top="top",
                source=source,
                fill_color=colour,
                line_color=colour,
                line_width=0 if kind in ("train", "heldout") else 1,
                **label,
            )
        tips = [("", "@what"), ("took", "@took"), ("", "@more")]
        drawn.add_tools(HoverTool(renderers=[marks], tooltips=tips))
        if kind in ("trains", "waits", "publishes", "saves"):
            linked.append(marks)
    # One tool for all marks: Bokeh obeys only the first of several.
    drawn.add_tools(TapTool(renderers=linked, callback=OpenURL(url="@link", same_tab=True)))


def _label_lanes(drawn: Any, lanes: Sequence[str]) -> None:
    """Name the lanes at the left, and times below."""
    middles = [len(lanes) - 1 - number + MIDDLE for number in range(len(lanes))]
    drawn.y_range = Range1d(start=-BELOW_LANES, end=len(lanes))
    drawn.yaxis.ticker = middles
    drawn.yaxis.major_label_overrides = {
        at: PlainText(text=plain(name, at_most=16)) for at, name in zip(middles, lanes, strict=True)
    }
    drawn.xaxis.ticker = DatetimeTicker(desired_num_ticks=4)
    drawn.xaxis.formatter = DatetimeTickFormatter(
        milliseconds="%H:%M:%S.%3N",
        seconds="%H:%M:%S",
        minsec="%H:%M:%S",
        minutes="%H:%M",
        hourmin="%H:%M",
        hours="%H:%M",
    )
    drawn.ygrid.visible = False
    drawn.xgrid.grid_line_color = GRID
    drawn.xgrid.grid_line_alpha = 0.25


def show_overlap(asked: PageRequest, table: pa.Table) -> Markup:
    """Say the share of overlap, and show it for each learner step."""
    rows = table.to_pylist()
    lineage = asked.row_link("/lineage", {"learner_step": "learner_step"})
    has_steps = rows[0]["learner_step"] is not None
    shown = table.select(["learner_step", "claimed_at", "training_s", "overlap", "groups"])
    return html(
        "timeline_overlap.html",
        row=rows[0],
        n_steps=len(rows) if has_steps else 0,
        table=show_rows(shown, links={"learner_step": lineage}) if has_steps else "",
    )


def show_slices(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the slices. An episode's leads to its transcript, a learner step's to its lineage."""

    def address(row: Mapping[str, Any]) -> str | None:
        if row["lane"] == "episodes":
            return asked.link("/trajectory", traj=row["thread"])
        if row["learner_step"] is not None:
            return asked.link("/lineage", learner_step=row["learner_step"])
        return None

    return show_rows(
        table,
        links={"what": address},
        hidden=("thread", "begin_us", "duration_us", "learner_step"),
    )


def _form(
    asked: PageRequest,
    *,
    begin: datetime,
    end: datetime,
    first: datetime,
    last: datetime,
    trace: str,
) -> Markup:
    seconds = int((end - begin).total_seconds())
    half = (end - begin) / 2

    def at(moment: datetime, length: int = seconds) -> str:
        return asked.link("/timeline", until=str(moment), seconds=length)

    middle = begin + half
    return html(
        "timeline_form.html",
        asked=asked,
        begin=begin,
        until=end,
        seconds=seconds,
        trace=trace,
        earlier=at(begin + half) if begin > first else None,
        later=at(end + half) if end < last else None,
        closer=at(middle + half / 2, max(1, seconds // 2)) if seconds > 1 else None,
        farther=at(middle + 2 * half, seconds * 2) if seconds * 2 <= MOST_S else None,
        newest=asked.link("/timeline", seconds=seconds),
    )


def _time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadAddressError("until is no time, such as 2026-11-23 02:59:44 (UTC)") from None
    # A window beside one at the end of what Python counts could not be named.
    if not FIRST_YEAR <= moment.year <= LAST_YEAR:
        raise BadAddressError(f"a timeline is of the years {FIRST_YEAR} to {LAST_YEAR}")
    return moment.replace(tzinfo=None)


def _ms(moment: datetime) -> float:
    return (moment - datetime(1970, 1, 1)).total_seconds() * 1e3


PAGE = Page(
    path="/timeline",
    title="Timeline",
    question="Who works, who waits and who pauses at each moment, and how much overlaps?",
    panels=panels,
)
