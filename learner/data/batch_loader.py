"""From claimed groups to optimizer updates: what the learner trains on next.

batch = source.claim(7)                                              # the coordinator's; None: not
enough groups yet ready = ready_batch(source, batch, version=7, learner_step=8)        # read,
verified, with advantages, packed stats = ranks.train([update.micro_batches for update in
ready.updates])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs import Config, LearnerConfig
from gigpo import AdvantageSettings, compute_advantages, filtered_groups
from learner.data.micro_batch import MicroBatch, micro_batches, split_updates
from learner.data.offline_selection import IMPORTED, trained_on
from store import Batch, RunLayout, read_segments

# of rows that another run played: its versions are not this run's, so there is nothing to count
OFFLINE_STALENESS = -1
ADVANTAGE_COLUMNS = (
    "step_return",
    "episode_advantage",
    "step_advantage",
    "advantage",
    "anchor_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoader:
    """Where the batches of a run come from and what is made of them."""

    # the coordinator's, asked with the version the batch will be trained at
    claim: Callable[[int], Batch | None]
    layout: RunLayout
    advantages: AdvantageSettings
    # what a group's episodes have to differ in, else it is left out; "none" keeps all groups
    group_filter: str
    # SQL condition on stored rows; those where it does not hold are left out; empty keeps all
    train_on: str
    learner: LearnerConfig
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer update of a batch: its rows, and as micro-batches those with a response.
    `rows_N` counts in `rows`.
    """

    rows: pa.Table
    micro_batches: list[MicroBatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Episodes:
    """Means over the trajectories of a batch, filtered ones included."""

    success: float  # fraction that won
    mean_return: float  # undiscounted sum of the rewards
    mean_steps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """A claimed batch with nothing left to do but to train on it. Times are seconds spent,
    whichever thread spent them.
    """

    batch: Batch
    # the policy version it has to be trained at: the staleness in `updates` is counted from it
    version: int
    rows: pa.Table  # SEGMENT_SCHEMA plus ADVANTAGE_COLUMNS, only those that are trained on
    updates: list[Update]  # of `rows`; none without a signal
    filtered: Mapping[bytes, str]  # group uid -> why nothing of it is trained on
    n_rows: int  # of all claimed groups, with or without a signal
    n_response_tokens: int  # of the same
    n_live_tokens: int  # of those of live groups: they were generated for this run
    success: float  # fraction of their trajectories that won
    live: Episodes | None  # trajectories of live groups; None without any
    offline: Episodes | None  # trajectories of offline groups; None without any
    claimed_at_s: float  # time.monotonic() when the groups were there
    read_s: float
    advantages_s: float  # of `compute_advantages`, waiting for a core included
    advantages_cpu_s: float  # the same without the waiting: it runs in this thread alone
    filter_s: float  # of finding the filtered groups, and the rows to train on
    pack_s: float  # of cutting the rows into updates and micro-batches


def source_of(
    config: Config, layout: RunLayout, *, claim: Callable[[int], Batch | None]
) -> BatchLoader:
    """What the config says about batches. Raises nothing: `configs.check` has seen it."""
    clones = config.loss.policy == "behaviour_cloning"
    return BatchLoader(
        claim=claim,
        layout=layout,
        advantages=AdvantageSettings.of(config.algorithm),
        group_filter="none" if clones else config.algorithm.group_filter,
        train_on=config.offline.train_on,
        learner=config.learner,
        seed=config.seed,
    )


def ready_batch(
    source: BatchLoader, batch: Batch, *, version: int, learner_step: int
) -> PreparedBatch:
    """Reads and verifies the segments of a batch just claimed, runs the advantage SQL over them,
    and packs the rows.

    Raises DigestError or another StoreError for a file that is not what was committed.
    `learner_step` seeds the order of rows.
    """
    claimed_at_s = time.monotonic()
    # digests verified, each trajectory once
    rows = in_batch_order(read_segments(source.layout, batch.segments), batch)
    read_at_s, worked_s = time.monotonic(), time.thread_time()
    advantages = compute_advantages(rows, source.advantages)
    computed_at_s, advantages_cpu_s = time.monotonic(), time.thread_time() - worked_s
    for name in ADVANTAGE_COLUMNS:
        rows = rows.append_column(name, advantages[name])
    silent: Mapping[bytes, str] = filtered_groups(advantages, group_filter=source.group_filter)
    kept = rows.filter(
        pc.invert(
            pc.is_in(rows["group_uid"], pa.array(list(silent), rows.schema.field("group_uid").type))
        )
    )
    if source.train_on:
        kept, unwanted = _select(kept, source.train_on)
        silent = {**silent, **unwanted}
    judged_at_s = time.monotonic()
    updates = cut_updates(
        kept, learner=source.learner, version=version, seed=source.seed + learner_step
    )
    is_stored = pc.equal(rows["split"], IMPORTED)
    live, offline = rows.filter(pc.invert(is_stored)), rows.filter(is_stored)
    return PreparedBatch(
        batch=batch,
        version=version,
        rows=kept,
        updates=updates,
        filtered=silent,
        n_rows=rows.num_rows,
        n_response_tokens=_n_response_tokens(rows),
        n_live_tokens=_n_response_tokens(live),
        success=pc.mean(_first_steps(rows)["won"]).as_py(),
        live=_episodes(live),
        offline=_episodes(offline),
        claimed_at_s=claimed_at_s,
        read_s=read_at_s - claimed_at_s,
        advantages_s=computed_at_s - read_at_s,
        advantages_cpu_s=advantages_cpu_s,
        filter_s=judged_at_s - computed_at_s,
        pack_s=time.monotonic() - judged_at_s,
    )


def _n_response_tokens(rows: pa.Table) -> int:
    return pc.sum(pc.list_value_length(rows["response_ids"]), min_count=0).as_py()


def _first_steps(rows: pa.Table) -> pa.Table:
    """Return one row for each trajectory."""
    return rows.filter(pc.equal(rows["step_index"], 0))


def _episodes(rows: pa.Table) -> Episodes | None:
    """Return the means over the trajectories of `rows`; None if there are none."""
    first_steps = _first_steps(rows)
    if first_steps.num_rows == 0:
        return None
    return Episodes(
        success=pc.mean(first_steps["won"]).as_py(),
        mean_return=pc.sum(rows["reward"]).as_py() / first_steps.num_rows,
        mean_steps=rows.num_rows / first_steps.num_rows,
    )


def cut_updates(rows: pa.Table, *, learner: LearnerConfig, version: int, seed: int) -> list[Update]:
    """Cut the rows into optimizer updates, shuffled by `seed`, to be trained at policy `version`.

    Parts without a single response token have nothing to learn and are left out. Five rows of
    versions 6, 6, 7, 7, 7, for two updates at version 7: one of three rows and one of two, the rows
    of version 6 with staleness 1, wherever they are. Offline rows have OFFLINE_STALENESS.
    """
    parts = split_updates(
        with_staleness(rows, version=version),
        updates=learner.updates_per_step,
        rows_per_update=learner.rows_per_update,
        seed=seed,
    )
    updates = []
    for part in parts:
        batches = micro_batches(
            part,
            micro_batch_tokens=learner.micro_batch_tokens,
            merge_steps=learner.merge_steps,
            ranks=learner.ranks,
        )
        if batches:
            updates.append(Update(rows=part, micro_batches=batches))
    return updates


def with_staleness(rows: pa.Table, *, version: int) -> pa.Table:
    """The rows with a column `staleness` at policy `version`, OFFLINE_STALENESS for offline ones."""
    is_stored = pc.equal(rows["split"], IMPORTED)
    return rows.append_column(
        "staleness",
        pc.if_else(is_stored, OFFLINE_STALENESS, pc.subtract(version, rows["version_min"])),
    )


def _select(rows: pa.Table, condition: str) -> tuple[pa.Table, dict[bytes, str]]:
    """The rows to train on, and the groups of which there are none. What they were compared with is
    already in them.
    """
    kept = rows.filter(trained_on(rows, condition))
    left = set(kept["group_uid"].unique().to_pylist())
    why = f"no step of it is one of offline.train_on={condition}"
    return kept, {
        group_uid: why
        for group_uid in rows["group_uid"].unique().to_pylist()
        if group_uid not in left
    }


def in_batch_order(rows: pa.Table, batch: Batch) -> pa.Table:
    """The rows by group as claimed, member and step: the same batch is the same tensors, whatever
    files its rows are in now.
    """
    claimed = pa.array(
        [group.group_uid for group in batch.groups], rows.schema.field("group_uid").type
    )
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
