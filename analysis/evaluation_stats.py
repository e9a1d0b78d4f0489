"""Show the success on held-out tasks with intervals, and compare two evaluations task by task."""

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
from envs import list_tasks, of_environment
from printable import printable
from store import RunLayout, StoreError

Z_95 = 1.959964  # normal quantile of a two-sided 95% interval
SIGN_FLIPS = 10_000  # the smallest p is 1 / 10,001
FLIPS_AT_ONCE = 100  # with MOST_FLIPPED tasks they take 8 MB
MOST_FLIPPED = 5_000  # tasks; they take 0.3 s
MAX_SHOWN_TASKS = 20  # those with the largest differences

# avg() skips NULL. In a round with graded episodes, an episode without a grade scores 0.
NEWEST_ROUND = """
WITH played AS (
    SELECT g.task_id, t.won, t.task_score, t.n_steps
    FROM newest_round AS g JOIN trajectories AS t USING (group_uid)
)
SELECT
    task_id,
    count(*) FILTER (won) AS won,
    count(*) AS played,
    avg(n_steps) AS steps,
    CASE WHEN (SELECT count(task_score) FROM played) > 0 THEN avg(coalesce(task_score, 0)) END
        AS score
FROM played GROUP BY task_id ORDER BY task_id
"""
ABANDONED = """
SELECT task_id, reason FROM newest_round WHERE state = 'abandoned' ORDER BY task_id
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """The episodes of one task in an evaluation round."""

    task_id: str
    won: int  # of `played` episodes
    played: int
    # mean graded score, 0 for an ungraded episode; None if nothing in the round is graded
    score: float | None
    steps: float  # mean per episode


def newest_round(reader: store.Reader) -> list[TaskResult]:
    """Return the tasks of the newest evaluation round; [] before the first."""
    return reader.records(NEWEST_ROUND, TaskResult)


def success(tasks: Sequence[TaskResult]) -> float:
    """Return the fraction of episodes that were won."""
    return sum(task.won for task in tasks) / sum(task.played for task in tasks)


def interval(tasks: Sequence[TaskResult]) -> tuple[float, float]:
    """Return Wilson's 95% interval of the success, for the effective number of episodes.

    Episodes of one task are correlated, so they count for less: for as many independent episodes
    as would vary as much, at least one per task and at most all.
    """
    rate_Q = np.array([task.won / task.played for task in tasks])
    mean = success(tasks)
    variance = float(np.var(rate_Q, ddof=1)) / len(tasks) if len(tasks) > 1 else 0.0
    independent = mean * (1 - mean) / variance if variance > 0 else 0.0
    n_played = sum(task.played for task in tasks)
    effective = round(min(max(independent, len(tasks)), n_played))
    return wilson_interval(mean * effective, effective)


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Return the 95% score interval of a proportion (Wilson 1927), also valid near 0 and 1."""
    rate, shrink = successes / trials, 1 + Z_95**2 / trials
    centre = (rate + Z_95**2 / (2 * trials)) / shrink
    half = Z_95 / shrink * math.sqrt(rate * (1 - rate) / trials + Z_95**2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_score(tasks: Sequence[TaskResult]) -> float | None:
    """Return the graded score per episode, or None if the round has no graded episodes."""
    graded = [(task.score, task.played) for task in tasks if task.score is not None]
    if not graded:
        return None
    return sum(score * played for score, played in graded) / sum(played for _, played in graded)


def show_evaluation(run: Path, console: Console) -> None:
    """Print the newest round, one line per task type, and the groups that it lacks.

    Raises StoreError if there is no round.
    """
    tasks, type_of = _round_of(run), _task_types(run)
    of_type: dict[str, list[TaskResult]] = {}
    for task in tasks:
        of_type.setdefault(type_of.get(task.task_id, ""), []).append(task)
    headings = ("type", "tasks", "episodes", "success", "95% interval", "score", "steps")
    table = Table(*headings, box=None, pad_edge=False)
    types = sorted(of_type.items()) if len(of_type) > 1 else []
    for name, some in [*types, ("all", tasks)]:
        low, high = interval(some)
        score = mean_score(some)
        n_played = sum(task.played for task in some)
        steps = sum(task.steps * task.played for task in some) / n_played
        table.add_row(
            printable(name),
            str(len(some)),
            str(n_played),
            f"{success(some):.3f}",
            f"{low:.3f} to {high:.3f}",
            "-" if score is None else f"{score:.3f}",
            f"{steps:.1f}",
        )
    console.print(table)
    with store.open_run(run, warn=False) as reader:
        abandoned = reader.rows(ABANDONED)
    if abandoned:
        console.print(f"groups that were abandoned, and count for nothing: {len(abandoned)}")
    for row in abandoned[:MAX_SHOWN_TASKS]:
        line = printable(f"  {row['task_id']}: {row['reason']}")
        console.print(line, markup=False, soft_wrap=True)
    if len(abandoned) > MAX_SHOWN_TASKS:
        console.print(f"  and {len(abandoned) - MAX_SHOWN_TASKS} more")


def show_evaluation_comparison(first: Path, second: Path, *, console: Console) -> None:
    """Print `second` against `first` on their common tasks. Raises StoreError without any."""
    results, others = (_round_of(run) for run in (first, second))
    other = {task.task_id: task for task in others}
    pairs = [(task, other[task.task_id]) for task in results if task.task_id in other]
    if not pairs:
        raise StoreError(
            f"{first} and {second} have played no task in common; evaluate both on the same split"
        )
    difference_Q = np.array([b.won / b.played - a.won / a.played for a, b in pairs])
    first_rate = success([one for one, _ in pairs])
    second_rate = success([other for _, other in pairs])
    console.print(
        f"{len(pairs)} tasks in common: {first} {first_rate:.3f}, {second} {second_rate:.3f}; "
        f"difference of the tasks' means {difference_Q.mean():+.3f}, "
        f"p = {sign_flip_p(difference_Q):.4f} (signs of the tasks' differences flipped)"
    )
    table = Table("task", str(first), str(second), "difference", box=None, pad_edge=False)
    order = np.argsort(-np.abs(difference_Q), kind="stable").tolist()
    for index in [index for index in order[:MAX_SHOWN_TASKS] if difference_Q[index]]:
        a, b = pairs[index]
        table.add_row(
            printable(a.task_id),
            f"{a.won}/{a.played}",
            f"{b.won}/{b.played}",
            f"{difference_Q[index]:+.2f}",
        )
    console.print(table)
    n_different = int(np.count_nonzero(difference_Q))
    shown = f", {MAX_SHOWN_TASKS} are shown" if n_different > MAX_SHOWN_TASKS else ""
    console.print(f"{n_different} tasks differ{shown}")


def sign_flip_p(difference_Q: np.ndarray) -> float:
    """Return the two-sided p-value of the mean of Q differences, float64, by random sign flips.

    Without an effect each difference could as well have had the other sign. Of more than
    MOST_FLIPPED the sum under random signs is taken for normal.
    """
    observed = abs(difference_Q.sum())
    if len(difference_Q) > MOST_FLIPPED:
        deviation = math.sqrt(np.square(difference_Q).sum())
        return math.erfc(observed / deviation / math.sqrt(2.0)) if deviation else 1.0
    random = np.random.default_rng(0)
    n_as_large = 0
    for _ in range(SIGN_FLIPS // FLIPS_AT_ONCE):
        signs_XQ = random.choice(np.array([-1.0, 1.0]), size=(FLIPS_AT_ONCE, len(difference_Q)))
        n_as_large += int(np.count_nonzero(np.abs(signs_XQ @ difference_Q) >= observed - 1e-9))
    return (1 + n_as_large) / (1 + SIGN_FLIPS)


def _round_of(run: Path) -> list[TaskResult]:
    with store.open_run(run) as reader:
        found = newest_round(reader)
    if not found:
        raise StoreError(f"{run}: nothing was played on held-out tasks yet; gigpo evaluate {run}")
    return found


def _task_types(run: Path) -> dict[str, str]:
    """Return the type of each held-out task, as its environment names it.

    With several environments a type begins with the environment's name.
    """
    layout = RunLayout.open(run)
    layout.check_trusted()  # its environment is imported
    config = configs.from_yaml(layout.info.config_yaml)
    types = {}
    for name, own in configs.environments(config).items():
        for task in list_tasks(own.env.name, own.env.options)["heldout"]:
            kind = task.data.get("type", "")
            if config.environments:
                types[of_environment(task, name).id] = f"{name} {kind}".rstrip()
            else:
                types[task.id] = kind
    return types
