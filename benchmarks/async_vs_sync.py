"""Compare learner steps per second: asynchronous, synchronous (max_staleness=0), in lock-step.

    python benchmarks/async_vs_sync.py [--quick] [--base runs/quickstart/base/policy]

Simulated: key_room whose every answer takes a log-normal time (sigma 1) by sleeping, a policy and a
learner that sleep; real coordinator, catalog, files and admission. All do the same work with the
same workers, each with one group at a time, and as many as a batch has groups, so that none has
more in flight than lock-step. In lock-step no episode takes its next turn before every episode of
the batch has had its answer; finished ones cost nothing, unlike there. The learner's step takes
about as long as the workers need for a batch.

Real engine (not with --quick): the quick start with its TextWorld games, vLLM and DeepSpeed on this
machine, max_staleness 2 over 0. Nothing sleeps there: engine and learner share the cores. `--base`
spares the cloning. The last line is JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser, show_json, show_table
from support.simulated_run import Pace, simulate

import store
from store import BASE_POLICY
from tests.support.simulation import Delay

ROOT = Path(__file__).resolve().parent.parent
MAX_STALENESS = 2  # versions, as the quick start
GENERATION, STEP_TIME = 0.5, 42.0  # times the median latency of an environment
WARM_UP = 2  # learner steps that are not counted
REAL_STEPS = 14  # learner steps of a run with vLLM and DeepSpeed, REAL_WARM_UP of them not counted
REAL_WARM_UP = 4
REQUIRED = {"async_over_sync": ">= 2", "async_over_lockstep": ">= 2.5", "learner_idle": "< 0.1"}
LAST_LINE = (*REQUIRED, "real_engine_async_over_sync")
STEP_TIMES = """
SELECT epoch_us(max(trained_at)) / 1e6 AS ended_s FROM lineage
WHERE batch_state = 'trained' GROUP BY learner_step"""


def simulated(directory: Path, *, latency_s: float, steps: int) -> dict[str, float]:
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
        f"episodes of up to {pace.max_steps} turns; answers take {1e3 * latency_s:g} ms (median), "
        f"a learner step {pace.step_time.median_s:g} s"
    )
    modes = {"async": (MAX_STALENESS, False), "sync": (0, False), "lockstep": (0, True)}
    timed = {
        name: simulate(
            directory / name,
            pace,
            max_staleness=max_staleness,
            lock_step=lock_step,
            steps=steps,
            warm_up=WARM_UP,
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
        train(directory / name, max_staleness=max_staleness, base=base)
        base = base or directory / name / BASE_POLICY  # both start from the same
        seconds[name] = real_step_s(directory / name)
    return {
        **{f"real_engine_{name}_step_s": value for name, value in seconds.items()},
        "real_engine_async_over_sync": seconds["sync"] / seconds["async"],
    }


def train(run_dir: Path, *, max_staleness: int, base: Path | None) -> None:
    """Run gigpo train as anybody does. It makes a base policy if `base` is None."""
    settings = {
        "run_dir": run_dir,
        "seed": 0,
        "max_staleness": max_staleness,
        "learner.steps": REAL_STEPS,
        "learner.checkpoint_every": REAL_STEPS,
        "evaluation.every": 0,
        "evaluation.final_episodes_per_task": 1,
        **({} if base is None else {"model.path": base}),
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "cli", "train", "configs/quickstart.yaml", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def real_step_s(run_dir: Path) -> float:
    """Return the mean seconds between the ends of learner steps after the warm-up."""
    with store.open_run(str(run_dir)) as run:
        ends_s = sorted(run.sql(STEP_TIMES)["ended_s"].to_pylist())[REAL_WARM_UP - 1 :]
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def main() -> None:
    parser = quick_parser(__doc__, quick="the simulated part only, for a run of under a minute")
    parser.add_argument(
        "--base",
        type=Path,
        help="the real engine's base policy; made if it is not given, in minutes",
    )
    options = parser.parse_args()
    figures: dict[str, float | None] = {"real_engine_async_over_sync": None}
    latency_s, steps = (0.02, 4) if options.quick else (0.04, 12)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        figures |= simulated(directory, latency_s=latency_s, steps=steps)
        if not options.quick:
            base = options.base and options.base.resolve()
            figures |= real_engine(directory / "real", base=base)
    show_table(figures, REQUIRED)
    show_json(figures, LAST_LINE)


if __name__ == "__main__":
    main()
