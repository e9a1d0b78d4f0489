"""Show the staleness map: how far behind the learner the weights of each group were.

A group is a mark: across, the learner step that consumed it; up, the oldest version that played it.
On the diagonal a group was played by the weights that were trained on it. The bound is
`max_staleness` versions below. Hollow marks are groups that taught nothing, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    HoverTool,
    NumeralTickFormatter,
    OpenURL,
    Range1d,
    TapTool,
)
from markupsafe import Markup

from analysis.view.charts import COLOURS, INK, bars, finish, new_figure
from analysis.view.html import html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.panel import Chart, Panel, show_rows
from analysis.view.sql_text import fill
from analysis.view.text import plain

SHOWN_STEPS = 24  # learner steps of the map, unless the address names others
MOST_MARKS = 4_000  # of the map; the newest are drawn
TREND_BUCKETS = 40  # points of the curve
MOST_BARS = 1_000  # of the shares by staleness
CELL = 0.84  # of a learner step's width, over which its groups are spread
KINDS = {
    "trained": ("circle", COLOURS[0], True),
    "filtered": ("square", "#b8860b", False),
    "stale": ("diamond", COLOURS[1], False),
}

LAST = """
SELECT max(learner_step) AS last, min(learner_step) AS first,
       getvariable('max_staleness')::BIGINT AS bound
FROM lineage WHERE batch_state = 'trained' AND live
"""
# A stale group was in no batch. It stands at the learner step that came next, at the oldest version
# that played it, or that it was begun with if none of its episodes ended.
MARKS = """
WITH batches AS (
    SELECT learner_step, max(version_in) AS version_in, max(trained_at) AS trained_at
    FROM lineage WHERE batch_state = 'trained' AND live GROUP BY learner_step),
begun AS (
    SELECT group_uid, min(version) AS begun FROM unfinished GROUP BY group_uid),
dropped AS (
    SELECT group_uid, max(entered_at) AS dropped_at FROM ledger WHERE state = 'stale' GROUP BY ALL),
stale AS (
    SELECT g.group_uid, g.task_id, 'stale' AS outcome, g.reason,
           least(g.version_min, u.begun) AS version,
           coalesce(b.learner_step, (SELECT max(learner_step) + 1 FROM batches)) AS learner_step,
           coalesce(b.version_in, (SELECT max(version_in) + 1 FROM batches)) AS version_in
    FROM groups AS g JOIN dropped AS d USING (group_uid) LEFT JOIN begun AS u USING (group_uid)
    ASOF LEFT JOIN batches AS b ON d.dropped_at <= b.trained_at
    WHERE g.state = 'stale' AND g.source IS NULL),
consumed AS (
    SELECT l.group_uid, l.task_id, l.outcome, if(l.outcome = 'filtered', g.reason, NULL) AS reason,
           l.version_min AS version, l.learner_step, l.version_in
    FROM lineage AS l LEFT JOIN groups AS g USING (group_uid)
    WHERE l.batch_state = 'trained' AND l.live AND l.staleness IS NOT NULL)
SELECT learner_step, version, version_in, version_in - version AS behind, outcome, group_uid,
       task_id, reason
FROM (FROM consumed UNION ALL BY NAME FROM stale)
WHERE learner_step BETWEEN $first AND $last AND version IS NOT NULL
ORDER BY learner_step DESC, version, outcome, group_uid LIMIT $marks
"""
SHARES = """
WITH trained AS (
    SELECT staleness, sum(n_steps) AS steps, count(*) AS groups
    FROM lineage JOIN groups USING (group_uid)
    WHERE batch_state = 'trained' AND live AND outcome = 'trained' AND staleness IS NOT NULL
    GROUP BY staleness),
possible AS (
    SELECT unnest(range(least($most, greatest(getvariable('max_staleness')::BIGINT,
                                              (SELECT max(staleness) FROM trained)) + 1)))
        AS staleness)
SELECT staleness, coalesce(steps, 0) / sum(steps) OVER () AS share, coalesce(steps, 0) AS steps,
       coalesce(groups, 0) AS groups
FROM possible LEFT JOIN trained USING (staleness) ORDER BY staleness
"""
# Versions that were published between the group's oldest version and its completion passed while it
# was played; the others while it waited for the learner.
CAUSES = """
WITH width AS (
    SELECT greatest(1, ceil((max(learner_step) - min(learner_step) + 1) / $buckets))::BIGINT
        AS width
    FROM lineage WHERE batch_state = 'trained' AND live)
SELECT l.learner_step // width * width AS learner_step,
       avg(p.version - l.version_min) AS played, avg(l.version_in - p.version) AS waited,
       count(*) AS groups
