"""From the store to rows with advantages: what the learner trains on next.

ready = next_batch(coordinator, layout, settings, current_version=7)     # None: not enough groups yet
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle

from gigpo import AdvantageSettings, compute_advantages, groups_without_signal, with_anchor_keys
from store import Batch, RunLayout, read_segments

COORDINATOR_TIMEOUT_S = 60.0  # it answers in milliseconds, or it is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyBatch:
    batch: Batch
    rows: pa.Table  # SEGMENT_SCHEMA plus the columns of `compute_advantages`, only groups with a signal
    no_signal: Mapping[bytes, str]  # group uid -> why it is left out
    read_s: float
    advantages_s: float  # of `compute_advantages`
    signal_s: float  # of finding the groups without a signal
    n_response_tokens: int  # of all claimed groups, with or without a signal
    success: float  # fraction of their trajectories that won


def next_batch(
    coordinator: ActorHandle,
    layout: RunLayout,
    settings: AdvantageSettings,
    *,
    current_version: int,
    signal: AdvantageSettings | None,
) -> ReadyBatch | None:
    """Claims the oldest complete groups, verifies and reads their segments, and runs the advantage SQL over them.

    Groups whose advantages under the settings `signal` are all 0 are left out of the rows; None keeps all of them.
    """
    batch = ray.get(coordinator.claim.remote(current_version), timeout=COORDINATOR_TIMEOUT_S)
    if batch is None:
        return None
    started = time.perf_counter()
    rows = in_batch_order(read_segments(layout, batch.segments), batch)  # digests verified, each trajectory once
    read = time.perf_counter()
    keyed = with_anchor_keys(rows, settings)
    advantages = compute_advantages(keyed, settings)
    computed = time.perf_counter()
    for name in ("step_return", "episode_advantage", "step_advantage", "advantage", "anchor_size"):
        rows = rows.append_column(name, advantages[name])
    asked = advantages if signal == settings else compute_advantages(keyed, signal) if signal else None
    silent = groups_without_signal(asked) if asked is not None else {}
    tokens = pc.sum(pc.list_value_length(rows["response_ids"])).as_py()
    success = pc.mean(rows.filter(pc.equal(rows["step_index"], 0))["won"]).as_py()
    kept = rows.filter(pc.invert(pc.is_in(rows["group_uid"], pa.array(list(silent), rows.schema.field("group_uid").type))))
    return ReadyBatch(
        batch=batch,
        rows=kept,
        no_signal=silent,
        read_s=read - started,
        advantages_s=computed - read,
        signal_s=time.perf_counter() - computed,
        n_response_tokens=tokens,
        success=success,
    )


def in_batch_order(rows: pa.Table, batch: Batch) -> pa.Table:
    """The rows by group as claimed, member and step: the same batch is the same tensors, whatever files its rows are in now."""
    claimed = pa.array([group.group_uid for group in batch.groups], rows.schema.field("group_uid").type)
    keys = pa.table(
        {
            "group": pc.index_in(rows["group_uid"], value_set=claimed),
            "member": rows["member"],
            "step": rows["step_index"],
        }
    )
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
    in_order = np.array_equal(order.to_numpy(), np.arange(len(rows)))
    return rows if in_order else rows.take(order).combine_chunks()
