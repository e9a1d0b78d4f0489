"""Find the tasks that kill workers, from the losses that the catalog and this process counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from coordinator.leases import Lease

SUSPECT_LOSSES = 2  # workers lost with a task in play; it is then played alone, after all others
MAX_LOSSES = 3  # the last one while the task was played alone; it is then abandoned


class Suspects:
    """Find the tasks that kill workers.

    A worker plays several groups at once, and loses all of them together. A task in play at
    SUSPECT_LOSSES losses is a suspect: it is played after all others, by a worker that plays
    nothing else. If that worker is lost too, the task is abandoned.
    """

    def __init__(self, losses: Mapping[str, int]) -> None:
        """Begin with the losses that earlier starts of the run counted, by task id."""
        self._losses = Counter(losses)
        self._reported: dict[str, list[Lease]] = {}
        self._drained = ""
        self.to_abandon: dict[str, str] = {}  # task id -> reason

    @property
    def task_ids(self) -> set[str]:
        """Return the suspects and the tasks to abandon."""
        return {task_id for task_id, n in self._losses.items() if n >= SUSPECT_LOSSES}

    def report(self, worker: str, leases: Sequence[Lease]) -> None:
        """Note groups that `worker` gave up because it fails; it is lost next."""
        self._reported.setdefault(worker, []).extend(leases)

    def lose(self, worker: str, leases: Sequence[Lease], *, why: str) -> Lease | None:
        """Count the loss of `worker` with `leases` in play. Return a lease whose task is to blame.

        Only a task that was played alone can be to blame.
        """
        in_play = [*self._reported.pop(worker, []), *leases]
        self.release(worker)
        self._losses.update({lease.task.id for lease in in_play})
        if len(in_play) != 1 or self._losses[in_play[0].task.id] < MAX_LOSSES:
            return None
        task_id = in_play[0].task.id
        self.to_abandon[task_id] = (
            f"task {task_id!r} was in play {self._losses[task_id]} times when a worker was lost, "
            f"the last time alone: {worker} {why}"
        )
        return in_play[0]

    def clear(self, task_id: str) -> None:
        """Clear a task of suspicion, because a whole group of it was played."""
        self._losses.pop(task_id, None)

    def begin_drain(self, worker: str) -> bool:
        """Give `worker` no new group until it can play a suspect alone. Return whether it drains.

        One worker at a time drains; for another this returns False.
        """
        self._drained = self._drained or worker
        return self._drained == worker

    def release(self, worker: str) -> None:
        """Let the next worker drain."""
        if self._drained == worker:
            self._drained = ""