FROM lineage AS l JOIN groups AS g USING (group_uid)
ASOF JOIN versions AS p ON g.completed_at >= p.published_at, width
WHERE l.batch_state = 'trained' AND l.live AND l.staleness IS NOT NULL
GROUP BY ALL ORDER BY learner_step
"""
BY_STALENESS = """
SELECT staleness, count(*) AS groups, sum(n_steps) AS steps,
       count(*) FILTER (outcome = 'filtered') / count(*) AS filtered,
       sum(n_won) / sum(n_members) AS success, sum(n_steps) / sum(n_members) AS steps_per_episode,
       avg(version_max - version_min) AS versions_within
FROM (SELECT l.*, g.n_steps, g.n_won, g.n_members
      FROM lineage AS l JOIN groups AS g USING (group_uid))
WHERE batch_state = 'trained' AND live AND staleness IS NOT NULL
GROUP BY staleness ORDER BY staleness
"""
VIOLATIONS = """
SELECT learner_step, staleness, group_uid, task_id, version_min, version_in, outcome
FROM staleness_violations ORDER BY learner_step DESC, group_uid
"""
HINTS = {
    "staleness": "the learner's version at consumption, minus the oldest version in the group",
    "filtered": "fraction of the groups that taught nothing",
    "success": "fraction of the episodes that reached their goal",
    "versions_within": "mean number of versions between the oldest and the newest that played it",
}


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of the staleness map."""
    first, last = asked.integer("from_step"), asked.integer("to_step")
    behind = (asked.text("up") or "version") == "behind"
    if first is not None and last is not None and first > last:
        raise BadAddressError("from_step comes after to_step")
    (run,) = asked.rows(LAST)
    newest = run["last"] or 0
    last = newest + 1 if last is None else last
    first = max(1, min(last, newest) - SHOWN_STEPS + 1) if first is None else first
    bound = run["bound"]
    return [
        Panel(
            title="Map",
            explains="A mark is a group. Across: the learner step that consumed it. Up: the oldest "
            "version of the weights that played it, or how many versions behind these were. "
            "Hollow: it taught nothing. A mark leads to its group.",
            query=fill(MARKS, first=first, last=last, marks=MOST_MARKS),
            show=partial(show_map, asked, bound=bound, behind=behind),
            above=_form(asked, run, first=first, last=last, behind=behind),
            empty="No group of this run was consumed in these learner steps.",
            width="full",
        ),
        *_causes(bound),
        Panel(
            title="Violations",
            explains="Groups that were trained on although they were staler than the run allows. "
            "This list must be empty.",
            query=VIOLATIONS,
            show=partial(show_violations, asked),
            empty=f"It is empty, as it must be: no group was trained on more than {bound} "
            f"version{'' if bound == 1 else 's'} behind.",
        ),
    ]


def _causes(bound: int) -> list[Panel]:
    """Return how much staleness there is, where it comes from, and what else comes with it."""
    return [
        Panel(
            title="Share of steps by staleness",
            explains="Of all steps that were trained on: how many versions behind the learner the "
            f"oldest weights of their group were. The bound is {bound}; 0 is on policy.",
            query=fill(SHARES, most=MOST_BARS),
            show=partial(
                bars,
                x="staleness",
                y=["share"],
                names={"staleness": "versions behind", "share": "share of steps"},
                is_fraction=True,
            ),
            empty="Nothing was trained on yet.",
        ),
        Panel(
            title="Where staleness comes from",
            explains="Versions that were published while a group was still played, and while it "
            "waited for the learner: the mean over the groups of each batch.",
            query=fill(CAUSES, buckets=TREND_BUCKETS),
            show=partial(
                bars,
                x="learner_step",
                y=["played", "waited"],
                names={
                    "learner_step": "learner step",
                    "played": "while it was played",
                    "waited": "while it waited",
                },
            ),
            later=True,
            empty="No group of this run was consumed yet.",
        ),
        Panel(
            title="Are stale groups different",
            explains="Groups that were consumed, by staleness. Long episodes become stale more "
            "easily, so a bound also selects.",
            query=BY_STALENESS,
            show=partial(show_rows, links={}, hints=HINTS),
            later=True,
            empty="No group of this run was consumed yet.",
        ),
    ]


