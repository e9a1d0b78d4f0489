"""Read the page headers of a Parquet file. They say how much it decodes to; its footer may lie.

    for page in column_pages(source, row_group.columns[0]):
        print(page.n_values, page.n_bytes)

Arrow and DuckDB allocate memory by a header's numbers, but do not show them to Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from store.untrusted.thrift import INT32, Form, read_structure

if TYPE_CHECKING:
    from store.untrusted.parquet_footer import ColumnChunk

# Most headers are shorter than the first. Each may hold four values of a column as statistics, of
# 4 KiB at most.
HEADER_BYTES, LONGEST_HEADER_BYTES = 256, 64 * 1024
MAGIC_BYTES = 4  # before the first page
# Fields of a header, and the structures in it that count a page's values in their first field.
PAGE_TYPE, UNCOMPRESSED_SIZE, COMPRESSED_SIZE = 1, 2, 3
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 5, 7, 8
TYPE_OF = {DATA_PAGE: 0, DICTIONARY_PAGE: 2, DATA_PAGE_V2: 3}  # Arrow passes over other types
N_VALUES = 1
ENCODING = {DATA_PAGE: 2, DICTIONARY_PAGE: 2, DATA_PAGE_V2: 4}
HEADER: Form = {
    PAGE_TYPE: INT32,
    UNCOMPRESSED_SIZE: INT32,
    COMPRESSED_SIZE: INT32,
    **{kind: {N_VALUES: INT32, encoding: INT32} for kind, encoding in ENCODING.items()},
}
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
    """Bytes that are no page header of ours, or a page that reaches beyond its column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The size of a page once it is decompressed, and how many values it stands for."""

    is_dictionary: bool
    n_bytes: int
    n_values: int  # with nulls, and an empty list is one


def column_pages(source: Any, column: ColumnChunk) -> Iterator[Page]:
    """Yield the pages of a column chunk of the file `source`.

    No page's content is read. Raises PageError or ThriftError.
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
            fields, length = read_structure(header, 0, HEADER)
        except IndexError:  # the header goes on
            continue
        kinds = [kind for kind in (DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2) if kind in fields]
        if len(kinds) != 1 or fields.get(PAGE_TYPE) != TYPE_OF[kinds[0]]:
            break
        n_values = fields[kinds[0]].get(N_VALUES)
        sizes: tuple[Any, Any] = (fields.get(UNCOMPRESSED_SIZE), fields.get(COMPRESSED_SIZE))
        if not all(number is not None and number >= 0 for number in (*sizes, n_values)):
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
