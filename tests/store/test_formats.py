"""Runs of older code open and become today's; what newer code wrote is refused, naming both
versions.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from store import (
    FORMAT_VERSION,
    SEGMENT_SCHEMA,
    Catalog,
    FormatError,
    RunLayout,
    SegmentMeta,
    export,
    from_table,
    read_segment,
    to_table,
    write_open_sql,
    write_segment,
)
from store.hashing import file_digest
from store.maintenance.fsck import CONTENTS, check
from store.reading.query import connect
from store.segments import decode, encode
from tests.support.store_runs import fingerprint, rewrite
from tests.support.store_samples import make_trajectory, open_train_group, play

FORMAT_1 = Path(__file__).parents[1] / "data" / "format-1.tar.gz"  # made by data/make_format_1.py
NEWER = FORMAT_VERSION + 97
BOTH = rf"version {NEWER}.*{FORMAT_VERSION}"


@pytest.fixture
def old(tmp_path: Path) -> RunLayout:
    with tarfile.open(FORMAT_1) as archive:
        archive.extractall(tmp_path, filter="data")
    return RunLayout.open(tmp_path / "format-1")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")


def rows(layout: RunLayout, query: str) -> list[tuple]:
    with closing(connect(layout)) as views:
        return views.sql(query).fetchall()


# Today's columns but those that format 1 did not have.
# columns its files do not have
LATER = "('admissible_actions', 'prompt_dropped_turns', 'prompt_dropped_tokens', 'images')"
STEPS = f"SELECT COLUMNS(lambda name: name NOT IN {LATER}) FROM steps ORDER BY traj_uid, step_index"


def test_a_run_of_format_1_answers_before_anybody_upgrades_it(old: RunLayout) -> None:
    before = fingerprint(old.root)
    assert old.info.format_version == 1
    assert len(rows(old, STEPS)) == 3 * (6 * 2 + 2 + 1)
    assert rows(old, "SELECT state, count(*) FROM groups GROUP BY ALL ORDER BY ALL") == [
        *(("complete", 2), ("no_signal", 1), ("open", 1), ("stale", 3), ("trained", 1))
    ]
    assert rows(old, "SELECT twice(21)") == [(42,)]
    assert check(old, level=CONTENTS) == []
    assert fingerprint(old.root) == before


def test_its_next_owner_upgrades_it_and_nothing_is_lost(old: RunLayout) -> None:
    steps, groups = (
        rows(old, STEPS),
        rows(old, "SELECT group_uid, state, reason, n_steps FROM groups ORDER BY ALL"),
    )
    segments = fingerprint(old.segments)
    with Catalog.open(old) as catalog:
        export(catalog, old)
    assert rows(old, STEPS) == steps
    assert rows(old, "SELECT group_uid, state, reason, n_steps FROM groups ORDER BY ALL") == groups
    assert fingerprint(old.segments) == segments
    assert rows(old, "SELECT twice(21)") == [(42,)]
    assert rows(old, "SELECT count(DISTINCT group_uid) FROM ledger") == [(len(groups),)]
    assert rows(old, "SELECT learner_step, name, value FROM metrics") == [(1, "loss", 0.5)]
    assert rows(
        old,
        "SELECT learner_step, count(*), any_value(oldest_weights_digest) FROM lineage WHERE live "
        "GROUP BY ALL",
    ) == [(1, 2, "d0")]
    assert check(old, level=CONTENTS) == []
    with Catalog.open(old) as catalog:
        group = catalog.lease_open_group(worker="w", lease_s=60.0)
        assert group is not None and group.missing == (2,)
        catalog.record_version(version=2, path="weights/v000002", digest="d2", learner_step=1)
        play(old, catalog, group, version=1)
        batch = catalog.claim(n_groups=2, current_version=2, max_staleness=1)
        assert (
            batch is not None
            and sum(read_segment(old, meta).num_rows for meta in batch.segments) == 3 * 5
        )
        catalog.settle(batch.batch_id, learner_step=2, no_signal={}, version_in=1)
        export(catalog, old)
    assert check(old, level=CONTENTS) == []


def segment_of(
    layout: RunLayout, meta: SegmentMeta, table: pa.Table, *, version: int = FORMAT_VERSION
) -> SegmentMeta:
    """The same trajectories, as code of another version would have written them."""
    sink = pa.BufferOutputStream()
    names = {
        "format_version": str(version),
        "run_id": layout.info.run_id,
        "worker": "w0",
        "epoch": "1",
    }
    pq.write_table(table.replace_schema_metadata(names), sink, write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    digest = file_digest(data)
    path = layout.segment(worker="w0", segment_id=digest)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    changes = {
        "segment_id": digest,
        "digest": digest,
        "path": layout.relative(path),
        "n_bytes": len(data),
    }
    changes["worker"] = "w0"
    return SegmentMeta(**{**{name: getattr(meta, name) for name in meta.__slots__}, **changes})


@pytest.mark.parametrize(
    "name", ["task_score", "env_us", "finish_reason", "response_logprobs", "images"]
)
def test_a_column_that_a_file_does_not_have_is_null(layout: RunLayout, name: str) -> None:
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        play(layout, catalog, open_train_group(catalog, 0))
        group = open_train_group(catalog, 1)
        trajectories = [make_trajectory(group, member) for member in range(2)]
        meta = write_segment(layout, trajectories, worker="w1", epoch=catalog.epoch)
        older = segment_of(layout, meta, to_table(trajectories).drop_columns([name]), version=1)
        catalog.commit(older, epoch=catalog.epoch)
        export(catalog, layout)
    table = read_segment(layout, older)
    assert table.schema == SEGMENT_SCHEMA and table[name].null_count == table.num_rows == 6
    whole = to_table(trajectories)
    assert table.drop_columns([name]).equals(whole.drop_columns([name]))
    assert rows(
        layout,
        f"SELECT count(*), count({name}) FROM steps WHERE group_uid = '{group.group_uid.hex()}'",
    ) == [(6, 0)]
    assert rows(layout, f"SELECT count(*) > 0 FROM steps WHERE {name} IS NOT NULL") == [(True,)]
    assert check(layout, level=CONTENTS) == []


def test_a_column_of_newer_code_is_left_out_and_a_narrower_type_widened(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
    trajectory = make_trajectory(group, 0)
    table = to_table([trajectory]).append_column("more", pa.array([1, 2, 3]))
    position = table.column_names.index("version_min")
    table = table.set_column(position, "version_min", table["version_min"].cast(pa.int32()))
    data = encode(table, metadata={"run_id": layout.info.run_id, "worker": "w", "epoch": "1"})
    assert from_table(decode(data, path=Path("x"))) == (trajectory,)


def test_what_newer_code_wrote_is_refused(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
        trajectories = [make_trajectory(group, member) for member in range(2)]
        meta = write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch)
    newer = segment_of(layout, meta, to_table(trajectories), version=NEWER)
    with pytest.raises(FormatError, match=rf"{newer.path}.*{BOTH}"):
        read_segment(layout, newer)
    with closing(sqlite3.connect(layout.catalog)) as connection, connection:
        connection.execute(f"UPDATE meta SET format_version = {NEWER}")
    before = layout.catalog.read_bytes()
    for attempt in (lambda: Catalog.open(layout), lambda: check(layout, level=CONTENTS)):
        with pytest.raises(FormatError, match=rf"catalog\.sqlite.*{BOTH}"):
            attempt()
    assert layout.catalog.read_bytes() == before
    rewrite(
        layout.run_json,
        json.dumps({**json.loads(layout.run_json.read_text()), "format_version": NEWER}).encode(),
    )
    with pytest.raises(FormatError, match=rf"{layout.root}.*{BOTH}"):
        RunLayout.open(layout.root)
