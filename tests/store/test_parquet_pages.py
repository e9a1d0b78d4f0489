"""Page headers are read as Arrow wrote them, and damaged ones are named."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.untrusted.parquet_footer import ColumnChunk, read_row_groups
from store.untrusted.parquet_pages import PageError, column_pages
from store.untrusted.thrift import ThriftError
from tests.support.parquet_maker import STRUCT, structure, varint, whole

TABLE = pa.table(
    {
        "number": pa.array(range(5000), pa.int64()),
        "text": pa.array([f"room {n % 7}" for n in range(5000)]),
        # 3 values in two rows, an empty list, and a null: 5 entries in four rows
        "list": pa.array([[1, 2], [3], [], None] * 1250, pa.list_(pa.int32())),
    }
)


def encoded(**options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=3000, write_page_checksum=True, **options)
    return sink.getvalue().to_pybytes()


def first_chunk(data: bytes) -> ColumnChunk:
    return read_row_groups(pa.BufferReader(data), n_bytes=len(data))[0].columns[0]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page_bytes", [1000, 1 << 20])
def test_pages_are_counted_as_the_footer_of_an_honest_file_says(
    version: str, page_bytes: int
) -> None:
    data = encoded(data_page_version=version, data_page_size=page_bytes, compression="zstd")
    source = pa.BufferReader(data)
    metadata = pq.ParquetFile(source).metadata
    counted: dict[str, int] = {}
    for number, group in enumerate(read_row_groups(source, n_bytes=len(data))):
        for place, chunk in enumerate(group.columns):
            column = metadata.row_group(number).column(place)
            pages = list(column_pages(source, chunk))
            values = sum(page.n_values for page in pages if not page.is_dictionary)
            assert values == column.num_values
            assert any(page.is_dictionary for page in pages) == column.has_dictionary_page
            # the footer's size has the headers too
            headers = column.total_uncompressed_size - sum(page.n_bytes for page in pages)
            assert 0 < headers < 100 * len(pages)
            name = column.path_in_schema.split(".")[0]
            counted[name] = counted.get(name, 0) + values
    assert counted == {"number": 5000, "text": 5000, "list": 6250}


def test_long_statistics_are_read_over() -> None:
    sink = pa.BufferOutputStream()
    texts = pa.table({"text": ["x" * 4000, "y" * 4000]})
    pq.write_table(texts, sink, use_dictionary=False, compression="none")
    source = pa.BufferReader(sink.getvalue())
    (page,) = column_pages(source, first_chunk(sink.getvalue().to_pybytes()))
    assert page.n_values == 2 and page.n_bytes > 8000


DAMAGED = encoded(compression="zstd")


@given(st.integers(0, 400), st.binary(min_size=1, max_size=40))
def test_damaged_headers_are_named_and_end(at: int, damage: bytes) -> None:
    data = bytearray(DAMAGED)
    column = first_chunk(DAMAGED)
    start = min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
    data[start + at : start + at + len(damage)] = damage
    try:
        pages = list(column_pages(pa.BufferReader(bytes(data)), column))
    except (PageError, ThriftError):
        return
    assert all(page.n_values >= 0 and page.n_bytes >= 0 for page in pages)


def header(*fields: tuple[int, int, int]) -> bytes:
    """Return a page's header with numbers: (field, type of Thrift's compact protocol, value)."""
    data = b""
    for field, kind, value in fields:
        data += bytes([kind]) + varint(2 * field) + varint(2 * value)
    return data


def chunk_of(n_bytes: int, *, at: int = 4, dictionary_at: int | None = None) -> ColumnChunk:
    """Return a column's place. Nothing but the place is read."""
    return ColumnChunk(
        path_in_schema="a",
        physical_type="INT32",
        num_values=0,
        total_compressed_size=n_bytes,
        data_page_offset=at,
        dictionary_page_offset=dictionary_at,
    )


I32, I64 = 5, 6
SIZES = ((2, I32, 8), (3, I32, 0))
DATA_PAGE, DICTIONARY_PAGE = 5, 7  # the fields of their headers
TYPES = {DATA_PAGE: 0, DICTIONARY_PAGE: 2}


