"""Segments: immutable Parquet files of whole trajectories, named by the digest of their bytes.

A file becomes visible in one rename and is then never changed. It counts only once the catalog has committed it;
before that it is an orphan, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.durable import READ_ONLY, make_directory, write_atomically
from store.errors import DigestError, StoreError
from store.hashing import file_digest
from store.layout import FORMAT_VERSION, RunLayout
from store.records import Trajectory, to_table

ZSTD_LEVEL = 1  # measured: level 3 is no smaller here and 14% slower
# A dictionary pays on repeated text; on token ids it halves the writing speed and adds a third to the size.
DICTIONARY_COLUMNS = [
    "traj_uid",
    "group_uid",
    "env_name",
    "task_id",
    "split",
    "finish_reason",
    "obs_text",
    "anchor_text",
    "state_hash",
    "action_text",
]
SPLIT_COLUMNS = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("prompt_ids", "response_ids", "response_logprobs")}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryMeta:
    """What the catalog keeps of a trajectory."""

    traj_uid: bytes
    group_uid: bytes
    member: int
    n_steps: int
    episode_return: float
    won: bool
    task_score: float | None
    invalid_steps: int
    version_min: int
    version_max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentMeta:
    """What a worker tells the catalog about a file it wrote (about 1 KB), and what a reader needs to read it."""

    segment_id: str
    path: str  # relative to the run's root
    digest: str  # blake2b-128 of the file's bytes, hex
    n_steps: int  # rows in the file
    n_bytes: int
    worker: str
    trajectories: tuple[TrajectoryMeta, ...]  # those that count; a file may hold duplicates, which do not


def write_segment(layout: RunLayout, trajectories: Sequence[Trajectory], *, worker: str, epoch: int) -> SegmentMeta:
    """Encode, write aside, sync, rename. The result is durable but does not count until `Catalog.commit`."""
    if not trajectories:
        raise StoreError("a segment needs at least one trajectory")
    if len({trajectory.traj_uid for trajectory in trajectories}) < len(trajectories):
        raise StoreError("two trajectories of one segment have the same traj_uid; give each member its own")
    table = to_table(trajectories)
    data = encode(table, metadata={"run_id": layout.info.run_id, "worker": worker, "epoch": str(epoch)})
    digest = file_digest(data)
    # Named by content: a second attempt at the same group cannot replace a file that was already committed.
    path = layout.segment(worker=worker, segment_id=digest)
    make_directory(path.parent)
    write_atomically(path, memoryview(data), mode=READ_ONLY)
    return SegmentMeta(
        segment_id=digest,
        path=layout.relative(path),
        digest=digest,
        n_steps=table.num_rows,
        n_bytes=len(data),
        worker=worker,
        trajectories=tuple(_meta(trajectory) for trajectory in trajectories),
    )


def read_segment(layout: RunLayout, meta: SegmentMeta, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of `meta.trajectories` (all columns if None), after the file's digest was found to be the committed one.

    Parquet readers return wrong data for most single-bit errors without noticing, hence the digest.
    """
    path = layout.root / meta.path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"segment {path} cannot be read: {error.strerror}; restore it from a backup") from error
    digest = file_digest(data)
    if digest != meta.digest:
        raise DigestError(
            f"segment {path} has digest {digest}, committed was {meta.digest}: its bytes changed on disk; "
            "restore it from a backup"
        )
    counted_steps = sum(trajectory.n_steps for trajectory in meta.trajectories)
    if counted_steps == meta.n_steps:
        return pq.read_table(pa.BufferReader(data), columns=list(columns) if columns is not None else None)
    wanted = None if columns is None else list(dict.fromkeys([*columns, "traj_uid"]))
    table = pq.read_table(pa.BufferReader(data), columns=wanted)
    uids = pa.array([trajectory.traj_uid for trajectory in meta.trajectories], table.schema.field("traj_uid").type)
    table = table.filter(pc.is_in(table["traj_uid"], value_set=uids))
    return table if columns is None else table.select(list(columns))


def encode(table: pa.Table, *, metadata: dict[str, str]) -> pa.Buffer:
    """The Parquet bytes of a table of SEGMENT_SCHEMA."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({"format_version": str(FORMAT_VERSION), **metadata}),
        sink,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=DICTIONARY_COLUMNS,
        column_encoding=SPLIT_COLUMNS,
        write_page_checksum=True,
    )
    return sink.getvalue()


def _meta(trajectory: Trajectory) -> TrajectoryMeta:
    return TrajectoryMeta(
        traj_uid=trajectory.traj_uid,
        group_uid=trajectory.group_uid,
        member=trajectory.member,
        n_steps=trajectory.n_steps,
        episode_return=trajectory.episode_return,
        won=trajectory.won,
        task_score=trajectory.task_score,
        invalid_steps=trajectory.invalid_steps,
        version_min=trajectory.version_min,
        version_max=trajectory.version_max,
    )
