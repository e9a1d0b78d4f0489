"""python -m store bias RUN [--where SQL] [--as-of LSN]: are dropped trajectories different from the
trained ones?
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cli.store_arguments import whole
from printable import printable

if TYPE_CHECKING:
    from store.bias.report import BiasReport, Comparison

ALPHA = 0.05
DESCRIPTION = """Are the trajectories that were dropped different from the trained ones in length, reward, success or task?
Dropped are groups that are stale, filtered or abandoned, and extra of groups with spare members. Unfinished episodes (view
`unfinished`), a kind for each reason, count with how far they got: whole, they would be at least that long. The run may be
training.

Groups are compared with trained ones of about the same policy versions (up to ten blocks of versions), extra and unfinished
episodes with the members of their own groups. p is of a permutation test: 2,000 permutations of whole groups within each block
(of the members within their group), of the difference of means over its cluster-robust standard error; for tasks, of the
chi-square of groups by task.
"p, all" is corrected for the number of comparisons (Holm). What a kind differs in by definition is shown and not tested.

    --where "version_min >= 10"      columns of the views `trajectories` and `groups`"""
LABELS = {
    "n_steps": "steps",
    "n_response_tokens": "response tokens",
    "episode_return": "return",
    "won": "won",
    "tasks": "tasks",
}
NO_SIGNAL = "(filtered groups are mostly won by all or by none, of tasks too easy or too hard: lengths and tasks go with that)"
HEAD = ("kind", "groups", "trajectories", "steps", "response tokens", "return", "won", "tasks")
COMPARED = ("kind", "measure", "dropped", "trained", "difference", "p", "p, all")


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bias",
        help="are dropped trajectories different from the trained ones?",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--where", metavar="SQL", help="which trajectories (default: all)")
    parser.add_argument(
        "--as-of", type=whole(at_least=0), metavar="LSN", help="as the run was then (default: now)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from store.bias.report import bias_report  # and with it DuckDB and Arrow

    report = bias_report(options.run_dir, as_of=options.as_of, where=options.where)
    lines = [*_kinds(report), "", *_comparisons(report), "", *_conclusions(report)]
    print("\n".join(map(printable, lines)))
    return 0


def _kinds(report: BiasReport) -> list[str]:
    rows: list[tuple[str, ...]] = [HEAD]
    for kind in report.kinds:
        means = [_number(measure, mean) for measure, mean in zip(LABELS, kind.means, strict=False)]
        means += ["-"] * (len(LABELS) - 1 - len(means))  # without tasks
        rows.append(
            (
                kind.name,
                f"{kind.n_groups:,}",
                f"{kind.n_trajectories:,}",
                *means,
                f"{kind.n_tasks:,}",
            )
        )
    unseen = ", ".join(f"{n:,} {name}" for name, n in report.n_unseen.items())
    # an older format has no number
    moment = "now" if report.lsn is None else f"at lsn {report.lsn}"
    lines = [f"{moment}, means per trajectory:", *_aligned(rows)]
    return (
        [*lines, f"groups of which no trajectory is stored, or no longer: {unseen}"]
        if unseen
        else lines
    )


def _comparisons(report: BiasReport) -> list[str]:
    rows: list[tuple[str, ...]] = [COMPARED]
    for row in report.comparisons:
        measure = LABELS[row.measure] if row.task is None else f"share of {row.task}"
        each = (
            _number(row.measure, row.difference.dropped),
            _number(row.measure, row.difference.kept),
        )
        difference = _number(row.measure, row.difference.dropped - row.difference.kept, sign="+")
        p = (
            ("by definition", "")
            if row.p_corrected is None
            else (f"{row.difference.p:.4f}", f"{row.p_corrected:.4f}")
        )
        rows.append((row.kind, measure, *each, difference, *p))
    shown = (
        ["compared with trained ones of about the same versions:", *_aligned(rows)]
        if len(rows) > 1
        else []
    )
    return [*shown, *(f"{kind}: {why}" for kind, why in report.not_compared.items())]


def _conclusions(report: BiasReport) -> list[str]:
    if not report.comparisons:
        return ["nothing to compare"]
    found = [
        row for row in report.comparisons if row.p_corrected is not None and row.p_corrected < ALPHA
    ]
    lines = [f"{row.kind} {_sentence(row)} (p = {row.p_corrected:.3f})" for row in found] or [
        "no difference beyond chance"
    ]
    return [*lines, NO_SIGNAL] if any(row.kind == "filtered" for row in found) else lines


def _sentence(row: Comparison) -> str:
    from store.catalog.records import WHY_UNFINISHED  # here: Arrow comes with it

    dropped, kept = row.difference.dropped, row.difference.kept
    size = _number(row.measure, abs(dropped - kept))
    if row.kind in WHY_UNFINISHED:
        unit, more = LABELS[row.measure], "more" if dropped > kept else "fewer"
        return f"episodes had {size} {more} {unit} when they were given up than the members of their groups in all"
    if row.measure == "n_steps":
        return f"trajectories are {size} steps {'longer' if dropped > kept else 'shorter'}"
    if row.measure == "n_response_tokens":
        return f"trajectories have {size} response tokens {'more' if dropped > kept else 'fewer'}"
    if row.measure == "episode_return":
        return f"trajectories return {size} {'more' if dropped > kept else 'less'}"
    if row.measure == "won":
        return f"trajectories won {_number('won', dropped)} of the time, trained ones {_number('won', kept)}"
    shares = (
        f"{_number('tasks', dropped)} of the groups, {_number('tasks', kept)} of the trained ones"
    )
    return f"groups are of other tasks; {row.task}, most of all, is {shares}"


def _number(measure: str, value: float, *, sign: str = "") -> str:
    return f"{value:{sign}.1%}" if measure in ("won", "tasks") else f"{value:{sign}.4g}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    n_words = 2 if rows[0] == COMPARED else 1
    return [
        "  ".join(
            cell.ljust(width) if place < n_words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
