"""Query all evaluations on held-out tasks, and compute the success of each round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from analysis.evaluation_stats import TaskResult, interval, success

ROUNDS = """
SELECT evaluated_version AS version, task_id, sum(n_won)::BIGINT AS won,
       sum(n_members)::BIGINT AS played
FROM groups WHERE split = 'heldout' AND state = 'complete' AND n_members > 0
GROUP BY ALL ORDER BY version, task_id
"""


def heldout_tasks(rows: Iterable[Mapping[str, Any]]) -> list[TaskResult]:
    """Return the tasks of an evaluation round from rows of (task_id, won, played)."""
    return [
        TaskResult(
            task_id=row["task_id"], won=row["won"], played=row["played"], score=None, steps=0.0
        )
        for row in rows
    ]


def round_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the columns version, success, low and high, with a row for each round.

    `rows` are those of ROUNDS. low and high are the ends of 95 % intervals.
    """
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        rounds.setdefault(row["version"], []).append(row)
    columns: dict[str, list[float]] = {"version": [], "success": [], "low": [], "high": []}
    for version, of_round in rounds.items():
        tasks = heldout_tasks(of_round)
        low, high = interval(tasks)
        for name, value in zip(columns, (version, success(tasks), low, high), strict=True):
            columns[name].append(value)
    return columns
