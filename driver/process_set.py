"""Own the processes of a run, and their planned starts.

    members = ProcessSet(start)
    members.plan(["learner", "worker-0"])
    members.start_due()
    members.end(members.processes["worker-0"])

No other code changes which processes exist, or when one is to be started. Nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from driver import processes
from driver.processes import LEARNER, ManagedProcess

STAGGER_S = 0.5  # between the starts of two workers, which load the same files


class ProcessSet:
    """Own the processes that Ray was asked for, the learner included, and the planned starts."""

    def __init__(self, start: Callable[[str], ManagedProcess]) -> None:
        """Begin without processes. `start(name)` asks Ray for one."""
        self._start = start
        self._processes: dict[str, ManagedProcess] = {}
        self._due: dict[str, float] = {}  # time.monotonic() at which to start each process

    @property
    def processes(self) -> Mapping[str, ManagedProcess]:
        """Return the processes that Ray was asked for, by name."""
        return MappingProxyType(self._processes)

    @property
    def due(self) -> Mapping[str, float]:
        """Return the time.monotonic() at which each process is to be started, by name."""
        return MappingProxyType(self._due)

    def plan(self, names: Sequence[str], *, after_s: float = 0.0) -> None:
        """Plan the start of processes, one after the other, the first after a pause."""
        first_s = time.monotonic() + after_s
        self._due |= {name: first_s + STAGGER_S * at for at, name in enumerate(names)}

    def drop_plans(self, names: Iterable[str]) -> None:
        """Start these processes no more."""
        for name in names:
            del self._due[name]

    def start_due(self) -> None:
        """Ask Ray for the processes whose time has come."""
        for name, due_at_s in list(self._due.items()):
            if time.monotonic() >= due_at_s:
                del self._due[name]
                self._processes[name] = self._start(name)

    def end(self, process: ManagedProcess) -> None:
        """Kill a process, which is then no member any more."""
        processes.kill(process)
        self._processes.pop(process.name, None)

    def workers(self) -> list[ManagedProcess]:
        """Return all workers, also those that leave."""
        return [process for name, process in self._processes.items() if name != LEARNER]

    def placed_workers(self) -> list[ManagedProcess]:
        """Return the workers that have a place and keep it, by the numbers in their names."""
        placed = [each for each in self.workers() if each.is_placed and not each.leaving_why]
        return sorted(placed, key=lambda process: int(process.name.rpartition("-")[2]))
