"""Show what two advantage settings would have trained differently: tables and a plot.

A step is trained on under a setting if its group passes the filter, in the direction of its
advantage's sign. The rows have one line per step; columns of setting a end in _a, of setting b
in _b. `gigpo audit` makes them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Column, Table

import store
from printable import one_line, printable

STEP_TEXTS = """
SELECT any_value(task_id) AS task, any_value(anchor_text) AS state, any_value(action_text) AS action
FROM steps WHERE traj_uid = '{traj_uid}' AND step_index = {step_index}
"""
TASKS = "SELECT group_uid::VARCHAR AS group_uid, task_id FROM groups WHERE group_uid IN ({uids})"
MAX_CHANGES = 10  # steps in the list, those that differ most
MAX_GROUPS = 10  # groups in the table
MAX_ROWS = 20  # of learner steps in the table; more of them share a row
MAX_BARS = 100  # of the chart; more learner steps share one
TEXT_WIDTH = 60  # characters of an observation or an action
TOLERANCE = 0.1  # of the larger of two advantages; closer ones count as the same
CHANGE_KINDS = (
    "trained by b alone",
    "trained by a alone",
    "another sign",
    f"other by over {TOLERANCE:.0%}",
    "as good as the same",
)
UNCHANGED = len(CHANGE_KINDS) - 1
# One for each kind but UNCHANGED. Colour-blind readers can tell them apart.
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00")
NO_BATCH = "in no batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Successive learner steps and how their rows change."""

    name: str
    n_steps: int
    shares: tuple[float, ...]  # of the rows, for each of CHANGE_KINDS


def change_kinds(rows: pa.Table) -> np.ndarray:
    """Return the index in CHANGE_KINDS of each row, int64 [R].

    A step that neither setting trains on is unchanged.
    """
    a_R, b_R = (rows[f"advantage_{suffix}"].to_numpy() for suffix in "ab")  # float64
    by_a_R, by_b_R = (rows[f"passes_filter_{suffix}"].to_numpy() for suffix in "ab")  # bool
    larger_R = np.maximum(np.abs(a_R), np.abs(b_R))
    conditions = [
        by_b_R & ~by_a_R,
        by_a_R & ~by_b_R,
        by_a_R & by_b_R & (np.sign(a_R) != np.sign(b_R)),
        by_a_R & by_b_R & (np.abs(a_R - b_R) > TOLERANCE * larger_R),
    ]
    return np.select(conditions, range(UNCHANGED), default=UNCHANGED)


def spans(rows: pa.Table, *, at_most: int) -> list[Span]:
    """Return at most this many spans of learner steps, in order.

    A last span has the groups that no batch has had, if there are any.
    """
    kinds_R = change_kinds(rows)
    step_R = rows["learner_step"].fill_null(-1).to_numpy()  # int64, -1 without a batch
    present = np.unique(step_R[step_R >= 0])  # each learner step once, ascending
    length = max(1, math.ceil(len(present) / at_most))
    found = []
    for start in range(0, len(present), length):
        part = present[start : start + length]
        first, last = part[0], part[-1]
        name = str(first) if first == last else f"{first} to {last}"
        found.append(_span(name, kinds_R[(step_R >= first) & (step_R <= last)]))
    if np.any(step_R < 0):
        found.append(_span(NO_BATCH, kinds_R[step_R < 0]))
    return found


def _span(name: str, kinds_R: np.ndarray) -> Span:
    shares = tuple(np.bincount(kinds_R, minlength=len(CHANGE_KINDS)) / len(kinds_R))
    return Span(name=name, n_steps=len(kinds_R), shares=shares)


def show_setting_comparison(reader: store.Reader, rows: pa.Table, *, console: Console) -> None:
    """Print how the advantages differ: overall, by learner step, by group, and the largest."""
    a_R, b_R = (rows[f"advantage_{suffix}"].to_numpy() for suffix in "ab")  # float64
    difference_R = np.abs(a_R - b_R)
    is_constant = np.std(a_R) == 0 or np.std(b_R) == 0
    correlation = float("nan") if is_constant else np.corrcoef(a_R, b_R)[0, 1]
    console.print(
        f"correlation {correlation:.4f}, mean difference {difference_R.mean():.4g}, largest "
        f"{difference_R.max():.4g}"
    )
    by_step = Table("learner steps", "steps", *CHANGE_KINDS, title="share of the steps")
    kinds_R = change_kinds(rows)
    for span in [*spans(rows, at_most=MAX_ROWS), _span("all", kinds_R)]:
        by_step.add_row(span.name, str(span.n_steps), *(f"{share:.1%}" for share in span.shares))
    console.print(by_step)
    one_sided_R = np.isin(kinds_R, (0, 1))  # trained by b alone, by a alone
    if one_sided_R.any():
        _show_groups(reader, rows.filter(pa.array(one_sided_R)), console=console)
    changes = Table("task", "state", "action", "a", "b", title="what changed most")
    for row in np.argsort(-difference_R, kind="stable")[:MAX_CHANGES]:
        query = STEP_TEXTS.format(
            traj_uid=rows["traj_uid"][row].as_py(), step_index=rows["step_index"][row].as_py()
        )
        texts = [str(column[0].as_py())[:TEXT_WIDTH] for column in reader.sql(query).columns]
        changes.add_row(*map(printable, texts), f"{a_R[row]:.3f}", f"{b_R[row]:.3f}")
    console.print(changes)


