"""Scalars of a run as TensorBoard reads them, and as the metrics table has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import store

Scalar = tuple[str, int, float]  # name, learner step, value


def in_tensorboard(run: Path) -> list[Scalar]:
    """Return every scalar of the run's event files, sorted. The same one twice is there twice."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return sorted(
        (name, scalar.step, scalar.value) for name in names for scalar in events.Scalars(name)
    )


def in_store(run: Path) -> list[Scalar]:
    """Return every row of the metrics view, sorted, as float32: event files hold no more."""
    with store.open_run(run) as reader:
        rows = reader.sql("SELECT name, learner_step, value FROM metrics").to_pylist()
    return sorted(
        (row["name"], row["learner_step"], float(np.float32(row["value"]))) for row in rows
    )
