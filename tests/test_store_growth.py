"""What a reader, an export, a merge and the status cost while a run grows: counted in files, rows and plans, never in time."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from store import Catalog, RunLayout, export, write_open_sql
from store.reading.query import show
from store.reading.read_only_files import PREFIX, ReadOnlyFiles
from store.reading.reader import open_run
from tests.store_samples import open_train_group, play

N_FILES = 12


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Return a run of N_FILES segments, one group each."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=1)
    with Catalog.open(layout) as catalog:
        for ordinal in range(N_FILES):
            play(layout, catalog, open_train_group(catalog, ordinal))
        export(catalog, layout)
    return layout


def segments(layout: RunLayout) -> list[Path]:
    return sorted(layout.segments.rglob("*.parquet"))


class CountedFiles(ReadOnlyFiles):
    """Notes the name of every file that DuckDB opens."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def open(self, path: str, mode: str = "rb", **_: object):
        self.opened.append(Path(path).name)
        return super().open(path, mode)


def test_opening_a_reader_opens_no_segment(layout: RunLayout) -> None:
    files = CountedFiles(layout.root)
    with duckdb.connect() as connection:
        connection.register_filesystem(files)
        show(connection, layout, as_of=None, prefix=PREFIX)
        names = {path.name for path in segments(layout)}
        assert names.isdisjoint(files.opened)
        files.opened.clear()
        assert connection.sql("SELECT count(DISTINCT group_uid) FROM steps").fetchall() == [(N_FILES,)]
        assert names <= set(files.opened)


@pytest.mark.parametrize("protection", ["landlock", "filesystem"])
def test_a_footer_that_cannot_be_decoded_is_left_out_when_it_is_read(layout: RunLayout, protection: str) -> None:
    broken = segments(layout)[3]
    data = bytearray(broken.read_bytes())
    n_footer = int.from_bytes(data[-8:-4], "little")
    data[-8 - n_footer : -8] = b"\xff" * n_footer  # its end is as it should be
    broken.chmod(0o644)
    broken.write_bytes(data)
    with open_run(layout.root, protection=protection) as reader:
        assert reader.left_out == ""
        with pytest.warns(UserWarning, match=f"1 of {N_FILES} files cannot be read and are left out: first ") as warned:
            assert reader.sql("SELECT count(DISTINCT group_uid) AS n FROM steps")["n"].to_pylist() == [N_FILES - 1]
        assert [warning.filename for warning in warned] == [__file__]
        assert f"first {broken}; " in reader.left_out
        assert reader.sql("SELECT count(*) > 0 AS some FROM steps")["some"].to_pylist() == [True]


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "directory", "link"])
def test_a_file_that_is_no_segment_is_left_out_at_once(layout: RunLayout, damage: str) -> None:
    broken = segments(layout)[0]
    data = broken.read_bytes()
    broken.unlink()
    if damage == "empty":
        broken.write_bytes(b"")
    elif damage == "cut":
        broken.write_bytes(data[:-100])
    elif damage == "directory":
        broken.mkdir()
    elif damage == "link":
        broken.symlink_to("/proc/self/environ")
    with open_run(layout.root, warn=False) as reader:
        assert f"1 of {N_FILES} files cannot be read and are left out: first {broken}" in reader.left_out
        assert reader.sql("SELECT count(DISTINCT group_uid) AS n FROM steps")["n"].to_pylist() == [N_FILES - 1]