def _show_groups(reader: store.Reader, rows: pa.Table, *, console: Console) -> None:
    """Print the groups of these rows, which one setting trains on and the other leaves out."""
    columns = ["learner_step", "group_uid", "passes_filter_a", "passes_filter_b"]
    groups = rows.select(columns).group_by(columns).aggregate([])
    groups = groups.sort_by([("learner_step", "ascending"), ("group_uid", "ascending")])
    n_by_b = int(np.sum(groups["passes_filter_b"].to_numpy()))
    console.print(f"b alone trains on {n_by_b} groups, a alone on {len(groups) - n_by_b}")
    shown = groups.slice(0, MAX_GROUPS).to_pylist()
    uids = ", ".join(f"'{row['group_uid']}'" for row in shown)
    task_of = {row["group_uid"]: row["task_id"] for row in reader.rows(TASKS.format(uids=uids))}
    title = "groups that one leaves out"
    if len(groups) > MAX_GROUPS:
        title += f", the first {MAX_GROUPS}"
    uid = Column("group", no_wrap=True, min_width=36)  # to be copied
    table = Table("learner step", uid, "task", "trained by", title=title)
    for row in shown:
        table.add_row(
            NO_BATCH if row["learner_step"] is None else str(row["learner_step"]),
            row["group_uid"],
            printable(task_of[row["group_uid"]]),
            "b" if row["passes_filter_b"] else "a",
        )
    console.print(table)


WIDTH, HEIGHT = 900, 360
LEFT, TOP, RIGHT, BOTTOM = 60, 60, 20, 50  # margins
PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
LEGEND_WIDTH = 190  # pixels of an entry
MAX_BAR_NAMES = 10  # below the bars; with more bars some have no name


def plot_settings(rows: pa.Table, descriptions: Sequence[str]) -> str:
    """Return an SVG: for each learner step, the share of its steps that change, by kind."""
    bars = spans(rows, at_most=MAX_BARS)
    top = max(0.01, *(sum(bar.shares[:UNCHANGED]) for bar in bars))  # share at the upper edge
    bar_width = (WIDTH - LEFT - RIGHT) / len(bars)
    a, b = map(one_line, descriptions)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, f"steps trained differently: a ({a}) and b ({b})", size=14),
    ]
    parts += [*_legend(), *_grid(top)]
    apart = math.ceil(len(bars) / MAX_BAR_NAMES)
    named = [*range(0, len(bars) - apart, apart), len(bars) - 1]
    for number, bar in enumerate(bars):
        x = LEFT + number * bar_width
        parts += _bar(bar, x=x, width=bar_width, top=top)
        if number in named:
            anchor = "end" if bar.name == NO_BATCH else "middle"
            parts.append(_text(x + bar_width / 2, HEIGHT - BOTTOM + 16, bar.name, anchor=anchor))
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 12, "learner step", anchor="middle"))
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> Iterator[str]:
    for index, (name, colour) in enumerate(zip(CHANGE_KINDS[:UNCHANGED], COLOURS, strict=True)):
        left = LEFT + index * LEGEND_WIDTH
        yield f'<rect x="{left}" y="32" width="12" height="12" fill="{colour}"/>'
        yield _text(left + 17, 43, name)


def _grid(top: float) -> Iterator[str]:
    """Yield lines at each quarter of `top`, the share at the upper edge."""
    for quarter in range(5):
        y = TOP + PLOT_HEIGHT * (1 - quarter / 4)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
        yield _text(LEFT - 6, y + 4, f"{top * quarter / 4:.1%}", anchor="end")


def _bar(bar: Span, *, x: float, width: float, top: float) -> Iterator[str]:
    """Yield one bar: its kinds of change, one above the other."""
    kinds = zip(CHANGE_KINDS, bar.shares, strict=True)
    title = f"{bar.name}: " + ", ".join(f"{name} {share:.1%}" for name, share in kinds)
    yield f"<g><title>{html.escape(title)}</title>"
    y = float(TOP + PLOT_HEIGHT)
    for share, colour in zip(bar.shares[:UNCHANGED], COLOURS, strict=True):
        height = PLOT_HEIGHT * share / top
        y -= height
        yield (
            f'<rect x="{x + 0.1 * width:.2f}" y="{y:.2f}" width="{0.8 * width:.2f}" '
            f'height="{height:.2f}" fill="{colour}"/>'
        )
    yield "</g>"


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
