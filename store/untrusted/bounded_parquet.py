"""Decode Parquet within bounds: a small file can repeat one text any number of times.

    table = read_table(pa.BufferReader(data), n_bytes=data.size, name=path)

The footer is not trusted: pages say how many values they stand for. Rows are decoded a few at a
time, and counted as they come. Arrow does not look whether texts are UTF-8; they are checked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.errors import FormatError, is_out_of_memory
from store.untrusted.parquet_footer import read_row_groups
from store.untrusted.parquet_pages import PageError, column_pages
from store.untrusted.thrift import ThriftError

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
# Bytes that Arrow keeps for each value of a list: the value, two levels while it decodes, and its
# place in each list around it.
NUMBER_BYTES, LEVELS_BYTES, OFFSET_BYTES = 8, 4, 4
ARRAY_BYTES = 512  # of the objects around the values of one column in a batch
SHOWN_CHARACTERS = 60  # of a writer's name
FIXED_BYTES = 32  # of a uid or a decimal, at most


@contextmanager
def _memory_is_no_damage() -> Iterator[None]:
    """Raise MemoryError where memory does not suffice: callers take Arrow's errors for damage."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise


@_memory_is_no_damage()
def open_parquet(
    source: Any,
    *,
    n_bytes: int,
    name: object,
    verify: bool,
    at_most_rows: int | None = None,
    usual_schema: pa.Schema | None = None,
) -> pq.ParquetFile:
    """Open a file of `n_bytes`. Raises FormatError if its footer says more rows than any run wrote.

    Those are `at_most_rows`, or MAX_ROWS and a row for each byte. With `verify`, the checksum of
    each page is compared as it is read. A file that has exactly the columns of `usual_schema` is
    spared the look at them, which takes 0.4 ms. Arrow's errors pass through.
    """
    if at_most_rows is None:
        at_most_rows = MAX_ROWS + n_bytes
    try:
        file = pq.ParquetFile(
            source,
            page_checksum_verification=verify,
            thrift_string_size_limit=max(n_bytes, 1),
            thrift_container_size_limit=min(MIN_ELEMENTS + n_bytes // ELEMENT_BYTES, MAX_ELEMENTS),
        )
        schema = file.schema_arrow  # made anew every time it is asked for
        if usual_schema is None or not schema.equals(usual_schema):
            _check_columns(schema, name=name)
        writer = file.metadata.created_by
    except UnicodeDecodeError as error:
        raise _not_ours(f"{name} names a column, or who wrote it, not in UTF-8") from error
    # Of old files of this writer Arrow decodes what lies behind the end of a column as well.
    if "parquet-mr" in writer.lower():
        raise _not_ours(f"{name} was written by {writer[:SHOWN_CHARACTERS]}")
    rows_of_groups = _rows_of_groups(file)
    for n_rows in (file.metadata.num_rows, sum(rows_of_groups), *rows_of_groups):
        if not 0 <= n_rows <= at_most_rows:
            raise _not_ours(f"{name} has {n_rows:,} rows in {n_bytes:,} bytes")
    return file


def _check_columns(schema: pa.Schema, *, name: object) -> None:
    """Raise FormatError for columns that decode otherwise than they are counted."""
    if _has_a_name_twice(schema):
        raise _not_ours(f"{name} has two columns, or two fields of a structure, of one name")
    # Arrow would repeat its values only after they were counted. The text of a type also names the
    # types of its fields.
    if any("dictionary<" in str(kind) for kind in schema.types):
        raise _not_ours(f"{name} has a column of coded values")
    # A null of such a type takes no byte in the file, and all of its bytes when it is decoded. An
    # extension type hides its storage.
    if any(_has_wide_nulls(kind) for kind in schema.types):
        raise _not_ours(f"{name} has a column of values of one large size, or an extension type")


def _has_a_name_twice(fields: Sequence[pa.Field]) -> bool:
    """Return whether two of the fields, or of those in one of them, have the same name."""
    names = [field.name for field in fields]
    return len(set(names)) < len(names) or any(
        _has_a_name_twice([field.type.field(n) for n in range(field.type.num_fields)])
        for field in fields
        if pa.types.is_nested(field.type)
    )


def _has_wide_nulls(kind: pa.DataType) -> bool:
    """Return whether a type, or one in it, has nulls of more bytes than a uid or a decimal.

    An extension type may have: its storage is not looked at, because no run writes one.
    """
    if pa.types.is_fixed_size_list(kind) or isinstance(kind, pa.BaseExtensionType):
        return True
    if pa.types.is_fixed_size_binary(kind):
        return kind.byte_width > FIXED_BYTES
    nested = pa.types.is_nested(kind)
    return nested and any(_has_wide_nulls(kind.field(n).type) for n in range(kind.num_fields))


@_memory_is_no_damage()
def read_table(
    file: pq.ParquetFile, source: Any, *, n_bytes: int, name: object, columns: Sequence[str] | None
) -> pa.Table:
    """Decode the columns (all if None) of a file that `open_parquet` opened from `source`.

    Raises FormatError if they are larger than any run wrote, or hold a text that is no UTF-8.
    Arrow's errors pass through.
    """
    table = _decoded(file, source, n_bytes=n_bytes, name=name, columns=columns)
    for number, field in enumerate(table.schema):
        if _has_texts(field.type):
            _check_texts(table.column(number), column=field.name, name=name)
    return table


def is_within_bounds(data: pa.Buffer) -> bool:
    """Return whether the bytes of a Parquet file are within the bounds of `read_table`."""
    source = pa.BufferReader(data)
    try:
        file = open_parquet(source, n_bytes=data.size, name="", verify=False)
        read_table(file, source, n_bytes=data.size, name="", columns=None)
    except FormatError:
        return False
    return True


def _decoded(
    file: pq.ParquetFile, source: Any, *, n_bytes: int, name: object, columns: Sequence[str] | None
) -> pa.Table:
    """Decode within the bounds of `read_table`. The texts may be no UTF-8."""
    at_most = MAX_DECODED_BYTES + MAX_RATIO * n_bytes
    too_large = f"{name} stands for more than {at_most:,} bytes in {n_bytes:,}"
    chosen = None if columns is None else list(columns)
    try:
        chunks = list(_chunks(file, source, n_bytes=n_bytes, columns=chosen))
    except (PageError, ThriftError) as error:
        raise _not_ours(f"{name} is damaged: {error}") from error
    for chunk in chunks:
        if not chunk.is_list and chunk.n_values != chunk.n_rows:
            raise _not_ours(f"{name} has {chunk.n_values:,} values in {chunk.n_rows:,} rows")
    if not _fit(chunks, source, at_most=at_most):
        raise _not_ours(too_large)
    batch_rows = min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, _repeatable_bytes(chunks))))
    if sum(_rows_of_groups(file)) <= batch_rows:
        # One group's file is one batch, and decodes a fifth faster so. A file without rows gives
        # no batch.
        return file.read(columns=chosen, use_threads=False)
    decoded, batches = 0, []
    for batch in file.iter_batches(batch_rows, columns=chosen, use_threads=False):
        decoded += batch.nbytes + ARRAY_BYTES * batch.num_columns
        if decoded > at_most:
            raise _not_ours(too_large)
        batches.append(batch)
    return pa.Table.from_batches(batches)


