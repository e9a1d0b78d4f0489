"""Texts that are no UTF-8, which DuckDB and Python cannot read: no door of a run takes them in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.__main__ import main
from store import Catalog, FormatError, Group, RunLayout, read_segments, to_table
from store.exchange.dataset_export import export_selection
from store.exchange.dataset_import import import_selection
from store.exchange.offline_import import find_sources, parse_source, take_sources
from store.hashing import uid
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.maintenance.repair import repair
from store.reading.reader import open_run
from store.records import SEGMENT_SCHEMA
from store.untrusted.bounded_parquet import open_parquet, read_table
from tests.support.fast_directory import fast_directory
from tests.support.foreign_texts import run_with_bad_text, with_bad_text
from tests.support.forged_dataset import write_dataset
from tests.support.sizes import some
from tests.support.store_runs import make_run
from tests.support.store_samples import make_trajectory

TEXT_COLUMNS = [
    field.name for field in SEGMENT_SCHEMA if field.type in (pa.string(), pa.list_(pa.string()))
]
THEIRS = "f" * 32  # a run id


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def group_rows(ordinal: int, *, run_id: str = THEIRS, size: int = 2) -> pa.Table:
    """Return the rows of a whole training group: three steps of each trajectory."""
    group_uid = uid(run_id, "train", ordinal, None)
    group = Group.imported(group_uid=group_uid, task_id="t", size=size)
    played = [replace(make_trajectory(group, member), split="train") for member in range(size)]
    return to_table(played)


def live_paths(layout: RunLayout) -> list[str]:
    with Catalog.open(layout) as catalog:
        segment_ids = [segment.segment_id for segment in catalog.live_segments()]
        return [meta.path for meta in catalog.segment_metas(segment_ids)]


def repaired(layout: RunLayout) -> list[str]:
    with Catalog.open(layout) as catalog:
        return repair(catalog, layout, findings=check(layout, level=CONTENTS))


def query_all(run: Path) -> int:
    """Read every text of a run, as its owner may."""
    with open_run(run) as reader:
        return len(reader.sql(f"SELECT {', '.join(TEXT_COLUMNS)} FROM steps"))


def test_the_schema_has_these_texts() -> None:
    """Name them once, so that a new text column is looked at here."""
    assert len(TEXT_COLUMNS) == 11


@pytest.mark.shortened
@pytest.mark.parametrize("column", some(TEXT_COLUMNS, every=3))
@pytest.mark.parametrize("row", [0, 4])
def test_a_dataset_with_such_a_text_is_not_imported(tmp_path: Path, column: str, row: int) -> None:
    """The attack: a query of the column failed ever after, and fsck called the run whole."""
    mine = make_run(tmp_path / "mine")
    n_rows = query_all(mine.root)
    # Of two files the second is the bad one: nothing of the first is imported either.
    forged = with_bad_text(group_rows(1), column, row=row)
    place = write_dataset(tmp_path / "theirs", group_rows(0), forged, run_id=THEIRS, size=2)
    told = f"part-00001.parquet has a {column} that is no UTF-8 in row {row}, counted from 0"
    with pytest.raises(FormatError, match=told):
        import_selection(mine.root, place)
    assert query_all(mine.root) == n_rows
    assert check(RunLayout.open(mine.root), level=CONTENTS) == []


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = make_run(tmp_path / "mine")
    table = with_bad_text(group_rows(0), "split", row=3)
    place = write_dataset(tmp_path / "theirs", table, run_id=THEIRS, size=2)
    assert main(["import", str(mine.root), str(place)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "has a split that is no UTF-8 in row 3" in line


def test_lost_trajectories_do_not_come_back_with_such_a_text(tmp_path: Path) -> None:
    """Whoever has an export of the run may have changed it."""
    mine = make_run(tmp_path / "mine")
    export_selection(mine.root, tmp_path / "honest", where="split = 'train'", as_of=None)
    (path, *_) = live_paths(mine)
    (mine.root / path).unlink()
    repaired(mine)
    n_rows = query_all(mine.root)
    rows = pa.concat_tables(
        pq.read_table(part) for part in (tmp_path / "honest" / "data").iterdir()
    ).replace_schema_metadata(None)
    forged = with_bad_text(rows, "action_text", row=0)
    place = write_dataset(tmp_path / "forged", forged, run_id=mine.info.run_id, size=2)
    with pytest.raises(FormatError, match="has a action_text that is no UTF-8 in row 0"):
        import_selection(mine.root, place)
    assert query_all(mine.root) == n_rows


@pytest.mark.shortened
@pytest.mark.parametrize("column", some(TEXT_COLUMNS, every=3))
def test_a_source_with_such_a_text_is_refused_before_a_run_is_made(
    tmp_path: Path, column: str
) -> None:
    target = make_run(tmp_path / "target")
    n_rows = query_all(target.root)
    table = with_bad_text(group_rows(0), column, row=5)
    place = write_dataset(tmp_path / "dataset", table, run_id=THEIRS, size=2)
    source = parse_source(str(place))
    for take in (
        lambda: find_sources([source], order=""),
        lambda: take_sources(target.root, [source], order=""),
    ):
        with pytest.raises(FormatError, match=f"has a {column} that is no UTF-8 in row 5"):
            take()
    assert query_all(target.root) == n_rows


@pytest.mark.parametrize("column", ["action_text", "admissible_actions"])
def test_nothing_is_taken_from_a_strangers_run_with_such_a_text(
    tmp_path: Path, column: str
) -> None:
    target = make_run(tmp_path / "target")
    n_rows = query_all(target.root)
    theirs, path = run_with_bad_text(tmp_path / "theirs", column)
    told = f"{Path(path).name} has a {column} that is no UTF-8 in row 1"
    with pytest.raises(FormatError, match=told):
        take_sources(target.root, [parse_source(str(theirs.root))], order="")
    with pytest.raises(FormatError, match=told):
        export_selection(theirs.root, tmp_path / "out", where=None, as_of=None)
    assert not (tmp_path / "out" / "dataset.json").exists()
    with Catalog.open(theirs) as catalog:
        metas = catalog.segment_metas([Path(path).stem])
    with pytest.raises(FormatError, match=told):
        read_segments(theirs, metas)
    assert query_all(target.root) == n_rows


@pytest.mark.parametrize("column", TEXT_COLUMNS)
def test_fsck_names_such_a_text_and_a_repair_sets_its_file_aside(
    tmp_path: Path, column: str
) -> None:
    layout, path = run_with_bad_text(tmp_path / "run", column)
    (finding,) = [one for one in check(layout, level=CONTENTS) if one.severity == "error"]
    assert (finding.what, finding.subject) == ("segment_unreadable", path)
    assert f"has a {column} that is no UTF-8 in row 1, counted from 0" in finding.detail
    repaired(layout)
    assert check(layout, level=CONTENTS) == []
    assert query_all(layout.root) == 6
    # Put back by hand it is the committed file, and cannot be read all the same.
    shutil.copy(layout.quarantine / Path(path).name, layout.root / path)
    lines = repaired(layout)
    assert any("is not what was committed; moved to" in line for line in lines), lines
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize("column", ["obs_text", "final_admissible_actions"])
def test_a_rebuild_adopts_no_such_file(tmp_path: Path, column: str) -> None:
    layout, path = run_with_bad_text(tmp_path / "run", column)
    layout.catalog.unlink()
    layout.backup.unlink(missing_ok=True)
    report = rebuild(layout)
    assert any(f"has a {column} that is no UTF-8" in line for line in report.lost), report
    assert not (layout.root / path).exists()
    assert query_all(layout.root) == 6


def test_an_exported_table_with_such_a_text_is_damage(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    tables = {part: pq.read_table(part) for part in layout.exports.glob("events-*.parquet")}
    part, table = max(tables.items(), key=lambda item: len(item[1]))
    pq.write_table(with_bad_text(table, "detail", row=0), tmp_path / "forged.parquet")
    part.chmod(0o644)
    shutil.copy(tmp_path / "forged.parquet", part)
    details = {one.what: one.detail for one in check(layout, level=CONTENTS)}
    assert "has a detail that is no UTF-8 in row 0" in details["export_damaged"]


def as_is(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column


def in_structures(column: pa.ChunkedArray) -> pa.Array:
    texts = column.combine_chunks()
    numbers = pa.array(range(len(texts)), pa.int64())
    return pa.StructArray.from_arrays([numbers, texts], names=["number", "text"])


def in_lists_of_structures(column: pa.ChunkedArray) -> pa.Array:
    structures = in_structures(column)
    offsets = pa.array(range(len(structures) + 1), pa.int32())
    return pa.ListArray.from_arrays(offsets, structures)


def large(column: pa.ChunkedArray) -> pa.Array:
    texts = column.combine_chunks()
    validity, offsets, data = texts.buffers()
    wide = pa.Array.from_buffers(pa.int32(), len(texts) + 1, [None, offsets]).cast(pa.int64())
    return pa.LargeStringArray.from_buffers(len(texts), wide.buffers()[1], data, validity)


@pytest.mark.parametrize("shape", [as_is, in_structures, in_lists_of_structures, large])
@pytest.mark.parametrize("row", [0, 1, 2999, 4000])
def test_the_row_of_a_text_in_any_type_is_found(
    tmp_path: Path, shape: Callable[[pa.ChunkedArray], pa.Array], row: int
) -> None:
    """Over several batches and row groups, with nulls before it."""
    texts = pa.table({"text": pa.array([None if n % 7 == 5 else "é" for n in range(4001)])})
    path = tmp_path / "texts.parquet"
    for table, is_bad in ((texts, False), (with_bad_text(texts, "text", row=row), True)):
        shaped = pa.table({"text": shape(table["text"])})
        pq.write_table(shaped, path, row_group_size=1500, use_dictionary=False)
        with path.open("rb") as source:
            n_bytes = path.stat().st_size
            file = open_parquet(source, n_bytes=n_bytes, name="it", verify=False)
            if not is_bad:
                table = read_table(file, source, n_bytes=n_bytes, name="it", columns=None)
                assert len(table) == 4001
                continue
            with pytest.raises(FormatError, match=f"it has a text that is no UTF-8 in row {row},"):
                read_table(file, source, n_bytes=n_bytes, name="it", columns=None)


def in_a_column(name: str) -> pa.Table:
    return pa.table({name: ["x"]})


def in_a_field(name: str) -> pa.Table:
    return pa.table({"outer": pa.array([{name: "x"}])})


@pytest.mark.parametrize("store_schema", [False, True])
@pytest.mark.parametrize("shape", [in_a_column, in_a_field])
def test_the_name_of_a_column_may_be_no_utf8_either(
    tmp_path: Path,
    shape: Callable[[str], pa.Table],
    store_schema: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: fsck and export of the run ended in a traceback."""
    sink = pa.BufferOutputStream()
    pq.write_table(shape("name-name"), sink, store_schema=store_schema)
    forged = sink.getvalue().to_pybytes().replace(b"name-name", b"name\xff\xfe\xc3(-")
    layout = make_run(tmp_path / "run")
    part = min(layout.exports.glob("events-*.parquet"))
    (path, *_) = live_paths(layout)
    for file in (part, layout.root / path):
        file.chmod(0o644)
        file.write_bytes(forged)
    details = {one.what: one.detail for one in check(layout, level=CONTENTS)}
    assert "names a column, or who wrote it, not in UTF-8" in details["export_damaged"]
    for command in (["fsck"], ["export", str(tmp_path / "out")]):
        verb, *rest = command
        assert main([verb, str(layout.root), *rest]) in (1, 2)
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err


def test_nor_is_the_name_of_the_program_that_wrote_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit of an exported table ended fsck, and its repair, in a traceback for good."""
    layout = make_run(tmp_path / "run")
    part = min(layout.exports.glob("groups-*.parquet"))
    content = part.read_bytes()
    place = content.rindex(b"parquet-cpp")
    part.chmod(0o644)
    part.write_bytes(content[:place] + b"\xf0" + content[place + 1 :])
    details = {one.what: one.detail for one in check(layout, level=CONTENTS)}
    assert "who wrote it, not in UTF-8" in details["export_damaged"]
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    assert check(layout, level=CONTENTS) == []
    assert "Traceback" not in capsys.readouterr().err
