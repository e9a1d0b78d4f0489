"""The tasks of a run, as its coordinator hands them out: training tasks by ordinal, held-out ones
all at once.

`round_due` and `training_is_due` say when the one and the other are played.
"""

from __future__ import annotations

from configs import Config, is_offline
from coordinator.admission import task_index
from envs import Task, list_tasks
from store import Catalog, VersionRecord

FIRST_ROUND = 0  # the evaluation before training: of the base model, under its first number


def round_due(config: Config, version: VersionRecord, *, last_step: int) -> int | None:
    """Return the version whose evaluation round is to be played now that `version` is published, or
    None.

    Until the first checkpoint a run that goes on begins again with the base model, under a new
    number. The round of version 0 is then the same one: opened once, finished if it was not.
    """
    step, evaluation = version.learner_step, config.evaluation
    if step is None or is_offline(config):
        return None
    if step == 0:
        return FIRST_ROUND if evaluation.at_start else None
    is_due = evaluation.every and step % evaluation.every == 0 and step < last_step
    return version.version if is_due else None


def training_is_due(config: Config, catalog: Catalog, *, last_step: int) -> bool:
    """Return whether training groups may be played: until the last learner step, and after the
    evaluation at the start.

    Training groups beside that evaluation would let the learner publish version 1 into it.
    """
    learner_step = catalog.learner_step()
    if config.evaluation.at_start and learner_step == 0 and catalog.open_heldout():
        return False
    return learner_step < last_step


class Tasks:
    """What the environment has; nothing where nothing is played, as then the environment need not
    even be installed.
    """

    def __init__(self, config: Config, *, learns: bool) -> None:
        self._config = config
        self._splits = (
            {} if learns and is_offline(config) else list_tasks(config.env.name, config.env.options)
        )
        self._by_id = {task.id: task for tasks in self._splits.values() for task in tasks}

    def __getitem__(self, task_id: str) -> Task:
        return self._by_id[task_id]

    def open_next_group(self, catalog: Catalog) -> None:
        """Enters the next training group, of the task whose turn it is."""
        ordinal, train = catalog.next_ordinal("train", purpose_version=None), self._splits["train"]
        task = train[task_index(ordinal, len(train), seed=self._config.seed)]
        size = self._config.algorithm.group_size
        catalog.open_group(
            ordinal=ordinal, task_id=task.id, split="train", size=size, purpose_version=None
        )

    def open_round(self, catalog: Catalog, version: int, *, episodes_per_task: int) -> None:
        """Puts every held-out task into the queue, `episodes_per_task` episodes each, before any
        train task.
        """
        task_ids = [task.id for task in self._splits["heldout"]]
        catalog.open_round(task_ids, episodes_per_task=episodes_per_task, version=version)
