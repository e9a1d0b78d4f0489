"""Draw training tasks by weight: `tasks.order` is SQL over what the store knows of each task.

    order = TaskOrder("variance", task_ids=["a", "b"], n_tasks=2, seed=0)
    order.draw(catalog, 17, n_drawn=lambda first: 17 - first).task_id  # of training group 17

Weights are computed once for each learner step, from the results that the catalog had when that
step was first announced. From then until the next step tasks are drawn without replacement, in
proportion to their weights. So a draw is a function of the seed, the order and the catalog: after a
crash the next draw is the one that would have come. Its cost is the same in a long run, because
each result is read once and added to its task's sums.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from configs import ConfigError
from printable import one_line
from store import Catalog, KnownResults, WholeGroup

if TYPE_CHECKING:
    import pyarrow as pa

# Columns that a weight may use, beside those of READY_MADE_WEIGHTS. docs/tasks.md describes them.
COLUMNS = (
    "task_id",
    "n_groups",
    "n_episodes",
    "success",
    "last_success",
    "mean_return",
    "groups_since",
    "staleness",
    "n_tasks",
)
TIMES_WITHOUT_BRACKETS = {"current_time", "current_timestamp", "localtime", "localtimestamp"}
# A task without a result yet has a good task's weight, divided by 1 + the groups that it was given:
# its environment may fail. A task outside the band is tried again after four passes' worth of
# groups, and the least `variance` is an eleventh of the greatest: the policy may have changed.
READY_MADE_WEIGHTS = """
    CASE WHEN last_success IS NULL THEN 1 / (1 + n_groups)
         WHEN last_success BETWEEN 0.2 AND 0.8 OR groups_since > 4 * n_tasks THEN 1
         ELSE 0 END AS band,
    CASE WHEN last_success IS NULL THEN (0.25 + 0.025) / (1 + n_groups)
         ELSE last_success * (1 - last_success) + 0.025 END AS variance"""
WEIGHTS = f"""SELECT ({{}}\n)::DOUBLE AS weight
FROM (SELECT *, {READY_MADE_WEIGHTS} FROM known) ORDER BY task_index"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The task of one group, with the numbers that it was drawn by."""

    task_id: str
    weight: float
    success_before: float | None  # fraction won of the task's latest whole group; None: none yet
    lsn: int  # the draw knew the results up to this transaction of the catalog


class TaskOrder:
    """Keep what the catalog knows of each task, and draw tasks by the weights of an SQL text."""

    def __init__(self, order: str, *, task_ids: Sequence[str], n_tasks: int, seed: int) -> None:
        """Take the tasks of one environment. `n_tasks` are those of all."""
        self._sql, self._task_ids, self._seed = order, task_ids, seed
        self._index = {task_id: index for index, task_id in enumerate(task_ids)}
        self._table = _Table(task_ids, n_tasks=n_tasks)
        self._known = KnownResults(lsn=-1, version=0)  # nothing was read yet
        self._n_seen = 0  # groups handed out that are in the table
        self._weights = np.ones(len(task_ids))
        self._drawn: tuple[str, np.ndarray] = ("", np.arange(0))  # the newest order, and its seed

    def draw(self, catalog: Catalog, ordinal: int, *, n_drawn: Callable[[int], int]) -> Drawn:
        """Return the task of the `ordinal`-th training group. Raises ConfigError if SQL fails.

        `n_drawn(first)` tells how many groups from `first` on were of this environment before.
        """
        known = catalog.known_results()
        if known != self._known:
            self._read(catalog, known)
            self._weights = weigh(self._sql, self._table.arrow(self._n_seen, known.version))
        first = catalog.first_weighed(lsn=known.lsn, ordinal=ordinal)
        index = self._index_of(n_drawn(first), first=first)
        last_success = self._table.last_success[index]
        return Drawn(
            task_id=self._task_ids[index],
            weight=float(self._weights[index]),
            success_before=None if np.isnan(last_success) else float(last_success),
            lsn=known.lsn,
        )

    def _index_of(self, number: int, *, first: int) -> int:
        """Return the index in the task list of the `number`-th draw since group `first`.

        When all tasks with a weight were drawn, they are drawn anew, in another order. If no task
        has a weight, all have the same.
        """
        weights = self._weights if self._weights.any() else np.ones(len(self._weights))
        n_pass, number_in_pass = divmod(number, int(np.count_nonzero(weights)))
        seed = f"{self._seed}/{first}/{n_pass}"
        if self._drawn[0] != seed:
            self._drawn = (seed, draw_order(weights, seed=seed))
        return int(self._drawn[1][number_in_pass])

    def _read(self, catalog: Catalog, known: KnownResults) -> None:
        """Add to the table the groups handed out, and those that became whole, since last time."""
        for ordinal, task_id in catalog.handed_out(first=self._n_seen, until=known.lsn):
            self._n_seen = ordinal + 1
            if (index := self._index.get(task_id)) is not None:
                self._table.hand_out(index, ordinal)
        for group in catalog.whole_groups(since=self._known.lsn, until=known.lsn):
            if (index := self._index.get(group.task_id)) is not None:
                self._table.add(index, group)
        self._known = known


