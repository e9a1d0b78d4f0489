"""Write and read segments: immutable Parquet files of whole trajectories, named by their digest.

A file becomes visible in one rename and never changes. It counts once the catalog has committed it.
Until then it is an orphan, which nobody reads.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from store.errors import DigestError, StoreError, UnavailableError
from store.hashing import file_digest
from store.layout import RunLayout
from store.records import SEGMENT_SCHEMA, UID_TYPE, WIDE_SCHEMA, Trajectory, to_table
from store.run_names import PRIMARY
from store.segment_encoding import decode, encode_for_readers
from store.storage import LocalStorage

# Arrow reads no lists of texts or pixels beyond 2 GiB at once. Half of it, because one trajectory
# may take more: an episode is truncated only after the step with which it is full.
MAX_SEGMENT_BYTES = 1 << 30
# Files read at once. Decoding takes the time, and the learner's process has other work.
MAX_READERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryMeta:
    """The columns of a trajectory that the catalog keeps."""

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

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryMeta:
        return cls(**{name: getattr(trajectory, name) for name in cls.__slots__})

    @classmethod
    def of_row(cls, row: Mapping[str, Any] | sqlite3.Row) -> TrajectoryMeta:
        """Read a row of the catalog's table `trajectory`, or one with the same columns.

        SQLite has no truth values: `won` is 0 or 1 there.
        """
        columns = {name: row[name] for name in cls.__slots__}
        return cls(**{**columns, "won": bool(row["won"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentMeta:
    """The description of a segment: workers send it to the catalog, readers need it."""

    segment_id: str
    path: str  # relative to the run's root
    digest: str  # blake2b-128 of the file's bytes, hex
    n_steps: int  # rows in the file
    n_bytes: int
    worker: str
    # the trajectories that count; the file may also hold duplicates
    trajectories: tuple[TrajectoryMeta, ...]

    @classmethod
    def of_file(
        cls,
        *,
        path: str,
        n_bytes: int,
        n_steps: int,
        worker: str,
        trajectories: Sequence[TrajectoryMeta],
    ) -> SegmentMeta:
        """Describe a whole file, whose name is its digest. All its trajectories count."""
        digest = PurePosixPath(path).stem
        return cls(
            segment_id=digest,
            path=path,
            digest=digest,
            n_steps=n_steps,
            n_bytes=n_bytes,
            worker=worker,
            trajectories=tuple(trajectories),
        )

    @classmethod
    def of_rows(
        cls, segment: Mapping[str, Any], trajectories: Sequence[Mapping[str, Any] | sqlite3.Row]
    ) -> SegmentMeta:
        """Read rows of the catalog's tables `segment` and `trajectory`."""
        metas = tuple(TrajectoryMeta.of_row(row) for row in trajectories)
        return cls(**{name: segment[name] for name in SEGMENT_COLUMNS}, trajectories=metas)


# Columns of the catalog's table `segment` that have the same names in SegmentMeta.
SEGMENT_COLUMNS = tuple(name for name in SegmentMeta.__slots__ if name != "trajectories")


def write_segment(
    layout: RunLayout, trajectories: Sequence[Trajectory], *, worker: str, epoch: int
) -> SegmentMeta:
    """Write trajectories to a new segment. It is durable, and counts after `Catalog.commit`."""
    if not trajectories:
        raise StoreError("a segment needs at least one trajectory")
    if len({trajectory.traj_uid for trajectory in trajectories}) < len(trajectories):
        raise StoreError(
            "two trajectories of one segment have the same traj_uid; give each member its own"
        )
    metas = tuple(TrajectoryMeta.of(trajectory) for trajectory in trajectories)
    return write_rows(
        layout, to_table(trajectories), trajectories=metas, worker=worker, epoch=epoch
    )


