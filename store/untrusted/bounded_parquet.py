"""Decode Parquet within bounds: a small file can repeat one text any number of times.

    table = read_table(pa.BufferReader(data), n_bytes=data.size, name=path)

The footer is not trusted. Rows are decoded a few at a time, and counted as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from store.errors import FormatError

# A step takes 1.2 KB on disk and 5.2 KB decoded. Drawn images decode to a hundred times their
# bytes. No merge makes more than 1 GiB of rows.
MAX_DECODED_BYTES = 1 << 30
MAX_RATIO = 100
# A step has log-probabilities and times, which take a byte at least. Small tables may repeat a row.
MAX_ROWS = 1 << 20
BATCH_ROWS = 1024  # measured: as fast as all rows at once, within the noise
BATCH_BYTES = 1 << 27  # of values that one batch may repeat
# Elements of a footer's lists. Arrow makes objects of hundreds of bytes of them, and each takes
# 8 bytes at least in the file.
MIN_ELEMENTS, ELEMENT_BYTES = 1000, 8
MAX_ELEMENTS = 1_000_000  # Arrow's own limit
# Every page begins with its type and its size, as numbers of Thrift's compact protocol.
HEADER_BYTES, NUMBER = 24, 0x15
DICTIONARY_PAGE, DATA_PAGES = b"\x15\x04", (b"\x15\x00", b"\x15\x06")


def open_parquet(source: Any, *, n_bytes: int, name: object, verify: bool) -> pq.ParquetFile:
    """Open a file of `n_bytes`. Raises FormatError if its footer says more rows than any run wrote.

    With `verify`, the checksum of each page is compared as it is read. Arrow's errors pass through.
    """
    file = pq.ParquetFile(
        source,
        page_checksum_verification=verify,
        thrift_string_size_limit=max(n_bytes, 1),
        thrift_container_size_limit=min(MIN_ELEMENTS + n_bytes // ELEMENT_BYTES, MAX_ELEMENTS),
    )
    # Arrow would repeat its values only after they were counted.
    if any("dictionary<" in str(kind) for kind in file.schema_arrow.types):
        raise _not_ours(f"{name} has a column of coded values")
    n_rows = file.metadata.num_rows
    if not 0 <= n_rows <= MAX_ROWS + n_bytes:
        raise _not_ours(f"{name} has {n_rows:,} rows in {n_bytes:,} bytes")
    return file


def read_table(
    file: pq.ParquetFile, source: Any, *, n_bytes: int, name: object, columns: Sequence[str] | None
) -> pa.Table:
    """Decode the columns (all if None) of a file that `open_parquet` opened from `source`.

    Raises FormatError if they are larger than any run wrote. Arrow's errors pass through.
    """
    at_most = MAX_DECODED_BYTES + MAX_RATIO * n_bytes
    n_rows = BATCH_BYTES // max(1, _repeatable_bytes(file, source, name=name))
    chosen = None if columns is None else list(columns)
    decoded, batches = 0, []
    for batch in file.iter_batches(
        min(BATCH_ROWS, max(1, n_rows)), columns=chosen, use_threads=False
    ):
        decoded += batch.nbytes
        if decoded > at_most:
            raise _not_ours(f"{name} stands for more than {at_most:,} bytes in {n_bytes:,}")
        batches.append(batch)
    if batches:
        return pa.Table.from_batches(batches)
    return file.read(columns=chosen, use_threads=False)  # a file without rows gives no batch


def _repeatable_bytes(file: pq.ParquetFile, source: Any, *, name: object) -> int:
    """Return the size of the dictionaries in the largest row group: one row may repeat it all."""
    metadata = file.metadata
    largest = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_rows:  # else it may have no pages
            largest = max(largest, sum(_dictionary_sizes(group, source, name=name)))
    return largest


def _dictionary_sizes(group: Any, source: Any, *, name: object) -> Iterator[int]:
    for number in range(group.num_columns):
        column = group.column(number)
        at, dictionary_at = column.data_page_offset, column.dictionary_page_offset
        source.seek(at if dictionary_at is None else min(at, dictionary_at))
        header = source.read(HEADER_BYTES)
        if header[:2] == DICTIONARY_PAGE:
            yield _page_bytes(header, name=name)
        elif header[:2] not in DATA_PAGES:
            raise _not_ours(f"{name} has a page with a strange beginning")


def _page_bytes(header: bytes, *, name: object) -> int:
    """Return the decompressed size of a page: the second number of its header."""
    value = 0
    for position, byte in enumerate(header[3:]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80 and header[2] == NUMBER:
            return value >> 1  # its lowest bit is the sign
    raise _not_ours(f"{name} has a page of no size")


def _not_ours(fault: str) -> FormatError:
    return FormatError(f"{fault}: no run wrote it; restore it from a backup")
