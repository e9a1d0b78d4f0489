"""Compute the advantages of earlier wins that are trained on again, beside a newer batch (SPEAR).

wins = replayed_wins(old_rows, batch_rows, settings, weight=replay_weight(7, warmup_steps=100))
# rows of the episodes that won, with the column `advantage`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import resources

import duckdb
import numpy as np
import pyarrow as pa

from gigpo.settings import UNSCALED, WHITENED, AdvantageSettings

_BATCH = ("group_uid", "traj_uid", "step_index", "reward")
_REPLAYED = (*_BATCH, "is_action_valid", "won")


def replayed_wins(
    replayed: pa.Table, batch: pa.Table, settings: AdvantageSettings, *, weight: float
) -> pa.Table:
    """Return the rows of `replayed` to train on, with a column float64 `advantage` above 0.

    `replayed` has whole groups of earlier batches, one row per step, and `batch` all groups that
    this one plays, filtered ones too. Columns read: group_uid, traj_uid, step_index, reward,
    is_action_valid, won. queries/replayed_wins.sql has the formula; `weight` multiplies it. The
    deviation divides where `settings` divide live advantages by one. The same rows in the same
    order give the same bits.
    """
    is_scaled = settings.estimator in WHITENED or (
        settings.normalise == "mean_std" and settings.estimator not in UNSCALED
    )
    row_numbers_R = pa.array(np.arange(len(replayed)))
    wins = _query_wins(
        batch.select(_BATCH),
        replayed.select(_REPLAYED).append_column("replayed_row", row_numbers_R),
        parameters={
            "is_scaled": is_scaled,
            "weight": weight,
            "invalid_penalty": settings.invalid_penalty,
        },
    )
    rows = replayed.take(wins["replayed_row"].combine_chunks())
    return rows.append_column("advantage", wins["advantage"])


def _query_wins(
    batch: pa.Table, replayed: pa.Table, *, parameters: Mapping[str, object]
) -> pa.Table:
    """Run queries/replayed_wins.sql over the two tables."""
    query = resources.files("gigpo").joinpath("queries", "replayed_wins.sql").read_text("utf-8")
    # One thread: sums of doubles are then taken in one order.
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("batch", batch)
        connection.register("replayed", replayed)
        return connection.sql(query, params=dict(parameters)).to_arrow_table()


def replay_weight(learner_step: int, *, warmup_steps: int) -> float:
    """Return the weight of replayed wins: half a cosine from 0 to 1 over `warmup_steps` steps.

    Learner steps count from 1. SPEAR's curriculum: an early policy has only lucky wins.
    """
    if learner_step >= warmup_steps:
        return 1.0
    return (1.0 - math.cos(math.pi * learner_step / warmup_steps)) / 2.0
