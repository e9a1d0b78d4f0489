"""Rounds of held-out tasks, from the store: success by task type with intervals, and two of them
compared task by task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import configs
import store
from envs import list_tasks
from printable import printable
from store import RunLayout, StoreError

Z_95 = 1.959964  # normal quantile of a two-sided 95% interval
FLIPS, AT_ONCE = 10_000, 100  # of signs; 50,000 tasks take 80 MB so
SHOWN = 20  # tasks with the largest differences

# avg() skips NULL. In a round with graded episodes, an episode without a grade scores 0.
NEWEST_ROUND = """
WITH played AS (
    SELECT g.task_id, t.won, t.task_score, t.n_steps
    FROM groups AS g JOIN trajectories AS t USING (group_uid)
    WHERE g.split = 'heldout' AND g.purpose_version = (SELECT max(purpose_version) FROM groups WHERE split = 'heldout'))
SELECT task_id, count(*) FILTER (won) AS won, count(*) AS played, avg(n_steps) AS steps,
       CASE WHEN (SELECT count(task_score) FROM played) > 0 THEN avg(coalesce(task_score, 0)) END AS score
FROM played GROUP BY task_id ORDER BY task_id
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One task in an evaluation round."""

    task_id: str
    won: int  # of `played` episodes
    played: int
    # mean graded score, 0 for an ungraded episode; None if nothing in the round is graded
    score: float | None
    steps: float  # mean


def newest_round(reader: store.Reader) -> list[Played]:
    """Of a run: none if nothing was played on held-out tasks yet."""
    return [Played(**row) for row in reader.rows(NEWEST_ROUND)]


def interval(tasks: Sequence[Played]) -> tuple[float, float]:
    """95% interval of the success: Wilson's, for as many independent episodes as would vary as much
    as these.

    Episodes of one task are alike, so those count for less: at least one a task, at most all of
    them.
    """
    rate_T = np.array([task.won / task.played for task in tasks])
    played = sum(task.played for task in tasks)
    mean, variance = (
        success(tasks),
        float(np.var(rate_T, ddof=1)) / len(tasks) if len(tasks) > 1 else 0.0,
    )
    alike = mean * (1 - mean) / variance if variance > 0 else 0.0
    effective = round(min(max(alike, len(tasks)), played))
    return wilson_interval(mean * effective, effective)


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927): honest near 0 and 1, where the normal one
    is not.
    """
    rate, shrink = successes / trials, 1 + Z_95**2 / trials
    centre = (rate + Z_95**2 / (2 * trials)) / shrink
    half = Z_95 / shrink * math.sqrt(rate * (1 - rate) / trials + Z_95**2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def success(tasks: Sequence[Played]) -> float:
    return sum(task.won for task in tasks) / sum(task.played for task in tasks)


def mean_score(tasks: Sequence[Played]) -> float | None:
    """Return the graded score per episode, or None if the round has no graded episodes."""
    graded = [(task.score, task.played) for task in tasks if task.score is not None]
    if not graded:
        return None
    return sum(score * played for score, played in graded) / sum(played for _, played in graded)


def show_evaluation(run: Path, console: Console) -> None:
    """The newest round: a line for all tasks, and one for each type where there are several. Raises
    StoreError without one.
    """
    tasks, type_of = _round_of(run), _types(run)
    of_type: dict[str, list[Played]] = {}
    for task in tasks:
        of_type.setdefault(type_of.get(task.task_id, ""), []).append(task)
    table = Table(
        "type",
        "tasks",
        "episodes",
        "success",
        "95% interval",
        "score",
        "steps",
        box=None,
        pad_edge=False,
    )
    for name, some in [*(sorted(of_type.items()) if len(of_type) > 1 else []), ("all", tasks)]:
        low, high = interval(some)
        score = mean_score(some)
        table.add_row(
            printable(name),
            str(len(some)),
            str(sum(task.played for task in some)),
            f"{success(some):.3f}",
            f"{low:.3f} to {high:.3f}",
            "-" if score is None else f"{score:.3f}",
            f"{sum(task.steps * task.played for task in some) / sum(task.played for task in some):.1f}",
        )
    console.print(table)


def show_evaluation_comparison(first: Path, second: Path, console: Console) -> None:
    """`second` against `first`, on the tasks that both have played. Raises StoreError if there are
    none.
    """
    ours, theirs = (_round_of(run) for run in (first, second))
    other = {task.task_id: task for task in theirs}
    pairs = [(task, other[task.task_id]) for task in ours if task.task_id in other]
    if not pairs:
        raise StoreError(
            f"{first} and {second} have played no task in common; evaluate both on the same split"
        )
    difference_T = np.array([b.won / b.played - a.won / a.played for a, b in pairs])
    rates = [success([pair[side] for pair in pairs]) for side in (0, 1)]
    console.print(
        f"{len(pairs)} tasks in common: {first} {rates[0]:.3f}, {second} {rates[1]:.3f}; "
        "difference of the tasks' means "
        f"{difference_T.mean():+.3f}, p = {sign_flip_p(difference_T):.4f} (signs of the tasks' "
        "differences flipped)"
    )
    table = Table("task", str(first), str(second), "difference", box=None, pad_edge=False)
    order = np.argsort(-np.abs(difference_T), kind="stable")
    for place in [int(place) for place in order[:SHOWN] if difference_T[place]]:
        a, b = pairs[place]
        table.add_row(
            printable(a.task_id),
            f"{a.won}/{a.played}",
            f"{b.won}/{b.played}",
            f"{difference_T[place]:+.2f}",
        )
    console.print(table)
    n_different = int(np.count_nonzero(difference_T))
    console.print(
        f"{n_different} tasks differ" + (f", {SHOWN} are shown" if n_different > SHOWN else "")
    )


def sign_flip_p(difference_T: np.ndarray) -> float:
    """Two-sided p of the mean of T differences, float64: each could as well have had the other
    sign.
    """
    draw = np.random.default_rng(0)
    at_least = 0
    for _ in range(FLIPS // AT_ONCE):
        signs_FT = draw.choice(np.array([-1.0, 1.0]), size=(AT_ONCE, len(difference_T)))
        at_least += int(
            np.count_nonzero(np.abs(signs_FT @ difference_T) >= abs(difference_T.sum()) - 1e-9)
        )
    return (1 + at_least) / (1 + FLIPS)


def _round_of(run: Path) -> list[Played]:
    with store.open_run(run) as reader:
        found = newest_round(reader)
    if not found:
        raise StoreError(f"{run}: nothing was played on held-out tasks yet; gigpo evaluate {run}")
    return found


def _types(run: Path) -> dict[str, str]:
    """Of each held-out task of the environment the run was made with."""
    env = configs.from_yaml(RunLayout.open(run).info.config_yaml).env
    return {
        task.id: task.data.get("type", "") for task in list_tasks(env.name, env.options)["heldout"]
    }
