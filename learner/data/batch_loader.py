"""Turn a claimed batch of groups into tensors: read, verify, compute advantages, select, pack.

    batch = loader.claim(7)
    prepared = prepare_batch(loader, batch, version=7, learner_step=8, more=None)
    stats = ranks.train([update.micro_batches for update in prepared.updates])

The coordinator returns None for a claim while there are too few groups. `more` gives a batch other
groups in place of those that teach nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from configs import (
    Config,
    ConfigError,
    LearnerConfig,
    ReplayConfig,
    groups_of_a_step,
    is_served,
    used_group_filter,
)
from gigpo import (
    TOKEN_LEVEL,
    AdvantageSettings,
    compute_advantages,
    filtered_groups,
    replay_weight,
    replayed_wins,
)
from learner.data.micro_batch import MicroBatch, micro_batches, split_updates
from learner.data.values import (
    critic_values,
    values_digest,
    with_token_advantages,
    with_token_values,
)
from printable import one_line
from store import IMPORTED, SEGMENT_SCHEMA, Batch, RunLayout, is_trusted, read_segments

OFFLINE_STALENESS = -1  # an offline row's versions are another run's, so there is none to count
ADVANTAGE_COLUMNS = {
    "step_return": pa.float64(),
    "episode_advantage": pa.float64(),
    "step_advantage": pa.float64(),
    "advantage": pa.float64(),
    "anchor_size": pa.int64(),
}
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
    n_live: int  # groups of a batch that this run plays
    refill_groups: int  # at most so many more of them, in place of filtered ones
    layout: RunLayout
    is_own: bool  # this user made or trusts the run; a stranger's can be replayed
    advantages: AdvantageSettings
    # Groups whose episodes do not differ in it are left out; "none" keeps all groups.
    group_filter: str
    # SQL condition on offline rows. Others are left out; an empty condition keeps all.
    train_on: str
    learner: LearnerConfig
    replay: ReplayConfig
    seed: int
    # The critic's value before each response token per micro-batch, for the estimators that need
    # one; they are asked for when a batch is prepared, so after the step before.
    values: Callable[[Sequence[MicroBatch]], Sequence[torch.Tensor]] | None = None
    # Append the log-probabilities of a teacher behind a server; None without one.
    ask_teacher: Callable[[pa.Table], pa.Table] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer update: its rows, and micro-batches of those that have a response.

    `MicroBatch.rows_N` are indices into `rows`.
    """

    rows: pa.Table
    micro_batches: list[MicroBatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Episodes:
    """Means over the trajectories of a batch, including filtered groups."""

    success: float  # fraction that won
    mean_return: float  # undiscounted sum of the rewards
    mean_steps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """A claimed batch, ready to train on."""

    batch: Batch
    version: int  # policy version to train at: staleness is counted from it
    # The rows that are trained on: SEGMENT_SCHEMA plus ADVANTAGE_COLUMNS and, with a critic, value
    # and value_target. An estimator of TOKEN_LEVEL adds lists, a number for each response token:
    # token_value, token_advantage and token_value_target. A teacher behind a server adds the list
    # teacher_logprob.
    rows: pa.Table
    replayed: pa.Table  # SEGMENT_SCHEMA plus `advantage`; rows of earlier wins, trained on again
    updates: list[Update]  # of `rows` and `replayed`; empty if all groups were filtered
    # trajectory uid -> the critic's value of each step, of all claimed groups; {} without a critic
    values: Mapping[bytes, Sequence[float]]
    # Digest of the critic's values of all response tokens of all claimed groups; None unless the
    # estimator is one of TOKEN_LEVEL.
    values_digest: int | None
    filtered: Mapping[bytes, str]  # group uid -> reason why none of its rows is trained on
    n_rows: int  # of all claimed groups, filtered ones included
    n_response_tokens: int  # of the same rows
    n_live_tokens: int  # of those rows that this run's workers generated
    success: float  # fraction of all trajectories that won
    live: Episodes | None  # trajectories of this run's workers; None without any
    offline: Episodes | None  # trajectories of offline groups; None without any
    n_missing: int  # filtered groups that no other stands for, because of algorithm.refill_groups
    claimed_at_s: float  # time.monotonic() when the last groups were there
    times: LoadTimes


@dataclass(kw_only=True, slots=True)
class LoadTimes:
    """Seconds that the preparing thread spent on a batch."""

    read_s: float = 0.0  # and to ask a teacher behind a server
    values_s: float = 0.0  # for the critic's forward passes; 0 without a critic
    advantages_s: float = 0.0  # including the wait for a core
    advantages_cpu_s: float = 0.0  # in `compute_advantages`, without the wait
    filter_s: float = 0.0  # to find filtered groups, and the rows to train on
    pack_s: float = 0.0  # to cut the rows into updates and micro-batches

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time until the end of the block to a field, `read_s` for example."""
        began_s = time.monotonic()
        yield
        setattr(self, name, getattr(self, name) + time.monotonic() - began_s)


def make_loader(
    config: Config, layout: RunLayout, *, claim: Callable[[int], Batch | None], refill: Refill
) -> BatchLoader:
    """Read the settings of a loader from a checked config.

    Raises TeacherError for a teacher behind a server that cannot be used, StoreError for a key of
    this user that others can read.
    """
    ask_teacher = None
    if is_served(config.loss.teacher):
        # Imported here, because the client takes half a second that other runs need not wait.
        from learner.data.served_teacher import ServedTeacher

        ask_teacher = ServedTeacher(config.loss.teacher).with_logprobs
    return BatchLoader(
        claim=claim,
        refill=refill,
        n_live=groups_of_a_step(config)[0],
        refill_groups=config.algorithm.refill_groups,
        layout=layout,
        is_own=is_trusted(layout.root),
        advantages=AdvantageSettings.of(config.algorithm),
        group_filter=used_group_filter(config),
        train_on=config.offline.train_on,
        learner=config.learner,
        replay=config.replay,
        seed=config.seed,
        ask_teacher=ask_teacher,
    )


def prepare_batch(
    loader: BatchLoader, batch: Batch, *, version: int, learner_step: int, more: More | None
) -> PreparedBatch:
    """Read a batch just claimed, compute its advantages, and pack its rows.

    `learner_step` seeds the order of rows. `more` refills the batch until it returns None. Raises
    StoreError (DigestError) if a segment is not as it was committed.
    """
    times, claimed_at_s = LoadTimes(), time.monotonic()
    played = _read(loader, batch, times=times)
    rows, filtered = _with_advantages(loader, played, times=times)
    while more is not None and (larger := more(batch, filtered)) is not None:
        claimed_at_s = time.monotonic()
        new = _read(loader, _new_groups(larger, before=batch), times=times)
        played, batch = in_batch_order(pa.concat_tables([played, new]), larger), larger
        # All of it again: some estimators compare all groups of a batch, and the last bits of a
        # value depend on what is computed with it.
        rows, filtered = _with_advantages(loader, played, times=times)
    n_missing = max(0, loader.n_live - n_teaching(batch, filtered)) if loader.refill_groups else 0
    values = {} if loader.values is None else _by_trajectory(rows)
    digest = None
    if loader.advantages.estimator in TOKEN_LEVEL:
        with times.timed("advantages_s"):
            digest = values_digest(rows)
            rows = with_token_advantages(rows, gae_lambda=loader.advantages.gae_lambda)
    with times.timed("filter_s"):
        uids = pa.array(list(filtered), rows.schema.field("group_uid").type)
        trained = rows.filter(pc.invert(pc.is_in(rows["group_uid"], uids)))
        if loader.train_on:
            trained, unselected = _select(trained, loader.train_on)
            filtered |= unselected
    if loader.ask_teacher is not None:
        with times.timed("read_s"):
            trained = loader.ask_teacher(trained)
    is_offline = pc.equal(rows["split"], IMPORTED)
    live, offline = rows.filter(pc.invert(is_offline)), rows.filter(is_offline)
    replayed = _replay(loader, batch, beside=live, learner_step=learner_step, times=times)
    with times.timed("pack_s"):
        updates = cut_updates(
            pa.concat_tables([trained, replayed], promote_options="default"),
            learner=loader.learner,
            version=version,
            seed=loader.seed + learner_step,
        )
    return PreparedBatch(
        batch=batch,
        version=version,
        rows=trained,
        replayed=replayed,
        updates=updates,
        values=values,
        values_digest=digest,
        filtered=filtered,
        n_rows=rows.num_rows,
        n_response_tokens=_n_response_tokens(rows),
        n_live_tokens=_n_response_tokens(live),
        success=pc.mean(_first_steps(rows)["won"]).as_py(),
        live=_episodes(live),
        offline=_episodes(offline),
        n_missing=n_missing,
        claimed_at_s=claimed_at_s,
        times=times,
    )


def n_teaching(batch: Batch, filtered: Collection[bytes]) -> int:
    """Return how many groups of the batch this run played and did not filter."""
    return sum(group.source is None and group.group_uid not in filtered for group in batch.groups)


def n_wanted(loader: BatchLoader, batch: Batch, filtered: Collection[bytes]) -> int:
    """Return how many more groups the batch may ask for: 0 if it is full, or at its bound.

    Example: 8 groups, 5 of them filtered, with refill_groups=4. It asks for 4 of the 5.
    """
    n_live = sum(group.source is None for group in batch.groups)
    room = loader.n_live + loader.refill_groups - n_live
    return max(0, min(loader.n_live - n_teaching(batch, filtered), room))


def _read(loader: BatchLoader, batch: Batch, *, times: LoadTimes) -> pa.Table:
    with times.timed("read_s"):
        rows = read_segments(loader.layout, batch.segments, is_own=loader.is_own)
        return in_batch_order(rows, batch)


def _replay(
    loader: BatchLoader, batch: Batch, *, beside: pa.Table, learner_step: int, times: LoadTimes
) -> pa.Table:
    """Return the rows of wins that the batch replays. `beside` has all rows that it plays."""
    if not batch.replayed:
        nothing = SEGMENT_SCHEMA.empty_table()
        return nothing.append_column("advantage", pa.array([], pa.float64()))
    old = replace(batch, groups=batch.replayed, segments=batch.replayed_segments)
    weight = replay_weight(learner_step, warmup_steps=loader.replay.warmup_steps)
    rows = _read(loader, old, times=times)
    with times.timed("advantages_s"):
        return replayed_wins(rows, beside, loader.advantages, weight=weight)


def _with_values(loader: BatchLoader, rows: pa.Table) -> pa.Table:
    """Append the column `value`, by the critic.

    For an estimator of TOKEN_LEVEL also append `token_value`, a list with a value for each response
    token.
    """
    assert loader.values is not None, "a critic's estimator has a critic"
    values_R, values_N = critic_values(rows, loader.values, learner=loader.learner)
    rows = rows.append_column("value", pa.array(values_R))
    return with_token_values(rows, values_N) if loader.advantages.estimator in TOKEN_LEVEL else rows


def _by_trajectory(rows: pa.Table) -> dict[bytes, list[float]]:
    """Return the values of each trajectory's steps. The rows are in the order of the batch."""
    values: dict[bytes, list[float]] = {}
    for traj_uid, value in zip(
        rows["traj_uid"].to_pylist(), rows["value"].to_pylist(), strict=True
    ):
        values.setdefault(traj_uid, []).append(value)
    return values


def _with_advantages(
    loader: BatchLoader, rows: pa.Table, *, times: LoadTimes
) -> tuple[pa.Table, dict[bytes, str]]:
    """Return the rows with their advantages, and the groups that the filter leaves out, and why."""
    columns = list(ADVANTAGE_COLUMNS)
    if loader.values is not None:
        columns.append("value_target")
        with times.timed("values_s"):
            rows = _with_values(loader, rows)
    cpu_s = time.thread_time()
    with times.timed("advantages_s"):
        advantages = compute_advantages(rows, loader.advantages)
    times.advantages_cpu_s += time.thread_time() - cpu_s
    with times.timed("filter_s"):
        filtered = dict(filtered_groups(advantages, group_filter=loader.group_filter))
    for name in columns:
        rows = rows.append_column(name, advantages[name])
    return rows, filtered


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


def cut_updates(rows: pa.Table, *, learner: LearnerConfig, version: int, seed: int) -> list[Update]:
    """Cut the rows into optimizer updates, shuffled by `seed`, to train at policy `version`.

    Parts without a response token are left out. Five rows of versions 6, 6, 7, 7, 7, cut into two
    updates at version 7: one of three rows and one of two. Rows of version 6 have staleness 1.
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
            ranks=learner.ranks,
        )
        if batches:
            updates.append(Update(rows=part, micro_batches=batches))
    return updates


def with_staleness(rows: pa.Table, *, version: int) -> pa.Table:
    """Append the column `staleness` at policy `version`; OFFLINE_STALENESS for offline rows."""
    is_offline = pc.equal(rows["split"], IMPORTED)
    staleness = pc.subtract(version, rows["version_min"])
    return rows.append_column("staleness", pc.if_else(is_offline, OFFLINE_STALENESS, staleness))


def check_train_on(condition: str) -> None:
    """Raise ConfigError unless the condition is valid SQL over the columns of a step."""
    advantages = [pa.field(name, kind) for name, kind in ADVANTAGE_COLUMNS.items()]
    if condition:
        rows_to_train_on(pa.schema([*SEGMENT_SCHEMA, *advantages]).empty_table(), condition)


def rows_to_train_on(rows: pa.Table, condition: str) -> pa.ChunkedArray:
    """Return a boolean per row: it is live, or it is offline and meets the condition.

    Raises ConfigError if the condition is not SQL, or fails on a value, as `task_id::INT > 3` may.
    """
    live = pc.not_equal(rows["split"], IMPORTED)
    numbers = pa.array(np.arange(len(rows)))
    settings = {"enable_external_access": False, "lock_configuration": True}
    try:
        # Parsed once without our parentheses, so that the condition cannot close them.
        duckdb.extract_statements(f"SELECT 1 WHERE {condition}")
        with duckdb.connect(config=settings) as connection:
            connection.register("steps", rows.append_column("row_of_batch", numbers))
            query = f"SELECT row_of_batch FROM steps WHERE (\n{condition}\n)"
            chosen = connection.sql(query).to_arrow_table()["row_of_batch"]
    except duckdb.Error as error:
        raise ConfigError(
            f"offline.train_on={condition!r} cannot be asked of these steps ({one_line(error)}); "
            "write it as after WHERE, over a step's columns and its advantages. A run that has "
            "begun goes on with another one"
        ) from error
    return pc.or_(live, pc.is_in(numbers, value_set=chosen.combine_chunks()))


def _select(rows: pa.Table, condition: str) -> tuple[pa.Table, dict[bytes, str]]:
    """Return the rows to train on, and the groups left without any, with the reason.

    Advantages are already computed, so left-out rows still count in the baselines.
    """
    kept = rows.filter(rows_to_train_on(rows, condition))
    before, after = (set(table["group_uid"].unique().to_pylist()) for table in (rows, kept))
    reason = f"no step of it is one of offline.train_on={condition}"
    return kept, dict.fromkeys(before - after, reason)


def _n_response_tokens(rows: pa.Table) -> int:
    return pc.sum(pc.list_value_length(rows["response_ids"]), min_count=0).as_py()


def _first_steps(rows: pa.Table) -> pa.Table:
    """Return one row per trajectory."""
    return rows.filter(pc.equal(rows["step_index"], 0))


def _episodes(rows: pa.Table) -> Episodes | None:
    first_steps = _first_steps(rows)
    if first_steps.num_rows == 0:
        return None
    return Episodes(
        success=pc.mean(first_steps["won"]).as_py(),
        mean_return=pc.sum(rows["reward"]).as_py() / first_steps.num_rows,
        mean_steps=rows.num_rows / first_steps.num_rows,
    )
