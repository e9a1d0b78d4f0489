"""Run what is missing of a study: safe to stop at any time, the same command goes on.

Each finished run is one line of the study's results. A run that was stopped has no line, and is
run again from its beginning. Arms of one seed come one after the other, so that what is there is
made of whole pairs.

    python -m benchmarks.studies.runner NAME SEEDS JOB JOBS     # a process of `gigpo study`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.study import ROOT, Arm, Study, load
from printable import UserError, say

SIGNIFICANT_DIGITS = 10  # of a measure: more than any reading, less than rounding
CURVE_DIGITS = 4  # of a point: as many as a picture shows
PACKAGES = ("actors", "configs", "coordinator", "driver", "envs", "gigpo", "learner", "store")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A finished run."""

    arm: str
    seed: int
    settings: dict[str, str | float]
    measures: dict[str, float | str]
    curve: list[float]
    cpu_s: float  # of the process, for this run alone
    commit: str  # of the checkout; with + if sources of the run differed from it


def read(study: Study) -> list[Row]:
    """Return the finished runs. Raises UserError for one with other settings than its arm now has.

    An unfinished last line, of a process that was killed while it wrote, counts as no run.
    """
    if not study.results.exists():
        return []
    settings = {arm.name: dict(arm.settings) for arm in study.arms}
    rows = []
    for line in study.results.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        row = Row(**json.loads(line))
        if settings.get(row.arm) != row.settings:
            raise UserError(
                f"{study.results}: seed {row.seed} of {row.arm!r} was run with {row.settings}, and "
                f"the arm now has {settings.get(row.arm)}; move the file away to run it again"
            )
        rows.append(row)
    return rows


def missing(study: Study, *, seeds: int) -> list[tuple[int, list[Arm]]]:
    """Return the seeds that are not done, each with the arms that it lacks."""
    done = {(row.arm, row.seed) for row in read(study)}
    wanted = [
        (seed, [arm for arm in study.arms if (arm.name, seed) not in done]) for seed in range(seeds)
    ]
    return [(seed, arms) for seed, arms in wanted if arms]


def run_part(study: Study, todo: Sequence[tuple[int, Sequence[Arm]]]) -> None:
    """Run these one after the other, and append a line for each as soon as it is finished."""
    study.work.mkdir(parents=True, exist_ok=True)
    study.results.parent.mkdir(parents=True, exist_ok=True)
    commit = _commit(study)
    for seed, arms in todo:
        began_s = _cpu_s()
        for arm, measures, curve in study.run(arms, seed, study.work):
            row = {
                "arm": arm.name,
                "seed": seed,
                "settings": dict(arm.settings),
                "measures": {name: _rounded(value) for name, value in measures.items()},
                "curve": [round(value, CURVE_DIGITS) for value in curve],
                "cpu_s": round(_cpu_s() - began_s, 1),
                "commit": commit,
            }
            _append(study.results, json.dumps(row) + "\n")
            say(f"{arm.name}, seed {seed}: {_short(measures)}, {row['cpu_s']} core-seconds")
            began_s = _cpu_s()


def run_missing(study: Study, *, seeds: int, jobs: int) -> None:
    """Run what is missing, in `jobs` processes at the same time."""
    todo = missing(study, seeds=seeds)
    if jobs == 1 or len(todo) < 2:
        run_part(study, todo)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.studies.runner", study.name, str(seeds)]
    processes = [
        subprocess.Popen([*command, str(job), str(jobs)], cwd=ROOT, env=environment)
        for job in range(jobs)
    ]
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            if failed := [process for process in processes if process.poll()]:
                raise UserError(
                    f"a process of the study ended with status {failed[0].returncode}; its error "
                    "is above. The same command goes on"
                )
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def run_share(name: str, *, seeds: int, job: int, jobs: int) -> None:
    """Run every `jobs`-th of the missing seeds, from the `job`-th on."""
    study = load(name)
    run_part(study, missing(study, seeds=seeds)[job::jobs])


def _append(path: Path, line: str) -> None:
    """Append a line at once, whole, after removing half a line of a killed process."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _commit(study: Study) -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    own = (
        *(f"{study.name}.py", "horizon.py", "small_*.py", "event_training.py"),
        *("corridor.py", "minimal_loop.py"),
    )
    sources = [*PACKAGES, *(f"benchmarks/studies/{name}" for name in own)]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def _rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _short(measures: object) -> str:
    assert isinstance(measures, dict)
    return ", ".join(
        f"{name} {value:.4g}" for name, value in measures.items() if isinstance(value, float)
    )


if __name__ == "__main__":
    name, seeds, job, jobs = sys.argv[1:]
    run_share(name, seeds=int(seeds), job=int(job), jobs=int(jobs))
