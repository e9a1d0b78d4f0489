"""gigpo bias: whether dropped trajectories differ from the trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.arguments import Command, as_of_option, run_argument, where_option
from printable import printable

if TYPE_CHECKING:
    from analysis import BiasReport, Comparison

ALPHA = 0.05  # of the corrected p below which a difference is named
LABELS = {
    "n_steps": "steps",
    "n_response_tokens": "response tokens",
    "episode_return": "return",
    "won": "won",
    "tasks": "tasks",
}
FILTERED_NOTE = (
    "(filtered groups are mostly won by all or by none, of tasks too easy or too hard: lengths "
    "and tasks go with that)"
)
HEAD = ("kind", "groups", "trajectories", "steps", "response tokens", "return", "won", "tasks")
COMPARED = ("kind", "measure", "dropped", "trained", "difference", "p", "p, all")


@click.command(cls=Command, epilog='Example: gigpo bias runs/a --where "version_min >= 10"')
@run_argument
@where_option
@as_of_option
def bias(*, run: Path, where: str | None, as_of: int | None) -> None:
    """Compare the trajectories that were dropped with those that were trained on.

    Compared are length, reward, success and task. Dropped are groups that are stale, filtered or
    abandoned, and extra members of groups. Unfinished episodes (view `unfinished`) count with how
    far they got: whole, they would be at least that long. The run may be training.

    Groups are compared with trained groups of about the same policy versions (up to ten blocks),
    extra and unfinished episodes with the members of their own groups. p is of a permutation test
    with 2,000 permutations of whole groups within each block, or of members within their group. Its
    statistic is the difference of means over its cluster-robust standard error; for tasks, the
    chi-square of groups by task. "p, all" is corrected for the number of comparisons (Holm).
    Differences that a kind has by definition are shown and not tested.

    The condition of --where is SQL on the columns of the views `trajectories` and `groups`.
    """
    from analysis import bias_report

    report = bias_report(run, as_of=as_of, where=where)
    lines = [*_kinds(report), "", *_comparisons(report), "", *_conclusions(report)]
    print("\n".join(map(printable, lines)))


def _kinds(report: BiasReport) -> list[str]:
    """Return the table of means, one line a kind."""
    rows: list[tuple[str, ...]] = [HEAD]
    for kind in report.kinds:
        # The first measures: tasks have no mean, and unfinished episodes no return.
        means = [_number(measure, mean) for measure, mean in zip(LABELS, kind.means, strict=False)]
        means += ["-"] * (len(LABELS) - 1 - len(means))  # without tasks
        counts = (f"{kind.n_groups:,}", f"{kind.n_trajectories:,}")
        rows.append((kind.name, *counts, *means, f"{kind.n_tasks:,}"))
    unseen = ", ".join(f"{n:,} {name}" for name, n in report.n_unseen.items())
    moment = "now" if report.lsn is None else f"at lsn {report.lsn}"
    lines = [f"means per trajectory, {moment}:", *_aligned(rows)]
    if unseen:
        lines.append(f"groups of which no trajectory is stored, or no longer: {unseen}")
    return lines


def _comparisons(report: BiasReport) -> list[str]:
    """Return the table of differences, and why some kinds were not compared."""
    rows: list[tuple[str, ...]] = [COMPARED]
    for row in report.comparisons:
        measure = LABELS[row.measure] if row.task is None else f"share of {row.task}"
        dropped, kept = row.difference.dropped, row.difference.kept
        means = (_number(row.measure, dropped), _number(row.measure, kept))
        difference = _number(row.measure, dropped - kept, sign="+")
        p = ("by definition", "")
        if row.p_corrected is not None:
            p = (f"{row.difference.p:.4f}", f"{row.p_corrected:.4f}")
        rows.append((row.kind, measure, *means, difference, *p))
    lines = []
    if report.comparisons:
        lines = ["compared with trained ones of about the same versions:", *_aligned(rows)]
    return [*lines, *(f"{kind}: {why}" for kind, why in report.not_compared.items())]


def _conclusions(report: BiasReport) -> list[str]:
    """Return a sentence for each difference that chance does not explain."""
    if not report.comparisons:
        return ["nothing to compare"]
    found = [
        row for row in report.comparisons if row.p_corrected is not None and row.p_corrected < ALPHA
    ]
    if not found:
        return ["no difference beyond chance"]
    lines = [f"{row.kind} {_sentence(row)} (p = {row.p_corrected:.3f})" for row in found]
    if any(row.kind == "filtered" for row in found):
        lines.append(FILTERED_NOTE)
    return lines


def _sentence(row: Comparison) -> str:
    """Describe one difference."""
    from store import WHY_UNFINISHED

    dropped, kept = row.difference.dropped, row.difference.kept
    size = _number(row.measure, abs(dropped - kept))
    if row.kind in WHY_UNFINISHED:
        unit, more = LABELS[row.measure], "more" if dropped > kept else "fewer"
        return (
            f"episodes had {size} {more} {unit} when they were given up than the members of their "
            "groups in all"
        )
    if row.measure == "n_steps":
        return f"trajectories are {size} steps {'longer' if dropped > kept else 'shorter'}"
    if row.measure == "n_response_tokens":
        return f"trajectories have {size} response tokens {'more' if dropped > kept else 'fewer'}"
    if row.measure == "episode_return":
        return f"trajectories return {size} {'more' if dropped > kept else 'less'}"
    if row.measure == "won":
        of_trained = _number("won", kept)
        return f"trajectories won {_number('won', dropped)} of the time, trained ones {of_trained}"
    return (
        f"groups are of other tasks; {row.task}, most of all, is {_number('tasks', dropped)} of "
        f"the groups, {_number('tasks', kept)} of the trained ones"
    )


def _number(measure: str, value: float, *, sign: str = "") -> str:
    return f"{value:{sign}.1%}" if measure in ("won", "tasks") else f"{value:{sign}.4g}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines of a table: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    n_words = 2 if rows[0] == COMPARED else 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < n_words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
