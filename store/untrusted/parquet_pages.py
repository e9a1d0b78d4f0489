"""Read the page headers of a Parquet file. They say how much it decodes to; its footer may lie.

    for page in column_pages(source, metadata.row_group(0).column(0)):
        print(page.n_values, page.n_bytes)

A header is a structure of Thrift's compact protocol. Arrow and DuckDB allocate memory by its
numbers, but do not show them to Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Most headers are shorter than the first. Each may hold four values of a column as statistics, of
# 4 KiB at most.
HEADER_BYTES, LONGEST_HEADER_BYTES = 256, 64 * 1024
MAGIC_BYTES = 4  # before the first page
MAX_DEPTH = 8  # a header's structures nest three deep
MAX_VARINT_BYTES = 10
# Types of the protocol.
TRUE, FALSE, BYTE, INT16, INT32, INT64, DOUBLE, BINARY, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
# Fields of a header, and the structures in it that count a page's values in their first field.
PAGE_TYPE, UNCOMPRESSED_SIZE, COMPRESSED_SIZE = 1, 2, 3
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 5, 7, 8
TYPE_OF = {DATA_PAGE: 0, DICTIONARY_PAGE: 2, DATA_PAGE_V2: 3}  # Arrow passes over other types
N_VALUES = 1
ENCODING = {DATA_PAGE: 2, DICTIONARY_PAGE: 2, DATA_PAGE_V2: 4}
# What our writer, DuckDB and Arrow use unless they are told to use another. The delta encodings
# (5 to 7) have counts of their own inside the page, or repeat the value before, so a page stands
# for any size.
ENCODINGS = {
    0: "PLAIN",
    2: "PLAIN_DICTIONARY",
    3: "RLE",
    8: "RLE_DICTIONARY",
    9: "BYTE_STREAM_SPLIT",
}


class PageError(ValueError):
    """Bytes that are no page header, or a page that reaches beyond its column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The size of a page once it is decompressed, and how many values it stands for."""

    is_dictionary: bool
    n_bytes: int
    n_values: int  # with nulls, and an empty list is one


def column_pages(source: Any, column: Any) -> Iterator[Page]:
    """Yield the pages of a column chunk (`pq.ColumnChunkMetaData`) of the file `source`.

    No page's content is read. Raises PageError.
    """
    dictionary_at, at = column.dictionary_page_offset, column.data_page_offset
    if dictionary_at is not None:
        # Arrow passes over other offsets without a word.
        if not MAGIC_BYTES <= dictionary_at < at:
            raise PageError(f"its dictionary is said to begin at byte {dictionary_at:,}")
        at = dictionary_at
    if at < MAGIC_BYTES:
        raise PageError(f"its first page is said to begin at byte {at:,}")
    end = at + column.total_compressed_size
    while at < end:
        page, n_bytes = _page_at(source, at)
        yield page
        at += n_bytes
    if at > end:
        raise PageError("a page reaches beyond its column")


def _page_at(source: Any, at: int) -> tuple[Page, int]:
    """Return the page at an offset of `source`, and the bytes that it takes with its header."""
    for at_most in (HEADER_BYTES, LONGEST_HEADER_BYTES):
        source.seek(at)
        header = source.read(at_most)
        try:
            fields, length = _structure(header, 0, depth=0)
        except IndexError:  # the header goes on
            continue
        kinds = [kind for kind in (DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2) if kind in fields]
        if len(kinds) != 1 or not isinstance(fields[kinds[0]], dict):
            break
        if fields.get(PAGE_TYPE) != TYPE_OF[kinds[0]]:
            break
        n_values = fields[kinds[0]].get(N_VALUES)
        sizes: tuple[Any, Any] = (fields.get(UNCOMPRESSED_SIZE), fields.get(COMPRESSED_SIZE))
        if not all(isinstance(number, int) and number >= 0 for number in (*sizes, n_values)):
            break
        encoding = fields[kinds[0]].get(ENCODING[kinds[0]])
        if encoding not in ENCODINGS:
            known = ", ".join(ENCODINGS.values())
            raise PageError(f"a page has the encoding {encoding}, which is none of {known}")
        n_bytes, stored_bytes = sizes
        # Arrow takes the bytes of a page that is not compressed as they are, whatever the header
        # says of their number.
        page = Page(
            is_dictionary=kinds[0] == DICTIONARY_PAGE,
            n_bytes=max(n_bytes, stored_bytes),
            n_values=n_values,
        )
        # Arrow allocates for each value of a dictionary before it looks for them.
        if page.is_dictionary and page.n_values > page.n_bytes:
            raise PageError(f"a dictionary has {n_values:,} values in {page.n_bytes:,} bytes")
        return page, length + stored_bytes
    raise PageError(f"there is no page at byte {at:,}")


def _structure(data: bytes, at: int, *, depth: int) -> tuple[dict[int, Any], int]:
    """Return the numbers and structures of a structure by field, and where it ends.

    Raises IndexError if it goes on after `data`.
    """
    if depth > MAX_DEPTH:
        raise PageError("a page's header nests too deep")
    fields: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        kind = head & 0x0F
        if head >> 4:
            field += head >> 4  # counted from the field before
        else:
            field, at = _number(data, at)
        if field in fields:  # readers differ in which of the two they take
            raise PageError(f"a page's header has field {field} twice")
        if kind == INT32:
            fields[field], at = _number(data, at)
        elif kind in (INT16, INT64):  # no number that we read; Arrow reads none of them either
            _, at = _number(data, at)
        elif kind == BINARY:
            length, at = _varint(data, at)
            at += length
        elif kind == STRUCT:
            fields[field], at = _structure(data, at, depth=depth + 1)
        elif kind in (BYTE, DOUBLE):
            at += 1 if kind == BYTE else 8
        elif kind not in (TRUE, FALSE):  # a header has no lists
            raise PageError(f"a page's header has a field of type {kind}")
    return fields, at + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at  # its lowest bit is the sign


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise PageError("a page's header has a number without end")
