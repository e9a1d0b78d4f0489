"""The cost of a reader, an export, a merge and the status while a run grows, counted in files
and rows.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

import store.reading.manifest as manifest_module
from store import Catalog, RunLayout, StoreError, VersionRecord, export, write_open_sql
from store.maintenance.compact import CompactionPolicy, choose, merges
from store.maintenance.fsck import CONTENTS, check
from store.reading.manifest import read_manifest
from store.reading.pins import Pin, pinned
from store.reading.query import show
from store.reading.read_only_files import PREFIX, ReadOnlyFiles
from store.reading.reader import open_run
from tests.support.store_samples import open_train_group, play

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
    """Note the name of every file that DuckDB opens."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, names=("segments", "export", "manifest.json"))
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
        assert connection.sql("SELECT count(DISTINCT group_uid) FROM steps").fetchall() == [
            (N_FILES,)
        ]
        assert names <= set(files.opened)


@pytest.mark.parametrize("protection", ["landlock", "filesystem"])
def test_a_footer_that_cannot_be_decoded_is_left_out_when_it_is_read(
    layout: RunLayout, protection: str
) -> None:
    broken = segments(layout)[3]
    data = bytearray(broken.read_bytes())
    n_footer = int.from_bytes(data[-8:-4], "little")
    data[-8 - n_footer : -8] = b"\xff" * n_footer  # its end is as it should be
    broken.chmod(0o644)
    broken.write_bytes(data)
    with open_run(layout.root, protection=protection) as reader:
        assert reader.left_out == ""
        with pytest.warns(
            UserWarning, match=f"1 of {N_FILES} files cannot be read and are left out: first "
        ) as warned:
            assert reader.sql("SELECT count(DISTINCT group_uid) AS n FROM steps")[
                "n"
            ].to_pylist() == [N_FILES - 1]
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
        assert (
            f"1 of {N_FILES} files cannot be read and are left out: first {broken}"
            in reader.left_out
        )
        assert reader.sql("SELECT count(DISTINCT group_uid) AS n FROM steps")["n"].to_pylist() == [
            N_FILES - 1
        ]


def plans(catalog: Catalog, ask: Callable[[], object]) -> list[str]:
    """Return how SQLite goes through its tables for every statement of `ask`."""
    connection = catalog._database._connection
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    ask()
    connection.set_trace_callback(None)
    reads = [text for text in statements if text.lstrip().startswith(("SELECT", "WITH"))]
    assert reads
    return [
        row["detail"] for text in reads for row in connection.execute(f"EXPLAIN QUERY PLAN {text}")
    ]


@pytest.mark.parametrize(
    "name", ["counts", "outstanding", "open_heldout", "finished_evaluations", "latest_metrics"]
)
def test_the_status_goes_through_no_table_that_grows(layout: RunLayout, name: str) -> None:
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v000000", digest="d", learner_step=None)
        )
        catalog.open_round(["a", "b"], episodes_per_task=1, version=0)
        lines = plans(catalog, getattr(catalog, name))
        assert [
            line for line in lines if re.match(r"SCAN (grp|g|v|version|m|metric)\b", line)
        ] == []
        # The groups of one state, or of one round, may be gone through; not all of a split.
        # A min() over a covering index ends at its first row.
        wide = [line for line in lines if re.search(r"USING INDEX grp\w+ \(split=\?\)$", line)]
        assert wide == []


def test_a_draw_goes_through_no_table_that_grows(layout: RunLayout) -> None:
    """It walks over the groups that were drawn, or became whole, since the newest learner step."""
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v000000", digest="d", learner_step=0)
        )
        known = catalog.known_results()

        def draw() -> None:
            catalog.known_results()
            catalog.first_weighed(lsn=known.lsn, ordinal=N_FILES)
            catalog.handed_out(first=N_FILES - 1, until=known.lsn)
            catalog.whole_groups(since=known.lsn - 1, until=known.lsn)

        lines = plans(catalog, draw)
        assert [line for line in lines if re.match(r"SCAN (grp|version)\b", line)] == []
        assert [line for line in lines if "(split=?" in line and "ordinal" not in line] == []


def change_and_fail(catalog: Catalog) -> None:
    with catalog._database.transaction() as tx:
        tx.run("UPDATE grp SET state = 'stale', n_members = 7")
        tx.run("INSERT INTO no_such_table VALUES (1)")


def test_the_counts_are_those_of_the_groups_after_every_change_and_after_one_that_failed(
    layout: RunLayout,
) -> None:
    counted = """SELECT split, state, count(*), sum(n_members), sum(n_steps)
                 FROM main.grp GROUP BY split, state ORDER BY 1, 2"""
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
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=0)
        catalog.roll_back(0)
        check(catalog)
        before = catalog.counts()
        with pytest.raises(StoreError, match="nothing of this transaction was written"):
            change_and_fail(catalog)
        check(catalog)
        assert catalog.counts() == before and before.complete == N_FILES + 1
    with Catalog.open(layout) as catalog:
        check(catalog)


