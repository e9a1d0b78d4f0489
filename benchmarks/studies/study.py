"""Define what a study is.

    STUDY = Study(name="horizon", question="...", prediction="...", arms=(Arm(name="gigpo"), ...),
                  seeds=10, measures={"final": "success after the last step"}, ..., run=run)

    def run(arms, seed, work):          # yields the result of each arm as soon as it is there
        for arm in arms:
            yield arm, {"final": 0.9}, [0.1, 0.5, 0.9]

All arms of a study begin with the same weights and play the same tasks. An arm's random numbers
depend on the seed only, so runs of one seed are a pair.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.studies import NAMES
from printable import UserError, did_you_mean

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One of the things that are compared. `settings` are written into each of its results."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    panel: str = ""  # arms of one panel are drawn together
    label: str = ""  # within the panel; empty: the name


# arm, its measures, and a curve (empty: none)
Result = tuple[Arm, Mapping[str, float | str], Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A question, and the runs that answer it.

    name           of the module, of `results/NAME.jsonl` and of the page
    prediction     written before the first run, with its date, and never changed
    setup          what a run is, for people
    measures       measure -> what it is; the first one is drawn where there are no curves
    comparisons    two arms: first minus second, paired by seed; four: how much more the first two
                   differ than the last two
    curve          what the curve shows and over what; empty: there are none
    reading        written after the runs. {arm[measure]} is a mean with its interval,
                   {arm - other[measure]} a difference: numbers come from the results
    numbers        format of the measures
    run_cpu_s      core-seconds of one run, measured, for the estimate of --dry-run
    is_timed       the runs are programs of their own, whose core-seconds nobody counts: the page
                   tells the time that they took, by the measure wall_s
    """

    name: str
    title: str
    question: str
    prediction: str
    setup: str
    arms: tuple[Arm, ...]
    seeds: int
    measures: Mapping[str, str]
    comparisons: tuple[tuple[str, ...], ...] = ()
    numbers: str = ".3f"
    curve: str = ""
    reading: str
    run_cpu_s: float
    is_timed: bool = False
    run: Callable[[Sequence[Arm], int, Path], Iterator[Result]]

    @property
    def results(self) -> Path:
        return ROOT / "benchmarks" / "studies" / "results" / f"{self.name}.jsonl"

    @property
    def work(self) -> Path:
        """Return the directory for models and runs, which may be removed at any time."""
        return ROOT / "runs" / "studies" / self.name


def load(name: str) -> Study:
    """Return the study of that name. Raises UserError if there is none."""
    if name not in NAMES:
        known = ", ".join(NAMES)
        raise UserError(f"{name} is no study; there are {known}{did_you_mean(name, NAMES)}")
    study = importlib.import_module(f"benchmarks.studies.{name}").STUDY
    assert isinstance(study, Study)
    return study