def pages_of(
    *fields: tuple[int, int, int],
    encoding: int = 0,
    kind: int = DATA_PAGE,
    page_type: int | None = None,
) -> list[object]:
    page_type = TYPES[kind] if page_type is None else page_type
    content = bytes([0x0C]) + varint(2 * kind)  # a structure
    content += header(*fields, (2, I32, encoding)) + b"\0"
    data = b"PAR1" + header((1, I32, page_type), *SIZES) + content + b"\0"
    return list(column_pages(pa.BufferReader(data), chunk_of(len(data) - 4)))


def test_a_field_that_readers_take_differently_is_refused() -> None:
    (page,) = pages_of((1, I32, 20))
    assert page.n_values == 20
    for kind in (I32, I64):  # Arrow reads no 64-bit number there
        with pytest.raises(ThriftError, match="has field 1 after field 1"):
            pages_of((1, I32, 20), (1, kind, 1))
    with pytest.raises(ThriftError, match="field 1 has type 6, and must have 5"):
        pages_of((1, I64, 20))
    # Arrow cuts both numbers off: it would read field 1, and a count of 20.
    with pytest.raises(ThriftError, match="a number has more than 16 bits"):
        pages_of((1, I32, 20), ((1 << 16) + 1, I32, 10**6))
    with pytest.raises(ThriftError, match="a number has more than 32 bits"):
        pages_of((1, I32, (1 << 32) + 20))


def test_an_encoding_that_is_a_structure_is_refused() -> None:
    """The attack: it was looked up among the encodings, and has no hash."""
    content = structure((1, I32, whole(1)), (2, STRUCT, structure()))
    sizes = [(number, I32, whole(0)) for number in (1, 2, 3)]
    data = b"PAR1" + structure(*sizes, (DATA_PAGE, STRUCT, content))
    with pytest.raises(ThriftError, match="field 2 has type 12, and must have 5"):
        list(column_pages(pa.BufferReader(data), chunk_of(len(data) - 4)))


@pytest.mark.parametrize("encoding", [1, 4, 5, 6, 7, 10])
def test_an_encoding_that_counts_inside_its_page_is_refused(encoding: int) -> None:
    with pytest.raises(PageError, match=f"has the encoding {encoding}, which is none of PLAIN"):
        pages_of((1, I32, 20), encoding=encoding)


@pytest.mark.parametrize("page_type", [1, 2, 3, 4, 9])
def test_a_page_of_another_type_than_its_header_is_refused(page_type: int) -> None:
    """Arrow passes over a page of type 1, whatever it counts."""
    with pytest.raises(PageError, match="there is no page"):
        pages_of((1, I32, 20), page_type=page_type)


def test_a_dictionary_has_no_more_values_than_bytes() -> None:
    """Arrow allocates sixteen bytes for each value before it looks for them."""
    (page,) = pages_of((1, I32, 8), kind=DICTIONARY_PAGE)  # of 8 bytes, as SIZES says
    assert page.is_dictionary and page.n_values == 8
    with pytest.raises(PageError, match="a dictionary has 9 values in 8 bytes"):
        pages_of((1, I32, 9), kind=DICTIONARY_PAGE)


@pytest.mark.parametrize("dictionary_at", [0, 3, 4, 5, 1 << 40, -1])
def test_a_dictionary_that_arrow_would_pass_over_is_refused(dictionary_at: int) -> None:
    chunk = chunk_of(100, dictionary_at=dictionary_at)
    with pytest.raises(PageError, match="dictionary is said to begin"):
        list(column_pages(pa.BufferReader(b"PAR1" + bytes(100)), chunk))


@pytest.mark.parametrize("at", [-1, 0, 3])
def test_a_page_before_the_first_byte_of_the_data_is_refused(at: int) -> None:
    with pytest.raises(PageError, match="first page is said to begin"):
        list(column_pages(pa.BufferReader(b"PAR1" + bytes(100)), chunk_of(100, at=at)))