@pytest.mark.parametrize("as_of", [False, True])
def test_a_reader_left_open_keeps_the_exports_it_shows_and_no_later_ones(
    layout: RunLayout, as_of: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = itertools.count(1)
    start_us = manifest_module.now_us()
    # past the grace
    monkeypatch.setattr(manifest_module, "now_us", lambda: start_us + next(minutes) * 61_000_000)
    questions = [
        f"SELECT count(*) AS n FROM {view}"
        for view in ("groups", "events", "ledger", "versions", "components")
    ]
    manifest = read_manifest(layout)
    assert manifest is not None
    shown = {part.path for parts in manifest.tables.values() for part in parts}
    with (
        Catalog.open(layout) as catalog,
        open_run(layout.root, as_of=manifest.lsn if as_of else None) as reader,
    ):
        before = [reader.sql(question) for question in questions]
        for number in range(40):
            catalog.record_version(
                VersionRecord(
                    version=number, path=f"weights/v{number:06d}", digest="d", learner_step=None
                )
            )
            catalog.heartbeats({"w": str(number)})
            catalog.log(component="w", what="x", detail=str(number))
            export(catalog, layout)
        newest = read_manifest(layout)
        assert newest is not None
        named = {part.path for parts in newest.tables.values() for part in parts} | {
            newest.segments[0]
        }
        there = {layout.relative(path) for path in layout.exports.iterdir()}
        assert there - named - shown == set(newest.superseded) - shown
        assert len(there - named - shown) <= 10, (
            "those that the last export replaced have their grace"
        )
        assert [reader.sql(question) for question in questions] == before
        with open_run(layout.root) as other:
            assert other.sql("SELECT count(*) AS n FROM versions")["n"].to_pylist() == [40]
    export_and_sweep(layout)
    assert shown.isdisjoint({layout.relative(path) for path in layout.exports.iterdir()} - named)


def test_a_file_that_is_none_of_the_stores_in_export_is_left_alone(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS makes one of a removed file that somebody reads. It ended the run for good: the owner
    named it in the manifest, and then refused that name.
    """
    monkeypatch.setattr(manifest_module, "GRACE_S", 0.0)
    foreign = layout.exports / ".nfs000000000001"
    foreign.write_bytes(b"theirs")
    export_and_sweep(layout)
    named = json.loads(layout.manifest.read_text())
    assert "export/.nfs000000000001" not in named["superseded"]
    assert foreign.read_bytes() == b"theirs"
    # an earlier version wrote this
    named["superseded"] = {"export/.nfs000000000001": {"lsn": 0, "at_us": 0}}
    layout.manifest.write_text(json.dumps(named))
    export_and_sweep(layout)
    assert foreign.read_bytes() == b"theirs"
    assert check(layout, level=CONTENTS) == []


def export_and_sweep(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        for _ in range(2):
            catalog.log(component="w", what="x", detail="")
            export(catalog, layout)


def test_while_a_reader_opens_nothing_from_its_lsn_on_is_removed(layout: RunLayout) -> None:
    with closing(Pin(layout, 5)) as opening, closing(Pin(layout, 9)) as settled:
        settled.settle(11)
        coarse, exact = sorted(pinned(layout), key=lambda pin: pin.since)
        assert (coarse.since, coarse.shown, exact.since, exact.shown) == (5, None, 9, 11)
        assert coarse.needs(written=8, replaced=20) and not coarse.needs(written=2, replaced=5)
        assert exact.needs(written=11, replaced=12) and not exact.needs(written=12, replaced=20)
        assert not exact.needs(written=3, replaced=11)
        opening.settle(2**80)  # no lsn: as if nothing was said
        assert {pin.shown for pin in pinned(layout)} == {None, 11}


def test_an_export_lists_the_live_files_from_an_index_alone(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        lines = plans(catalog, lambda: catalog.snapshot({}))
    (line,) = [line for line in lines if " segment USING" in line and "segment_shown" in line]
    assert line == "SCAN segment USING COVERING INDEX segment_shown"


def test_files_are_merged_one_after_another_and_the_live_ones_listed_once(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Catalog.open(layout) as catalog:
        listed, real = [], catalog.live_segments
        monkeypatch.setattr(catalog, "live_segments", lambda: listed.append(1) or real())
        policy = CompactionPolicy(fan_in=2, max_live_files=2, min_file_bytes=1 << 20)
        results = list(merges(catalog, layout, policy=policy, skip=()))
        assert len(listed) == 1 and len(results) > 5
        # The same files are left as if they were listed anew before each merge.
        assert choose(real(), policy=policy, skip=()) == ()
        assert len(real()) <= 2
        export(catalog, layout)
    with open_run(layout.root) as reader:
        assert reader.sql("SELECT count(DISTINCT group_uid) AS n FROM steps")["n"].to_pylist() == [
            N_FILES
        ]