def in_segments(trajectories: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    """Divide trajectories into parts of at most MAX_SEGMENT_BYTES, a segment each.

    One trajectory is never divided. It is truncated at MAX_EPISODE_BYTES.
    """
    part: list[Trajectory] = []
    n_bytes = 0
    for trajectory in trajectories:
        more = trajectory.max_bytes
        if part and n_bytes + more > MAX_SEGMENT_BYTES:
            yield part
            part, n_bytes = [], 0
        part.append(trajectory)
        n_bytes += more
    if part:
        yield part


def check_written(layout: RunLayout, path: str, *, worker: str) -> None:
    """Raise UnavailableError if this machine does not see the file of a segment.

    The volume of a `file://` storage may not be mounted where `worker` runs, or not here any more.
    Then the file lies beneath the mount point. All machines see the same object storage.
    """
    storage = layout.storage
    if layout.info.storage_uri is None or not isinstance(storage, LocalStorage):
        return
    for name, where in ((PRIMARY, "here"), (path, f"where {worker} runs")):
        if not storage.exists(name):
            raise UnavailableError(
                f"{storage.locate(name)} is not there; mount the volume {where}, then give the "
                "command again. Trajectories that were written without it are not committed"
            )


def write_rows(
    layout: RunLayout,
    table: pa.Table,
    *,
    trajectories: tuple[TrajectoryMeta, ...],
    worker: str,
    epoch: int,
) -> SegmentMeta:
    """Write a table of SEGMENT_SCHEMA that holds exactly `trajectories` to a new segment."""
    metadata = {"run_id": layout.info.run_id, "worker": worker, "epoch": str(epoch)}
    data = encode_for_readers(table, metadata=metadata, n_trajectories=len(trajectories))
    digest = file_digest(data)
    # Named by its content, so that a second attempt at a group cannot replace a committed file.
    path = layout.relative(layout.segment(worker=worker, segment_id=digest))
    layout.storage.write(path, data)
    check_written(layout, path, worker=worker)
    return SegmentMeta.of_file(
        path=path,
        n_bytes=len(data),
        n_steps=table.num_rows,
        worker=worker,
        trajectories=trajectories,
    )


def read_segment(
    layout: RunLayout,
    meta: SegmentMeta,
    *,
    columns: Sequence[str] = SEGMENT_SCHEMA.names,
    is_own: bool = False,
) -> pa.Table:
    """Return the rows of `meta.trajectories`. `traj_uid` must be among the columns.

    The digest of the file is compared first, because Parquet readers return wrong data for most
    single-bit errors. Raises DigestError. `is_own`: see `decode`.
    """
    path = layout.storage.locate(meta.path)
    data = layout.storage.read(meta.path)
    digest = file_digest(data)
    if digest != meta.digest:
        raise DigestError(
            f"segment {path} has digest {digest}, committed was {meta.digest}: its bytes changed "
            f"on disk; restore it from a backup, or set it aside: gigpo fsck --repair {layout.root}"
        )
    table = decode(data, path=path, columns=columns, is_own=is_own)
    if sum(trajectory.n_steps for trajectory in meta.trajectories) != meta.n_steps:
        uids = pa.array([trajectory.traj_uid for trajectory in meta.trajectories], UID_TYPE)
        table = table.filter(pc.is_in(table["traj_uid"], value_set=uids))
    return table


def read_segments(
    layout: RunLayout,
    metas: Sequence[SegmentMeta],
    *,
    columns: Sequence[str] = SEGMENT_SCHEMA.names,
    is_own: bool = False,
) -> pa.Table:
    """Return the rows of several segments in their order, each read as by `read_segment`.

    They have columns of WIDE_SCHEMA: all together may have any number of texts and pixels.
    """
    if not metas:
        raise StoreError("no segments to read; ask for at least one")
    with ThreadPoolExecutor(min(len(metas), os.cpu_count() or 1, MAX_READERS)) as readers:
        tables = list(
            readers.map(
                lambda meta: read_segment(layout, meta, columns=columns, is_own=is_own), metas
            )
        )
    wide = pa.schema([WIDE_SCHEMA.field(name) for name in columns])
    return pa.concat_tables(tables).cast(wide).combine_chunks()
