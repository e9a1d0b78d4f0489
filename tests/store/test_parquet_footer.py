"""A footer is read as Arrow reads it, and one that would end the process is refused."""

from __future__ import annotations

import faulthandler
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from store.errors import FormatError
from store.untrusted.bounded_parquet import open_parquet, read_table
from store.untrusted.parquet_footer import TAIL_BYTES, ColumnChunk, read_row_groups
from store.untrusted.thrift import ThriftError
from tests.support.parquet_maker import (
    BINARY,
    INT32_FIELD,
    INT64_FIELD,
    LIST,
    STRUCT,
    Field,
    column_chunk,
    page,
    parquet,
    several,
    structure,
    text,
    whole,
)
from tests.support.sizes import examples

TABLE = pa.table(
    {
        "number": pa.array(range(500), pa.int64()),
        "text": pa.array([f"room {n % 7}" for n in range(500)]),
        "list": pa.array([[1, 2], [3], [], None] * 125, pa.list_(pa.int32())),
        "both": pa.array([{"a": 1.5, "b": [b"x" * 16]}] * 500),
    }
)
NAMES = tuple(ColumnChunk.__slots__)


def written(**options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=300, **options)
    return sink.getvalue().to_pybytes()


def as_arrow_reads(data: bytes) -> list[list[tuple[object, ...]]]:
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [
        [
            tuple(getattr(group.column(number), name) for name in NAMES)
            for number in range(group.num_columns)
        ]
        for group in groups
    ]


def as_we_read(data: bytes) -> list[list[tuple[object, ...]]]:
    return [
        [tuple(getattr(column, name) for name in NAMES) for column in row_group.columns]
        for row_group in read_row_groups(pa.BufferReader(data), n_bytes=len(data))
    ]


def decoded(data: bytes) -> pa.Table:
    source = pa.BufferReader(data)
    file = open_parquet(source, n_bytes=len(data), name="f", verify=False)
    return read_table(file, source, n_bytes=len(data), name="f", columns=None)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("use_dictionary", [False, True])
def test_an_honest_footer_says_what_arrow_says(
    compression: str, version: str, use_dictionary: bool
) -> None:
    data = written(
        compression=compression,
        data_page_version=version,
        use_dictionary=use_dictionary,
        sorting_columns=[pq.SortingColumn(0)],
        write_page_index=True,
    )
    assert as_we_read(data) == as_arrow_reads(data)
    assert decoded(data).equals(TABLE)


@pytest.mark.shortened
def test_what_a_changed_footer_says_is_what_arrow_reads() -> None:
    """Or one of the two refuses it. Arrow may end its process: each is asked in a child."""
    sound = bytearray(written(write_statistics=False))
    length = int.from_bytes(sound[-TAIL_BYTES:-4], "little")
    rng, compared = random.Random(5), 0
    n_changes = examples(600, full=3000)
    for _ in range(n_changes):
        changed = bytearray(sound)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(sound) - TAIL_BYTES - length, len(sound) - TAIL_BYTES)
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, changed[at] ^ 1 << rng.randrange(8)))
        data = bytes(changed)
        try:
            pq.ParquetFile(pa.BufferReader(data))
            ours = as_we_read(data)
        except (pa.ArrowException, OSError, UnicodeDecodeError, ThriftError):
            continue
        compared += 1
        assert is_what_arrow_reads(data, ours), data[-TAIL_BYTES - length :].hex()
    assert compared > n_changes / 10


def is_what_arrow_reads(data: bytes, ours: object) -> bool:
    """Return whether Arrow reads the same, or ends the process. Asks it in a child."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # a test need not show how Arrow ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            same = as_arrow_reads(data) == ours
        except (pa.ArrowException, OSError, IndexError, UnicodeDecodeError):
            same = True
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0


def made(*, more: list[Field] | None = None, beside: list[Field] | None = None, **other: object):
    """Return a file of one number, whose column's chunk has further fields."""
    body = page(n_values=1, data=bytes(4))
    chunk = column_chunk(
        ["a"], n_values=1, at=4, n_bytes=len(body), more=more or (), beside=beside or (), **other
    )
    return parquet(body, columns=[("a", None)], row_groups=[([chunk], 1)])


LEVELS = several(INT64_FIELD, [whole(1)] * 3)  # of a column with one level at most
OF_ANOTHER_KEY = structure((2, STRUCT, structure((1, LIST, several(BINARY, [text("a")])))))


def test_a_file_of_one_number_is_decoded() -> None:
    assert decoded(made())["a"].to_pylist() == [0]


@pytest.mark.parametrize(
    "data",
    [
        made(more=[(16, STRUCT, structure((2, LIST, LEVELS)))]),
        made(more=[(16, STRUCT, structure((3, LIST, LEVELS)))]),
        made(beside=[(8, STRUCT, OF_ANOTHER_KEY)]),
    ],
    ids=["repetition levels", "definition levels", "encrypted"],
)
def test_a_footer_with_which_arrow_ends_the_process_is_one_line(
    data: bytes, tmp_path: Path
) -> None:
    """The attack: the whole command ended with SIGABRT, and named no file."""
    (tmp_path / "f.parquet").write_bytes(data)
    script = (
        "import sys, pyarrow.parquet as pq\n"
        "print(pq.ParquetFile(sys.argv[1]).metadata.row_group(0).column(0).num_values)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "f.parquet")], capture_output=True
    )
    assert done.returncode < 0, "Arrow names it now: is this module needed?"
    with pytest.raises((FormatError, pa.ArrowException, OSError)):
        decoded(data)


def test_columns_that_the_schema_does_not_have_are_refused() -> None:
    """pyarrow would take their description from behind the schema's end."""
    body = page(n_values=1, data=bytes(4))
    chunk = column_chunk(["a"], n_values=1, at=4, n_bytes=len(body))
    data = parquet(body, columns=[("a", None)], row_groups=[([chunk, chunk], 1)])
    with pytest.raises(FormatError, match="a row group has 2 columns"):
        decoded(data)


ENDLESS = several(STRUCT, [whole(0), whole(3)])  # Arrow reads two encodings from it


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (made(encodings=ENDLESS), "a list has type 12, and must have 5"),
        (made(more=[((1 << 16) + 5, INT64_FIELD, whole(9))]), "more than 16 bits"),
        (made(more=[(9, INT64_FIELD, whole(9))]), "field 9 after field 9"),
        (made(more=[(7, INT64_FIELD, whole(9))]), "field 7 after field 9"),
        (made(more=[(11, INT32_FIELD, whole(9))]), "field 11 has type 5, and must have 6"),
        (made(more=[(20, LIST, several(INT32_FIELD, [whole(1)]))]), "a field has type 9"),
        (made(beside=[(9, BINARY, text("x"))]), "a column is encrypted"),
    ],
)
def test_a_footer_that_can_be_read_in_two_ways_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(ThriftError, match=re.escape(fault)):
        as_we_read(data)


@pytest.mark.parametrize("n_kept", range(4, 60, 7))
def test_a_footer_that_is_cut_off_is_refused(n_kept: int) -> None:
    data = made()
    cut = data[: -TAIL_BYTES - n_kept] + data[-TAIL_BYTES:]
    with pytest.raises(ThriftError):
        as_we_read(cut)
