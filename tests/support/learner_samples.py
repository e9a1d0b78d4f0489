"""Rows as the learner reads them, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa

from learner.data.micro_batch import MicroBatch

STEP_KEYS = ("traj_uid", "step_index")
# prompt, response, its log-probabilities, advantage
Row = tuple[list[int], list[int], list[float], float]


def table(*rows: Row, steps: Sequence[tuple[int, int]] | None = None) -> pa.Table:
    """One row each; `steps` are their (trajectory, step), otherwise each is a trajectory by
    itself.
    """
    prompts, responses, logprobs, advantages = zip(*rows, strict=True)
    trajectories, step_indices = zip(
        *(steps or [(row, 0) for row in range(len(rows))]), strict=True
    )
    return pa.table(
        {
            "traj_uid": pa.array(
                [bytes([trajectory]) * 16 for trajectory in trajectories], pa.binary(16)
            ),
            "step_index": pa.array(step_indices, pa.int32()),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "response_logprobs": pa.array(logprobs, pa.list_(pa.float32())),
            "advantage": pa.array(advantages, pa.float64()),
            "staleness": pa.array(range(len(rows)), pa.int64()),
        }
    )


def one_step_each(rows: pa.Table) -> pa.Table:
    """The rows as trajectories of one step, so that none continues another one's sequence."""
    uids = pa.array([row.to_bytes(16) for row in range(len(rows))], pa.binary(16))
    others = rows.drop_columns([name for name in STEP_KEYS if name in rows.column_names])
    keys = (uids, pa.array([0] * len(rows), pa.int32()))
    for name, values in zip(STEP_KEYS, keys, strict=True):
        others = others.append_column(name, values)
    return others


def sequences_of(batch: MicroBatch) -> list[list[int]]:
    """The token ids of each sequence."""
    bounds = batch.bounds_Sp1.tolist()
    return [batch.input_ids_T[start:end].tolist() for start, end in pairwise(bounds)]
