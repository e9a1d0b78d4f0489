"""Measure each contender of benchmarks/learner.py in its own process, update by update.

    contenders = {"ours": partial(Learner, base, rows, ...), "hf": partial(HfLoop, base, rows, ...)}
    with seated(contenders) as seats:
        for _ in range(7):
            for seat in seats.values():    # alternately, so that other load affects all of them
                seat.update()
    seats["ours"].best_s, seats["ours"].peak_mib

Times are CPU seconds of all threads of the contender's process, so other programs do not count.
Memory is the process's peak minus its size when it was forked: weights, gradients, optimizer,
activations. The parent has imported everything before, so imports do not count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

PATIENCE_S = 600.0
KIB_PER_MIB = 1024  # ru_maxrss is in KiB on Linux
_FORK = multiprocessing.get_context("fork")


class Contender(Protocol):
    def update(self) -> float:
        """Make one optimizer update over all rows; return the norm of its gradient."""


@dataclass(kw_only=True, slots=True)
class Seat:
    """The parent's end of one contender's process."""

    name: str
    process: BaseProcess
    connection: Connection
    # CPU, of each update but the first, which warms up
    seconds: list[float] = field(default_factory=list)
    grad_norm: float | None = None  # of the first update
    peak_mib: float = 0.0  # so far

    @property
    def best_s(self) -> float:
        return min(self.seconds)

    def update(self) -> None:
        self.connection.send(None)
        if not self.connection.poll(PATIENCE_S):
            raise TimeoutError(
                f"{self.name} made no update within {PATIENCE_S:g} s; give it fewer rows"
            )
        try:
            seconds, grad_norm, self.peak_mib = self.connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} failed in its process; the reason is above") from None
        if self.grad_norm is None:
            self.grad_norm = grad_norm
        else:
            self.seconds.append(seconds)


@contextlib.contextmanager
def seated(contenders: Mapping[str, Callable[[], Contender]]) -> Iterator[dict[str, Seat]]:
    """Start a process for each contender, which is made there at its first update."""
    seats = {}
    for name, make in contenders.items():
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_serve, args=(make, theirs), daemon=True)
        process.start()
        theirs.close()  # or nobody would notice that the process is gone
        seats[name] = Seat(name=name, process=process, connection=ours)
    try:
        yield seats
    finally:
        for seat in seats.values():
            seat.process.kill()  # it has nothing to save
            seat.process.join()


def _serve(make: Callable[[], Contender], connection: Connection) -> None:
    """Make updates until it is killed, or until nobody has asked for long: its parent is gone."""
    at_fork_mib = _peak_mib()
    contender: Contender | None = None
    while connection.poll(PATIENCE_S):
        connection.recv()
        contender = contender or make()
        started_s = time.process_time()
        grad_norm = contender.update()
        connection.send((time.process_time() - started_s, grad_norm, _peak_mib() - at_fork_mib))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB
