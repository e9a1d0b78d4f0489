"""Compaction, retention and sweeping: fewer files, the same rows, and nothing gone that somebody
may still ask for.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from store import (
    COMPACTION_POLICY,
    SEGMENT_SCHEMA,
    Batch,
    Catalog,
    CheckpointRecord,
    CompactionPolicy,
    LiveSegment,
    Maintainer,
    MaintainerSettings,
    RunLayout,
    StoreError,
    VersionRecord,
    export,
    now_us,
    read_segment,
    write_open_sql,
    write_segment,
)
from store.errors import FormatError
from store.maintenance import compact
from store.maintenance import maintainer as maintainer_module
from store.maintenance.compact import MAX_SLICES, choose, file_limit, in_group_order
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.sweep import (
    ORPHAN_GRACE_S,
    OrphanLook,
    expire_old,
    sweep_orphans,
    sweep_retired,
)
from store.reading.manifest import read_manifest
from store.reading.pins import Pin
from store.storage import LocalStorage, StoredFile
from tests.support.program import gigpo
from tests.support.run_views import connect
from tests.support.store_runs import compact_once, make_run
from tests.support.store_samples import from_table, make_trajectory, open_train_group, play

FOUR = CompactionPolicy(fan_in=4, max_live_files=10, min_file_bytes=1 << 20)
TWO_AT_ANY_TIME = CompactionPolicy(fan_in=2, max_live_files=1, min_file_bytes=1 << 20)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=4)
    return layout


@pytest.fixture
def catalog(layout: RunLayout) -> Iterator[Catalog]:
    with Catalog.open(layout) as catalog:
        yield catalog


def file(name: str, *, level: int = 0, n_bytes: int = 10, settled: bool = True) -> LiveSegment:
    return LiveSegment(
        segment_id=name,
        level=level,
        n_bytes=n_bytes,
        n_steps=1,
        lsn=1,
        committed_us=1,
        settled=settled,
    )


def train(catalog: Catalog, learner_step: int, *, n_groups: int = 1) -> Batch:
    batch = catalog.claim(n_groups=n_groups, current_version=5, max_staleness=9)
    assert batch is not None
    catalog.settle(batch.batch_id, learner_step=learner_step, filtered={}, version_in=5)
    return batch


def play_and_train(layout: RunLayout, catalog: Catalog, n_groups: int) -> None:
    for _ in range(n_groups):
        play(layout, catalog, open_train_group(catalog, None))
        train(catalog, catalog.learner_step() + 1)


def compact_all(catalog: Catalog, layout: RunLayout, policy: CompactionPolicy) -> int:
    n = 0
    while (result := compact_once(catalog, layout, policy=policy, skip=())) is not None:
        assert result.left_out == ()
        n += 1
    return n


def steps(layout: RunLayout, as_of: int | None = None) -> pa.Table:
    with connect(layout, as_of=as_of) as connection:
        return connection.sql("SELECT * FROM steps ORDER BY traj_uid, step_index").to_arrow_table()


def rows_of(layout: RunLayout, batch: Batch) -> set:
    return {t for meta in batch.segments for t in from_table(read_segment(layout, meta))}


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def events(layout: RunLayout, catalog: Catalog, component: str) -> list[tuple[str, str]]:
    """From the exports, not the view: a missing segment would hide them."""
    export(catalog, layout)
    manifest = read_manifest(layout)
    assert manifest is not None
    rows = [
        row
        for part in manifest.tables["events"]
        for row in pq.read_table(layout.root / part.path).to_pylist()
    ]
    return [(row["what"], row["detail"]) for row in rows if row["component"] == component]


# The choice of files to merge.


@pytest.mark.parametrize(
    ("live", "skip", "expected"),
    [
        ([file("a"), file("b"), file("c")], (), ""),
        ([file("a"), file("b"), file("c"), file("d"), file("e")], (), "abcd"),
        ([file("a"), file("b", settled=False), file("c"), file("d"), file("e")], (), "acde"),
        ([file("a"), file("b", level=1), file("c"), file("d"), file("e", level=1)], (), ""),
        ([file("a"), *(file(name, level=1) for name in "bcde")], (), "bcde"),
        ([file(name, level=1) for name in "abcd"] + [file(name) for name in "efgh"], (), "efgh"),
        ([file(name) for name in "abcde"], ("b",), "acde"),
        ([file(name) for name in "abcd"], ("b",), ""),
        # The limit here is 100: a file of more than 50 is full, others are taken while they fit.
        ([file(name, n_bytes=40) for name in "abcd"], (), "ab"),
        ([file("a", n_bytes=51), *(file(name) for name in "bcde")], (), "bcde"),
        ([file("a", n_bytes=51), *(file(name) for name in "bcd")], (), ""),
        # More than 10 files: those that are not settled too, the fullest level first, then across
        # levels.
        ([file(name, settled=False) for name in "abcdefghij"], (), ""),
        ([file(name, settled=False) for name in "abcdefghijk"], (), "abcd"),
        ([file("a", level=1), *(file(name, settled=False) for name in "bcdefghijk")], (), "bcde"),
        ([file(str(level), level=level, settled=False) for level in range(11)], (), "0123"),
        ([file(name, n_bytes=51) for name in "abcdefghijk"], (), ""),
        ([file(name, n_bytes=51) for name in "abcdefghij"] + [file("k")], (), ""),
    ],
)
def test_what_is_chosen(live: list[LiveSegment], skip: tuple[str, ...], expected: str) -> None:
    policy = CompactionPolicy(fan_in=4, max_live_files=10, min_file_bytes=100)
    assert (
        "".join(chosen.segment_id for chosen in choose(live, policy=policy, skip=skip)) == expected
    )


def test_the_file_limit_grows_with_the_run() -> None:
    policy = CompactionPolicy(fan_in=4, max_live_files=10, min_file_bytes=100)
    assert file_limit([file("a", n_bytes=20_000)], policy=policy) == 100
    assert file_limit([file("a", n_bytes=60_000), file("b", n_bytes=20_000)], policy=policy) == 400


@pytest.mark.parametrize(
    ("hot", "largest"), [(0, 40_000), (300, 1 << 20), (1_200, 1 << 20), (300, 16 << 20)]
)
def test_500_files_suffice_for_20000_commits(hot: int, largest: int) -> None:
    """Sizes alone, up to 160 GB: the newest `hot` files are not settled; whatever is due is merged
    after every 8 commits.
    """
    sizes = random.Random(hot + largest)
    live: list[LiveSegment] = []
    waiting: list[str] = []
    written = rewritten = 0
    for number in range(20_000):
        n_bytes = sizes.randint(largest // 100, largest)
        written += n_bytes
        waiting.append(str(number))
        live.append(file(str(number), n_bytes=n_bytes, settled=False))
        if number % 8:
            continue
        unsettled, waiting = set(waiting[-hot:] if hot else ()), waiting[-hot:] if hot else []
        live = [
            f
            if f.level or f.segment_id in unsettled or f.settled
            else file(f.segment_id, n_bytes=f.n_bytes)
            for f in live
        ]
        while chosen := choose(live, policy=COMPACTION_POLICY, skip=()):
            total = sum(f.n_bytes for f in chosen)
            assert 2 <= len(chosen) <= 64 and total <= file_limit(live, policy=COMPACTION_POLICY)
            rewritten += total
            gone = {f.segment_id for f in chosen}
            merged = file(
                f"{number}m{rewritten}", level=max(f.level for f in chosen) + 1, n_bytes=total
            )
            live = [f for f in live if f.segment_id not in gone] + [merged]
        assert len(live) <= COMPACTION_POLICY.max_live_files
    assert sum(f.n_bytes for f in live) == written
    assert rewritten <= 3 * written


def test_rows_are_in_the_order_of_their_groups() -> None:
    def rows(*names: str) -> pa.Table:
        """`a10`: group a, member 1, step 0."""
        columns = {
            "group_uid": [name[0].encode() * 16 for name in names],
            "member": [int(name[1]) for name in names],
            "step_index": [int(name[2]) for name in names],
            "action_text": list(names),
        }
        arrays = [
            pa.array(columns.get(field.name, [None] * len(names)), field.type)
            for field in SEGMENT_SCHEMA
        ]
        return pa.Table.from_arrays(arrays, schema=SEGMENT_SCHEMA)

    merged = in_group_order(
        [rows("b10", "b11", "b00"), rows("a00"), rows("c01", "c00", "b01", "a10")]
    )
    assert merged["action_text"].to_pylist() == [
        "b00",
        "b01",
        "b10",
        "b11",
        "a00",
        "a10",
        "c00",
        "c01",
    ]
    assert in_group_order([rows(), rows("a00")])["action_text"].to_pylist() == ["a00"]
    assert in_group_order([rows()]).num_rows == 0


def test_rows_in_any_order_are_few_pieces_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: a million rows in reverse order took 19 GB as slices."""
    n = 3 * MAX_SLICES
    ordered = pa.table(
        {
            "group_uid": pa.array([b"g" * 16] * n, pa.binary(16)),
            "member": pa.array([0] * n, pa.uint16()),
            "step_index": pa.array(range(n), pa.uint32()),
            "response_ids": pa.array([[number] for number in range(n)], pa.list_(pa.int32())),
            "obs_text": [f"text {number}" for number in range(n)],
        }
    )
    reverse = ordered.take(pa.array(range(n - 1, -1, -1)))
    merged = in_group_order([reverse.slice(0, n // 2), reverse.slice(n // 2)])
    assert merged.equals(ordered)
    assert merged["obs_text"].num_chunks <= 2
    monkeypatch.setattr(compact, "MAX_ROW_BYTES", reverse.nbytes - 1)
    with pytest.raises(FormatError, match="are in no order of groups"):
        in_group_order([reverse])


# Rows are the same.


def test_every_row_and_column_is_the_same_and_groups_lie_together(
    layout: RunLayout, catalog: Catalog
) -> None:
    groups = [open_train_group(catalog, None, size=3) for _ in range(4)]
    for members in ((2, 0), (1, 2)):  # two workers shared every group, and both played member 2
        for group in groups:
            trajectories = [make_trajectory(group, member, version=1) for member in members]
            catalog.commit(
                write_segment(layout, trajectories, worker=f"w{members[0]}", epoch=catalog.epoch),
                epoch=catalog.epoch,
            )
    train(catalog, 1, n_groups=4)
    export(catalog, layout)
    before = steps(layout)
    assert before.num_rows == 4 * 3 * 3
    assert compact_all(catalog, layout, FOUR) == 2
    # the duplicates are gone
    assert {(f.level, f.n_steps) for f in catalog.live_segments()} == {(1, 24), (1, 12)}
    assert compact_all(catalog, layout, TWO_AT_ANY_TIME) == 1
    export(catalog, layout)
    assert steps(layout).equals(before)
    (merged,) = catalog.live_segments()
    assert (merged.level, merged.n_steps) == (2, 36)
    (meta,) = catalog.segment_metas([merged.segment_id])
    path = layout.root / meta.path
    assert path.parent.name == "compact" and not path.stat().st_mode & 0o222
    found = pq.read_table(path, columns=["group_uid", "member", "step_index"]).to_pylist()
    expected = [
        (group.group_uid, member, step)
        for group in groups
        for member in range(3)
        for step in range(3)
    ]
    assert [(row["group_uid"], row["member"], row["step_index"]) for row in found] == expected
    assert set(from_table(read_segment(layout, meta))) == {
        make_trajectory(group, member, version=1) for group in groups for member in range(3)
    }


def test_small_files_become_few_whatever_the_number_of_commits(
    layout: RunLayout, catalog: Catalog
) -> None:
    groups = 120
    for _ in range(groups):
        play(layout, catalog, open_train_group(catalog, None))
        compact_all(catalog, layout, FOUR)
        assert len(catalog.live_segments()) <= 10  # nothing is settled: all of it is the hot tail
    export(catalog, layout)
    with connect(layout) as connection:
        assert connection.execute(
            "SELECT count(*), count(DISTINCT (traj_uid, step_index)) FROM steps"
        ).fetchall() == [(groups * 6, groups * 6)]
        levels = max(f.level for f in catalog.live_segments())
    assert 2 <= levels <= 5


def test_a_claim_reads_the_same_rows_before_and_after_and_so_does_one_after_a_roll_back(
    layout: RunLayout, catalog: Catalog
) -> None:
    for _ in range(4):
        play(layout, catalog, open_train_group(catalog, None))
    batch = catalog.claim(n_groups=2, current_version=1, max_staleness=4)
    assert batch is not None
    expected = {
        make_trajectory(open_train_group(catalog, n), member) for n in (0, 1) for member in (0, 1)
    }
    compact_all(catalog, layout, TWO_AT_ANY_TIME)
    # the learner was told of files that were replaced meanwhile
    assert rows_of(layout, batch) == expected
    after = catalog.claim(n_groups=2, current_version=1, max_staleness=4)
    assert after is not None and {Path(meta.path).parent.name for meta in after.segments} == {
        "compact"
    }
    assert rows_of(layout, after) == {
        make_trajectory(open_train_group(catalog, n), m) for n in (2, 3) for m in (0, 1)
    }
    for step, claimed in enumerate((batch, after), start=1):
        catalog.settle(claimed.batch_id, learner_step=step, filtered={}, version_in=1)
    assert catalog.roll_back(0).groups == 4
    export(catalog, layout)
    assert len(sweep_retired(catalog, layout, window_s=0.0)) == 6
    again = catalog.claim(n_groups=2, current_version=1, max_staleness=4)
    assert again is not None and rows_of(layout, again) == expected


def test_a_commit_that_is_retried_after_its_file_was_merged_changes_nothing(
    layout: RunLayout, catalog: Catalog
) -> None:
    groups = [open_train_group(catalog, None) for _ in range(2)]
    segments = [
        write_segment(
            layout, [make_trajectory(group, m) for m in (0, 1)], worker="w0", epoch=catalog.epoch
        )
        for group in groups
    ]
    for segment in segments:
        catalog.commit(segment, epoch=catalog.epoch)
    compact_all(catalog, layout, TWO_AT_ANY_TIME)
    live = catalog.live_segments()
    assert catalog.commit(segments[0], epoch=catalog.epoch).new == ()
    export(catalog, layout)
    assert catalog.live_segments() == live and steps(layout).num_rows == 12


def test_a_crash_before_the_swap_leaves_an_orphan_and_nothing_else(
    layout: RunLayout, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_and_train(layout, catalog, 4)
    export(catalog, layout)
    before, live = steps(layout), catalog.live_segments()
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "replace_segments", killed)
        with pytest.raises(KeyboardInterrupt):
            compact_once(catalog, layout, policy=FOUR, skip=())
    export(catalog, layout)
    assert catalog.live_segments() == live and steps(layout).equals(before)
    (orphan,) = layout.segments.glob("compact/*.parquet")
    assert compact_all(catalog, layout, FOUR) == 1  # the same bytes under the same name
    assert list(layout.segments.glob("compact/*.parquet")) == [orphan]


@pytest.mark.parametrize("damage", ["flipped", "gone", "foreign"])
def test_a_damaged_file_is_named_and_left_out_and_the_others_are_merged(
    layout: RunLayout, catalog: Catalog, damage: str
) -> None:
    play_and_train(layout, catalog, 5)
    bad = catalog.live_segments()[1].segment_id
    path = layout.segments / "w0" / f"{bad}.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data if damage == "flipped" else b"PAR1")
    first = compact_once(catalog, layout, policy=FOUR, skip=())
    assert first is not None and (first.left_out, first.merged) == ((bad,), None)
    second = compact_once(catalog, layout, policy=FOUR, skip=first.left_out)
    assert (
        second is not None
        and second.merged is not None
        and len(second.sources) == 4
        and bad not in second.sources
    )
    assert compact_once(catalog, layout, policy=FOUR, skip=first.left_out) is None
    ((_, detail),) = [
        event for event in events(layout, catalog, "compaction") if event[0] == "damaged"
    ]
    assert str(path) in detail and "\n" not in detail
    assert bad in {f.segment_id for f in catalog.live_segments()}  # only fsck sets it aside


def test_no_merge_takes_more_rows_than_fit_into_memory(
    layout: RunLayout, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_and_train(layout, catalog, 8)
    before = steps(layout)
    metas = catalog.segment_metas([segment.segment_id for segment in catalog.live_segments()])
    one = max(read_segment(layout, meta).nbytes for meta in metas)
    monkeypatch.setattr("store.maintenance.compact.MAX_ROW_BYTES", int(2.5 * one))
    first = compact_once(catalog, layout, policy=FOUR, skip=())
    assert first is not None and len(first.sources) == 2, "of four that are due"
    left_out: frozenset[str] = frozenset()
    while (
        result := compact_once(catalog, layout, policy=TWO_AT_ANY_TIME, skip=left_out)
    ) is not None:
        assert len(result.sources) in (0, 2)
        left_out |= {*result.left_out}
    assert len(catalog.live_segments()) >= 4, "two groups to a file at most"
    assert left_out, "they fit with no other"
    assert steps(layout).equals(before)


def test_a_file_that_does_not_hold_what_was_committed_is_not_merged(
    layout: RunLayout, catalog: Catalog
) -> None:
    play_and_train(layout, catalog, 3)
    group = open_train_group(catalog, None)
    segment = write_segment(
        layout,
        [make_trajectory(group, member) for member in (0, 1)],
        worker="w0",
        epoch=catalog.epoch,
    )
    first, second = segment.trajectories
    lie = dataclasses.replace(
        segment, n_steps=7, trajectories=(dataclasses.replace(first, n_steps=4), second)
    )
    catalog.commit(lie, epoch=catalog.epoch)
    train(catalog, 4)
    result = compact_once(catalog, layout, policy=FOUR, skip=())
    assert result is not None and result.left_out == (segment.segment_id,)
    assert "6 rows that count, committed were 7" in events(layout, catalog, "compaction")[0][1]


# Snapshots.


def test_a_snapshot_shows_the_same_steps_before_and_after_a_merge(
    layout: RunLayout, catalog: Catalog
) -> None:
    play_and_train(layout, catalog, 3)
    early = export(catalog, layout)
    seen_early = steps(layout)
    play_and_train(layout, catalog, 1)
    late = export(catalog, layout)
    seen_late = steps(layout)
    assert compact_all(catalog, layout, FOUR) == 1
    merged = export(catalog, layout)
    assert seen_early.num_rows == 18 and seen_late.num_rows == 24
    for lsn, expected in ((early, seen_early), (late, seen_late), (merged, seen_late)):
        assert steps(layout, as_of=lsn).equals(expected)
    sweep_retired(catalog, layout, window_s=0.0)
    assert steps(layout, as_of=merged).equals(seen_late)
    with pytest.raises(StoreError, match="for 15 minutes"):
        steps(layout, as_of=late)


def test_a_replaced_file_is_kept_for_the_window_the_manifest_and_pinned_readers(
    layout: RunLayout, catalog: Catalog
) -> None:
    play_and_train(layout, catalog, 4)
    lsn = export(catalog, layout)
    compact_all(catalog, layout, FOUR)
    old = list(layout.segments.glob("w0/*.parquet"))
    assert sweep_retired(catalog, layout, window_s=0.0) == ()  # the manifest still shows them
    pin = Pin(layout, lsn)
    after = export(catalog, layout)
    newer = Pin(layout, after)
    assert sweep_retired(catalog, layout, window_s=0.0) == ()  # pinned
    pin.close()
    assert sweep_retired(catalog, layout, window_s=60.0) == ()  # within the window
    assert all(path.exists() for path in old)
    # a newer pin is no reason
    assert {layout.root / path for path in sweep_retired(catalog, layout, window_s=0.0)} == {*old}
    assert (
        not any(path.exists() for path in old) and len(list(layout.segments.glob("compact/*"))) == 1
    )
    assert sweep_retired(catalog, layout, window_s=0.0) == ()
    newer.close()
    assert [what for what, _ in events(layout, catalog, "sweep")] == ["removed"]


def test_files_are_forgotten_before_they_are_removed(
    layout: RunLayout, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_and_train(layout, catalog, 4)
    early = export(catalog, layout)
    compact_all(catalog, layout, FOUR)
    export(catalog, layout)
    with monkeypatch.context() as patch:
        patch.setattr("store.storage.LocalStorage.remove", killed)
        with pytest.raises(KeyboardInterrupt):
            sweep_retired(catalog, layout, window_s=0.0)
    # a promise nobody could keep is not made
    with pytest.raises(StoreError, match="for 15 minutes"):
        steps(layout, as_of=early)
    age(*layout.segments.glob("w0/*.parquet"))
    assert sweep_orphans(catalog, layout, opened_us=now_us(), before=None).foreign == ()
    assert not list(layout.segments.glob("w0/*.parquet"))


# Retention.


@pytest.fixture
def history(layout: RunLayout, catalog: Catalog) -> dict[str, str]:
    """One file for every kind of group, all of version 5 and 6 but the stale one; checkpoints at
    learner steps 1 and 2.
    """
    for kind in ("trained 1", "trained 2", "claimed"):
        play(layout, catalog, open_train_group(catalog, None), version=5)
        if kind != "claimed":
            train(catalog, int(kind[-1]))
    claimed = catalog.claim(n_groups=1, current_version=5, max_staleness=0)
    assert claimed is not None
    play(layout, catalog, open_train_group(catalog, 3), version=0)
    assert catalog.claim(n_groups=1, current_version=5, max_staleness=4) is None
    play(layout, catalog, open_train_group(catalog, 4), version=5)
    half = open_train_group(catalog, 5)
    catalog.commit(
        write_segment(
            layout, [make_trajectory(half, 0, version=5)], worker="w0", epoch=catalog.epoch
        ),
        epoch=catalog.epoch,
    )
    heldout = catalog.open_group(
        ordinal=0, task_id="h", split="heldout", size=2, evaluated_version=5
    )
    play(layout, catalog, heldout, version=5)
    catalog.record_version(
        VersionRecord(version=9, path="weights/v000009", digest="d", learner_step=2)
    )
    for step in (1, 2):
        catalog.record_checkpoint(
            CheckpointRecord(
                learner_step=step, path=layout.relative(layout.checkpoint_dir(step)), version=step
            )
        )
        layout.checkpoint_dir(step).mkdir()
    names = ("trained 1", "trained 2", "claimed", "stale", "complete", "open", "heldout")
    return dict(zip(names, [f.segment_id for f in catalog.live_segments()], strict=True))


def remove_checkpoint(step: int) -> Callable[[RunLayout, Catalog], None]:
    return lambda layout, catalog: layout.checkpoint_dir(step).rmdir()


@pytest.mark.parametrize(
    ("before", "limits", "expected"),
    [
        (None, {"keep_versions": 1}, {"trained 1", "stale", "heldout"}),
        (
            remove_checkpoint(1),
            {"keep_versions": 1},
            {"trained 1", "trained 2", "stale", "heldout"},
        ),
        (remove_checkpoint(2), {"keep_versions": 1}, {"trained 1", "stale", "heldout"}),
        # Rolled back: what was trained is asked for again, and checkpoint 2 is no longer one.
        (
            lambda layout, catalog: catalog.roll_back(1),
            {"keep_versions": 1},
            {"trained 1", "stale", "heldout"},
        ),
        (lambda layout, catalog: catalog.roll_back(0), {"keep_versions": 1}, {"stale", "heldout"}),
        # Newest is 9: three versions are 7, 8 and 9; four are 6 to 9, which sampled all but the
        # stale group.
        (None, {"keep_versions": 3}, {"trained 1", "stale", "heldout"}),
        (None, {"keep_versions": 4}, {"stale"}),
        (None, {"keep_days": 1.0}, set()),
        (None, {"keep_days": 0.0}, {"trained 1", "stale", "heldout"}),
        (None, {"keep_days": 0.0, "keep_versions": 4}, {"stale"}),
        (None, {"keep_days": 1.0, "keep_versions": 1}, set()),
        (None, {}, set()),
    ],
)
def test_retention_takes_what_nobody_can_ask_for_again(
    layout: RunLayout,
    catalog: Catalog,
    history: dict[str, str],
    before: Callable[[RunLayout, Catalog], None] | None,
    limits: dict[str, float],
    expected: set[str],
) -> None:
    if before is not None:
        before(layout, catalog)
    asked = {"keep_days": None, "keep_versions": None, **limits}
    expired = expire_old(catalog, layout, **asked)  # type: ignore[arg-type]
    assert {name for name, segment_id in history.items() if segment_id in expired} == expected
    assert {f.segment_id for f in catalog.live_segments()} == {*history.values()} - {*expired}
    assert len(events(layout, catalog, "retention")) == bool(expected)
    with connect(layout) as connection:  # what is known of a group stays
        assert connection.execute("SELECT count(*) FROM groups").fetchall() == [(7,)]
        assert connection.execute("SELECT count(*) FROM steps").fetchall() == [
            (39 - 6 * len(expected),)
        ]
    assert catalog.roll_back(1).groups <= 2
    batch = catalog.claim(n_groups=1, current_version=9, max_staleness=9)
    assert batch is not None and len(rows_of(layout, batch)) == 2  # what is available can be read


def test_a_merged_file_goes_only_when_all_of_it_may(
    layout: RunLayout, catalog: Catalog, history: dict[str, str]
) -> None:
    policy = CompactionPolicy(fan_in=7, max_live_files=1, min_file_bytes=1 << 20)
    assert compact_all(catalog, layout, policy) == 1
    assert expire_old(catalog, layout, keep_days=0.0, keep_versions=None) == ()


# Sweeping.


def age(*paths: Path) -> None:
    old_s = time.time() - ORPHAN_GRACE_S - 60.0
    for path in paths:
        os.utime(path, (old_s, old_s))


def test_orphans_and_unfinished_writes_go_after_the_grace(
    layout: RunLayout, catalog: Catalog
) -> None:
    play_and_train(layout, catalog, 1)
    group = open_train_group(catalog, None)
    written = write_segment(layout, [make_trajectory(group, 0)], worker="w0", epoch=catalog.epoch)
    orphan = layout.root / written.path
    (committed,) = (path for path in layout.segments.glob("w0/*") if path != orphan)
    unfinished = [
        layout.segments / "w0" / f".{'0' * 32}.parquet.1-1.tmp",
        layout.exports / ".groups.parquet.1-1.tmp",
        layout.root / ".manifest.json.1-1.tmp",
    ]
    foreign = [
        layout.segments / "w0" / "notes.txt",
        layout.segments / "mine.parquet",
        layout.segments / "w0" / "a" / "b.parquet",
    ]
    foreign[2].parent.mkdir()
    for path in (*unfinished, *foreign):
        path.write_bytes(b"half")
    # as if the catalog had been opened after all of them were written
    opened_us = now_us() + 1_000_000
    names = tuple(sorted(layout.relative(path) for path in foreign))
    # younger than the grace
    look = sweep_orphans(catalog, layout, opened_us=opened_us, before=None)
    assert tuple(sorted(look.foreign)) == names
    assert orphan.exists() and all(path.exists() for path in unfinished)
    age(committed, orphan, *unfinished, *foreign)
    opened_long_ago = now_us() - round(2 * ORPHAN_GRACE_S * 1e6)
    for _ in range(2):  # the first sees the new times
        look = sweep_orphans(catalog, layout, opened_us=opened_long_ago, before=look)
        assert orphan.exists()  # written under this owner: its worker may still commit it
    sweep_orphans(catalog, layout, opened_us=opened_us, before=look)
    assert not orphan.exists() and not any(path.exists() for path in unfinished)
    assert committed.exists() and all(path.exists() for path in foreign)
    said = events(layout, catalog, "sweep")
    assert [what for what, _ in said] == ["foreign", "removed"]  # each once
    assert all(name in said[0][1] for name in names) and said[1][1].startswith("4 files")


def test_a_damaged_list_of_files_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One changed byte of a path in the catalog, and the next look removed the file."""
    layout = make_run(tmp_path / "run")
    with closing(sqlite3.connect(layout.catalog)) as connection:
        (path,) = connection.execute(
            "SELECT path FROM segment WHERE retired_lsn IS NULL"
        ).fetchone()
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'segment'"
        ).fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(layout.catalog.read_bytes())
    data[data.index(path.encode(), (page - 1) * 4096) + len(path) - len("0.parquet")] ^= 1
    layout.catalog.write_bytes(data)
    # as if it were changed after the start
    monkeypatch.setattr("store.catalog.connection.check_indexes", lambda *_: None)
    age(*layout.segments.glob("*/*.parquet"))
    with Catalog.open(layout) as catalog:
        look = None
        for _ in range(2):
            look = sweep_orphans(catalog, layout, opened_us=now_us() + 1_000_000, before=look)
        ((what, detail),) = events(layout, catalog, "sweep")
    assert (layout.root / path).exists()
    assert what == "kept" and "gigpo rebuild" in detail and path in detail


@pytest.mark.parametrize("retired", [False, True])
def test_a_file_that_was_never_retired_counts_as_removed_by_no_byte(
    layout: RunLayout, catalog: Catalog, retired: bool
) -> None:
    """The attack: in SQLite's file one changed byte makes NULL the number 0 or 1. A live file was
    an orphan then, for fsck too, and the next look removed it.
    """
    play_and_train(layout, catalog, 1)
    (path,) = (layout.relative(path) for path in layout.segments.glob("w0/*"))
    if retired:  # within the snapshot window
        catalog.expire(tuple(segment.segment_id for segment in catalog.live_segments()))
    export(catalog, layout)
    with closing(sqlite3.connect(layout.catalog)) as connection, connection:
        connection.execute("UPDATE segment SET removed_us = 1 WHERE path = ?", (path,))
    age(layout.root / path)
    sweep_orphans(catalog, layout, opened_us=now_us() + 1_000_000, before=None)
    assert (layout.root / path).exists()
    if not retired:
        assert not check(layout, level=CONTENTS)


def test_a_clock_of_the_storage_that_is_behind_loses_nothing(
    layout: RunLayout, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a file that was committed while the sweep listed was removed as an orphan."""
    opened_us = now_us()
    play_and_train(layout, catalog, 1)
    files = LocalStorage.files
    group = open_train_group(catalog, None)
    trajectories = [make_trajectory(group, member) for member in group.missing]
    behind_us = 3 * round(ORPHAN_GRACE_S * 1e6)
    committed: list[str] = []

    def written_meanwhile(storage: LocalStorage, directory: str) -> Iterator[StoredFile]:
        if not committed:
            segment = write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch)
            catalog.commit(segment, epoch=catalog.epoch)
            committed.append(segment.path)
        for file in files(storage, directory):
            yield replace(file, modified_us=file.modified_us - behind_us)

    monkeypatch.setattr(LocalStorage, "files", written_meanwhile)
    look = sweep_orphans(catalog, layout, opened_us=opened_us, before=OrphanLook())
    assert (layout.root / committed[0]).exists()
    # written, and not committed yet: the time of its storage says that it is an old one
    later = open_train_group(catalog, None)
    written = write_segment(
        layout, [make_trajectory(later, 0)], worker="w0", epoch=catalog.epoch
    ).path
    look = sweep_orphans(catalog, layout, opened_us=opened_us, before=look)
    assert (layout.root / written).exists()
    sweep_orphans(catalog, layout, opened_us=opened_us, before=look)
    assert not (layout.root / written).exists(), "nobody commits it any more"


# The maintainer and the command.


def settings(**changes: object) -> MaintainerSettings:
    fields = {
        "snapshot_window_s": 0.0,
        "keep_days": None,
        "keep_versions": None,
        "pause_s": 0.001,
        "policy": FOUR,
    }
    return MaintainerSettings(**{**fields, **changes})  # type: ignore[arg-type]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_maintainer_merges_expires_and_sweeps(layout: RunLayout, catalog: Catalog) -> None:
    play_and_train(layout, catalog, 4)
    maintainer = Maintainer(catalog, layout, settings=settings(keep_days=0.0))
    maintainer.work()
    # no checkpoint: all of it may be trained on again
    assert [f.level for f in catalog.live_segments()] == [1]
    layout.checkpoint_dir(4).mkdir()
    catalog.record_checkpoint(
        CheckpointRecord(learner_step=4, path=layout.relative(layout.checkpoint_dir(4)), version=4)
    )
    export(catalog, layout)
    maintainer.start()
    wait_for(lambda: not catalog.live_segments())
    export(catalog, layout)
    wait_for(lambda: not list(layout.segments.glob("*/*.parquet")))
    maintainer.close()
    maintainer.close()
    maintainer.check()
    assert not maintainer._thread.is_alive()


def test_a_damaged_file_is_left_out_by_the_maintainer_and_said_once(
    layout: RunLayout, catalog: Catalog
) -> None:
    play_and_train(layout, catalog, 5)
    bad = catalog.live_segments()[0].segment_id
    (layout.segments / "w0" / f"{bad}.parquet").unlink()
    maintainer = Maintainer(catalog, layout, settings=settings())
    maintainer.work()
    maintainer.work()
    assert [f.level for f in catalog.live_segments()] == [0, 1]
    assert [what for what, _ in events(layout, catalog, "compaction")] == ["damaged", "merged"]


def test_what_the_maintainer_fails_of_is_raised_in_its_owner(
    layout: RunLayout, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("out of tea")

    monkeypatch.setattr(maintainer_module, "merges", broken)
    maintainer = Maintainer(catalog, layout, settings=settings())
    maintainer.check()
    maintainer.start()
    wait_for(lambda: maintainer._failure)
    with pytest.raises(
        StoreError, match="maintainer of .* stopped: ValueError.'out of tea'"
    ) as caught:
        maintainer.check()
    assert isinstance(caught.value.__cause__, ValueError)
    maintainer.close()


def test_a_full_disk_is_said_once_and_waited_for(
    layout: RunLayout, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_and_train(layout, catalog, 4)
    failures = 0

    def no_space(*_: object) -> None:
        nonlocal failures
        failures += failures < 3
        if failures < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("store.atomic_write.os.fsync", no_space)
    maintainer = Maintainer(catalog, layout, settings=settings())
    maintainer.start()
    wait_for(lambda: [f.level for f in catalog.live_segments()] == [1])
    maintainer.close()
    maintainer.check()
    said = [what for what, _ in events(layout, catalog, "maintainer")]
    assert failures == 3 and said == ["disk full"]
    assert not list(layout.segments.glob("*/.*.tmp"))


def test_the_command_compacts_a_run_that_nobody_owns(layout: RunLayout) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return gigpo("compact", layout.root, *arguments)

    with Catalog.open(layout) as catalog:
        for _ in range(65):
            play(layout, catalog, open_train_group(catalog, None))
        train(catalog, 1, n_groups=65)
        export(catalog, layout)
        refused = command()
    assert (
        refused.returncode == 2
        and str(os.getpid()) in refused.stderr
        and len(refused.stderr.splitlines()) == 1
    )
    before = steps(layout)
    done = command()
    assert done.returncode == 0, done.stderr
    assert "live files    65 -> 2" in done.stdout and "removed files 0" in done.stdout
    assert steps(layout).equals(before)
    assert "removed files 64" in command("--snapshot-window", "0").stdout
    assert steps(layout).equals(before)
    assert len(list(layout.segments.glob("*/*.parquet"))) == 2
    assert "above 0" in command("--keep-days", "0").stderr
