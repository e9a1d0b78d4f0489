"""Small files that stand for gigabytes, and files of gigabytes without content: each is one line,
within little memory.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from store import (
    FORMAT,
    Catalog,
    FormatError,
    RunLayout,
    VersionRecord,
    export,
    read_segment,
    to_table,
    write_open_sql,
    write_segment,
)
from store.hashing import file_digest
from store.maintenance.segment_rows import open_rows
from store.reading import mirror
from store.records import SEGMENT_SCHEMA, UID_TYPE
from store.segment_encoding import decode
from store.segments import SegmentMeta
from store.storage import LocalStorage
from store.untrusted import bounded_parquet
from store.untrusted.bounded_parquet import open_parquet, read_table
from store.untrusted.parquet_footer import read_row_groups
from store.untrusted.parquet_pages import column_pages
from tests.support.parquet_maker import UNKNOWN_TYPE, column_chunk, page, parquet, varint
from tests.support.store_samples import make_trajectory, open_train_group, play

LIMIT_BYTES = 5 * 2**30  # of private memory, half of what the files below stand for
TIME_LIMIT_S = 120
HUGE_BYTES = 20 * 2**30
N_ROWS, TEXT_BYTES = 6_000, 2_000_000  # 12 GB
LIMITED = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT_BYTES}, -1))  # a query's process has its own
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def repeated(row: pa.Table, *, n_rows: int) -> pa.Table:
    """Return a table of `n_rows` times this row, whose text is stored once."""
    columns = []
    for field in SEGMENT_SCHEMA:
        if field.name == "obs_text":
            indices = pa.array(range(1), pa.int32()).take(pa.nulls(n_rows, pa.int32()).fill_null(0))
            columns.append(pa.DictionaryArray.from_arrays(indices, pa.array(["x" * TEXT_BYTES])))
        elif pa.types.is_nested(field.type):
            columns.append(pa.nulls(n_rows, field.type))
        else:
            columns.append(pa.repeat(row[field.name][0], n_rows))
    return pa.table(columns, names=SEGMENT_SCHEMA.names)


def encoded(table: pa.Table, layout: RunLayout, *, format: str = FORMAT) -> pa.Buffer:
    metadata = {
        "format": format,
        "run_id": layout.info.run_id,
        "worker": "w0",
        "epoch": "1",
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=True,
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        writer.add_key_value_metadata(metadata)
        writer.write_table(table, row_group_size=table.num_rows)
    return sink.getvalue()


def run_with(
    root: Path, damage: Callable[[RunLayout, SegmentMeta], SegmentMeta]
) -> tuple[RunLayout, SegmentMeta]:
    """Make a run of two groups. The second one's file is what `damage` returns."""
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d0", learner_step=None)
        )
        play(layout, catalog, open_train_group(catalog, 0), version=0)
        group = open_train_group(catalog, 1, size=1)
        meta = write_segment(
            layout, [make_trajectory(group, 0, version=0)], worker="w0", epoch=catalog.epoch
        )
        meta = damage(layout, meta)
        catalog.commit(meta, epoch=catalog.epoch)
        export(catalog, layout)
    return layout, meta


def bomb(layout: RunLayout, meta: SegmentMeta) -> SegmentMeta:
    row = pq.read_table(layout.root / meta.path).slice(0, 1)
    data = encoded(repeated(row, n_rows=N_ROWS), layout)
    digest = file_digest(data)
    path = meta.path.replace(meta.segment_id, digest)
    layout.storage.write(path, data)
    layout.storage.remove(meta.path)
    (trajectory,) = meta.trajectories
    return dataclasses.replace(
        meta,
        segment_id=digest,
        path=path,
        digest=digest,
        n_steps=N_ROWS,
        n_bytes=data.size,
        trajectories=(dataclasses.replace(trajectory, n_steps=N_ROWS),),
    )


def counted(n_rows: int) -> pa.Array:
    """Return a uid for each row. Split into streams of bytes, they compress to almost nothing."""
    return pa.array([number.to_bytes(16, "little") for number in range(n_rows)], UID_TYPE)


