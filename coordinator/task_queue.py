"""Queue the tasks of a run: training tasks one by one, held-out tasks in evaluation rounds."""

from __future__ import annotations

import random
from array import array
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from configs import (
    Config,
    draws_by_weight,
    environment_weights,
    environments,
    is_offline,
)
from coordinator.task_order import TaskOrder
from envs import Task, list_tasks, of_environment
from store import HELDOUT, TRAIN, Catalog, Group, VersionRecord

GOLDEN_RATIO = 0.6180339887498949
FIRST_ROUND = 0  # the evaluation of the base model before training, under version 0


def task_index(ordinal: int, n_tasks: int, *, seed: int) -> int:
    """Return the task of the `ordinal`-th group. Each pass over all tasks is shuffled anew."""
    return _order(n_tasks, f"{seed}/{ordinal // n_tasks}")[ordinal % n_tasks]


@lru_cache(maxsize=8)  # called once per group, and there may be 100,000 tasks
def _order(n_tasks: int, seed: str) -> tuple[int, ...]:
    order = list(range(n_tasks))
    random.Random(seed).shuffle(order)
    return tuple(order)


def round_due(config: Config, version: VersionRecord, *, last_step: int) -> int | None:
    """Return the version to evaluate now that `version` is published, None if none is due.

    A run that goes on before its first checkpoint publishes the base model again, under a new
    number. Its round is still that of version 0: opened once, finished if it was not.
    """
    step, evaluation = version.learner_step, config.evaluation
    if step is None or is_offline(config):
        return None
    if step == 0:
        return FIRST_ROUND if evaluation.at_start else None
    is_due = evaluation.every and step % evaluation.every == 0 and step < last_step
    return version.version if is_due else None


def training_is_due(config: Config, catalog: Catalog, *, last_step: int) -> bool:
    """Return whether training groups may be leased."""
    learner_step = catalog.learner_step()
    # Training groups beside the first evaluation would let the learner publish version 1 into it.
    if config.evaluation.at_start and learner_step == 0 and catalog.open_heldout():
        return False
    return learner_step < last_step


def free_groups(*, outstanding: int, groups_per_step: int, max_staleness: int) -> int:
    """Return how many groups may be leased now, so that none is too old when it is consumed.

    Let B = groups_per_step and S = max_staleness. A group is *outstanding* (open, complete or
    claimed) from its lease until its batch is settled, after the weights of that learner step were
    published. A claimed group that teaches nothing is not, once its batch asks for another in its
    place.

    A worker starts a group on weights at least as new as v, the newest version at the time of the
    lease. The lease is granted only while outstanding < (S + 1) * B. The learner consumes B groups
    or more per version, oldest first, so at most S whole batches precede the new group. It is
    consumed at version v + S at the latest, and its staleness is at most S.

    Example: S = 1, B = 8. The learner trains on 8 claimed groups (version 4 becomes 5), so 8 more
    may be played meanwhile. They start on version 4 and are consumed at version 5: staleness 1.
    With S = 0 no group is admitted while the learner trains, which is synchronous training.

    Groups that overtake each other can break the argument, so this only paces. The bound is
    `drop_stale` in store/catalog/batches.py: it drops a group that is too old, and records the
    reason.
    """
    return max(0, (max_staleness + 1) * groups_per_step - outstanding)


class EnvironmentOrder:
    """Assign an environment to each training group, in proportion to weights.

    It is a function of the ordinal alone. The multiples of the golden ratio spread evenly over
    [0, 1), so the share of an environment is right in a whole run and, nearly, in each batch.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._names = list(weights)
        total = sum(weights.values())
        self._ends = list(accumulate(weight / total for weight in weights.values()))
        # By ordinal: the environment's index, and the group's number among its groups.
        self._indices, self._numbers = array("H"), array("q")
        self._n_groups = [0] * len(self._names)

    def __getitem__(self, ordinal: int) -> tuple[str, int]:
        """Return the environment of a group, and its number among that environment's groups."""
        for following in range(len(self._indices), ordinal + 1):
            share = (following + 0.5) * GOLDEN_RATIO % 1.0
            index = min(bisect(self._ends, share), len(self._names) - 1)
            self._indices.append(index)
            self._numbers.append(self._n_groups[index])
            self._n_groups[index] += 1
        return self._names[self._indices[ordinal]], self._numbers[ordinal]

    def n_before(self, ordinal: int, *, first: int) -> int:
        """Count the groups from `first` up to `ordinal` that are of the same environment."""
        _, number = self[ordinal]
        return number - self._numbers[self._indices.index(self._indices[ordinal], first)]


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
        """Enter a group of `episodes_per_task` episodes for every held-out task.

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
