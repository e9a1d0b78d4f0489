"""Read from a Parquet file's footer where its columns lie.

    for row_group in read_row_groups(source, n_bytes=size):
        print(row_group.n_rows, row_group.columns[0].n_values)

pyarrow tells the same of a sound file. Of some others its C++ code throws an error that ends the
process (`FileMetaData.row_group(0).column(0)`, pyarrow 26).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from store.untrusted.thrift import (
    BINARY,
    INT32,
    INT64,
    STRUCT,
    Form,
    ThriftError,
    read_structure,
)

TAIL_BYTES = 8  # the footer's length, and PAR1
# Numbers of the format's fields, parquet.thrift.
ROW_GROUPS, ENCRYPTION, SIGNING_KEY = 4, 8, 9
COLUMNS, N_ROWS = 1, 3
METADATA, CRYPTO_METADATA, ENCRYPTED_METADATA = 3, 8, 9
TYPE, PATH, N_VALUES, COMPRESSED_SIZE, DATA_PAGE_AT, DICTIONARY_PAGE_AT = 1, 3, 5, 7, 9, 11
TYPES = {
    0: "BOOLEAN",
    1: "INT32",
    2: "INT64",
    3: "INT96",
    4: "FLOAT",
    5: "DOUBLE",
    6: "BYTE_ARRAY",
    7: "FIXED_LEN_BYTE_ARRAY",
}
COLUMN: Form = {
    TYPE: INT32,
    2: (INT32,),  # encodings
    PATH: [BINARY],
    N_VALUES: INT64,
    COMPRESSED_SIZE: INT64,
    8: (STRUCT,),  # texts
    DATA_PAGE_AT: INT64,
    DICTIONARY_PAGE_AT: INT64,
    13: (STRUCT,),  # pages of each encoding
    16: {2: (INT64,), 3: (INT64,)},  # how many values have each level
}
FOOTER: Form = {
    2: (STRUCT,),  # the schema
    ROW_GROUPS: [
        {
            COLUMNS: [{METADATA: COLUMN, CRYPTO_METADATA: {}, ENCRYPTED_METADATA: BINARY}],
            N_ROWS: INT64,
            4: (STRUCT,),  # sorted by
        }
    ],
    5: (STRUCT,),  # texts
    7: (STRUCT,),  # orders
    ENCRYPTION: {},
    SIGNING_KEY: BINARY,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChunk:
    """One column of one row group. The names are pyarrow's."""

    path_in_schema: str
    physical_type: str
    num_values: int  # with nulls, and an empty list is one
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    n_rows: int
    columns: tuple[ColumnChunk, ...]


def read_row_groups(source: Any, *, n_bytes: int) -> list[RowGroup]:
    """Read the row groups of a file of `n_bytes` that Arrow could open. Raises ThriftError."""
    source.seek(max(0, n_bytes - TAIL_BYTES))
    length = int.from_bytes(source.read(TAIL_BYTES)[:4], "little")
    source.seek(max(0, n_bytes - TAIL_BYTES - length))
    try:
        footer, _ = read_structure(source.read(length), 0, FOOTER)
        if ENCRYPTION in footer or SIGNING_KEY in footer:
            raise ThriftError("it is encrypted")
        return [
            RowGroup(
                n_rows=row_group[N_ROWS],
                columns=tuple(_column_chunk(column) for column in row_group[COLUMNS]),
            )
            for row_group in footer[ROW_GROUPS]
        ]
    except (IndexError, KeyError) as error:
        raise ThriftError("its footer is not whole") from error


def _column_chunk(column: Mapping[int, Any]) -> ColumnChunk:
    if CRYPTO_METADATA in column or ENCRYPTED_METADATA in column:
        raise ThriftError("a column is encrypted")
    metadata = column[METADATA]
    if metadata[TYPE] not in TYPES:
        raise ThriftError(f"a column has the type {metadata[TYPE]}, which is none of Parquet's")
    return ColumnChunk(
        path_in_schema=b".".join(metadata[PATH]).decode(errors="replace"),
        physical_type=TYPES[metadata[TYPE]],
        num_values=metadata[N_VALUES],
        total_compressed_size=metadata[COMPRESSED_SIZE],
        data_page_offset=metadata[DATA_PAGE_AT],
        dictionary_page_offset=metadata.get(DICTIONARY_PAGE_AT),
    )