@pytest.mark.parametrize(
    ("n_rows", "has_uids", "says"),
    [(100_000, False, "100,000 rows"), (4000, True, "4,000 trajectories")],
)
def test_a_small_file_has_no_room_for_many_rows(
    tmp_path: Path, n_rows: int, has_uids: bool, says: str
) -> None:
    """The attack: files of 40 KB with 250,000 trajectories each kept `gigpo fsck` for minutes."""
    layout, meta = run_with(tmp_path / "run", lambda _, meta: meta)
    row = pq.read_table(layout.root / meta.path).slice(0, 1)
    table = repeated(row, n_rows=n_rows)
    if has_uids:
        table = table.set_column(0, "traj_uid", counted(n_rows))
    plain = table.set_column(
        table.column_names.index("obs_text"), "obs_text", pa.array(["x"] * n_rows)
    )
    sink = pa.BufferOutputStream()
    pq.write_table(
        plain.cast(SEGMENT_SCHEMA).replace_schema_metadata(
            {"format": FORMAT, "run_id": layout.info.run_id, "worker": "w0", "epoch": "1"}
        ),
        sink,
        compression="zstd",
        use_dictionary=[name for name in SEGMENT_SCHEMA.names if name != "traj_uid"],
        column_encoding={"traj_uid": "BYTE_STREAM_SPLIT"},
    )
    data = sink.getvalue()
    for read in (decode, open_rows):
        with pytest.raises(FormatError, match=says):
            read(data, path=tmp_path / "small.parquet")


def sparse(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, HUGE_BYTES)


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `gigpo` with little memory."""
    command = [sys.executable, "-c", LIMITED, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIME_LIMIT_S, cwd=Path(__file__).parents[2]
    )


@pytest.fixture(scope="module")
def bombed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunLayout, SegmentMeta]:
    layout, meta = run_with(tmp_path_factory.mktemp("bomb") / "run", bomb)
    assert meta.n_bytes < 100_000
    return layout, meta


# rebuild is the last: it moves the file
@pytest.mark.parametrize("command", ["fsck", "export", "rebuild"])
def test_a_small_file_that_stands_for_gigabytes_is_one_line(
    command: str, bombed: tuple[RunLayout, SegmentMeta], tmp_path: Path
) -> None:
    layout, meta = bombed
    options = {"export": (str(tmp_path / "new"),), "rebuild": ("--force",), "fsck": ()}[command]
    done = limited(command, str(layout.root), *options)
    lines = [
        line for line in (done.stdout + done.stderr).splitlines() if "stands for more than" in line
    ]
    assert len(lines) == 1 and meta.segment_id in lines[0] and "no run wrote it" in lines[0], (
        done.stdout,
        done.stderr,
    )
    assert "Traceback" not in done.stderr


def test_its_rows_are_not_decoded(bombed: tuple[RunLayout, SegmentMeta]) -> None:
    layout, meta = bombed
    path = next(layout.root.rglob(f"{meta.segment_id}.parquet"))  # in quarantine after a rebuild
    here = dataclasses.replace(meta, path=layout.relative(path))
    with pytest.raises(FormatError, match="stands for more than .* no run wrote it"):
        read_segment(layout, here)


def test_the_rows_are_the_same_whether_they_are_counted_or_not(tmp_path: Path) -> None:
    layout, meta = run_with(tmp_path / "run", lambda _, meta: meta)
    assert read_segment(layout, meta, is_own=True).equals(read_segment(layout, meta))


@pytest.mark.parametrize(
    ("name", "value", "length"),
    [("prompt_ids", 7, 100_000_000), ("admissible_actions", "x" * 1000, 1_200_000)],
)
def test_one_row_with_a_list_without_end_is_not_decoded(
    name: str, value: object, length: int, tmp_path: Path
) -> None:
    """Equal values of a list take a few bytes for any number of them."""
    layout, meta = run_with(tmp_path / "run", lambda _, meta: meta)
    row = pq.read_table(layout.root / meta.path).slice(0, 1)
    kind = SEGMENT_SCHEMA.field(name).type.value_type
    repeated_value = pa.array([value], kind).dictionary_encode()
    indices = pa.nulls(length, pa.int32()).fill_null(0)
    values = pa.DictionaryArray.from_arrays(indices, repeated_value.dictionary)
    values = values if pa.types.is_string(kind) else values.cast(kind)
    column = pa.ListArray.from_arrays(pa.array([0, length], pa.int32()), values)
    data = encoded(row.set_column(SEGMENT_SCHEMA.get_field_index(name), name, column), layout)
    assert data.size < 100_000
    before = pa.total_allocated_bytes()
    with pytest.raises(FormatError, match="stands for more than .* no run wrote it"):
        decode(data, path="hostile")
    assert pa.total_allocated_bytes() - before < 10**8


@pytest.mark.parametrize("kind", [pa.binary(10_000_000), pa.list_(pa.int64(), 1_000_000)])
def test_nulls_of_a_large_size_are_not_decoded(kind: pa.DataType, tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, pa.schema([("wide", kind)])) as writer:
        writer.write_table(pa.table({"wide": pa.nulls(1, kind)}))
    source = pa.BufferReader(sink.getvalue())
    with pytest.raises(FormatError, match="values of one large size.* no run wrote it"):
        open_parquet(source, n_bytes=source.size(), name="hostile", verify=True)


@pytest.mark.parametrize("is_nested", [False, True])
def test_an_extension_type_hides_no_large_nulls(is_nested: bool) -> None:
    """Arrow registers arrow.opaque by itself: its storage may be of any size."""
    kind = pa.opaque(pa.binary(10_000_000), "type", "vendor")
    column = pa.ExtensionArray.from_storage(kind, pa.nulls(1, kind.storage_type))
    if is_nested:
        column = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), column)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"wide": column}), sink)
    source = pa.BufferReader(sink.getvalue())
    with pytest.raises(FormatError, match="an extension type.* no run wrote it"):
        open_parquet(source, n_bytes=source.size(), name="hostile", verify=True)


def read_all(data: pa.Buffer) -> pa.Table:
    source = pa.BufferReader(data)
    file = open_parquet(source, n_bytes=data.size, name="hostile", verify=True)
    return read_table(file, source, n_bytes=data.size, name="hostile", columns=None)


@pytest.mark.parametrize("value", [7, "x" * 1000])
def test_lists_of_all_row_groups_count_together(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row group of such a file is as large as a run may write."""
    monkeypatch.setattr(bounded_parquet, "MAX_DECODED_BYTES", 10_000_000)
    length = 500_000 if value == 7 else 6_000
    one = pa.table({"list": pa.array([[value] * length])})
    for n_groups, is_read in ((1, True), (3, False)):
        sink = pa.BufferOutputStream()
        table = pa.concat_tables([one] * n_groups)
        pq.write_table(table, sink, row_group_size=1, compression="zstd")
        if is_read:
            assert read_all(sink.getvalue()).equals(table)
        else:
            with pytest.raises(FormatError, match="stands for more than .* no run wrote it"):
                read_all(sink.getvalue())


