"""What two settings would have trained on differently, as gigpo audit shows it: by learner step,
by group, and as a plot.

Under one setting a step is trained on if its group passes the filter, in the direction of its
advantage's sign. Rows are those of `audit.advantages`: one a step, the columns of setting a with
the suffix _a, of setting b with _b.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Column, Table

import store
from printable import printable

CHANGED = """SELECT any_value(s.task_id) AS task, any_value(s.anchor_text) AS state, any_value(s.action_text) AS action
FROM steps s WHERE s.traj_uid = '{traj_uid}' AND s.step_index = {step_index}"""
TASKS = "SELECT group_uid::VARCHAR AS group_uid, task_id FROM groups WHERE group_uid IN ({uids})"
SHOWN_CHANGES = 10
SHOWN_GROUPS = 10
SHOWN_ROWS = 20  # of learner steps; of more, as many are taken together
SHOWN_BARS = 100
TEXT_WIDTH = 60
TOLERANCE = 0.1  # of the larger of two advantages: closer ones count as the same
CHANGE_KINDS = (
    "trained by b alone",
    "trained by a alone",
    "another sign",
    f"other by over {TOLERANCE:.0%}",
    "as good as the same",
)
# of all fates but the last; told apart by the colour-blind
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00")
NO_BATCH = "in no batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Some learner steps that follow each other."""

    name: str
    n_steps: int
    shares: tuple[float, ...]  # of its steps, for each of CHANGE_KINDS


def fates(rows: pa.Table) -> np.ndarray:
    """Of each step, which of CHANGE_KINDS: int64, one a row. A step that neither trains on is as good as
    the same.
    """
    a, b = (rows[f"advantage_{suffix}"].to_numpy() for suffix in "ab")
    trains_a, trains_b = (rows[f"passes_filter_{suffix}"].to_numpy() for suffix in "ab")
    conditions = [
        trains_b & ~trains_a,
        trains_a & ~trains_b,
        trains_a & trains_b & (np.sign(a) != np.sign(b)),
        trains_a & trains_b & (np.abs(a - b) > TOLERANCE * np.maximum(np.abs(a), np.abs(b))),
    ]
    return np.select(conditions, range(len(conditions)), default=len(conditions))


