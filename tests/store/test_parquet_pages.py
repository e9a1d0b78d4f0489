"""Page headers are read as Arrow wrote them, and damaged ones are named."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.untrusted.parquet_pages import PageError, column_pages
from tests.support.parquet_maker import varint

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


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page_bytes", [1000, 1 << 20])
def test_pages_are_counted_as_the_footer_of_an_honest_file_says(
    version: str, page_bytes: int
) -> None:
    data = encoded(data_page_version=version, data_page_size=page_bytes, compression="zstd")
    source = pa.BufferReader(data)
    metadata = pq.ParquetFile(source).metadata
    counted: dict[str, int] = {}
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        for column in (group.column(number) for number in range(group.num_columns)):
            pages = list(column_pages(source, column))
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
    (page,) = column_pages(source, pq.ParquetFile(source).metadata.row_group(0).column(0))
    assert page.n_values == 2 and page.n_bytes > 8000


DAMAGED = encoded(compression="zstd")


@given(st.integers(0, 400), st.binary(min_size=1, max_size=40))
def test_damaged_headers_are_named_and_end(at: int, damage: bytes) -> None:
    data = bytearray(DAMAGED)
    column = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0).column(0)
    start = min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
    data[start + at : start + at + len(damage)] = damage
    try:
        pages = list(column_pages(pa.BufferReader(bytes(data)), column))
    except PageError:
        return
    assert all(page.n_values >= 0 and page.n_bytes >= 0 for page in pages)


def header(*fields: tuple[int, int, int]) -> bytes:
    """Return a page's header with numbers: (field, type of Thrift's compact protocol, value)."""
    data = b""
    for field, kind, value in fields:
        data += bytes([kind]) + varint(2 * field) + varint(2 * value)
    return data


class Chunk:
    """The fields of a column chunk's metadata that `column_pages` reads."""

    def __init__(self, n_bytes: int, *, at: int = 4, dictionary_at: int | None = None) -> None:
        self.data_page_offset, self.dictionary_page_offset = at, dictionary_at
        self.total_compressed_size = n_bytes


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
    return list(column_pages(pa.BufferReader(data), Chunk(len(data) - 4)))


def test_a_field_that_readers_take_differently_is_refused() -> None:
    (page,) = pages_of((1, I32, 20))
    assert page.n_values == 20
    for kind in (I32, I64):  # Arrow reads no 64-bit number there
        with pytest.raises(PageError, match="has field 1 twice"):
            pages_of((1, I32, 20), (1, kind, 1))
    with pytest.raises(PageError, match="no page"):
        pages_of((1, I64, 20))


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
    chunk = Chunk(100, dictionary_at=dictionary_at)
    with pytest.raises(PageError, match="dictionary is said to begin"):
        list(column_pages(pa.BufferReader(b"PAR1" + bytes(100)), chunk))


@pytest.mark.parametrize("at", [-1, 0, 3])
def test_a_page_before_the_first_byte_of_the_data_is_refused(at: int) -> None:
    with pytest.raises(PageError, match="first page is said to begin"):
        list(column_pages(pa.BufferReader(b"PAR1" + bytes(100)), Chunk(100, at=at)))
