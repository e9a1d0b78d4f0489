"""Read one segment file: its trajectories' figures, and whether its rows are well formed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from printable import one_line
from row_bounds import MAX_CHARACTERS, MAX_REWARD
from store.errors import FormatError
from store.hashing import state_hash
from store.records import CHANNELS, uid_text
from store.segment_encoding import decode, most_rows
from store.segments import TrajectoryMeta
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

_WITH_NULLS = pc.CountOptions(mode="all")
# Columns that may be null, as records.py says.
NULLABLE = (
    *("task_score", "prompt_dropped_turns", "prompt_dropped_tokens", "anchor_text", "state_hash"),
    *("admissible_actions", "images", "final_observation", "final_anchor_text"),
    *("final_state_hash", "final_admissible_actions"),
)
LARGEST_NUMBER = (1 << 40) - 1  # of a policy version; token ids are 32 bits wide
LONGEST_US = 1 << 45  # of generation or of an environment: a year. Sums of 2^63 overflow
LAST_TIME_US = (1 << 63) // 1000  # in 2262; Arrow and pandas also count nanoseconds in 64 bits
LOOK_AT_IT = "look at its run with gigpo fsck, or export it again"


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
    """Read every page of the file and check it. Raises FormatError if it is no segment.

    Nothing is asked of its rows but that they say what a row must.
    """
    try:
        source = pa.BufferReader(data)
        file = open_parquet(
            source,
            n_bytes=data.size,
            name=path,
            verify=True,
            at_most_rows=most_rows(data.size),
        )
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
    if (missing := _missing_column(table)) is not None:
        raise FormatError(f"{path} has no {missing} in a row: no run wrote it")
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
        if row["traj_uid"] is None:
            wrong.append(("step_index", f"{row['step_index_count']} rows have no traj_uid"))
            continue
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


def check_importable(table: pa.Table, *, name: str) -> None:
    """Raise FormatError, which calls the rows `name`, for values that no run writes.

    Readers of the run and its learner would fail on them later. `table` has SEGMENT_SCHEMA.
    """
    if (missing := _missing_column(table)) is not None:
        raise FormatError(f"{name} has no {missing} in a row; {LOOK_AT_IT}")
    for _, detail in malformed(table):
        raise FormatError(f"{name}: {detail}; {LOOK_AT_IT}")
    for column, inner in _inner_values(table):
        if inner.null_count:
            raise FormatError(f"{name} has a null in {column}; {LOOK_AT_IT}")
    for column in ("prompt_ids", "response_ids", "version_min", "version_max", "member"):
        _check_range(table, column, least=0, most=LARGEST_NUMBER, name=name)
    for column in ("gen_us", "env_us"):
        _check_range(table, column, least=0, most=LONGEST_US, name=name)
    for column in ("reward", "task_score"):
        _check_range(table, column, least=-MAX_REWARD, most=MAX_REWARD, name=name)
    _check_range(table, "response_logprobs", least=None, most=None, name=name)
    _check_times(table, name=name)
    for column, most in MAX_CHARACTERS.items():
        _check_length(table, column, most=most, name=name)
    _check_images(table, name=name)
    n_ids, n_logprobs = (
        pc.list_value_length(table[column]) for column in ("response_ids", "response_logprobs")
    )
    if not _all(pc.equal(n_ids, n_logprobs)):
        raise FormatError(
            f"{name} has a row whose response_ids and response_logprobs differ in number; "
            f"{LOOK_AT_IT}"
        )
    same = table.select(["traj_uid", *_FIRST]).group_by("traj_uid")
    several = same.aggregate([(column, "count_distinct", _WITH_NULLS) for column in _FIRST])
    for column in _FIRST:
        if not _all(pc.equal(several[f"{column}_count_distinct"], 1)):
            raise FormatError(f"{name} has a trajectory with more than one {column}; {LOOK_AT_IT}")


def check_trainable(table: pa.Table, *, name: str) -> None:
    """Raise FormatError for a row that a learner cannot train on: without prompt or response."""
    for column in ("prompt_ids", "response_ids"):
        if not _all(pc.greater(pc.list_value_length(table[column]), 0)):
            raise FormatError(
                f"{name} has a row without {column}, so nothing can be trained from it; leave its "
                "trajectories out"
            )


def longest_step(table: pa.Table) -> tuple[int, str]:
    """Return the tokens of the longest step, prompt and response together, and the step's name."""
    n_tokens = pc.add(
        *(pc.list_value_length(table[name]) for name in ("prompt_ids", "response_ids"))
    )
    longest = pc.max(n_tokens).as_py()
    if longest is None:  # no rows
        return 0, ""
    row = pc.index(n_tokens, longest).as_py()
    step, traj_uid = (table[name][row].as_py() for name in ("step_index", "traj_uid"))
    return longest, f"step {step} of trajectory {uid_text(traj_uid)}"


