"""Learner steps per second: asynchronous, synchronous (max_staleness=0), and in lock-step; the same
work, the same code.

    python benchmarks/async_vs_sync.py [--quick] [--base runs/quickstart/base/policy]

Simulated: key_room whose every answer takes a log-normal time (sigma 1) by sleeping, a policy and a
learner that sleep; real coordinator, catalog, files and admission. All three have the same workers,
each with one group at a time, and as many as a batch has groups, so that none has more in flight
than lock-step. In lock-step no episode takes its next turn before every episode of the batch has
had its answer; finished ones cost nothing, unlike there. The learner's step takes about as long as
the workers need for a batch.

Real engine (not with --quick): the quick start with its TextWorld games, vLLM and DeepSpeed on this
machine, max_staleness 2 over 0. Nothing sleeps there: engine and learner share the cores. `--base`
spares the cloning. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import real_run
from support.simulated_run import Pace, Timed, simulate

from tests.support.simulation import Delay

MAX_STALENESS = 2
GENERATION, STEP_TIME = 0.5, 42.0  # times the median latency of an environment
REAL_STEPS, REAL_WARM_UP = 14, 4
REQUIRED = {"async_over_sync": ">= 2", "async_over_lockstep": ">= 2.5", "learner_idle": "< 0.1"}
LAST_LINE = (
    "async_over_sync",
    "async_over_lockstep",
    "learner_idle",
    "real_engine_async_over_sync",
)


def simulated(directory: Path, *, latency_s: float, steps: int, warm_up: int) -> dict[str, float]:
    pace = Pace(
        environment=Delay(median_s=latency_s, sigma=1.0),
        generation=Delay(median_s=GENERATION * latency_s, sigma=0.0),
        step_time=Delay(median_s=STEP_TIME * latency_s, sigma=0.1),
        workers=8,
        groups_per_step=8,
        group_size=8,
        max_steps=10,
    )
    print(
        f"{pace.workers} workers, batches of {pace.groups_per_step} groups of {pace.group_size} "
        "episodes of up to",
        end=" ",
    )
    print(
        f"{pace.max_steps} turns; answers take {1e3 * latency_s:g} ms (median), a learner step "
        f"{pace.step_time.median_s:g} s"
    )
    modes = {"async": (MAX_STALENESS, False), "sync": (0, False), "lockstep": (0, True)}
    timed: dict[str, Timed] = {
        name: simulate(
            directory / name,
            pace,
            max_staleness=max_staleness,
            lock_step=lock_step,
            steps=steps,
            warm_up=warm_up,
        )
        for name, (max_staleness, lock_step) in modes.items()
    }
    return {
        **{f"{name}_step_s": result.step_s for name, result in timed.items()},
        **{f"{name}_learner_idle": result.idle for name, result in timed.items()},
        "async_staleness": timed["async"].staleness,
        "async_over_sync": timed["sync"].step_s / timed["async"].step_s,
        "async_over_lockstep": timed["lockstep"].step_s / timed["async"].step_s,
        "learner_idle": timed["async"].idle,
    }


def real_engine(directory: Path, *, base: Path | None) -> dict[str, float]:
    seconds = {}
    for name, max_staleness in (("async", MAX_STALENESS), ("sync", 0)):
        real_run.train(directory / name, max_staleness=max_staleness, steps=REAL_STEPS, base=base)
        base = base or directory / name / "base" / "policy"  # both start from the same
        seconds[name] = real_run.step_s(directory / name, warm_up=REAL_WARM_UP)
    return {
        **{f"real_engine_{name}_step_s": value for name, value in seconds.items()},
        "real_engine_async_over_sync": seconds["sync"] / seconds["async"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="the simulated part only, for a run of under a minute"
    )
    parser.add_argument(
        "--base",
        type=Path,
        help="the real engine's base policy; made if it is not given, in minutes",
    )
    options = parser.parse_args()
    figures: dict[str, float | None] = {"real_engine_async_over_sync": None}
    with tempfile.TemporaryDirectory() as directory:
        pace = (
            {"latency_s": 0.02, "steps": 4} if options.quick else {"latency_s": 0.04, "steps": 12}
        )
        figures |= simulated(Path(directory), warm_up=2, **pace)
        if not options.quick:
            figures |= real_engine(
                Path(directory) / "real", base=options.base and options.base.resolve()
            )
    print(f"{'figure':30} {'measured':>10}   required")
    for name, value in figures.items():
        print(
            f"{name:30} {'-' if value is None else f'{value:10.3f}':>10}   {REQUIRED.get(name, '')}"
        )
    print(json.dumps({name: figures[name] and round(figures[name], 4) for name in LAST_LINE}))


if __name__ == "__main__":
    main()
