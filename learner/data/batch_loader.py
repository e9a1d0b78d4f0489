"""Turn a claimed batch of groups into tensors: read, verify, score, select, pack.

    batch = loader.claim(7)
    prepared = prepare_batch(loader, batch, version=7, learner_step=8, more=None)
    stats = ranks.train([update.micro_batches for update in prepared.updates])

The coordinator returns None for a claim while there are too few groups. `more` gives a batch other
groups in place of those that teach nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs import Config, ReplayConfig, groups_of_a_step, is_served
from gigpo import replay_weight, replayed_wins
from learner.data.batch_summary import BatchSummary, batch_summary, own_rows
from learner.data.training_rows import (
    RowSettings,
    ScoredRows,
    check_finite,
    rows_to_train,
    scored_rows,
)
from learner.data.updates import Update, cut_updates
from learner.data.values import AskCritic
from learner.step_times import LoadTimes, timed
from store import WIDE_SCHEMA, Batch, RunLayout, read_segments

# From a batch and its filtered groups to the batch with more groups; None if it stays as it is.
More = Callable[[Batch, Mapping[bytes, str]], Batch | None]


class Refill(Protocol):
    """Ask the coordinator for more groups of a batch: `Coordinator.refill`."""

    def __call__(
        self, batch_id: int, *, filtered: Collection[bytes], n_groups: int, current_version: int
    ) -> Batch | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoader:
    """The settings that turn claimed groups into optimizer updates."""

    # Ask the coordinator for a batch to train at a policy version.
    claim: Callable[[int], Batch | None]
    refill: Refill
    n_own: int  # groups of a batch that this run plays
    refill_groups: int  # at most so many more of them, in place of filtered ones
    layout: RunLayout
    is_trusted: bool  # this user made or trusts the run; a stranger's can be replayed
    settings: RowSettings
    replay: ReplayConfig
    seed: int
    # Append the log-probabilities of a teacher behind a server; None without one.
    ask_teacher: Callable[[pa.Table], pa.Table] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """A claimed batch, ready to train on."""

    batch: Batch
    version: int  # policy version to train at: staleness is counted from it
    # The rows that are trained on, with the columns of ScoredRows. A teacher behind a server adds
    # the list teacher_logprob.
    rows: pa.Table
    replayed: pa.Table  # as read, plus `advantage`; rows of earlier wins, trained on again
    updates: list[Update]  # of `rows` and `replayed`; empty if all groups were filtered
    # trajectory uid -> the critic's value of each step, of all claimed groups; {} without a critic
    state_values: Mapping[bytes, Sequence[float]]
    # Group uid -> reason why none of its rows is trained on.
    filtered: Mapping[bytes, str]
    unselected: Mapping[bytes, str]  # some of these: no step of theirs meets offline.train_on
    n_missing: int  # groups that no other stands for, because of algorithm.refill_groups
    summary: BatchSummary
    claimed_at_s: float  # time.monotonic() when the last groups were there
    times: LoadTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class _FullBatch:
    """A batch that asks for no more groups, with its rows."""

    batch: Batch
    scored: ScoredRows
    claimed_at_s: float  # when the last groups were there


def make_loader(
    config: Config,
    layout: RunLayout,
    *,
    claim: Callable[[int], Batch | None],
    refill: Refill,
    ask_critic: AskCritic,
) -> BatchLoader:
    """Read the settings of a loader from a checked config.

    `ask_critic` is for the estimators that need a critic. It is called when a batch is prepared, so
    after the step before. Raises TeacherError for a teacher behind a server that cannot be used,
    StoreError for a key of this user that others can read.
    """
    ask_teacher = None
    if is_served(config.loss.teacher):
        # Imported here, because the client takes half a second that other runs need not wait.
        from learner.data.served_teacher import ServedTeacher

        ask_teacher = ServedTeacher(config.loss.teacher).with_logprobs
    return BatchLoader(
        claim=claim,
        refill=refill,
        n_own=groups_of_a_step(config)[0],
        refill_groups=config.algorithm.refill_groups,
        layout=layout,
        is_trusted=layout.is_trusted(),
        settings=RowSettings.of(config, ask_critic=ask_critic),
        replay=config.replay,
        seed=config.seed,
        ask_teacher=ask_teacher,
    )


def prepare_batch(
    loader: BatchLoader, batch: Batch, *, version: int, learner_step: int, more: More | None
) -> PreparedBatch:
    """Read a batch just claimed, compute its advantages, and pack its rows.

    `learner_step` seeds the order of rows. `more` refills the batch until it returns None. Raises
    StoreError (DigestError) if a segment is not as it was committed, and AdvantageError for an
    advantage that is not a finite float32.
    """
    times = LoadTimes()
    full = _refilled(loader, batch, more=more, times=times)
    batch, scored = full.batch, full.scored
    with timed(times, "filter_s"):
        rows, unselected = rows_to_train(scored, train_on=loader.settings.train_on)
    if loader.ask_teacher is not None:
        with timed(times, "read_s"):
            rows = loader.ask_teacher(rows)
    replayed = _replay(
        loader, batch, beside=own_rows(scored.rows), learner_step=learner_step, times=times
    )
    with timed(times, "pack_s"):
        trained = pa.concat_tables([rows, replayed], promote_options="default")
        check_finite(trained)
        updates = cut_updates(
            trained,
            learner=loader.settings.learner,
            version=version,
            seed=loader.seed + learner_step,
        )
    return PreparedBatch(
        batch=batch,
        version=version,
        rows=rows,
        replayed=replayed,
        updates=updates,
        state_values={} if loader.settings.ask_critic is None else _by_trajectory(scored.rows),
        filtered={**scored.filtered, **unselected},
        unselected=unselected,
        n_missing=_n_missing(loader, batch, scored.filtered),
        summary=batch_summary(scored.rows),
        claimed_at_s=full.claimed_at_s,
        times=times,
    )


def _refilled(
    loader: BatchLoader, batch: Batch, *, more: More | None, times: LoadTimes
) -> _FullBatch:
    """Read and score a batch, and again with more groups until `more` returns None."""
    claimed_at_s = time.monotonic()
    rows = _read(loader, batch, times=times)
    scored = scored_rows(rows, loader.settings, times=times)
    while more is not None and (larger := more(batch, scored.filtered)) is not None:
        claimed_at_s = time.monotonic()
        new = _read(loader, _new_groups(larger, before=batch), times=times)
        rows, batch = in_batch_order(pa.concat_tables([rows, new]), larger), larger
        # All of it again: some estimators compare all groups of a batch, and the last bits of a
        # value depend on what is computed with it.
        scored = scored_rows(rows, loader.settings, times=times)
    return _FullBatch(batch=batch, scored=scored, claimed_at_s=claimed_at_s)


def n_teaching(batch: Batch, filtered: Collection[bytes]) -> int:
    """Return how many groups of the batch this run played and did not filter."""
    return sum(group.source is None and group.group_uid not in filtered for group in batch.groups)


def n_wanted(loader: BatchLoader, batch: Batch, filtered: Collection[bytes]) -> int:
    """Return how many more groups the batch may ask for: 0 if it is full, or at its bound.

    Example: 8 groups, 5 of them filtered, with refill_groups=4. It asks for 4 of the 5.
    """
    n_own = sum(group.source is None for group in batch.groups)
    room = loader.n_own + loader.refill_groups - n_own
    return max(0, min(loader.n_own - n_teaching(batch, filtered), room))


def _n_missing(loader: BatchLoader, batch: Batch, filtered: Collection[bytes]) -> int:
    """Return how many groups a refilled batch still lacks; 0 for a batch that is not refilled."""
    if not loader.refill_groups:
        return 0
    return max(0, loader.n_own - n_teaching(batch, filtered))


def _read(loader: BatchLoader, batch: Batch, *, times: LoadTimes) -> pa.Table:
    with timed(times, "read_s"):
        rows = read_segments(
            loader.layout,
            batch.segments,
            columns=loader.settings.columns,
            is_own=loader.is_trusted,
        )
        return in_batch_order(rows, batch)


def _replay(
    loader: BatchLoader, batch: Batch, *, beside: pa.Table, learner_step: int, times: LoadTimes
) -> pa.Table:
    """Return the rows of wins that the batch replays. `beside` has all rows that it plays."""
    if not batch.replayed:
        nothing = WIDE_SCHEMA.empty_table().select(loader.settings.columns)
        return nothing.append_column("advantage", pa.array([], pa.float64()))
    old = replace(batch, groups=batch.replayed, segments=batch.replayed_segments)
    weight = replay_weight(learner_step, warmup_steps=loader.replay.warmup_steps)
    rows = _read(loader, old, times=times)
    with timed(times, "advantages_s"):
        return replayed_wins(rows, beside, loader.settings.advantages, weight=weight)


def _by_trajectory(rows: pa.Table) -> dict[bytes, list[float]]:
    """Return the values of each trajectory's steps. The rows are in the order of the batch."""
    state_values: dict[bytes, list[float]] = {}
    for traj_uid, value in zip(
        rows["traj_uid"].to_pylist(), rows["value"].to_pylist(), strict=True
    ):
        state_values.setdefault(traj_uid, []).append(value)
    return state_values


def _new_groups(batch: Batch, *, before: Batch) -> Batch:
    """Return the part of a refilled batch that it did not have before."""
    known = {group.group_uid for group in before.groups}
    segments = []
    for segment in batch.segments:
        new = tuple(one for one in segment.trajectories if one.group_uid not in known)
        if new:
            segments.append(replace(segment, trajectories=new))
    groups = tuple(group for group in batch.groups if group.group_uid not in known)
    return replace(batch, groups=groups, segments=tuple(segments))


def in_batch_order(rows: pa.Table, batch: Batch) -> pa.Table:
    """Sort rows by group as claimed, member and step.

    The same batch then gives the same tensors, also after compaction moved rows to other files.
    """
    uid_type = rows.schema.field("group_uid").type
    claimed = pa.array([group.group_uid for group in batch.groups], uid_type)
    keys = pa.table(
        {
            "group": pc.index_in(rows["group_uid"], value_set=claimed),
            "member": rows["member"],
            "step": rows["step_index"],
        }
    )
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
    in_order = np.array_equal(order.to_numpy(), np.arange(len(rows)))
    return (rows if in_order else rows.take(order)).combine_chunks()