class _Table:
    """Keep one row per task, in arrays of numbers by the task's index in the list."""

    def __init__(self, task_ids: Sequence[str], *, n_tasks: int) -> None:
        n = len(task_ids)
        self._n_tasks = n_tasks
        self._task_ids = task_ids
        self._n_groups = np.zeros(n, np.int64)
        self._n_episodes = np.zeros(n, np.int64)
        self._n_won = np.zeros(n, np.int64)
        self._return_sum = np.zeros(n)
        self._last_ordinal = np.full(n, -1, np.int64)
        self._last_version = np.full(n, -1, np.int64)
        self.last_success = np.full(n, np.nan)

    def hand_out(self, index: int, ordinal: int) -> None:
        """Count the `ordinal`-th group of the run, which is of this task."""
        self._n_groups[index] += 1
        self._last_ordinal[index] = ordinal

    def add(self, index: int, group: WholeGroup) -> None:
        """Add the results of a group that became whole."""
        self._n_episodes[index] += group.size
        self._n_won[index] += group.n_won
        self._return_sum[index] += group.return_sum
        self._last_version[index] = group.version_max
        self.last_success[index] = group.n_won / group.size

    def arrow(self, n_handed_out: int, version: int) -> pa.Table:
        """Return COLUMNS, and `task_index`, the row of the task. NULL stands for no result yet."""
        import pyarrow as pa

        untried = self._n_episodes == 0
        n_episodes = np.where(untried, 1, self._n_episodes)  # no division by 0: these are masked
        n = len(self._task_ids)
        return pa.table(
            {
                "task_index": np.arange(n),
                "task_id": pa.array(self._task_ids, pa.string()),
                "n_groups": self._n_groups,
                "n_episodes": self._n_episodes,
                "success": pa.array(self._n_won / n_episodes, mask=untried),
                "last_success": pa.array(self.last_success, mask=untried),
                "mean_return": pa.array(self._return_sum / n_episodes, mask=untried),
                "groups_since": pa.array(
                    n_handed_out - 1 - self._last_ordinal, mask=self._n_groups == 0
                ),
                "staleness": pa.array(version - self._last_version, mask=untried),
                "n_tasks": np.full(n, self._n_tasks),
            }
        )


def check_order(order: str) -> None:
    """Raise ConfigError for an SQL text that gives no weights, or other ones another day."""
    import duckdb  # here: a coordinator without weights does not load it

    with duckdb.connect() as connection:
        functions = connection.sql(
            "SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'"
        ).fetchall()
    changing = {name for (name,) in functions} | TIMES_WITHOUT_BRACKETS
    if used := sorted(changing & set(re.findall(r"\w+", order.lower()))):
        raise ConfigError(
            f"tasks.order={order!r} gives other weights each time ({', '.join(used)}), so a run "
            "could not be repeated; leave out what is random or tells the time (draws are random "
            "by themselves)"
        )
    table = _Table(["untried", "tried"], n_tasks=2)
    table.hand_out(1, 0)
    table.add(1, WholeGroup(task_id="tried", size=4, n_won=1, return_sum=2.5, version_max=0))
    weigh(order, table.arrow(1, 1))


def weigh(order: str, known: pa.Table) -> np.ndarray:
    """Return the weight of each row as float64 [R]. NULL, NaN and weights below 0 count as 0.

    DuckDB can reach nothing but the table. Raises ConfigError if the text is no weight.
    """
    import duckdb  # here: a coordinator without weights does not load it

    with duckdb.connect(
        config={"enable_external_access": False, "lock_configuration": True, "threads": 1}
    ) as connection:
        connection.register("known", known)
        try:
            query = WEIGHTS.format(order)
            if len(duckdb.extract_statements(query)) != 1:
                raise ConfigError(f"tasks.order={order!r} is not one expression; write a weight")
            weights = connection.sql(query).fetchnumpy()["weight"]
        except duckdb.Error as error:
            raise ConfigError(
                f"tasks.order={order!r} cannot be used ({one_line(error)}); give a weight in SQL "
                f"over {', '.join(COLUMNS)}, band and variance"
            ) from error
    if len(weights) != len(known):
        raise ConfigError(
            f"tasks.order={order!r} gives {len(weights)} weights for {len(known)} tasks; write an "
            "expression over the columns of one task, or add OVER ()"
        )
    return np.clip(np.nan_to_num(np.ma.filled(weights, 0.0), nan=0.0), 0.0, None)


def draw_order(weights: np.ndarray, *, seed: str) -> np.ndarray:
    """Return the indices of the tasks with a weight, drawn one by one in proportion to it.

    Task i waits an exponential time of rate `weights[i]`, and the shortest wait comes first
    (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
    """
    rng = random.Random(seed)  # its numbers are the same in every version of Python
    uniform = np.array([rng.random() for _ in weights])
    drawn = np.flatnonzero(weights)
    waits = -np.log1p(-uniform[drawn]) / weights[drawn]
    return drawn[np.argsort(waits, kind="stable")]
