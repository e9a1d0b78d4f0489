"""Make Parquet files by hand: footers and page headers that no library writes.

    body = page(n_values=2, data=bytes(8))
    chunk = column_chunk(["a"], n_values=2, at=4, n_bytes=len(body))
    data = parquet(body, columns=[("a", None)], row_groups=[([chunk], 2)])

A structure of Thrift's compact protocol is a list of (field, type, encoded value).
"""

from __future__ import annotations

from collections.abc import Sequence

INT32_FIELD, INT64_FIELD, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
INT32 = 1  # the physical type of all columns
REQUIRED, OPTIONAL = 0, 1
PLAIN, RLE = 0, 3
UNKNOWN_TYPE = 11  # of LogicalType: every value is null
MAGIC = b"PAR1"

Field = tuple[int, int, bytes]


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def whole(number: int) -> bytes:
    return varint(2 * number if number >= 0 else -2 * number - 1)


def text(content: str) -> bytes:
    return varint(len(content)) + content.encode()


def structure(*fields: Field) -> bytes:
    encoded, last = bytearray(), 0
    for field, kind, value in fields:
        if 0 < field - last <= 15:
            encoded += bytes([(field - last) << 4 | kind]) + value
        else:
            encoded += bytes([kind]) + whole(field) + value
        last = field
    return bytes(encoded) + b"\0"


def several(kind: int, items: Sequence[bytes]) -> bytes:
    return bytes([0xF0 | kind]) + varint(len(items)) + b"".join(items)


def page(*, n_values: int, data: bytes) -> bytes:
    """Return a data page with its header."""
    counts = structure(
        (1, INT32_FIELD, whole(n_values)),
        (2, INT32_FIELD, whole(PLAIN)),
        (3, INT32_FIELD, whole(RLE)),
        (4, INT32_FIELD, whole(RLE)),
    )
    sizes = [(number, INT32_FIELD, whole(len(data))) for number in (2, 3)]
    return structure((1, INT32_FIELD, whole(0)), *sizes, (5, STRUCT, counts)) + data


def column_chunk(
    path: Sequence[str],
    *,
    n_values: int,
    at: int,
    n_bytes: int,
    encodings: bytes | None = None,
    more: Sequence[Field] = (),
    beside: Sequence[Field] = (),
) -> bytes:
    """Return what a footer says of the column in one row group, whose pages begin at byte `at`.

    `encodings` is another list than the usual one, `more` are further fields of what it says, and
    `beside` of the structure around it.
    """
    about = structure(
        (1, INT32_FIELD, whole(INT32)),
        (2, LIST, encodings or several(INT32_FIELD, [whole(PLAIN), whole(RLE)])),
        (3, LIST, several(BINARY, [text(name) for name in path])),
        (4, INT32_FIELD, whole(0)),
        (5, INT64_FIELD, whole(n_values)),
        (6, INT64_FIELD, whole(n_bytes)),
        (7, INT64_FIELD, whole(n_bytes)),
        (9, INT64_FIELD, whole(at)),
        *more,
    )
    return structure((2, INT64_FIELD, whole(at)), (3, STRUCT, about), *beside)


def parquet(
    body: bytes,
    *,
    columns: Sequence[tuple[str, int | None]],
    row_groups: Sequence[tuple[Sequence[bytes], int]],
    n_rows: int | None = None,
) -> bytes:
    """Return a file of whole numbers.

    `columns` have a name, and a logical type or None. `row_groups` have column chunks and a number
    of rows. The footer says `n_rows`, by default those of all groups.
    """
    schema = [structure((4, BINARY, text("schema")), (5, INT32_FIELD, whole(len(columns))))]
    for name, logical in columns:
        repetition = REQUIRED if logical is None else OPTIONAL
        fields: list[Field] = [
            (1, INT32_FIELD, whole(INT32)),
            (3, INT32_FIELD, whole(repetition)),
            (4, BINARY, text(name)),
        ]
        if logical is not None:
            fields.append((10, STRUCT, structure((logical, STRUCT, structure()))))
        schema.append(structure(*fields))
    groups = [
        structure(
            (1, LIST, several(STRUCT, chunks)),
            (2, INT64_FIELD, whole(100)),
            (3, INT64_FIELD, whole(n)),
        )
        for chunks, n in row_groups
    ]
    said = sum(n for _, n in row_groups) if n_rows is None else n_rows
    footer = structure(
        (1, INT32_FIELD, whole(2)),
        (2, LIST, several(STRUCT, schema)),
        (3, INT64_FIELD, whole(said)),
        (4, LIST, several(STRUCT, groups)),
    )
    return MAGIC + body + footer + len(footer).to_bytes(4, "little") + MAGIC
