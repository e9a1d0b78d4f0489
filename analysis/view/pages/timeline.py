"""Show the timeline: what each part of the run did at each moment, with waits and overlap.

Steps are read of one window only. The groups that were open in it say which versions played it, and
these spare the other files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pyarrow as pa
from bokeh.models import (
    ColumnDataSource,
    DatetimeTicker,
    DatetimeTickFormatter,
    HoverTool,
    OpenURL,
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

WINDOW_S = 120  # unless the address says more
MOST_S = 3600
FIRST_YEAR, LAST_YEAR = 1000, 9000  # of moments that are shown
BINS = 240  # of a window, in which requests are counted
LISTED_SLICES = 200
MOST_SLICES = 200_000  # of a trace
TRACE = "perfetto.json"
NO_VERSIONS = -1

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
REQUESTS = """
WITH requests AS (
    SELECT traj_uid, group_uid, step_index, split, task_id, version_min AS version,
           epoch_us(t_start) AS begin_us, epoch_us(t_start) + gen_us AS answered_us,
           epoch_us(t_start) + gen_us + env_us AS end_us
    FROM steps
    WHERE version_min >= $oldest AND version_max <= $newest AND split <> 'imported'
      AND t_start < $reach_end::TIMESTAMP
      AND t_start + to_microseconds(gen_us + env_us) > $reach_begin::TIMESTAMP),
bounds AS (
    SELECT epoch_us($begin::TIMESTAMP) AS low_us, epoch_us($end::TIMESTAMP) AS high_us),
batches AS (
    SELECT learner_step, min(epoch_us(claimed_at)) AS claimed_us,
           max(epoch_us(trained_at)) AS trained_us, count(*) AS n_groups
    FROM lineage WHERE batch_state = 'trained' AND live
      AND claimed_at < $reach_end::TIMESTAMP + INTERVAL 1 HOUR
      AND trained_at > $reach_begin::TIMESTAMP - INTERVAL 1 HOUR
    GROUP BY learner_step)
"""
SLICES = """,
in_order AS (
    SELECT *, lag(trained_us) OVER (ORDER BY learner_step) AS before_us FROM batches),
times AS (
    SELECT learner_step, name, value * 1e6 AS value_us FROM metrics
    WHERE name IN ('time/publish_s', 'time/checkpoint_s')
      AND learner_step BETWEEN (SELECT min(learner_step) FROM batches)
                           AND (SELECT max(learner_step) + 1 FROM batches)),
loads AS (
    SELECT component, epoch_us(logged_at) AS end_us,
           regexp_extract(detail, '"version": ([0-9]{1,15})', 1) AS version,
           list_sum(list_transform(
               ['pause', 'start', 'update', 'finish', 'resume'],
               lambda phase: coalesce(try_cast(regexp_extract(
                   detail, '"' || phase || '_ms": ([0-9.]{1,15})', 1) AS DOUBLE), 0))) * 1e3
               AS pause_us
    FROM events WHERE what = 'weights loaded'
      AND logged_at BETWEEN $begin::TIMESTAMP AND $end::TIMESTAMP + INTERVAL 1 MINUTE),
