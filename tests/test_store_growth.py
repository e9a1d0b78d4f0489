"""What a reader, an export, a merge and the status cost while a run grows: counted in files, rows and plans, never in time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from store import Catalog, RunLayout, StoreError, export, write_open_sql
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


def plans(catalog: Catalog, ask: Callable[[], object]) -> list[str]:
    """Return how SQLite goes through its tables for every statement of `ask`."""
    connection = catalog._database._connection
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    ask()
    connection.set_trace_callback(None)
    reads = [text for text in statements if text.lstrip().startswith(("SELECT", "WITH"))]
    assert reads
    return [row["detail"] for text in reads for row in connection.execute(f"EXPLAIN QUERY PLAN {text}")]


@pytest.mark.parametrize("name", ["counts", "outstanding", "open_heldout", "finished_evaluations", "latest_metrics"])
def test_the_status_goes_through_no_table_that_grows(layout: RunLayout, name: str) -> None:
    with Catalog.open(layout) as catalog:
        catalog.record_version(version=0, path="weights/v000000", digest="d", learner_step=None)
        catalog.open_round(["a", "b"], episodes_per_task=1, version=0)
        whole = [
            line for line in plans(catalog, getattr(catalog, name)) if re.match(r"SCAN (grp|g|v|version|m|metric)\b", line)
        ]
        assert whole == []
        # The groups of one state, or of one round, may be gone through; not all of a split.
        # A min() over a covering index ends at its first row.
        wide = [line for line in lines if re.search(r"USING INDEX grp\w+ \(split=\?\)$", line)]
        assert wide == []


def change_and_fail(catalog: Catalog) -> None:
    with catalog._database.transaction() as tx:
        tx.run("UPDATE grp SET state = 'stale', n_members = 7")
        tx.run("INSERT INTO no_such_table VALUES (1)")


def test_the_counts_are_those_of_the_groups_after_every_change_and_after_one_that_failed(layout: RunLayout) -> None:
    counted = "SELECT split, state, count(*), sum(n_members), sum(n_steps) FROM main.grp GROUP BY split, state ORDER BY 1, 2"
    kept = "SELECT * FROM group_count WHERE n_groups > 0 ORDER BY 1, 2"

    def check(catalog: Catalog) -> None:
        with catalog._database.transaction() as tx:
            assert [tuple(row) for row in tx.rows(kept)] == [tuple(row) for row in tx.rows(counted)]

    with Catalog.open(layout) as catalog:
        check(catalog)
        group = open_train_group(catalog, N_FILES)
        check(catalog)
        play(layout, catalog, group)
        batch = catalog.claim(n_groups=3, current_version=0, max_staleness=1)
        assert batch is not None
        check(catalog)
        catalog.settle(batch.batch_id, learner_step=1, no_signal={}, version_in=0)
        catalog.roll_back(0)
        check(catalog)
        before = catalog.counts()
        with pytest.raises(StoreError, match="nothing of this transaction was written"):
            change_and_fail(catalog)
        check(catalog)
        assert catalog.counts() == before and before.complete == N_FILES + 1
    with Catalog.open(layout) as catalog:
        check(catalog)