def test_a_page_behind_the_end_of_its_column_is_not_decoded() -> None:
    """Arrow reads on behind it in files of old writers, up to the number that the footer says."""
    sink = pa.BufferOutputStream()
    table = pa.table({"list": pa.array([[0] * 10_000])})
    pq.write_table(table, sink, compression="none", write_statistics=False, store_schema=False)
    data = sink.getvalue().to_pybytes()
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    column, writer = metadata.row_group(0).column(0), metadata.created_by.encode()

    def numbers(n_stored: int) -> bytes:  # fields 5 to 7 of a column's metadata, in its footer
        sizes = (column.num_values, column.total_uncompressed_size, n_stored)
        return b"".join(b"\x16" + varint(2 * number) for number in sizes) + b"\x26"

    footer_bytes = int.from_bytes(data[-8:-4], "little")
    pages, footer = data[: -8 - footer_bytes], data[-8 - footer_bytes : -8]
    whole = numbers(column.total_compressed_size)
    assert footer.count(whole) == 1 and footer.count(writer) == 1
    dictionary_only = numbers(column.data_page_offset - column.dictionary_page_offset)
    old = b"parquet-mr version 1.2.8 (build "
    old += b"x" * (len(writer) - len(old) - 1) + b")"
    footer = footer.replace(whole, dictionary_only).replace(writer, old)
    changed = pages + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    assert read_all(pa.py_buffer(data)).equals(table)
    with pytest.raises(FormatError, match=r"was written by parquet-mr version 1\.2\.8"):
        read_all(pa.py_buffer(changed))