def spans(rows: pa.Table, *, at_most: int) -> list[Span]:
    """Learner steps in order, at most so many spans of them; the last is of groups that no batch
    has had, if there are any.
    """
    fate = fates(rows)
    learner_step = rows["learner_step"].fill_null(-1).to_numpy()
    present = np.unique(learner_step[learner_step >= 0])
    parts = np.split(present, range(0, len(present), max(1, -(-len(present) // at_most))))[1:]
    found = []
    for part in parts:
        first, last = part[0], part[-1]
        name = str(first) if first == last else f"{first} to {last}"
        found.append(_span(name, fate[(learner_step >= first) & (learner_step <= last)]))
    if np.any(learner_step < 0):
        found.append(_span(NO_BATCH, fate[learner_step < 0]))
    return found


def _span(name: str, fate: np.ndarray) -> Span:
    return Span(
        name=name,
        n_steps=len(fate),
        shares=tuple(np.bincount(fate, minlength=len(CHANGE_KINDS)) / len(fate)),
    )


def show_setting_comparison(reader: store.Reader, rows: pa.Table, *, console: Console) -> None:
    a, b = (rows[f"advantage_{suffix}"].to_numpy() for suffix in "ab")
    difference = np.abs(a - b)
    alike = np.corrcoef(a, b)[0, 1] if np.std(a) > 0 and np.std(b) > 0 else float("nan")
    console.print(
        f"correlation {alike:.4f}, mean difference {difference.mean():.4g}, largest "
        f"{difference.max():.4g}"
    )
    by_step = Table("learner steps", "steps", *CHANGE_KINDS, title="share of the steps")
    everything = _span("all", fates(rows))
    for span in [*spans(rows, at_most=SHOWN_ROWS), everything]:
        by_step.add_row(span.name, str(span.n_steps), *(f"{share:.1%}" for share in span.shares))
    console.print(by_step)
    if everything.shares[0] or everything.shares[1]:
        _show_groups(reader, rows, console=console)
    changes = Table("task", "state", "action", "a", "b", title="what changed most")
    for row in np.argsort(-difference, kind="stable")[:SHOWN_CHANGES]:
        step = CHANGED.format(
            traj_uid=rows["traj_uid"][row].as_py(), step_index=rows["step_index"][row].as_py()
        )
        texts = [
            printable(str(column[0].as_py())[:TEXT_WIDTH]) for column in reader.sql(step).columns
        ]
        changes.add_row(*texts, f"{a[row]:.3f}", f"{b[row]:.3f}")
    console.print(changes)


def _show_groups(reader: store.Reader, rows: pa.Table, *, console: Console) -> None:
    """Those that one setting trains on and the other leaves out."""
    groups = rows.select(["learner_step", "group_uid", "passes_filter_a", "passes_filter_b"])
    groups = (
        groups.filter(pa.array(np.isin(fates(rows), (0, 1))))
        .group_by(groups.column_names)
        .aggregate([])
    )
    groups = groups.sort_by([("learner_step", "ascending"), ("group_uid", "ascending")])
    n_by_b = int(np.sum(groups["passes_filter_b"].to_numpy()))
    console.print(f"b alone trains on {n_by_b} groups, a alone on {len(groups) - n_by_b}")
    shown = groups.slice(0, SHOWN_GROUPS).to_pylist()
    known = reader.sql(TASKS.format(uids=", ".join(f"'{row['group_uid']}'" for row in shown)))
    tasks = dict(zip(*(column.to_pylist() for column in known.columns), strict=True))
    first = f", the first {SHOWN_GROUPS}" if len(groups) > SHOWN_GROUPS else ""
    uid = Column("group", no_wrap=True, min_width=36)  # to be copied
    table = Table(
        "learner step", uid, "task", "trained by", title=f"groups that one leaves out{first}"
    )
    for row in shown:
        step = NO_BATCH if row["learner_step"] is None else str(row["learner_step"])
        table.add_row(
            step,
            row["group_uid"],
            printable(tasks[row["group_uid"]]),
            "b" if row["passes_filter_b"] else "a",
        )
    console.print(table)


WIDTH, HEIGHT = 900, 360
LEFT, TOP, RIGHT, BOTTOM = 60, 60, 20, 50  # margins
LEGEND_WIDTH = 190


def plot_settings(rows: pa.Table, descriptions: Sequence[str]) -> str:
    """An SVG: for each learner step, the share of its steps that b trains differently than a, one
    colour a fate.
    """
    bars = spans(rows, at_most=SHOWN_BARS)
    top = max(0.01, *(sum(bar.shares[:-1]) for bar in bars))  # the share at the upper edge
    high, wide = HEIGHT - TOP - BOTTOM, (WIDTH - LEFT - RIGHT) / len(bars)
    a, b = (" ".join(text.split()) for text in descriptions)
    parts = [_text(LEFT, 20, f"steps trained differently: a ({a}) and b ({b})", size=14)]
    for place, (name, colour) in enumerate(zip(CHANGE_KINDS, COLOURS, strict=False)):
        left = LEFT + place * LEGEND_WIDTH
        parts += [
            f'<rect x="{left}" y="32" width="12" height="12" fill="{colour}"/>',
            _text(left + 17, 43, name),
        ]
    for quarter in range(5):
        y = TOP + high * (1 - quarter / 4)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, f"{top * quarter / 4:.1%}", anchor="end"))
    apart = -(-len(bars) // 10)  # ten names fit
    named = [*range(0, len(bars) - apart, apart), len(bars) - 1]
    for number, bar in enumerate(bars):
        x, y = LEFT + number * wide, float(TOP + high)
        title = f"{bar.name}: " + ", ".join(
            f"{name} {share:.1%}" for name, share in zip(CHANGE_KINDS, bar.shares, strict=True)
        )
        parts.append(f"<g><title>{html.escape(title)}</title>")
        for share, colour in zip(bar.shares, COLOURS, strict=False):
            y -= high * share / top
            box = f'x="{x + 0.1 * wide:.2f}" y="{y:.2f}" width="{0.8 * wide:.2f}" height="{high * share / top:.2f}"'
            parts.append(f'<rect {box} fill="{colour}"/>')
        parts.append("</g>")
        if number in named:
            parts.append(
                _text(
                    x + wide / 2,
                    TOP + high + 16,
                    bar.name,
                    anchor="end" if bar.name == NO_BATCH else "middle",
                )
            )
    parts.append(
        _text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 12, "learner step", anchor="middle")
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>\n"]
    )


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{html.escape(text)}</text>'