slices AS (
    SELECT 'learner' AS lane, 'trains' AS what, learner_step,
           greatest(claimed_us, coalesce(before_us, claimed_us)) AS begin_us,
           trained_us AS end_us, n_groups || ' groups' AS detail FROM in_order
    UNION ALL BY NAME
    SELECT 'learner' AS lane, 'waits' AS what, learner_step, before_us AS begin_us,
           claimed_us AS end_us, 'for groups' AS detail
    FROM in_order WHERE claimed_us > before_us
    UNION ALL BY NAME
    SELECT 'publishing' AS lane, 'publishes' AS what, v.learner_step,
           epoch_us(published_at) - coalesce(t.value_us, 0)::BIGINT AS begin_us,
           epoch_us(published_at) AS end_us, 'version ' || version AS detail
    FROM versions AS v LEFT JOIN times AS t
      ON t.learner_step = v.learner_step AND t.name = 'time/publish_s'
    UNION ALL BY NAME
    SELECT 'checkpoints' AS lane, 'saves' AS what, c.learner_step,
           least(coalesce(b.trained_us, epoch_us(saved_at)), epoch_us(saved_at)) AS begin_us,
           greatest(epoch_us(saved_at), begin_us + coalesce(t.value_us, 0)::BIGINT) AS end_us,
           path AS detail
    FROM checkpoints AS c LEFT JOIN batches AS b USING (learner_step)
    LEFT JOIN times AS t
      ON t.learner_step = c.learner_step + 1 AND t.name = 'time/checkpoint_s'
    WHERE c.live
    UNION ALL BY NAME
    SELECT component AS lane, 'pauses' AS what, (end_us - pause_us)::BIGINT AS begin_us, end_us,
           'loads version ' || version AS detail FROM loads
    UNION ALL BY NAME
    SELECT 'evaluation' AS lane, 'evaluates' AS what, min(epoch_us(opened_at)) AS begin_us,
           max(epoch_us(coalesce(completed_at, $end::TIMESTAMP))) AS end_us,
           'version ' || evaluated_version AS detail
    FROM groups WHERE split = 'heldout' GROUP BY evaluated_version
    UNION ALL BY NAME
    SELECT 'events' AS lane, what, epoch_us(logged_at) AS begin_us,
           epoch_us(logged_at) AS end_us, component || ': ' || left(detail, 200) AS detail
    FROM events WHERE what <> 'weights loaded')
"""
LANES = (
    REQUESTS
    + SLICES
    + """,
phases AS (
    SELECT 'engine' AS lane, split, begin_us, answered_us AS end_us FROM requests
    UNION ALL
    SELECT 'environments', split, answered_us, end_us FROM requests),
cut AS (
    SELECT lane, split, greatest(begin_us, low_us) AS begin_us, least(end_us, high_us) AS end_us,
           low_us, (high_us - low_us) / $bins AS width
    FROM phases, bounds WHERE begin_us < high_us AND end_us > low_us),
spread AS (
    SELECT *, unnest(range(floor((begin_us - low_us) / width)::BIGINT,
                           least($bins, ceil((end_us - low_us) / width))::BIGINT)) AS bin
    FROM cut)
SELECT lane, split AS what, NULL::BIGINT AS learner_step,
       (any_value(low_us) + bin * any_value(width))::BIGINT AS begin_us,
       (any_value(low_us) + (bin + 1) * any_value(width))::BIGINT AS end_us,
       sum(least(end_us, low_us + (bin + 1) * width) - greatest(begin_us, low_us + bin * width))
           / any_value(width) AS at_once, NULL AS detail
FROM spread GROUP BY lane, split, bin
UNION ALL BY NAME
SELECT s.* FROM slices AS s, bounds WHERE s.begin_us < high_us AND s.end_us >= low_us
ORDER BY lane, begin_us, what
"""
)
# The view generation_overlap for this window's requests and learner steps, and for the window
# itself (a span without a learner step): each interval adds what the ones before have not covered.
OVERLAP = (
    REQUESTS
    + """,
phases AS (
    SELECT 'engine' AS lane, begin_us, answered_us AS end_us FROM requests
    UNION ALL
    SELECT 'environments', answered_us, end_us FROM requests),
spans AS (
    SELECT learner_step, n_groups, claimed_us AS from_us, trained_us AS until_us
    FROM batches, bounds WHERE claimed_us < high_us AND trained_us > low_us
    UNION ALL
    SELECT NULL, NULL, low_us, high_us FROM bounds),
