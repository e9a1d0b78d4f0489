"""Seconds per learner step of the quick start with a real engine and a real learner: gigpo train
as anybody runs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import store

ROOT = Path(__file__).resolve().parent.parent.parent
STEP_TIMES = """
SELECT epoch_us(max(trained_at)) / 1e6 AS ended_s FROM lineage
WHERE batch_state = 'trained' GROUP BY learner_step"""


def train(run_dir: Path, *, max_staleness: int, steps: int, base: Path | None) -> None:
    """Runs gigpo train to learner step `steps`; `base` is a base policy made before, None makes
    one. Raises CalledProcessError.
    """
    settings = {
        "run_dir": run_dir,
        "seed": 0,
        "max_staleness": max_staleness,
        "learner.steps": steps,
        "learner.checkpoint_every": steps,
        "evaluation.every": 0,
        "evaluation.final_episodes_per_task": 1,
        **({} if base is None else {"model.path": base}),
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    subprocess.run(
        [sys.executable, "-m", "cli", "train", "configs/quickstart.yaml", *overrides],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def step_s(run_dir: Path, *, warm_up: int) -> float:
    """Mean seconds from the end of a learner step to that of the next, after the first
    `warm_up`.
    """
    with store.open_run(str(run_dir)) as run:
        ends_s = sorted(run.sql(STEP_TIMES)["ended_s"].to_pylist())
    return (ends_s[-1] - ends_s[warm_up - 1]) / (len(ends_s) - warm_up)
