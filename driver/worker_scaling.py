"""Have the workers of a run follow the nodes of its cluster, and a person's wish.

    scaling = WorkerScaling(members, config, learns=True, remove=remove, notice=notice)
    scaling.leave_draining_nodes()   # workers of nodes that leave finish, and are asked for again
    scaling.follow_wanted_workers()  # as many as `gigpo workers` asked for, or the range's most
    scaling.end_late_closings()

The supervisor calls these in its loop. None of them waits.

On a joined cluster the workers follow its nodes (`nodes.py`). With a range in `actors.workers` Ray
is asked for all of them once the run has begun. A worker without a place stays asked for, which is
what an autoscaler looks at. Nothing is left to be asked for when the driver is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from configs import Config, WorkerRange, least_workers, most_workers
from driver import processes
from driver.cluster import is_joined
from driver.nodes import draining_nodes, node_of
from driver.process_set import ProcessSet
from driver.processes import LEARNER, ManagedProcess
from driver.run_control import wanted_workers

UNPLACED_S = 20.0  # a process that Ray has not begun by then is reported
MAX_NAMED = 4  # processes in one line

Tell = Callable[[str, str], None]


class WorkerScaling:
    """Have workers join and leave a run that goes on."""

    def __init__(
        self, members: ProcessSet, config: Config, *, learns: bool, remove: Tell, notice: Tell
    ) -> None:
        """Scale the workers of `members`.

        `remove(name, why)` frees the groups of a process for others. `notice(what, detail)` tells
        the person who watches the run.
        """
        self.members = members
        self.config = config
        self.learns = learns
        self.drained_nodes: set[str] = set()  # that were seen draining
        self._remove, self._notice = remove, notice
        self._room_made_s = float("-inf")  # time.monotonic() when a worker left for the learner

    def follow_wanted_workers(self) -> None:
        """Start or stop workers until those are there that are wanted now."""
        if (wanted := self._n_wanted()) is None:
            return
        names = self._names_beside_learner(worker_names(wanted))
        known = {*self.members.processes, *self.members.due}
        self.members.plan([name for name in names if name not in known])
        due = list(self.members.due)
        self.members.drop_plans(name for name in due if name != LEARNER and name not in names)
        for process in [each for each in self.members.workers() if each.name not in names]:
            if process.has_started and not process.leaving_why:
                self.leave(process, "left, as it was asked to", within_s=0.0)
            elif not process.is_placed and not processes.has_process(process):
                self.forget(process)  # Ray need not look for a place any more

    def leave_draining_nodes(self) -> None:
        """Have the workers of draining nodes leave, and ask for each of them again."""
        draining = draining_nodes()
        self.drained_nodes.update(draining)
        for process in self.members.workers() if draining else []:
            process.node = process.node or node_of(process.handle)
            if process.node in draining and not process.leaving_why:
                within_s = draining[process.node]
                self._notice(
                    "node leaves",
                    f"{process.name} is on a node that leaves the cluster; its episodes may go on "
                    f"for {within_s:.0f} s, then others play them. It is asked for again",
                )
                process.is_wanted_again = True
                self.leave(process, "left, with its node", within_s=within_s)

    def make_room(self) -> None:
        """Have the last worker beyond the least ones leave, as the learner finds no place."""
        beyond = self.members.placed_workers()[least_workers(self.config.actors) :]
        now_s = time.monotonic()
        if beyond and now_s - self._room_made_s >= UNPLACED_S:
            self._room_made_s = now_s
            self.leave(beyond[-1], "left, to make room for the learner", within_s=0.0)

    def end_late_closings(self) -> None:
        """Kill workers that take too long to close."""
        for process in self.members.workers():
            if process.closes_by_s is not None and time.monotonic() > process.closes_by_s:
                self.forget(process)

    def leave(self, process: ManagedProcess, why: str, *, within_s: float) -> None:
        """Have a worker finish within `within_s`, hand back its groups, and end."""
        process.leaving_why = why
        if process.has_started:
            process.handle.leave.remote(within_s=within_s)
        else:  # it plays nothing yet
            self._remove(process.name, why)
            self.forget(process)

    def forget(self, process: ManagedProcess) -> None:
        """Kill a worker that has left, and ask for it again if it is wanted again."""
        self.members.end(process)
        if process.is_wanted_again:
            self.members.plan([process.name])

    def playing(self) -> frozenset[str]:
        """Return the workers that have started and are not about to leave."""
        members = self.members.workers()
        started = [each for each in members if each.has_started and not each.leaving_why]
        return frozenset(process.name for process in started)

    def wanted_line(self) -> str:
        """Say how many workers are wanted, and by whom."""
        asked = wanted_workers(Path(self.config.run_dir))
        if asked is not None:
            return f"{asked} (gigpo workers)"
        least, most = least_workers(self.config.actors), most_workers(self.config.actors)
        return f"{least if least == most else f'{least} to {most}'} (actors.workers)"

    def _n_wanted(self) -> int | None:
        """Return how many workers are wanted; None: those of the start, and nobody else asked."""
        asked = wanted_workers(Path(self.config.run_dir))
        if asked is None and is_joined() and isinstance(self.config.actors.workers, WorkerRange):
            return most_workers(self.config.actors)
        return asked

    def _names_beside_learner(self, names: Sequence[str]) -> Sequence[str]:
        """Return the wanted workers. While the learner has no place, ask for no more of them.

        Otherwise Ray would give them the places that the learner has left when it was lost.
        """
        learner = self.members.processes.get(LEARNER)
        if not self.learns or (learner is not None and learner.is_placed):
            return names
        placed = {process.name for process in self.members.placed_workers()}
        kept = [name for name in names if name in placed]
        n_missing = max(0, least_workers(self.config.actors) - len(kept))
        return [*kept, *[name for name in names if name not in placed][:n_missing]]


def workers_line(
    before: Collection[str], now: Collection[str], *, why_ended: Mapping[str, str], wanted: str
) -> str:
    """Say how the number of workers changed, and why.

    Example: "from 3 to 1: worker-1, worker-2 ended (left, with its node); wanted: 1 to 3
    (actors.workers)".
    """
    changes = []
    if began := [name for name in now if name not in before]:
        changes.append(f"{_named(began)} began to play")
    for why in sorted(set(why_ended.values())):
        ended = [name for name in before if name not in now and why_ended[name] == why]
        changes.append(f"{_named(ended)} ended ({why})")
    return f"from {len(before)} to {len(now)}: {', '.join(changes)}; wanted: {wanted}"


def _named(workers: Collection[str]) -> str:
    """Return the first names, by their numbers, and how many more there are."""
    by_number = sorted(workers, key=lambda name: int(name.rpartition("-")[2]))
    more = f" and {len(workers) - MAX_NAMED} more" if len(workers) > MAX_NAMED else ""
    return f"{', '.join(by_number[:MAX_NAMED])}{more}"


def worker_names(number: int) -> list[str]:
    """Return the names of so many workers: worker-0, worker-1, ..."""
    return [f"worker-{each}" for each in range(number)]