def largest_token(table: pa.Table) -> int:
    """Return the largest token id of the rows, -1 of rows without tokens."""
    columns = [pc.list_flatten(table[name]) for name in ("prompt_ids", "response_ids")]
    return max((pc.max(one).as_py() for one in columns if len(one)), default=-1)


def _missing_column(table: pa.Table) -> str | None:
    """Return a column that a row has no value of, though each must have one."""
    return next(
        (name for name in table.column_names if name not in NULLABLE and table[name].null_count),
        None,
    )


def _inner_values(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """Yield the values of each column of lists."""
    for column in table.column_names:
        if pa.types.is_list(table.schema.field(column).type):
            yield column, pc.list_flatten(table[column])


def _check_range(
    table: pa.Table, column: str, *, least: float | None, most: float | None, name: str
) -> None:
    """Raise FormatError for a number beyond the bounds, or one that is not finite."""
    values = table[column]
    if pa.types.is_list(values.type):
        values = pc.list_flatten(values)
    values = pc.drop_null(values)
    is_wrong = pc.invert(pc.is_finite(values))
    if least is not None and most is not None:
        is_wrong = pc.or_(is_wrong, pc.or_(pc.less(values, least), pc.greater(values, most)))
    wrong = values.filter(is_wrong)
    if len(wrong):
        raise FormatError(
            f"{name} has {column}={wrong[0].as_py():.3g}, which no run writes; {LOOK_AT_IT}"
        )


def _check_times(table: pa.Table, *, name: str) -> None:
    """Raise FormatError for a start before 1970 or after 2262, which no Python object can hold."""
    times_us = table["t_start"].cast(pa.int64())
    wrong = times_us.filter(
        pc.or_(pc.less(times_us, 0), pc.greater(times_us, pa.scalar(LAST_TIME_US)))
    )
    if len(wrong):
        raise FormatError(
            f"{name} has t_start={wrong[0].as_py()} us, outside of the years 1970 to 2262; "
            f"{LOOK_AT_IT}"
        )


def _check_images(table: pa.Table, *, name: str) -> None:
    """Raise FormatError for an image whose pixels are not those of its height and width."""
    images = pc.list_flatten(table["images"])
    height, width, pixels = (
        pc.struct_field(images, field) for field in ("height", "width", "pixels")
    )
    n_pixels = pc.multiply(height.cast(pa.int64()), width.cast(pa.int64()))
    n_bytes = pc.multiply(n_pixels, CHANNELS)
    has_sides = pc.and_(pc.greater(height, 0), pc.greater(width, 0))
    if not _all(pc.and_(has_sides, pc.equal(n_bytes, pc.binary_length(pixels).cast(pa.int64())))):
        raise FormatError(
            f"{name} has an image whose pixels are not height x width x {CHANNELS} bytes; "
            f"{LOOK_AT_IT}"
        )


def _check_length(table: pa.Table, column: str, *, most: int, name: str) -> None:
    """Raise FormatError for a text of more than `most` characters."""
    texts = table[column]
    if pa.types.is_list(texts.type):
        texts = pc.list_flatten(texts)
    # Bytes are never fewer than characters, and need no look at each of them.
    if (pc.max(pc.binary_length(texts)).as_py() or 0) <= most:
        return
    longest = pc.max(pc.utf8_length(texts)).as_py()
    if longest > most:
        raise FormatError(
            f"{name} has a {column} of {longest:,} characters, more than {most:,}; {LOOK_AT_IT}"
        )


def _all(values: pa.ChunkedArray) -> bool:
    """Return whether all values are true; a null is not."""
    return bool(pc.all(pc.fill_null(values, False)).as_py() is not False)
