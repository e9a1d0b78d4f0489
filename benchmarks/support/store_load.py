"""Make the rows of benchmarks/store.py, in the processes that write them.

Row model: about 40 steps an episode, 5.2 KB a step as Arrow; token ids are log-uniform behind a
shared template, rooms are met again. Writers cycle a pool of 128 episodes with fresh uids. So
compression is a model, not that of real traces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pyarrow as pa

from store import (
    Group,
    RunLayout,
    Step,
    Trajectory,
    TrajectoryMeta,
    state_hash,
    to_table,
    uid,
    write_segment,
)
from store.segment_encoding import encode
from store.segments import write_rows

GROUP_SIZE, BATCH_GROUPS = 8, 16
GROUPS_PER_FILE = 64  # of a compacted file: 512 episodes, about 20,000 steps
# Steps are like ALFWorld's: lengths in tokens, between two bounds, and texts that recur.
POOL_EPISODES, EPISODE_STEPS = 128, (29, 50)
TEMPLATE_TOKENS = 500
PROMPT_TOKENS = (260, 460)
RESPONSE_TOKENS = (60, 140)
VOCABULARY = 50_000
STATES, EXITS = 60, 10

Pool = list[tuple[Step, ...]]


def make_pool(seed: int) -> Pool:
    rng = np.random.default_rng(seed)
    template = tuple(log_uniform(np.random.default_rng(0), TEMPLATE_TOKENS))
    rooms = [room_text(number) for number in range(STATES)]
    return [make_episode(rng, template=template, rooms=rooms) for _ in range(POOL_EPISODES)]


def make_episode(
    rng: np.random.Generator, *, template: tuple[int, ...], rooms: list[str]
) -> tuple[Step, ...]:
    n_steps = int(rng.integers(*EPISODE_STEPS, endpoint=True))
    return tuple(
        make_step(rng, index, is_last=index == n_steps - 1, template=template, rooms=rooms)
        for index in range(n_steps)
    )


def make_step(
    rng: np.random.Generator,
    index: int,
    *,
    is_last: bool,
    template: tuple[int, ...],
    rooms: list[str],
) -> Step:
    n_prompt, n_response = int(rng.integers(*PROMPT_TOKENS)), int(rng.integers(*RESPONSE_TOKENS))
    room = rooms[int(rng.integers(STATES))]
    return Step(
        step_index=index,
        prompt_ids=template + tuple(log_uniform(rng, n_prompt)),
        prompt_dropped_turns=0,
        prompt_dropped_tokens=0,
        response_ids=tuple(log_uniform(rng, n_response)),
        response_logprobs=tuple((-rng.exponential(0.5, n_response)).astype(np.float32).tolist()),
        version_min=0,
        version_max=0,
        finish_reason="stop",
        obs_text=f"{room} You have walked for {index} minutes.",
        anchor_text=room,
        state_hash=state_hash(room),
        admissible_actions=None,
        action_text=f"take the key {int(rng.integers(EXITS))}",
        reward=10.0 * is_last,
        is_action_valid=True,
        terminated=is_last,
        truncated=False,
        t_start_us=1_700_000_000_000_000 + index * 1_000_000 + int(rng.integers(1_000_000)),
        gen_us=int(rng.integers(100_000, 900_000)),
        env_us=int(rng.integers(10, 1_000)),
    )


def log_uniform(rng: np.random.Generator, n: int) -> list[int]:
    tokens: list[int] = np.exp(rng.uniform(0, math.log(VOCABULARY), n)).astype(int).tolist()
    return tokens


def room_text(number: int) -> str:
    rng = np.random.default_rng(number)
    things = [
        f"There is a {kind} thing behind door {door}."
        for door, kind in enumerate(rng.choice(["red", "old"], EXITS))
    ]
    return f"You are in room {number}. {' '.join(things)}"


def make_trajectories(
    group_uid: bytes, traj_uids: Sequence[bytes], task_id: str, pool: Pool
) -> list[Trajectory]:
    first = int.from_bytes(group_uid[:4], "little")
    return [
        Trajectory(
            traj_uid=traj_uid,
            group_uid=group_uid,
            env_name="rooms",
            task_id=task_id,
            split="train",
            seed=0,
            member=member,
            won=True,
            task_score=None,
            steps=pool[(first + member) % len(pool)],
        )
        for member, traj_uid in enumerate(traj_uids)
    ]


# The writers. Each does one job at a time, asks the owner as it goes, and ends with the number of
# steps it handled.


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    n_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NewGroups:
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    name: str
    pipe: Connection
    layout: RunLayout
    pool: Pool

    def ask(self, request: object) -> Any:
        self.pipe.send(request)
        return self.pipe.recv()


def work(pipe: Connection, name: str) -> None:
    """Do the jobs that come as (function, run, amount), until None comes: a writer process."""
    pool = make_pool(seed=int(name[1:]))
    pipe.send(Done(n_steps=0))
    while (job := pipe.recv()) is not None:
        function, layout, amount = job
        writer = Writer(name=name, pipe=pipe, layout=layout, pool=pool)
        pipe.send(Done(n_steps=function(writer, amount)))


def invented(n_groups: int, pool: Pool) -> list[list[Trajectory]]:
    groups = []
    for number in range(n_groups):
        group_uid = uid("invented", number)
        traj_uids = [uid(group_uid, member) for member in range(GROUP_SIZE)]
        groups.append(make_trajectories(group_uid, traj_uids, "t", pool))
    return groups


def encode_only(writer: Writer, n_groups: int) -> int:
    """Encode steps as Arrow rows and Parquet, which a worker must do in any case."""
    n_steps = 0
    for trajectories in invented(n_groups, writer.pool):
        table = to_table(trajectories)
        encode(table, metadata={})
        n_steps += table.num_rows
    return n_steps


def to_store(writer: Writer, n_groups: int) -> int:
    """Lease, play nothing, write and commit: a worker without its model."""
    n_steps = 0
    for _ in range(n_groups):
        group = writer.ask(Lease(worker=writer.name))
        trajectories = make_trajectories(
            group.group_uid, group.traj_uids, group.task_id, writer.pool
        )
        segment = write_segment(writer.layout, trajectories, worker=writer.name, epoch=group.epoch)
        writer.ask(segment)
        n_steps += segment.n_steps
    return n_steps


def episodes_to_duckdb(writer: Writer, n_groups: int) -> int:
    """Send each episode, when it has ended, to the owner of one database file as Arrow."""
    episodes = [[episode] for group in invented(n_groups, writer.pool) for episode in group]
    return sum(to_duckdb(writer, to_table(episode)) for episode in episodes)


def groups_to_duckdb(writer: Writer, n_groups: int) -> int:
    """Send a whole group at a time, as the store commits."""
    return sum(to_duckdb(writer, to_table(group)) for group in invented(n_groups, writer.pool))


def to_duckdb(writer: Writer, table: pa.Table) -> int:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    writer.ask(sink.getvalue().to_pybytes())
    return int(table.num_rows)


def in_bulk(writer: Writer, n_files: int) -> int:
    """Commit files as compaction leaves them. Rows come from the pool as Arrow, not as Steps."""
    episodes = make_trajectories(
        bytes(16), [uid("pool", number) for number in range(POOL_EPISODES)], "t", writer.pool
    )
    rows, ends = to_table(episodes), np.cumsum([episode.n_steps for episode in episodes])
    n_steps = 0
    for _ in range(n_files):
        groups: list[Group] = writer.ask(NewGroups(number=GROUPS_PER_FILE))
        chosen = np.random.default_rng(groups[0].ordinal).integers(
            0, POOL_EPISODES, GROUPS_PER_FILE * GROUP_SIZE
        )
        lengths = np.diff(ends, prepend=0)[chosen]
        spans = zip(ends[chosen] - lengths, ends[chosen], strict=True)
        table = rows.take(np.concatenate([np.arange(*span) for span in spans]))
        members = [(group, member) for group in groups for member in range(GROUP_SIZE)]
        metas = tuple(
            meta_of(episodes[e], group=group, member=member)
            for e, (group, member) in zip(chosen, members, strict=True)
        )
        columns = {
            "traj_uid": repeated([meta.traj_uid for meta in metas], lengths),
            "group_uid": repeated([meta.group_uid for meta in metas], lengths),
            "task_id": pa.array(np.repeat([group.task_id for group, _ in members], lengths)),
            "member": pa.array(np.repeat([member for _, member in members], lengths), pa.int32()),
        }
        for name, column in columns.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        segment = write_rows(
            writer.layout, table, trajectories=metas, worker=writer.name, epoch=groups[0].epoch
        )
        writer.ask(segment)
        n_steps += segment.n_steps
    return n_steps


def repeated(uids: list[bytes], lengths: np.ndarray) -> pa.Array:
    values = np.repeat(np.frombuffer(b"".join(uids), dtype="V16"), lengths)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(values), [None, pa.py_buffer(values.tobytes())]
    )


def meta_of(episode: Trajectory, *, group: Group, member: int) -> TrajectoryMeta:
    return TrajectoryMeta(
        traj_uid=group.traj_uids[member],
        group_uid=group.group_uid,
        member=member,
        n_steps=episode.n_steps,
        episode_return=episode.episode_return,
        won=episode.won,
        task_score=None,
        invalid_steps=0,
        version_min=0,
        version_max=0,
    )
