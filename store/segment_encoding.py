"""Encode rows as the Parquet bytes of a segment, and decode them. The sizes here were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from printable import one_line
from store.errors import FormatError
from store.records import SEGMENT_SCHEMA
from store.run_json import FORMAT, check_format
from store.untrusted.bounded_parquet import (
    ARRAY_BYTES,
    MAX_DECODED_BYTES,
    is_within_bounds,
    open_parquet,
    read_table,
)

ZSTD_LEVEL = 1  # measured: level 3 is no smaller here and 14% slower
# Zstandard's set-up costs each file 0.9 ms of a core to write, and as much to read. A file with few
# rows, such as a group of short episodes, is no larger with LZ4.
SMALL_BYTES = 32 * 1024
# One trajectory of a merged file is found 2.5 times as fast as in row groups of 20,000 steps.
# Smaller row groups slow scans.
ROW_GROUP_STEPS = 8192
# With images, a few hundred rows are as large as thousands without.
ROW_GROUP_BYTES = 256 * 1024**2
# A file has at most so many rows beside one for each ROW_BYTES of it, because the work on it grows
# with them. A step of a tiny game takes 32 bytes, and one of equal episodes 6: their times differ.
# A uid does not compress.
ALLOWED_ROWS, ROW_BYTES = 4096, 2
ALLOWED_TRAJECTORIES, UID_BYTES = 1000, 16
# Readers count at most so many bytes for each byte of a table: 20 for the value of a list, and its
# 4 in the page.
COUNTED_AS = 8
# A dictionary helps with repeated text. On token ids it halves the writing speed, and adds a third
# to the size.
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
    "final_observation",
    "final_anchor_text",
    "final_state_hash",
    "final_admissible_actions.list.element",
]
# BYTE_STREAM_SPLIT makes log-probabilities a quarter smaller. Token ids would gain 8% at most, and
# DuckDB 1.5 reads split bytes of floats only.
SPLIT_COLUMNS = {"response_logprobs.list.element": "BYTE_STREAM_SPLIT"}


def decode(
    data: pa.Buffer,
    *,
    path: Path | str,
    columns: Sequence[str] = SEGMENT_SCHEMA.names,
    is_own: bool = False,
) -> pa.Table:
    """Return the rows in a segment's bytes. `path` is for messages.

    Raises FormatError for another format, for bytes that are no segment, and for a file that
    decodes to more rows or bytes than any run wrote. The bytes are not counted if `is_own`: this
    user made the run, so a file with the committed digest is one that it wrote. Counting takes a
    third of the time.
    """
    chosen = None if set(columns) == set(SEGMENT_SCHEMA.names) else list(columns)
    try:
        source = pa.BufferReader(data)
        at_most = None if is_own else most_rows(data.size)
        file = open_parquet(
            source,
            n_bytes=data.size,
            name=path,
            verify=False,
            at_most_rows=at_most,
            usual_schema=SEGMENT_SCHEMA,
        )
        found = file.schema_arrow  # made anew every time it is asked for
        metadata = {key.decode(): value.decode() for key, value in (found.metadata or {}).items()}
        check_format(metadata, name=str(path))
        if not found.equals(SEGMENT_SCHEMA):
            raise ValueError("it has other columns")
        if is_own:
            table = _all_rows(file, columns=chosen)
        else:
            table = read_table(file, source, n_bytes=data.size, name=path, columns=chosen)
            _check_trajectories(table, n_bytes=data.size)
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise FormatError(
            f"{path} is not a segment ({one_line(error)}); restore it from a backup"
        ) from error
    return table.select(columns).replace_schema_metadata(None)


def _all_rows(file: pq.ParquetFile, *, columns: Sequence[str] | None) -> pa.Table:
    """Read a file by row groups: Arrow reads no 2 GiB of lists of texts or pixels at once."""
    if file.num_row_groups <= 1:
        return file.read(columns=columns, use_threads=False)
    numbers = range(file.num_row_groups)
    return pa.concat_tables(
        [file.read_row_group(number, columns=columns, use_threads=False) for number in numbers]
    )


def _counted_bytes(table: pa.Table) -> int:
    """Return a bound of what readers count for the rows of a table, see bounded_parquet.py.

    With long texts in its dictionaries each row is a batch of its own.
    """
    return COUNTED_AS * table.nbytes + ARRAY_BYTES * table.num_columns * table.num_rows


def most_rows(n_bytes: int) -> int:
    """Return the rows that a segment of `n_bytes` has at most."""
    return ALLOWED_ROWS + n_bytes // ROW_BYTES


def _check_trajectories(table: pa.Table, *, n_bytes: int) -> None:
    """Raise ValueError for more trajectories than a file of this size has room for their uids."""
    if "traj_uid" not in table.column_names or table.num_rows <= ALLOWED_TRAJECTORIES:
        return
    n_trajectories = pc.count_distinct(table["traj_uid"]).as_py()
    if n_trajectories > _most_trajectories(n_bytes):
        raise ValueError(f"it has {n_trajectories:,} trajectories in {n_bytes:,} bytes")


def _most_trajectories(n_bytes: int) -> int:
    return ALLOWED_TRAJECTORIES + n_bytes // UID_BYTES


def encode_for_readers(
    table: pa.Table, *, metadata: dict[str, str], n_trajectories: int
) -> pa.Buffer:
    """Return Parquet bytes that every reader takes, plain if need be.

    Readers have bounds, for strangers' files. Rows that are all alike, such as those of a dataset,
    would be compressed below them.
    """
    data = encode(table, metadata=metadata)
    is_taken = (
        table.num_rows <= most_rows(data.size)
        and n_trajectories <= _most_trajectories(data.size)
        and (_counted_bytes(table) <= MAX_DECODED_BYTES or is_within_bounds(data))
    )
    return data if is_taken else encode(table, metadata=metadata, is_plain=True)


def encode(table: pa.Table, *, metadata: dict[str, str], is_plain: bool = False) -> pa.Buffer:
    """Return the Parquet bytes of a table of SEGMENT_SCHEMA.

    If plain, they are neither compressed nor coded: each row takes all its bytes.
    """
    sink = pa.BufferOutputStream()
    n_bytes = table.nbytes
    is_small = n_bytes < SMALL_BYTES
    table = table.replace_schema_metadata({"format": FORMAT, **metadata})
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="none" if is_plain else "lz4" if is_small else "zstd",
        compression_level=None if is_small or is_plain else ZSTD_LEVEL,
        use_dictionary=[] if is_plain else DICTIONARY_COLUMNS,
        column_encoding=SPLIT_COLUMNS,
        write_page_checksum=True,
    ) as writer:
        for rows in _row_groups(table, n_bytes=n_bytes):
            writer.write_table(rows, row_group_size=len(rows))
    return sink.getvalue()


def _row_groups(table: pa.Table, *, n_bytes: int) -> Iterator[pa.Table]:
    """Divide a table into row groups. A few long rows beside many short ones are divided again.

    `n_bytes` are those of the table, which take 0.2 ms to count.
    """
    n_rows = ROW_GROUP_BYTES * table.num_rows // max(1, n_bytes)
    n_rows = max(1, min(ROW_GROUP_STEPS, n_rows))
    is_large = n_bytes > 2 * ROW_GROUP_BYTES  # else none of its parts is
    for start in range(0, table.num_rows, n_rows):
        rows = table.slice(start, n_rows)
        if is_large and rows.num_rows > 1 and rows.nbytes > 2 * ROW_GROUP_BYTES:
            yield from _row_groups(rows, n_bytes=rows.nbytes)
        else:
            yield rows