@pytest.mark.parametrize("is_list", [False, True])
def test_a_page_that_is_not_compressed_has_the_bytes_that_are_there(is_list: bool) -> None:
    """The attack: its header said that it had none, and its text was repeated without a count."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 500), pa.array(["x" * 4_000_000]))
    table = pa.table({"text": texts})
    if is_list:
        table = pa.table({"text": pa.ListArray.from_arrays(pa.array([0, 500]), texts)})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="none",
        store_schema=False,
        write_statistics=False,
        dictionary_pagesize_limit=1 << 30,
    )
    data = bytearray(sink.getvalue().to_pybytes())
    column = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0).column(0)
    # The header begins with the fields 1 and 2, the page's kind and its uncompressed size.
    at = data.index(b"\x15", column.dictionary_page_offset + 1) + 1
    while data[at] & 0x80:
        data[at] = 0x80
        at += 1
    data[at] = 0
    (row_group,) = read_row_groups(pa.BufferReader(bytes(data)), n_bytes=len(data))
    (dictionary, *_) = column_pages(pa.BufferReader(bytes(data)), row_group.columns[0])
    assert dictionary.n_bytes > 4_000_000
    with pytest.raises(FormatError, match="stands for more than"):
        read_all(pa.py_buffer(bytes(data)))


def test_pages_that_row_groups_share_are_not_looked_through_again_for_each() -> None:
    """The attack: 374 KB with 100,000 pages in 10,000 groups would have taken seven minutes."""
    body = page(n_values=1, data=bytes(4)) + 100 * page(n_values=0, data=b"")
    chunk = column_chunk(["a"], n_values=1, at=4, n_bytes=len(body))
    once = parquet(body, columns=[("a", None)], row_groups=[([chunk], 1)])
    assert read_all(pa.py_buffer(once))["a"].to_pylist() == [0]
    shared = parquet(body, columns=[("a", None)], row_groups=1000 * [([chunk], 1)])
    with pytest.raises(FormatError, match="its columns together are longer than the file"):
        read_all(pa.py_buffer(shared))


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("lie", ["type", "path"])
def test_what_a_chunk_says_of_its_column_is_compared_with_the_schema(
    lie: str, is_list: bool
) -> None:
    """The attack: texts that were said to be numbers, or another column, were not counted."""
    column = pa.array([["x" * 1000] * 3] * 2) if is_list else pa.array(["x" * 1000] * 2)
    other = pa.array([[1], [2]]) if is_list else pa.array([1, 2])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"one": column, "two": other}), sink, store_schema=False)
    data = sink.getvalue().to_pybytes()
    n_footer = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - n_footer], bytearray(data[-8 - n_footer : -8])
    names = ["one", "list", "element"] if is_list else ["one"]
    path = bytes([len(names) << 4 | 8]) + b"".join(bytes([len(n)]) + n.encode() for n in names)
    at = footer.index(b"\x19" + path)  # field 3 of the chunk's metadata; field 1 is the type
    if lie == "type":
        kind = footer.rindex(b"\x15\x0c\x19", 0, at) + 1
        footer[kind] = 2  # INT32, where it was BYTE_ARRAY
    else:
        footer[at:] = footer[at:].replace(b"\x03one", b"\x03two", 1)
    changed = body + bytes(footer) + len(footer).to_bytes(4, "little") + b"PAR1"
    assert read_all(pa.py_buffer(data)).num_rows == 2
    with pytest.raises(FormatError, match="one.*, BYTE_ARRAY, is said to be"):
        read_all(pa.py_buffer(changed))


def test_a_negative_size_lifts_no_bound() -> None:
    """The attack: a group without rows said so, and the pages of the others were shared."""
    body = page(n_values=1, data=bytes(4)) + 100 * page(n_values=0, data=b"")
    chunk = column_chunk(["a"], n_values=1, at=4, n_bytes=len(body))
    empty = column_chunk(["a"], n_values=0, at=4, n_bytes=-(1 << 60))
    shared = parquet(
        body, columns=[("a", None)], row_groups=[([empty], 0), *(1000 * [([chunk], 1)])]
    )
    with pytest.raises(FormatError, match="a is said to take -1,152,921,504,606,846,976 bytes"):
        read_all(pa.py_buffer(shared))


@pytest.mark.parametrize("n_said", [1, None])
def test_rows_of_nulls_that_take_no_byte_are_not_decoded(n_said: int | None) -> None:
    """The attack: 6 KB stand for 430,000 million rows, of which the footer says one."""
    n_values = 2**31 - 1
    levels = varint(n_values << 1) + b"\0"  # one run: all of them are null
    body = 3 * page(n_values=n_values, data=len(levels).to_bytes(4, "little") + levels)
    chunk = column_chunk(["a"], n_values=3 * n_values, at=4, n_bytes=len(body))
    data = parquet(
        body, columns=[("a", UNKNOWN_TYPE)], row_groups=[([chunk], 3 * n_values)], n_rows=n_said
    )
    with pytest.raises(FormatError, match=r"6,442,450,941 rows in \d+ bytes"):
        read_all(pa.py_buffer(data))


def test_small_batches_count_with_the_objects_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: a large dictionary makes each row a batch. Its objects took 10 GB, uncounted."""
    monkeypatch.setattr(bounded_parquet, "BATCH_BYTES", 1)
    n_rows = 5000
    table = pa.table({f"c{number}": pa.nulls(n_rows, pa.string()) for number in range(30)})
    table = table.append_column("text", pa.array(["x", "y"] * (n_rows // 2)))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue()
    assert read_all(data).num_rows == n_rows
    monkeypatch.setattr(bounded_parquet, "MAX_DECODED_BYTES", 1 << 20)
    with pytest.raises(FormatError, match="stands for more than"):
        read_all(data)


def test_texts_of_a_structure_are_counted_one_after_the_other() -> None:
    """The attack: while one field of 593 bytes was counted, its sibling took gigabytes."""
    n_values, text = 3000, pa.array(["x" * 1_000_000])
    indices = pa.array([0] * n_values, pa.int32())
    fields = [pa.DictionaryArray.from_arrays(indices, text) for _ in range(2)]
    values = pa.StructArray.from_arrays(fields, ["a", "b"])
    table = pa.table({"l": pa.ListArray.from_arrays(pa.array([0, n_values], pa.int32()), values)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", store_schema=False)
    usual, pool = pa.default_memory_pool(), pa.system_memory_pool()  # no other test takes from it
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(FormatError, match="stands for more than"):
            read_all(sink.getvalue())
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 500 << 20


@pytest.mark.parametrize(("encoding", "number"), [("BYTE_ARRAY", 7), ("LENGTH_BYTE_ARRAY", 6)])
def test_texts_in_a_delta_encoding_are_not_decoded(encoding: str, number: int) -> None:
    """An equal text takes two bytes, whatever its length. Lengths of 0 take none at all."""
    sink = pa.BufferOutputStream()
    texts = pa.table({"text": pa.repeat("x" * 100_000, 1000)})
    pq.write_table(texts, sink, use_dictionary=False, column_encoding={"text": f"DELTA_{encoding}"})
    with pytest.raises(FormatError, match=f"a page has the encoding {number}, which is none of"):
        read_all(sink.getvalue())


@pytest.mark.parametrize("is_list", [False, True])
def test_a_count_inside_a_page_fills_no_memory(is_list: bool) -> None:
    """The attack: a page of 3 texts began with a block of 2 billion lengths, and took 8 GB."""
    mark = "the only text" * 20
    texts = pa.array([[mark]] * 3 if is_list else [mark] * 3)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"text": texts}),
        sink,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        column_encoding={"text.list.element" if is_list else "text": "DELTA_LENGTH_BYTE_ARRAY"},
    )
    data = bytearray(sink.getvalue().to_pybytes())
    # A block's header: the values of a block, its parts, and the lengths that follow.
    at = data.rindex(varint(128) + varint(4) + varint(3), 0, data.index(mark.encode()))
    n_lengths = 0x7FFFFF80
    lengths = varint(n_lengths) + varint(1) + varint(n_lengths + 1) + varint(0) + varint(0) + b"\0"
    data[at : at + len(lengths)] = lengths
    with pytest.raises(FormatError, match="a page has the encoding 6"):
        read_all(pa.py_buffer(bytes(data)))


def test_two_fields_of_one_name_are_refused() -> None:
    """The attack: only one of them was counted, or none of the two was found."""
    fields = pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], ["a", "a"])
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    for table in (pa.table({"s": fields}), pa.table({"l": pa.array([[1]])}), twice):
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, store_schema=False)
        if table.column_names == ["l"]:
            assert read_all(sink.getvalue()).equals(table)
        else:
            with pytest.raises(FormatError, match="of one name"):
                read_all(sink.getvalue())


