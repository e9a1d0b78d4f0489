"""Read one segment file: its trajectories' figures, and whether its rows are well formed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from printable import one_line
from store.errors import FormatError
from store.hashing import state_hash
from store.records import uid_text
from store.segments import TrajectoryMeta, decode
from store.untrusted.bounded_parquet import open_parquet, read_table

# Columns whose values are the same in all rows of a trajectory, and all columns that are looked at.
_FIRST = ("group_uid", "task_id", "split", "member", "won", "task_score", "episode_steps")
COLUMNS = [
    "traj_uid",
    *_FIRST,
    "step_index",
    "version_min",
    "version_max",
    "reward",
    "is_action_valid",
    "anchor_text",
    "state_hash",
    "final_anchor_text",
    "final_state_hash",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The content of a segment file."""

    run_id: str
    worker: str
    epoch: int
    table: pa.Table  # COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One trajectory of the rows."""

    meta: TrajectoryMeta
    task_id: str
    split: str


def open_rows(data: pa.Buffer, *, path: Path) -> Rows:
    """Read every page of the file and check it. Raises FormatError if it is no segment."""
    try:
        source = pa.BufferReader(data)
        file = open_parquet(source, n_bytes=data.size, name=path, verify=True)
        read_table(file, source, n_bytes=data.size, name=path, columns=None)
        metadata = file.schema_arrow.metadata or {}
        names = (b"run_id", b"worker", b"epoch")
        run_id, worker, epoch = (metadata[name].decode() for name in names)
        number = int(epoch)
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise FormatError(
            f"{path} is not a segment ({one_line(error)}); restore it from a backup"
        ) from error
    table = decode(data, path=path, columns=COLUMNS)
    return Rows(run_id=run_id, worker=worker, epoch=number, table=table)


def trajectories(table: pa.Table) -> tuple[Played, ...]:
    """Return each trajectory's figures as its worker computed them: rewards in the rows' order.

    `table` has COLUMNS, and may have others.
    """
    figures = (
        table.select(COLUMNS)
        .group_by("traj_uid", use_threads=False)
        .aggregate(
            [
                *[(name, "first") for name in _FIRST],
                ("step_index", "count"),
                ("reward", "sum"),
                ("is_action_valid", "sum"),
                ("is_action_valid", "count"),
                ("version_min", "min"),
                ("version_max", "max"),
            ]
        )
    )
    return tuple(_played(row) for row in figures.to_pylist())


def _played(row: Mapping[str, Any]) -> Played:
    """Return one trajectory of the aggregates that `trajectories` asks Arrow for."""
    figures = {
        "traj_uid": row["traj_uid"],
        "n_steps": row["step_index_count"],
        "episode_return": row["reward_sum"] or 0.0,
        "invalid_steps": row["is_action_valid_count"] - (row["is_action_valid_sum"] or 0),
        "version_min": row["version_min_min"],
        "version_max": row["version_max_max"],
        **{name: row[f"{name}_first"] for name in _FIRST},
    }
    return Played(
        meta=TrajectoryMeta.of_row(figures), task_id=figures["task_id"], split=figures["split"]
    )


def malformed(table: pa.Table) -> list[tuple[str, str]]:
    """Return (code, detail) of trajectories that are not whole and of wrong state hashes.

    `table` has COLUMNS, and may have others.
    """
    wrong = []
    steps = (
        table.select(COLUMNS)
        .group_by("traj_uid")
        .aggregate(
            [
                ("step_index", "min"),
                ("step_index", "max"),
                ("step_index", "count_distinct"),
                ("step_index", "count"),
                ("episode_steps", "min"),
                ("episode_steps", "max"),
            ]
        )
    )
    for row in steps.to_pylist():
        n, name = row["step_index_count"], uid_text(row["traj_uid"])
        indices = row["step_index_min"], row["step_index_max"], row["step_index_count_distinct"]
        if indices != (0, n - 1, n):
            detail = f"the {n} rows of trajectory {name} are not steps 0..{n - 1}"
            wrong.append(("step_index", detail))
        elif (row["episode_steps_min"], row["episode_steps_max"]) != (n, n):
            detail = f"trajectory {name} has {n} of its {row['episode_steps_max']} rows"
            wrong.append(("episode_steps", detail))
    for names in (["anchor_text", "state_hash"], ["final_anchor_text", "final_state_hash"]):
        for row in table.group_by(names).aggregate([]).to_pylist():
            text, digest = (row[name] for name in names)
            if digest != (None if text is None else state_hash(text)):
                detail = f"the {names[1]} of {text!r:.80} is {digest and digest.hex()}, another's"
                wrong.append(("state_hash", detail))
    return wrong