def show_map(asked: PageRequest, table: pa.Table, *, bound: int, behind: bool) -> Chart:
    """Draw the groups, the diagonal and the bound."""
    rows = sorted(table.to_pylist(), key=lambda row: row["learner_step"])
    batches = {row["learner_step"]: row["version_in"] for row in rows}
    drawn = new_figure(x="learner step", height=440)
    _draw_bounds(drawn, batches, bound=bound, behind=behind)
    linked: list[Any] = []
    for kind, (marker, colour, is_filled) in KINDS.items():
        places = _places(asked, rows, kind=kind, behind=behind)
        if not places["x"]:
            continue
        marks = drawn.scatter(
            x="x",
            y="y",
            source=ColumnDataSource(places),
            marker=marker,
            size=9 if kind == "stale" else 7,
            line_color=colour,
            line_width=1.5,
            fill_color=colour,
            fill_alpha=0.75 if is_filled else 0.0,
            legend_label=f"{kind} ({len(places['x']):,})",
        )
        linked.append(marks)
        tips = [
            ("group", "@group"),
            ("task", "@task"),
            ("oldest version", "@version, @behind behind"),
            ("learner step", "@step"),
            (kind, "@reason"),
        ]
        drawn.add_tools(
            HoverTool(renderers=[marks], tooltips=tips),
        )
    # One tool for all marks: Bokeh obeys only the first of several.
    drawn.add_tools(TapTool(renderers=linked, callback=OpenURL(url="@link", same_tab=True)))
    drawn.yaxis.axis_label = "versions behind" if behind else "policy version"
    drawn.yaxis.formatter = NumeralTickFormatter(format="0")
    if behind:
        highest = max([bound, *(row["behind"] for row in rows)])
        drawn.y_range = Range1d(start=highest + 0.7, end=-0.7)  # fresh groups are on top
        # no list of all versions: the bound is a number of the run
        drawn.yaxis.ticker = BasicTicker(min_interval=1)
    of_kind = Counter(row["outcome"] for row in rows)
    counts = ", ".join(f"{of_kind[kind]} {kind}" for kind in KINDS)
    return finish(drawn, f"groups by learner step and oldest version: {counts}")


def show_violations(asked: PageRequest, table: pa.Table) -> Markup:
    """Show what must not be there. Each row leads to its group."""
    group = asked.row_link("/group", {"group": "group_uid"})
    warning = Markup('<p class="sentence alarm">{} groups were too stale.</p>')
    return warning.format(f"{table.num_rows:,}") + show_rows(table, links={"group_uid": group})


def _draw_bounds(drawn: Any, batches: Mapping[int, int], *, bound: int, behind: bool) -> None:
    """Draw what is allowed: from the learner's own version down to the bound."""
    steps = sorted(batches)
    top = [0 if behind else batches[step] for step in steps]
    bottom = [bound if behind else version - bound for version in top]
    source = ColumnDataSource({"x": steps, "top": top, "bottom": bottom})
    half = -0.5 if behind else 0.5
    drawn.vbar(
        x=steps,
        width=1.0,
        top=[value + half for value in top],
        bottom=[value - half for value in bottom],
        fill_color=COLOURS[0],
        fill_alpha=0.07,
        line_color=None,
        level="underlay",
    )
    for column, colour, dash, label in (
        ("top", INK, "solid", "the learner's version: staleness 0"),
        ("bottom", COLOURS[1], [6, 4], f"max_staleness = {bound}"),
    ):
        drawn.step(
            x="x",
            y=column,
            source=source,
            mode="center",
            line_color=colour,
            line_dash=dash,
            line_width=1.5,
            line_alpha=0.7,
            legend_label=label,
        )


def _places(
    asked: PageRequest, rows: Sequence[Mapping[str, Any]], *, kind: str, behind: bool
) -> dict[str, list[Any]]:
    """Return where the marks of a kind stand. Groups of one step and version stand side by side."""
    cells: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["learner_step"], row["version"]), []).append(row)
    places: dict[str, list[Any]] = {
        name: [] for name in ("x", "y", "group", "task", "version", "behind", "step", "reason")
    }
    links = []
    for (step, version), groups in cells.items():
        width = min(0.16, CELL / len(groups))
        for number, row in enumerate(groups):
            if row["outcome"] != kind:
                continue
            places["x"].append(step + (number - (len(groups) - 1) / 2) * width)
            places["y"].append(row["behind"] if behind else version)
            places["group"].append(row["group_uid"][:8])
            places["task"].append(plain(row["task_id"], at_most=60))
            places["version"].append(version)
            places["behind"].append(row["behind"])
            places["step"].append(step)
            places["reason"].append(plain(row["reason"] or f"learner step {step}", at_most=120))
            links.append(asked.link("/group", group=row["group_uid"]))
    return {**places, "link": links}


def _form(
    asked: PageRequest, run: Mapping[str, Any], *, first: int, last: int, behind: bool
) -> Markup:
    """Return the form of the map, with links to the steps before and after."""
    up = "behind" if behind else None
    newest, oldest = run["last"] or 0, run["first"] or 0
    width = max(1, min(last, newest) - first + 1)

    def steps(begin: int) -> str:
        return asked.link("/staleness", from_step=begin, to_step=begin + width - 1, up=up)

    return html(
        "staleness_form.html",
        asked=asked,
        first=first,
        last=min(last, newest),
        behind=behind,
        earlier=steps(max(oldest, first - width)) if first > oldest else None,
        later=steps(first + width) if last < newest else None,
        all_steps=asked.link("/staleness", from_step=oldest, up=up),
        n_steps=newest,
    )


PAGE = Page(
    path="/staleness",
    title="Staleness map",
    question="How far behind the learner were the weights that played what it trained on?",
    panels=panels,
)