beside AS (
    SELECT s.*, p.*, max(p.end_us) OVER (
               PARTITION BY learner_step, lane ORDER BY p.begin_us
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS covered_us
    FROM spans AS s LEFT JOIN phases AS p ON p.begin_us < s.until_us AND p.end_us > s.from_us),
added AS (
    SELECT *, greatest(0, least(end_us, until_us) - greatest(begin_us, from_us, covered_us))
        AS added_us FROM beside),
shares AS (
    SELECT learner_step, n_groups, from_us, (until_us - from_us) / 1e6 AS span_s,
           coalesce(sum(added_us) FILTER (lane = 'engine'), 0) / (until_us - from_us) AS engine,
           coalesce(sum(added_us) FILTER (lane = 'environments'), 0) / (until_us - from_us)
               AS environments
    FROM added GROUP BY learner_step, n_groups, from_us, until_us)
SELECT s.learner_step, make_timestamp(s.from_us) AS claimed_at, s.span_s AS training_s,
       s.engine AS overlap, s.n_groups AS groups,
       sum(s.engine * s.span_s) OVER () / sum(s.span_s) OVER () AS overlap_of_all,
       w.engine, w.environments
FROM shares AS w LEFT JOIN shares AS s ON s.learner_step IS NOT NULL
WHERE w.learner_step IS NULL ORDER BY s.learner_step DESC
"""
)
TRACED = (
    REQUESTS
    + SLICES
    + """,
following AS (
    SELECT *, lead(begin_us) OVER (PARTITION BY traj_uid ORDER BY begin_us, step_index) AS next_us
    FROM requests),
traced AS (
    SELECT lane, 'all' AS thread, what, begin_us, end_us, learner_step, detail FROM slices
    UNION ALL BY NAME
    SELECT 'episodes' AS lane, traj_uid::VARCHAR AS thread, 'generates' AS what, begin_us,
           least(answered_us, coalesce(next_us, answered_us)) AS end_us,
           'step ' || step_index || ' of ' || left(task_id, 200) || ', version ' || version
               AS detail
    FROM following
    UNION ALL BY NAME
    SELECT 'episodes' AS lane, traj_uid::VARCHAR AS thread, 'environment' AS what,
           least(answered_us, coalesce(next_us, answered_us)) AS begin_us,
           least(end_us, coalesce(next_us, end_us)) AS end_us,
           'step ' || step_index || ' of ' || left(task_id, 200) AS detail
    FROM following)
SELECT make_timestamp(begin_us) AS begin_at, greatest(0, end_us - begin_us) / 1e3 AS duration_ms,
       lane, thread, what, detail, learner_step, begin_us,
       greatest(0, end_us - begin_us) AS duration_us
FROM traced, bounds WHERE begin_us < high_us AND end_us >= low_us
ORDER BY begin_us, duration_us DESC, lane, thread, what LIMIT $slices
"""
)
FIRST_LANES = ("learner", "publishing", "checkpoints", "evaluation", "engine", "environments")
COUNTED_LANES = ("engine", "environments")  # their height says how many ran at once
AXIS_PX, LANE_PX = 70, 46  # heights
# Within a lane, which is 1 high.
SLICE_HEIGHT, COUNTED_HEIGHT = 0.7, 0.84
MIDDLE = 0.4  # where its name stands
BELOW_LANES = 0.15
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


def show_lanes(asked: PageRequest, table: pa.Table, *, begin: datetime, end: datetime) -> Chart:
    """Draw a lane for each part, the engine's and the environments' with their height."""
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
        at: plain(name, at_most=16) for at, name in zip(middles, lanes, strict=True)
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


def to_trace(table: pa.Table) -> bytes:
    """Return the slices as Chrome trace events: a process for each lane, a thread for an episode.

    Every event has a name, ph, ts, dur, pid and tid, and they are sorted by time. Times are in us.
    """
    rows = table.to_pylist()
    pids: dict[str, int] = {}
    tids: dict[tuple[str, str], int] = {}
    for row in rows:
        pids.setdefault(row["lane"], len(pids) + 1)
        tids.setdefault((row["lane"], row["thread"]), len(tids) + 1)
    names = [("process_name", pid, 0, lane) for lane, pid in pids.items()]
    names += [("thread_name", pids[lane], tid, thread) for (lane, thread), tid in tids.items()]
    events: list[dict[str, Any]] = [
        {
            "name": name,
            "ph": "M",
            "ts": 0,
            "dur": 0,
            "pid": pid,
            "tid": tid,
            "args": {"name": plain(text)},
        }
        for name, pid, tid, text in names
    ]
    events += [
        {
            "name": plain(row["what"]),
            "ph": "X",
            "ts": row["begin_us"],
            "dur": row["duration_us"],
            "pid": pids[row["lane"]],
            "tid": tids[row["lane"], row["thread"]],
            "args": {"detail": plain(row["detail"] or "", at_most=300)},
        }
        for row in rows
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


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
