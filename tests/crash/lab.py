"""Run the workload in processes, record it, and simulate crashes from the recordings."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import store  # noqa: F401  imported once per worker; what it forks starts at once
from tests.crash import tracer
from tests.crash.checks import EndState, Line, broken_promises, end_state, read_diary
from tests.crash.disk import Disk, Tree, lay_out, read_tree
from tests.crash.tracer import FileCall, Trace

WORKERS = 2
WORKLOAD = "tests.crash.workload:main"
MEMORY = Path("/dev/shm")  # crashes are simulated: nothing need reach a disk
# of the simulated crashes are also asked through the views and all levels of fsck
THOROUGH_EVERY = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    base: Path  # what was watched; the run is in it, so that its own name can be lost too
    before: Tree  # what was there already, and safe
    calls: tuple[FileCall, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """A crash that broke promises."""

    after_calls: int
    seed: int
    phase: str
    broken: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """The result of a run that was killed and tried again."""

    phases: tuple[str, ...]  # what it was doing at each kill
    broken: tuple[str, ...]


def record_after_kill(base: Path, *, sources: Path | None = None) -> Recording:
    """Record a start that is killed between making a directory and saving its name, and the next.

    SIGKILL loses nothing that was written, so both are one story to the disk.
    """
    undisturbed = [call for call in record(base.with_name("dry")).calls if call.name != "mark"]
    made = [
        number
        for number, call in enumerate(undisturbed, start=1)
        if call.name == "mkdir" and "/segments/" in call.path
    ]
    killed = run_workload(base, kill_at=made[-1] + 1)
    again = record(base, sources=sources)
    return Recording(base=base, before={f"{base}": None}, calls=killed.calls + again.calls)


class Failed(Exception):
    """The traceback of a process that was to reach its end."""


# Checks the directory that a crash left, given the diary. The first crashes are checked more
# thoroughly.
Verify = Callable[[Path, Sequence[Line], bool], list[str]]


def the_run_is_whole(base: Path, diary: Sequence[Line], thorough: bool) -> list[str]:
    """Check the run that the workload left."""
    return broken_promises(base / "run", diary, thorough=thorough)


@functools.cache
def workers() -> ProcessPoolExecutor:
    """Return processes of `new_workers` that all tests share: each takes a second to start."""
    return new_workers()


def new_workers() -> ProcessPoolExecutor:
    """Start clean processes to fork from, in this one's environment: this one may have threads.

    Skip, loudly, where processes cannot be traced.
    """
    pool = ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn"))
    reason = pool.submit(tracer.why_not).result()
    if reason is not None:
        pool.shutdown()
        pytest.skip(reason)
    return pool


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a directory in memory, or in the usual place for temporary files."""
    path = Path(
        tempfile.mkdtemp(prefix="store-crash-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
    )
    try:
        yield path
    finally:
        shutil.rmtree(path)


def run_workload(base: Path, *, kill_at: int | None = None, traced: bool = True) -> Trace:
    """Run the workload in `base` until its end or its kill_at-th call."""
    base.mkdir(exist_ok=True)
    diary = diary_of(base)
    watched = base if traced else None
    return tracer.run(WORKLOAD, base / "run", diary, watched=watched, marks=diary, kill_at=kill_at)


def diary_of(base: Path) -> Path:
    """Beside what is watched, as nothing is to be lost of it."""
    return base.with_suffix(".diary")


def record(base: Path, *, entry: str = WORKLOAD, sources: Path | None = None) -> Recording:
    """An undisturbed `entry`, call by call; Failed if it does not reach its end."""
    base.mkdir(exist_ok=True)
    before, diary = read_tree(base), diary_of(base)
    trace = tracer.run(entry, base / "run", diary, sources=sources, watched=base, marks=diary)
    if trace.status != 0:
        raise Failed(trace.error or f"exit {trace.status}")
    return Recording(base=base, before=before, calls=trace.calls)


def kill_and_retry(base: Path, kills: Sequence[int], end: EndState) -> Killed:
    """SIGKILL at the given call; for each further one start again and kill that; then once more, to
    the end.
    """
    reached = []
    for kill_at in kills:
        trace = run_workload(base, kill_at=kill_at)
        if trace.status != -signal.SIGKILL:
            return Killed(
                phases=tuple(reached),
                broken=(f"call {kill_at} never came: {trace.error or trace.status}",),
            )
        reached.append(
            [line["phase"] for line in read_diary(diary_of(base)) if "phase" in line][-1]
        )
    trace = run_workload(base, traced=False)
    broken = [f"the retry failed: {trace.error or trace.status}"] if trace.status != 0 else []
    broken += broken_promises(base / "run", read_diary(diary_of(base)), thorough=True)
    if not broken:
        reached_end = end_state(base / "run")
        broken = [
            f"the end differs in {name}" for name, rows in end.items() if rows != reached_end[name]
        ]
    shutil.rmtree(base)
    return Killed(phases=tuple(reached), broken=tuple(broken))


def phases(calls: Sequence[FileCall]) -> list[str]:
    """Return the phase of each call of the workload; "" for a mark of the diary."""
    phase, result = "", []
    for call in calls:
        if call.name == "mark":
            phase = json.loads(call.data).get("phase", phase)
        result.append("" if call.name == "mark" else phase)
    return result


def calls_of(phase: str, recording: Recording) -> list[int]:
    """Return the numbers of the calls of a phase, from 1."""
    return [number for number, name in enumerate(phases(recording.calls), start=1) if name == phase]


def lose_power(
    recording: Recording,
    points: Sequence[int],
    *,
    seed: int,
    until_bad: bool = False,
    verify: Verify = the_run_is_whole,
) -> list[Bad]:
    """Crash after each of these numbers of calls (ascending), with what may be left then; those
    that broke promises.
    """
    disk, diary, phase, bad = Disk(recording.base, recording.before), [], "", []
    calls = iter(enumerate(recording.calls, start=1))
    done = 0
    with scratch() as directory:
        for number, point in enumerate(points):
            while done < point:
                done, call = next(calls)
                if call.name != "mark":
                    disk.apply(call)
                    continue
                diary.append(json.loads(call.data))
                phase = diary[-1].get("phase", phase)
            crash_seed = seed + number
            left = disk.after_power_loss(random.Random(crash_seed))
            lay_out(left, instead_of=recording.base, at=directory / f"{number}")
            broken = verify(directory / f"{number}", diary, number % THOROUGH_EVERY == 0)
            shutil.rmtree(directory / f"{number}")
            if broken:
                bad.append(
                    Bad(after_calls=point, seed=crash_seed, phase=phase, broken=tuple(broken))
                )
                if until_bad:
                    break
    return bad


def kill_anywhere(recording: Recording, points: Sequence[int]) -> list[Bad]:
    """Kill at each of `points` until the first bad result. SIGKILL loses nothing written."""
    disk, diary, phase = Disk(recording.base, recording.before), [], ""
    wanted = set(points)
    with scratch() as directory:
        for number, call in enumerate(recording.calls, start=1):
            if call.name == "mark":
                diary.append(json.loads(call.data))
                phase = diary[-1].get("phase", phase)
                continue
            disk.apply(call)
            if number in wanted:
                lay_out(disk.everything(), instead_of=recording.base, at=directory / f"{number}")
                broken = the_run_is_whole(directory / f"{number}", diary, False)
                shutil.rmtree(directory / f"{number}")
                if broken:
                    return [Bad(after_calls=number, seed=0, phase=phase, broken=tuple(broken))]
    return []
