"""Show two runs side by side: which one learns better, at what cost, and on which tasks?

Every query is asked of both runs. The first run is the one that the other pages show, the second
the one named by `with` in the address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool
from markupsafe import Markup

from analysis.evaluation_stats import Z_95, TaskResult, interval, sign_flip_p, success
from analysis.run_status import duration
from analysis.view.charts import COLOURS, finish, new_figure, thinned
from analysis.view.heldout_rounds import ROUNDS, heldout_tasks, round_columns
from analysis.view.html import html, number, percent
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.pages.run import FIGURES, RECENT_STEPS
from analysis.view.panel import Chart, Panel
from analysis.view.run_settings import differing, settings_of
from analysis.view.sql_text import Value, fill
from analysis.view.text import plain
from printable import shell_word

SMOOTH_STEPS = 5  # learner steps whose groups a point of the curves is the mean of
LAST_STEPS = 20  # learner steps whose groups the success by kind is taken from
CERTAIN_P = 0.05  # the usual level of significance
SHOWN_TASKS = 200  # rows of the table
SHOWN_KINDS = 200  # of each split and run, those that were played most
SIDE = "side"  # the column that combine adds: 0 the first run, 1 the second
HELDOUT, TRAIN = "heldout", "train"
SPLITS = {TRAIN: "training", HELDOUT: "held\u00a0out"}
HOURS_FROM = 2.0  # a run that is shorter is drawn in minutes
MINUTES_OF_HOUR = 60.0
APART = 0.006  # of the axis: two runs' evaluations of one version, so that both are seen

# A point is the mean over the groups of some learner steps, with an interval by how much these
# groups differ: episodes of one task are alike.
CURVE = """
WITH consumed AS (
    SELECT learner_step, n_won / n_members AS rate, claimed_at, trained_at
    FROM lineage JOIN groups USING (group_uid)
    WHERE batch_state = 'trained' AND live AND lineage.source IS NULL AND n_members > 0),
windowed AS (
    SELECT learner_step, avg(rate) OVER recent AS success,
           coalesce(stddev_samp(rate) OVER recent / sqrt(count(*) OVER recent), 0) AS error,
           epoch(max(trained_at) OVER (PARTITION BY learner_step)
                 - min(claimed_at) OVER ()) / 3600 AS hours
    FROM consumed
    WINDOW recent AS (
        ORDER BY learner_step RANGE BETWEEN $smooth - 1 PRECEDING AND CURRENT ROW))
SELECT learner_step, any_value(hours) AS hours, any_value(success) AS success,
       greatest(0, any_value(success - $z * error)) AS low,
       least(1, any_value(success + $z * error)) AS high
FROM windowed GROUP BY learner_step ORDER BY learner_step
"""
# The kind of a task is the begin of its id: alfworld's pick_and_place_simple, sokoban.
KINDS = """
WITH recent AS (
    SELECT DISTINCT group_uid FROM lineage WHERE batch_state = 'trained' AND live
      AND learner_step > (SELECT max(learner_step) FROM lineage
                          WHERE batch_state = 'trained' AND live) - $steps),
played AS (
    FROM groups WHERE split = 'train' AND n_members > 0
      AND group_uid IN (SELECT group_uid FROM recent)
    UNION ALL
    FROM newest_results)
SELECT split, split_part(regexp_replace(task_id, '^[a-z_]+/', ''), '-', 1) AS kind, task_id,
       sum(n_won)::BIGINT AS won, sum(n_members)::BIGINT AS played
FROM played GROUP BY ALL ORDER BY ALL
"""
TASKS = """
SELECT task_id, split, sum(n_won)::BIGINT AS won, sum(n_members)::BIGINT AS played
FROM groups WHERE n_members > 0 AND split IN ('train', 'heldout')
GROUP BY ALL ORDER BY ALL
"""
FIGURE_ROWS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("learner_step", "learner step", number),
    ("version", "version of the weights", number),
    ("trained_s", "training for", lambda value: "–" if value is None else duration(value)),
    ("train_success", f"success, training (last {RECENT_STEPS} learner steps)", percent),
    ("heldout_success", "success, held out (newest evaluation)", percent),
    ("trained", "groups trained", number),
    ("episodes", "episodes", lambda value: number(int(value or 0))),
    ("steps", "steps", lambda value: number(int(value or 0))),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The two runs of the page."""

    asked: PageRequest
    other: int  # number of the second run
    names: tuple[str, str]

    def both(self, query: str, table: pa.Table) -> pa.Table:
        """Return the rows of the first run, which are there, and of the second. Raises StoreError.

        The column SIDE says whose they are.
        """
        tables = [table, self.asked.ask_run(self.other, query)]
        sided = [
            each.append_column(SIDE, pa.array([side] * each.num_rows, pa.int8()))
            for side, each in enumerate(tables)
        ]
        return pa.concat_tables(sided, promote_options="permissive")

    def panel(
        self, title: str, explains: str, query: str, show: Callable[..., Any], **settings: Any
    ) -> Panel:
        """Return a panel of both runs' rows. `show` gets the pair and the rows."""
        return Panel(
            title=title,
            explains=explains,
            query=query,
            show=partial(show, self),
            combine=partial(self.both, query),
            keeps=bool(self.asked.parameters.get(f"as_of_{self.other}")),
            **settings,
        )

    def link(self, side: int, path: str, **parameters: Value) -> str:
        """Return the address of a page of one of the runs, at the moment that is shown."""
        if side == 0:
            return self.asked.link(path, **parameters)
        kept: dict[str, Value] = dict(parameters)
        kept["run"] = self.other
        if not self.asked.is_live:
            kept["as_of"] = self.asked.lsn_of(self.other)
        return f"{path}?{urlencode(kept)}"


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of two runs, or of one with a line on how to open two."""
    pair = pair_of(asked)
    if pair is None:
        return [_only_one(asked)]
    return [*_overview(pair), *_learning(pair), *_tasks(pair)]


def _overview(pair: Pair) -> list[Panel]:
    return [
        pair.panel(
            "Two runs",
            "Every query of this page is asked of both runs. A name leads to the run's own page.",
            fill(FIGURES, steps=RECENT_STEPS),
            show_figures,
        ),
        Panel(
            title="Settings that differ",
            explains="Of the newest start of each run, also for an earlier moment.",
            content=partial(show_settings, pair),
            keeps=False,
        ),
    ]


def _learning(pair: Pair) -> list[Panel]:
    curve = fill(CURVE, smooth=SMOOTH_STEPS, z=Z_95)
    mean = f"Each point is the mean of {SMOOTH_STEPS} learner steps; bands are 95 % intervals."
    return [
        pair.panel(
            "Success by learner step",
            f"Which one learns from fewer batches? {mean}",
            curve,
            show_by_step,
            empty="No batch was trained on yet, in either run.",
        ),
        pair.panel(
            "Success by time",
            "Which one learns in less time? The same points by the time since the first batch was "
            "handed to the learner, stops included.",
            curve,
            show_by_time,
            empty="No batch was trained on yet, in either run.",
        ),
        pair.panel(
            "Held-out success",
            "Each evaluation of tasks that are never trained on. Whiskers are 95 % intervals "
            "(Wilson, for the effective number of episodes).",
            ROUNDS,
            show_rounds,
            empty="Nothing was played on held-out tasks, in either run.",
        ),
    ]


def _tasks(pair: Pair) -> list[Panel]:
    return [
        pair.panel(
            "Tasks that only one run won",
            "Played by both, over the whole training. Counts lead to the groups of that run.",
            TASKS,
            show_tasks,
            empty="No task was played yet, in either run.",
        ),
        pair.panel(
            "Success by kind of task",
            f"Share of episodes that were won: training tasks of the last {LAST_STEPS} learner "
            "steps, and the newest evaluation. In brackets 95 % intervals, then the number of "
            "episodes. The kind is the begin of a task's id.",
            fill(KINDS, steps=LAST_STEPS),
            show_kinds,
            empty="No task was played yet, in either run.",
            width="full",
        ),
    ]


def pair_of(asked: PageRequest) -> Pair | None:
    """Return the two runs that the address names; None if only one is open."""
    if len(asked.runs) < 2:
        return None
    other = asked.integer("with")
    if other is None:
        other = next(each for each in range(len(asked.runs)) if each != asked.run_number)
    if not 0 <= other < len(asked.runs):
        raise BadAddressError(f"with is a number from 0 to {len(asked.runs) - 1}")
    names = [plain(Path(asked.runs[each]).name, at_most=40) for each in (asked.run_number, other)]
    if names[0] == names[1]:
        names = [f"{name} ({each})" for name, each in zip(names, ("1st", "2nd"), strict=True)]
    return Pair(asked=asked, other=other, names=(names[0], names[1]))


def show_figures(pair: Pair, table: pa.Table) -> Markup:
    """Show the key figures of both, and links to compare with another run."""
    sides = _sides(table)
    rows = []
    for name, label, show in FIGURE_ROWS:
        rows.append((label, [show(row[0][name]) if row else "–" for row in sides]))
    return html(
        "compare_figures.html",
        pair=pair,
        pages=[pair.link(side, "/run") for side in (0, 1)],
        lsns=[pair.asked.lsn, pair.asked.lsn_of(pair.other)],
        rows=rows,
        others=[
            (plain(Path(name).name, at_most=40), pair.asked.link("/compare", **{"with": each}))
            for each, name in enumerate(pair.asked.runs)
            if each not in (pair.asked.run_number, pair.other)
        ],
    )


def show_by_step(pair: Pair, table: pa.Table) -> Chart:
    """Draw the success of both runs over learner steps."""
    return _draw_curves(pair, _sides(table), x="learner_step", label="learner step")


def show_by_time(pair: Pair, table: pa.Table) -> Chart:
    """Draw the success of both runs over the hours, or minutes, since their first batch."""
    sides = _sides(table)
    hours = max(row["hours"] for rows in sides for row in rows)
    if hours >= HOURS_FROM:
        return _draw_curves(pair, sides, x="hours", label="hours")
    for row in [*sides[0], *sides[1]]:
        row["minutes"] = row["hours"] * MINUTES_OF_HOUR
    return _draw_curves(pair, sides, x="minutes", label="minutes")


def show_rounds(pair: Pair, table: pa.Table) -> Chart:
    """Draw each evaluation of both runs with its interval."""
    drawn = new_figure(x="policy version", height=260, is_fraction=True)
    sides = _sides(table)
    versions = table["version"].to_pylist()
    apart = APART * max(1, max(versions) - min(versions))
    for side, shift in enumerate((-apart, apart)):
        name, colour = pair.names[side], COLOURS[side]
        rounds = round_columns(sides[side])
        rounds["at"] = [version + shift for version in rounds["version"]]
        source = ColumnDataSource(rounds)
        drawn.segment(x0="at", x1="at", y0="low", y1="high", source=source, color=colour)
        drawn.line(x="at", y="success", source=source, color=colour, line_alpha=0.5)
        marks = drawn.scatter(
            x="at", y="success", source=source, size=8, color=colour, legend_label=name
        )
        _add_tips(drawn, marks, name, "policy version", "@version")
    return finish(drawn, f"held-out success of {' and '.join(pair.names)} over policy version")


def show_kinds(pair: Pair, table: pa.Table) -> Markup:
    """Show the success on each kind of task, with intervals, and whether held-out tasks differ."""
    sides = _sides(table)
    found: dict[tuple[str, str], list[str]] = {}
    for side, rows in enumerate(sides):
        for split in SPLITS:
            by_kind: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                if row["split"] == split:
                    by_kind.setdefault(row["kind"], []).append(row)
            # A forged run may have a kind for each row.
            kinds = dict(sorted(by_kind.items(), key=_n_played, reverse=True)[:SHOWN_KINDS])
            if len(by_kind) > 1:
                kinds[""] = [row for some in by_kind.values() for row in some]
            for kind, some in kinds.items():
                played = _with_interval(heldout_tasks(some))
                found.setdefault((split, kind), ["–", "–"])[side] = played
    return html(
        "compare_kinds.html",
        names=pair.names,
        sentence=heldout_sentence(pair.names, sides),
        rows=[
            (SPLITS[split], kind or "all", values)
            for (split, kind), values in sorted(found.items(), key=_kind_order)
        ],
    )


def _n_played(kind: tuple[str, Sequence[Mapping[str, Any]]]) -> int:
    return sum(row["played"] for row in kind[1])


def heldout_sentence(names: tuple[str, str], sides: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return a sentence on the held-out tasks that both have played."""
    first, second = map(_heldout_rates, sides)
    common = sorted(first.keys() & second.keys())
    if not common:
        return "The newest evaluations have no held-out task in common."
    first_T = np.array([first[task] for task in common])
    second_T = np.array([second[task] for task in common])
    difference_T = second_T - first_T
    p = sign_flip_p(difference_T)
    verdict = "that is more than chance" if p < CERTAIN_P else "the difference may be chance"
    if not difference_T.any():
        verdict = "they win the same tasks"
    return (
        f"On {len(common)} held-out tasks in common {names[0]} wins {percent(first_T.mean())} and "
        f"{names[1]} wins {percent(second_T.mean())}: {verdict} (p = {p:.3f}, signs of the tasks' "
        "differences flipped)."
    )


def _heldout_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {row["task_id"]: row["won"] / row["played"] for row in rows if row["split"] == HELDOUT}


def show_tasks(pair: Pair, table: pa.Table) -> Markup:
    """Show the tasks that both have played and only one has won."""
    sides = [_by_task(rows) for rows in _sides(table)]
    common = sorted(sides[0].keys() & sides[1].keys())
    only: list[list[tuple[str, str]]] = [[], []]
    both = neither = 0
    for key in common:
        won = [side[key]["won"] > 0 for side in sides]
        both += all(won)
        neither += not any(won)
        if won[0] != won[1]:
            only[won[1]].append(key)

    def best_rate(key: tuple[str, str]) -> float:
        return max(side[key]["won"] / side[key]["played"] for side in sides)

    shown = sorted([*only[0], *only[1]], key=best_rate, reverse=True)[:SHOWN_TASKS]
    rows = []
    for split, task in shown:
        cells = []
        for which, side in enumerate(sides):
            row = side[split, task]
            address = pair.link(which, "/groups", task=task, split=split)
            cells.append((f"{row['won']} of {row['played']}", address, row["won"] > 0))
        rows.append({"task": task, "split": SPLITS[split], "cells": cells})
    return html(
        "compare_tasks.html",
        names=pair.names,
        counts=[len(each) for each in only],
        n_common=len(common),
        both=both,
        neither=neither,
        n_left_out=len(only[0]) + len(only[1]) - len(shown),
        rows=rows,
    )


