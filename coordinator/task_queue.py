"""Queue the tasks of a run: training tasks one by one, held-out tasks in evaluation rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from configs import (
    Config,
    draws_by_weight,
    environment_weights,
    environments,
    is_offline,
)
from coordinator.environment_order import EnvironmentOrder
from coordinator.task_order import TaskOrder
from envs import Task, list_tasks, of_environment
from store import HELDOUT, TRAIN, Catalog, Group


def task_index(ordinal: int, n_tasks: int, *, seed: int) -> int:
    """Return the task of the `ordinal`-th group. Each pass over all tasks is shuffled anew."""
    return _order(n_tasks, f"{seed}/{ordinal // n_tasks}")[ordinal % n_tasks]


@lru_cache(maxsize=8)  # called once per group, and there may be 100,000 tasks
def _order(n_tasks: int, seed: str) -> tuple[int, ...]:
    order = list(range(n_tasks))
    random.Random(seed).shuffle(order)
    return tuple(order)


class TaskQueue:
    """Hold the tasks of all environments, by split and by id.

    A run that plays nothing has none: its environment need not be installed.
    """

    def __init__(self, config: Config, *, learns: bool) -> None:
        self._config = config
        self._environment_order = EnvironmentOrder(environment_weights(config))
        plays = not (learns and is_offline(config))
        splits = {name: _splits(config, name) for name in environments(config)} if plays else {}
        self._train = {name: own[TRAIN] for name, own in splits.items()}
        self._heldout = [task for own in splits.values() for task in own[HELDOUT]]
        training = [task for tasks in self._train.values() for task in tasks]
        self._by_id = {task.id: task for task in (*training, *self._heldout)}
        self._orders: dict[str, TaskOrder] = {}  # empty: each pass over all tasks is shuffled
        if draws_by_weight(config):
            for name, tasks in self._train.items():
                self._orders[name] = TaskOrder(
                    config.tasks.order,
                    task_ids=[task.id for task in tasks],
                    n_tasks=len(training),
                    seed=config.seed,
                )

    def __getitem__(self, task_id: str) -> Task:
        return self._by_id[task_id]

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._by_id

    def open_next_group(self, catalog: Catalog) -> None:
        """Enter the next training group in the catalog, within the caller's transaction."""
        ordinal = catalog.next_ordinal(TRAIN, evaluated_version=None)
        name, number = self._environment_order[ordinal]
        if not self._orders:
            train = self._train[name]
            task = train[task_index(number, len(train), seed=self._config.seed)]
            self._open(catalog, ordinal, task_id=task.id)
            return
        drawn = self._orders[name].draw(
            catalog,
            ordinal,
            n_drawn=lambda first: self._environment_order.n_before(ordinal, first=first),
        )
        group = self._open(catalog, ordinal, task_id=drawn.task_id)
        catalog.record_weight(
            group.group_uid,
            weight=drawn.weight,
            success_before=drawn.success_before,
            lsn=drawn.lsn,
        )

    def _open(self, catalog: Catalog, ordinal: int, *, task_id: str) -> Group:
        size = self._config.algorithm.group_size
        return catalog.open_group(
            ordinal=ordinal, task_id=task_id, split=TRAIN, size=size, evaluated_version=None
        )

    def open_round(self, catalog: Catalog, version: int, *, episodes_per_task: int) -> None:
        """Enter `episodes_per_task` groups of one episode for every held-out task.

        They are leased before any training group.
        """
        task_ids = [task.id for task in self._heldout]
        catalog.open_round(task_ids, episodes_per_task=episodes_per_task, version=version)


def _splits(config: Config, name: str) -> dict[str, Sequence[Task]]:
    """List the tasks of one environment. With several, its name stands in each."""
    env = environments(config)[name].env
    splits = list_tasks(env.name, env.options)
    if not config.environments:
        return splits
    named: dict[str, Sequence[Task]] = {}
    for split, tasks in splits.items():
        named[split] = [of_environment(task, name) for task in tasks]
    return named
