"""Run one check on a store, mutated or not: a recording that loses power, kills, or a refusal."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

from tests.crash import tracer
from tests.crash.commands import forked_whole, make_forkable_run
from tests.crash.lab import (
    WORKLOAD,
    Bad,
    Failed,
    Recording,
    Verify,
    calls_of,
    kill_anywhere,
    lose_power,
    record,
    record_after_kill,
    run_workload,
    the_run_is_whole,
)
from tests.crash.mutations import MUTATIONS, ROOT, SOURCES, Mutation
from tests.crash.repairs import damage, mended, published

KILLS = 40
AT_THE_END = 10  # of the crashes come when all was acknowledged
SEED = 40_000
# Errors that a mutation may cause. Any other means that the mutation did not even run.
RED = ("AssertionError", "store.errors.", "sqlite3.")

# Programs that lose power: what is recorded, the check afterwards, and the number of losses.
# Unmutated they survive all.
RECORDED: dict[str, tuple[str, Verify, int]] = {
    "workload": (WORKLOAD, the_run_is_whole, 80),
    "killed": (WORKLOAD, the_run_is_whole, 10),
    "mend": ("tests.crash.repairs:mend", mended, 10),
    "publish": ("tests.crash.repairs:publish", published, 200),
    "fork": ("tests.crash.commands:fork_once", forked_whole, 40),
    "copy": ("tests.crash.commands:copy_once", forked_whole, 40),
}


def recording_of(what: str, base: Path, *, sources: Path | None = None) -> Recording:
    """One of RECORDED."""
    if what == "killed":
        return record_after_kill(base, sources=sources)
    if what == "mend":
        run_workload(base, traced=False)
        damage(f"{base / 'run'}")
    if what in ("fork", "copy"):
        base.mkdir()
        make_forkable_run(base)
    return record(base, entry=RECORDED[what][0], sources=sources)


def verdict(number: int | None, check: str, directory: Path) -> str:
    """Why the check is red for the store with that mutation, or without any; "" if it is green.

    A check is "power" and what is recorded, "kill" and a phase of the workload, or a function of
    guards.py and its argument.
    """
    directory.mkdir()
    sources = directory / "sources"
    copy_sources(sources, None if number is None else MUTATIONS[number])
    try:
        return _verdict(sources, check, directory)
    finally:
        # in /dev/shm, and a killed process may still be writing byte code
        shutil.rmtree(directory, ignore_errors=True)


def _verdict(sources: Path, check: str, directory: Path) -> str:
    kind, _, argument = check.partition(" ")
    try:
        if kind == "power":
            bad = _after_power_losses(directory / "base", sources, what=argument)
        elif kind == "kill":
            bad = _after_kills(directory / "base", sources, phase=argument)
        else:
            entry = f"tests.crash.guards:{kind}"
            place = directory / "place"
            place.mkdir()
            trace = tracer.run(entry, place, *([argument] if argument else []), sources=sources)
            return _reason(trace.error) if trace.status != 0 else ""
    except Failed as failed:  # it does not get through undisturbed: red without any crash
        return _reason(f"{failed}")
    return f"{bad[0].phase}: {bad[0].broken[0]}" if bad else ""


def _after_power_losses(base: Path, sources: Path, *, what: str) -> list[Bad]:
    recording = recording_of(what, base, sources=sources)
    _, verify, crashes = RECORDED[what]
    rng = random.Random(SEED)
    points = sorted(rng.randrange(len(recording.calls) + 1) for _ in range(crashes))
    points += [len(recording.calls)] * AT_THE_END
    return lose_power(recording, points, seed=SEED, until_bad=True, verify=verify)


def _after_kills(base: Path, sources: Path, *, phase: str) -> list[Bad]:
    recording = record(base, sources=sources)
    numbers = calls_of(phase, recording)
    if phase == "manifest":  # it is torn for two calls only
        numbers = [
            number for number in numbers if "manifest.json" in recording.calls[number - 1].path
        ]
    return kill_anywhere(recording, random.Random(SEED).sample(numbers, min(KILLS, len(numbers))))


def _reason(error: str) -> str:
    reason = [line for line in error.splitlines() if re.match(r"[A-Za-z]", line)][-1]
    assert reason.startswith(RED), f"the mutation does not even run: {error}"
    return reason


def copy_sources(directory: Path, mutation: Mutation | None) -> None:
    """Copy the sources of the store, with a mutation or, as a control, without."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name)
        else:
            (directory / name).parent.mkdir(parents=True)
            shutil.copy2(ROOT / name, directory / name)
    if mutation is not None:
        path = directory / mutation.file
        path.write_text(mutation.edit(path.read_text()))