def _by_task(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the rows by (split, task id)."""
    return {(row["split"], row["task_id"]): row for row in rows}


def show_settings(pair: Pair) -> Markup:
    """Show the settings in which the runs differ. Raises ConfigError, StoreError."""
    asked = pair.asked
    layouts = [asked.layout_of(number) for number in (asked.run_number, pair.other)]
    found = differing(*(settings_of(one, has_left=asked.has_left) for one in layouts))
    return html("compare_settings.html", names=pair.names, rows=found)


def _draw_curves(
    pair: Pair, sides: Sequence[Sequence[Mapping[str, Any]]], *, x: str, label: str
) -> Chart:
    drawn = new_figure(x=label, height=260, is_fraction=True)
    if x != "learner_step":
        drawn.xaxis.ticker = BasicTicker()
    for name, colour, rows in zip(pair.names, COLOURS[:2], map(thinned, sides), strict=True):
        source = ColumnDataSource(_columns(rows, (x, "success", "low", "high", "learner_step")))
        drawn.varea(
            x=x,
            y1="low",
            y2="high",
            source=source,
            fill_color=colour,
            fill_alpha=0.14,
            level="underlay",
        )
        drawn.line(x=x, y="success", source=source, line_width=2, color=colour, legend_label=name)
        marks = drawn.scatter(x=x, y="success", source=source, size=4, color=colour)
        _add_tips(drawn, marks, name, "learner step", "@learner_step")
    return finish(drawn, f"success of {' and '.join(pair.names)} over {label}")


def _only_one(asked: PageRequest) -> Panel:
    how = Markup("<p>One run is open. Open two with <code>{}</code></p>").format(
        plain(f"gigpo view {shell_word(asked.run)} OTHER_RUN", at_most=500)
    )
    return Panel(
        title="Two runs",
        explains="This page compares two runs: success by learner step and by time, tasks that "
        "only one of them won, and the settings that differ.",
        above=how,
        width="full",
    )


def _sides(table: pa.Table) -> list[list[dict[str, Any]]]:
    rows: list[list[dict[str, Any]]] = [[], []]
    for row in table.to_pylist():
        rows[row[SIDE]].append(row)
    return rows


def _with_interval(tasks: Sequence[TaskResult]) -> str:
    low, high = interval(tasks)
    n_played = sum(task.played for task in tasks)
    return f"{percent(success(tasks))} ({percent(low)} to {percent(high)}), {number(n_played)}"


def _kind_order(item: tuple[tuple[str, str], list[str]]) -> tuple[bool, bool, str]:
    (split, kind), _ = item
    return split == HELDOUT, not kind, kind


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    columns = {}
    for name in names:
        columns[name] = [row[name] for row in rows]
    return columns


def _add_tips(drawn: Any, marks: Any, name: str, label: str, value: str) -> None:
    # The name is a column, because Bokeh reads the tooltip as a template, and a stranger may have
    # named the run.
    columns = marks.data_source.data
    columns["run"] = [name] * len(columns["success"])
    tips = [
        ("run", "@run"),
        (label, value),
        ("success", "@success{0.0 %}"),
        ("95 % interval", "@low{0.0 %} to @high{0.0 %}"),
    ]
    drawn.add_tools(HoverTool(renderers=[marks], tooltips=tips, mode="mouse"))


PAGE = Page(
    path="/compare",
    title="Compare",
    question="Which of two runs learns better, at what cost, and on which tasks?",
    panels=panels,
    compares=True,
)