def test_a_view_of_texts_hides_none_that_is_no_utf_8() -> None:
    texts = pa.array([b"ok", b"\xff"], pa.binary_view()).view(pa.string_view())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink)
    with pytest.raises(FormatError, match="has a text that is no UTF-8 in row 1"):
        read_all(sink.getvalue())


def test_wide_values_of_a_list_count_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decimal takes 32 bytes, so a list of 10,000 is refused where one of numbers is read."""
    monkeypatch.setattr(bounded_parquet, "MAX_DECODED_BYTES", 200_000)
    for kind, is_read in ((pa.int64(), True), (pa.decimal256(70, 0), False)):
        table = pa.table({"l": pa.array([[7] * 10_000], pa.list_(kind))})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        if is_read:
            assert read_all(sink.getvalue()).equals(table)
        else:
            with pytest.raises(FormatError, match="stands for more than"):
                read_all(sink.getvalue())


def test_long_lists_that_a_run_may_write_are_decoded(tmp_path: Path) -> None:
    """Many commands, each of a few characters, are less than the dictionary might stand for."""
    layout, meta = run_with(tmp_path / "run", lambda _, meta: meta)
    row = pq.read_table(layout.root / meta.path).slice(0, 1)
    commands = [f"take the thing {number}" for number in range(5000)] * 20
    column = pa.array([commands], SEGMENT_SCHEMA.field("admissible_actions").type)
    number = SEGMENT_SCHEMA.get_field_index("admissible_actions")
    data = encoded(row.set_column(number, "admissible_actions", column), layout)
    assert decode(data, path="ours")["admissible_actions"].to_pylist() == [commands]


def test_rows_without_content_are_counted(tmp_path: Path) -> None:
    """Nulls take a few bytes for any number of rows, and eight each when they are decoded."""
    layout, _ = run_with(tmp_path / "run", lambda _, meta: meta)
    data = encoded(pa.table({"seed": pa.nulls(20_000_000, pa.int64())}), layout)
    path = f"segments/w0/{file_digest(data)}.parquet"
    layout.storage.write(path, data)
    os.utime(layout.root / path, (1e9, 1e9))
    done = limited("fsck", str(layout.root))
    assert "has 20,000,000 rows" in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_copy_of_a_storage_takes_no_such_file(tmp_path: Path) -> None:
    layout, _ = run_with(tmp_path / "run", lambda _, meta: meta)
    copy = RunLayout.create(tmp_path / "copy", config_yaml="a: 1\n")
    data = encoded(pa.table({"seed": pa.nulls(20_000_000, pa.int64())}), layout)
    path = f"segments/w0/{file_digest(data)}.parquet"
    layout.storage.write(path, data)
    with pytest.raises(FormatError, match="has 20,000,000 rows"):
        mirror._fetch(layout.storage, copy, path, None)
    assert not copy.storage.exists(path)


@pytest.mark.parametrize("command", ["fsck", "sql", "export", "rebuild"])
def test_a_file_that_grew_to_20_gb_is_not_read(command: str, tmp_path: Path) -> None:
    layout, meta = run_with(tmp_path / "run", lambda _, meta: meta)
    sparse(layout.root / meta.path)
    options = {
        "export": (str(tmp_path / "new"),),
        "rebuild": ("--force",),
        "sql": ("SELECT * FROM steps",),
        "fsck": (),
    }
    done = limited(command, str(layout.root), *options[command])
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    if command == "sql":  # DuckDB reads the file's last bytes, and says what they are not
        assert done.returncode != 0 and len(done.stderr.splitlines()) <= 3
    else:
        lines = [line for line in said.splitlines() if meta.segment_id in line]
        whys = {
            "export": "cannot be read",
            "fsck": f"{HUGE_BYTES:,} bytes",
            "rebuild": f"{HUGE_BYTES:,} bytes",
        }
        assert lines and whys[command] in lines[0], said


def test_an_exported_table_that_stands_for_gigabytes_is_one_line(tmp_path: Path) -> None:
    layout, _ = run_with(tmp_path / "run", lambda _, meta: meta)
    path = next(layout.exports.glob("groups-*.parquet"))
    row = to_table([make_trajectory(open_group_of(layout), 0, version=0)]).slice(0, 1)
    path.chmod(0o644)
    path.write_bytes(memoryview(encoded(repeated(row, n_rows=N_ROWS), layout)))
    done = limited("fsck", str(layout.root))
    said = done.stdout + done.stderr
    assert "stands for more than" in said and "Traceback" not in said, said
    # A rebuild reads no exported table.
    done = limited("rebuild", str(layout.root), "--force")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def open_group_of(layout: RunLayout):
    with Catalog.open(layout) as catalog:
        return open_train_group(catalog, 2, size=1)


def test_files_of_the_storage_have_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    storage = LocalStorage(tmp_path)
    assert storage.read("file", at_most=5).size == 5
    with pytest.raises(Exception, match="5 bytes, more than 4: no run wrote it"):
        storage.read("file", at_most=4)
    assert storage.digest("file") == file_digest(b"12345")