def _has_texts(kind: pa.DataType) -> bool:
    """Return whether a type, or one in it, is a text."""
    if pa.types.is_nested(kind):
        return any(_has_texts(kind.field(n).type) for n in range(kind.num_fields))
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _check_texts(values: pa.ChunkedArray, *, column: str, name: object) -> None:
    """Raise FormatError, which names the first row, if a text is no UTF-8.

    Whatever reads such a text later would fail: DuckDB, Python, the query of a whole run.
    """
    if _is_valid(values):
        return
    row, end = 0, len(values)  # the rows before `row` are valid, those before `end` are not
    while end - row > 1:
        middle = (row + end) // 2
        is_later = all(map(_has_valid_texts, values.slice(row, middle - row).chunks))
        row, end = (middle, end) if is_later else (row, middle)
    raise _not_ours(f"{name} has a {column} that is no UTF-8 in row {row}, counted from 0")


def _is_valid(values: pa.Array | pa.ChunkedArray) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _has_valid_texts(values: pa.Array) -> bool:
    """Return whether the texts of a slice are valid. Arrow would check all values of its lists."""
    if pa.types.is_struct(values.type):
        return all(map(_has_valid_texts, values.flatten()))
    if pa.types.is_nested(values.type):
        return _has_valid_texts(values.flatten())
    return _is_valid(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """One column of one row group."""

    row_group: int
    path: str  # such as `prompt_ids.list.element`
    is_list: bool
    n_rows: int
    n_values: int
    n_bytes: int  # of its pages, decompressed
    value_bytes: int  # of a value in a list, decoded
    dictionary_bytes: int  # of the dictionary of texts: each value may repeat it whole


def _chunks(
    file: pq.ParquetFile, source: Any, *, n_bytes: int, columns: Sequence[str] | None
) -> Iterator[_Chunk]:
    """Yield the sizes of the columns, as their pages tell them. Raises PageError or ThriftError.

    Columns that share their pages would be looked through again for each.
    """
    left_bytes = n_bytes
    abouts = [file.schema.column(number) for number in range(len(file.schema))]
    row_groups = read_row_groups(source, n_bytes=n_bytes)
    if [row_group.n_rows for row_group in row_groups] != _rows_of_groups(file):
        raise PageError("its footer can be read in two ways")
    for number, row_group in enumerate(row_groups):
        n_rows = row_group.n_rows
        if len(row_group.columns) != len(abouts):
            raise PageError(f"a row group has {len(row_group.columns):,} columns")
        for column, about in zip(row_group.columns, abouts, strict=True):
            path = about.path
            # Arrow decodes what the schema says, whatever the footer says of one chunk.
            other = (column.path_in_schema, column.physical_type)
            if other != (path, about.physical_type):
                raise PageError(f"{path}, {about.physical_type}, is said to be {', '.join(other)}")
            if columns is not None and path.split(".")[0] not in columns:
                continue
            if column.total_compressed_size < 0:  # also of a chunk without rows: it would add
                raise PageError(f"{path} is said to take {column.total_compressed_size:,} bytes")
            left_bytes -= column.total_compressed_size
            if left_bytes < 0:
                raise PageError("its columns together are longer than the file")
            # A chunk without rows may have no pages.
            pages = list(column_pages(source, column)) if n_rows else []
            n_values = sum(page.n_values for page in pages if not page.is_dictionary)
            # Arrow decodes as many values as the footer says, in some files also of pages that lie
            # behind the end of the chunk.
            if n_values != column.num_values:
                said = f"the footer says {column.num_values:,} values"
                raise PageError(f"{said} of {path}, its pages {n_values:,}")
            if not n_rows:
                continue
            has_texts = about.physical_type == "BYTE_ARRAY"
            is_decimal = about.logical_type.type == "DECIMAL"
            is_wide = is_decimal or about.physical_type == "FIXED_LEN_BYTE_ARRAY"
            dictionary_bytes = sum(page.n_bytes for page in pages if page.is_dictionary)
            yield _Chunk(
                row_group=number,
                path=path,
                is_list=about.max_repetition_level > 0,
                n_rows=n_rows,
                n_values=n_values,
                n_bytes=sum(page.n_bytes for page in pages),
                value_bytes=(FIXED_BYTES if is_wide else NUMBER_BYTES)
                + LEVELS_BYTES
                + OFFSET_BYTES * about.max_repetition_level,
                dictionary_bytes=dictionary_bytes if has_texts else 0,
            )


def _rows_of_groups(file: pq.ParquetFile) -> list[int]:
    metadata = file.metadata
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def _repeatable_bytes(chunks: Sequence[_Chunk]) -> int:
    """Return the size of the dictionaries in the largest row group: one row may repeat it all."""
    sizes: Counter[int] = Counter()
    for chunk in chunks:
        sizes[chunk.row_group] += chunk.dictionary_bytes
    return max(sizes.values(), default=0)


def _fit(chunks: Sequence[_Chunk], source: Any, *, at_most: int) -> bool:
    """Return whether all pages and all lists of a file together decode to at most `at_most` bytes.

    Texts that rows repeat are counted later, batch by batch. A row's list may be of any length, so
    texts that lists repeat are counted here.
    """
    lists = [chunk for chunk in chunks if chunk.is_list]
    n_bytes = sum(chunk.n_bytes for chunk in chunks)
    n_bytes += sum(chunk.value_bytes * chunk.n_values for chunk in lists)
    if n_bytes > at_most:
        return False
    if n_bytes + sum(chunk.n_values * chunk.dictionary_bytes for chunk in lists) <= at_most:
        return True
    for chunk in lists:
        if chunk.dictionary_bytes:
            n_bytes += _repeated_bytes(chunk, source)
        if n_bytes > at_most:
            return False
    return True


def _repeated_bytes(chunk: _Chunk, source: Any) -> int:
    """Return the bytes of all texts in a column of lists. Its values must fit in memory."""
    # The longest value is not known. With its dictionary left apart, the column is small.
    n_bytes = 0
    source.seek(0)
    file = pq.ParquetFile(source, read_dictionary=[chunk.path])
    # Only this leaf: a sibling in the same structure may repeat its texts as well.
    table = file.read_row_group(chunk.row_group, columns=[chunk.path], use_threads=False)
    for values in (leaf for array in table.column(0).chunks for leaf in _leaves(array)):
        if pa.types.is_dictionary(values.type):
            lengths = pc.binary_length(values.dictionary).take(values.indices)
            n_bytes += pc.sum(lengths.cast(pa.int64())).as_py() or 0
    return n_bytes


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the innermost values of lists and structures."""
    if pa.types.is_struct(array.type):
        for number in range(array.type.num_fields):
            yield from _leaves(array.field(number))
    elif pa.types.is_nested(array.type):
        yield from _leaves(array.values)
    else:
        yield array


def _not_ours(fault: str) -> FormatError:
    return FormatError(f"{fault}: no run wrote it; restore it from a backup")
