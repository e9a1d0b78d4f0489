"""Segments: immutable Parquet files of whole trajectories, named by the digest of their bytes.

A file becomes visible in one rename and is then never changed. It counts only once the catalog has
committed it; before that it is an orphan, which nobody reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.errors import DigestError, FormatError, NewerFormatError, StoreError
from store.hashing import file_digest
from store.layout import FORMAT_VERSION, RunLayout
from store.records import SEGMENT_SCHEMA, Trajectory, to_table
from store.untrusted.bounded_parquet import open_parquet, read_table

ZSTD_LEVEL = 1  # measured: level 3 is no smaller here and 14% slower
# Zstandard's preparations cost every file 0.9 ms of a core to write and as much to read. One with
# so few rows (a group of short episodes; a merge makes them one of many) is no larger with LZ4.
SMALL_BYTES = 32 * 1024
# One trajectory out of a merged file is found 2.5 times as fast as in one row group of 20,000
# steps; smaller ones slow scans.
ROW_GROUP_STEPS = 8192
# of rows: with images a few hundred are as much as thousands without
ROW_GROUP_BYTES = 256 * 1024**2
# files read at once; decoding is what takes the time, and the learner's GPU process has other work
MAX_READERS = 8
# A dictionary pays on repeated text; on token ids it halves the writing speed and adds a third to
# the size.
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
    "admissible_actions.list.element",
]
# A quarter smaller. Token ids stay plain: they would gain 8% at most, and DuckDB 1.5 reads split
# bytes of floats only.
SPLIT_COLUMNS = {"response_logprobs.list.element": "BYTE_STREAM_SPLIT"}


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
    """What a worker tells the catalog about a file it wrote (about 1 KB), and what a reader needs
    to read it.
    """

    segment_id: str
    path: str  # relative to the run's root
    digest: str  # blake2b-128 of the file's bytes, hex
    n_steps: int  # rows in the file
    n_bytes: int
    worker: str
    # those that count; a file may hold duplicates, which do not
    trajectories: tuple[TrajectoryMeta, ...]


def write_segment(
    layout: RunLayout, trajectories: Sequence[Trajectory], *, worker: str, epoch: int
) -> SegmentMeta:
    """Encode, write aside, sync, rename. The result is durable but does not count until
    `Catalog.commit`.
    """
    if not trajectories:
        raise StoreError("a segment needs at least one trajectory")
    if len({trajectory.traj_uid for trajectory in trajectories}) < len(trajectories):
        raise StoreError(
            "two trajectories of one segment have the same traj_uid; give each member its own"
        )
    metas = tuple(_meta(trajectory) for trajectory in trajectories)
    return write_rows(
        layout, to_table(trajectories), trajectories=metas, worker=worker, epoch=epoch
    )


def write_rows(
    layout: RunLayout,
    table: pa.Table,
    *,
    trajectories: tuple[TrajectoryMeta, ...],
    worker: str,
    epoch: int,
) -> SegmentMeta:
    """The same for rows of SEGMENT_SCHEMA that are already a table and hold exactly
    `trajectories`.
    """
    data = encode(
        table, metadata={"run_id": layout.info.run_id, "worker": worker, "epoch": str(epoch)}
    )
    digest = file_digest(data)
    # Named by content: a second attempt at the same group cannot replace a file that was already
    # committed.
    path = layout.relative(layout.segment(worker=worker, segment_id=digest))
    layout.storage.write(path, data)
    return SegmentMeta(
        segment_id=digest,
        path=path,
        digest=digest,
        n_steps=table.num_rows,
        n_bytes=len(data),
        worker=worker,
        trajectories=trajectories,
    )


def read_segment(
    layout: RunLayout, meta: SegmentMeta, *, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of `meta.trajectories` (all columns if None), after the file's digest was found to
    be the committed one.

    Parquet readers return wrong data for most single-bit errors without noticing, hence the digest.
    """
    path = layout.storage.locate(meta.path)
    data = layout.storage.read(meta.path)
    digest = file_digest(data)
    if digest != meta.digest:
        raise DigestError(
            f"segment {path} has digest {digest}, committed was {meta.digest}: its bytes changed "
            "on disk; "
            "restore it from a backup, or set it aside: gigpo fsck --repair "
            f"{layout.root}"
        )
    wanted = None if columns is None else list(dict.fromkeys([*columns, "traj_uid"]))
    table = decode(data, path=path, columns=wanted)
    if sum(trajectory.n_steps for trajectory in meta.trajectories) < meta.n_steps:
        uids = pa.array(
            [trajectory.traj_uid for trajectory in meta.trajectories],
            table.schema.field("traj_uid").type,
        )
        table = table.filter(pc.is_in(table["traj_uid"], value_set=uids))
    return table if columns is None else table.select(list(columns))


def read_segments(layout: RunLayout, metas: Sequence[SegmentMeta]) -> pa.Table:
    """The rows of all `metas` in their order, each read as `read_segment` does; several files at a
    time.
    """
    if not metas:
        raise StoreError("no segments to read; ask for at least one")
    with ThreadPoolExecutor(
        max_workers=min(len(metas), os.cpu_count() or 1, MAX_READERS)
    ) as readers:
        tables = list(readers.map(lambda meta: read_segment(layout, meta), metas))
    return pa.concat_tables(tables).combine_chunks()


def decode(data: pa.Buffer, *, path: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a segment's bytes with today's columns: one that its format did not have yet is
    null, one of a newer code is left out. `path` is for messages. Raises FormatError for a newer
    format, for what is no segment, and for a file that stands for more rows or bytes than any run
    wrote.
    """
    wanted = (
        SEGMENT_SCHEMA
        if columns is None
        else pa.schema([SEGMENT_SCHEMA.field(name) for name in columns])
    )
    try:
        source = pa.BufferReader(data)
        file = open_parquet(source, n_bytes=data.size, name=path, verify=False)
        found = file.schema_arrow  # made anew every time it is asked for
        version = int((found.metadata or {})[b"format_version"])
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{path} has format version {version}, this code reads up to {FORMAT_VERSION}; "
                "update the code"
            )
        present = set(found.names)
        names = [name for name in wanted.names if name in present]
        chosen = None if names == found.names else names
        table = read_table(file, source, n_bytes=data.size, name=path, columns=chosen)
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise FormatError(
            f"{path} is not a segment ({' '.join(str(error).split())}); restore it from a backup"
        ) from error
    if table.schema.equals(wanted):
        return table.replace_schema_metadata(None)
    missing = {
        field.name: pa.nulls(table.num_rows, field.type)
        for field in wanted
        if field.name not in present
    }
    arrays = [
        missing[field.name] if field.name in missing else table[field.name].cast(field.type)
        for field in wanted
    ]
    return pa.Table.from_arrays(arrays, schema=wanted)


def encode(table: pa.Table, *, metadata: dict[str, str]) -> pa.Buffer:
    """The Parquet bytes of a table of SEGMENT_SCHEMA."""
    sink = pa.BufferOutputStream()
    is_small = table.nbytes < SMALL_BYTES
    pq.write_table(
        table.replace_schema_metadata({"format_version": str(FORMAT_VERSION), **metadata}),
        sink,
        row_group_size=max(
            1, min(ROW_GROUP_STEPS, ROW_GROUP_BYTES * table.num_rows // max(1, table.nbytes))
        ),
        compression="lz4" if is_small else "zstd",
        compression_level=None if is_small else ZSTD_LEVEL,
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
