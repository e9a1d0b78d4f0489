"""Damaged, foreign, missing, full, read-only, and a clock that goes back: a clear error, and
nothing else is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from cli.__main__ import main
from store import (
    Catalog,
    CheckpointRecord,
    FormatError,
    LockedError,
    RunLayout,
    StoreError,
    export,
    read_segment,
    write_segment,
)
from store.atomic_write import write_atomically
from store.clock import US_PER_S
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.sweep import sweep_retired
from store.reading.reader import open_run
from tests.support.run_views import connect
from tests.support.store_damage import mounted, no_file_may_grow, no_space_left
from tests.support.store_runs import (
    MERGE_TWO,
    compact_once,
    copy_run,
    fingerprint,
    flip,
    make_run,
    rewrite,
)
from tests.support.store_samples import make_trajectory, open_train_group, play


def one_line(problem: pytest.ExceptionInfo[StoreError], *, names: Path, remedy: str) -> None:
    text = str(problem.value)
    assert "\n" not in text and str(names) in text and remedy in text, text


# A segment that is not what it was.

BAD_FILES: dict[str, Callable[[Path, RunLayout], object]] = {
    "truncated": lambda path, other: rewrite(path, path.read_bytes()[:-100]),
    "empty": lambda path, other: rewrite(path, b""),
    "half copied": lambda path, other: rewrite(
        path, path.read_bytes()[:4000] + b"\0" * (path.stat().st_size - 4000)
    ),
    "bit flipped": lambda path, other: flip(path, 8 * 4000),
    "foreign": lambda path, other: rewrite(
        path, next(other.segments.rglob("*.parquet")).read_bytes()
    ),
    "deleted": lambda path, other: path.unlink(),
    "a directory": lambda path, other: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", BAD_FILES)
def test_a_bad_segment_is_named_and_the_rest_of_the_run_stays_readable(
    layout: RunLayout, tmp_path: Path, damage: str
) -> None:
    other = make_run(tmp_path / "other") if damage == "foreign" else layout
    with Catalog.open(layout) as catalog:
        metas = catalog.segment_metas([segment.segment_id for segment in catalog.live_segments()])
        export(catalog, layout)
    bad, path = metas[2], layout.root / metas[2].path
    BAD_FILES[damage](path, other)
    before = fingerprint(layout.root)
    with pytest.raises(StoreError) as problem:
        read_segment(layout, bad)
    one_line(problem, names=path, remedy="restore it from a backup")
    assert all(read_segment(layout, meta).num_rows for meta in metas if meta is not bad)
    with warnings.catch_warnings(record=True) as said, closing(connect(layout)) as views:
        for name in ("groups", "lineage", "versions", "metrics", "checkpoints", "events", "ledger"):
            assert views.sql(f"SELECT count(*) > 0 FROM {name}").fetchall() == [(True,)]
        # others open, and only a digest tells
        if damage in ("truncated", "empty", "half copied", "deleted"):
            assert views.sql("SELECT count(DISTINCT traj_uid) FROM steps").fetchall()[0][
                0
            ] == 15 - len(bad.trajectories)
            assert [
                str(path) in str(line.message) and "gigpo fsck" in str(line.message)
                for line in said
            ] == [True]
            with pytest.warns(UserWarning, match=path.name), open_run(layout.root) as reader:
                assert reader.sql("SELECT count(*) FROM steps").to_pylist()
    assert {finding.subject for finding in check(layout, level=CONTENTS)} == {bad.path}
    assert fingerprint(layout.root) == before
    if damage == "a directory":
        return  # somebody put it there; fsck names it
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    with closing(connect(layout)) as views:
        assert views.sql("SELECT count(DISTINCT traj_uid) FROM steps").fetchall()[0][0] == 15 - len(
            bad.trajectories
        )
    # open.sql: this run is a copy
    changed = {"catalog.sqlite", "catalog.lock", "manifest.json", "open.sql", bad.path}
    changed.add("backup/catalog.sqlite")
    after = fingerprint(layout.root)
    assert {name for name, digest in before.items() if after.get(name) != digest} <= changed


def test_a_bad_segment_cannot_be_committed_for_a_good_one(
    layout: RunLayout, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other")
    with Catalog.open(other) as catalog:
        stranger = catalog.segment_metas([catalog.live_segments()[0].segment_id])[0]
    with Catalog.open(layout) as catalog:
        before = fingerprint(layout.root)
        with pytest.raises(StoreError, match="never opened; commit to the run that leased it"):
            catalog.commit(stranger, epoch=catalog.epoch)
        assert fingerprint(layout.root) == before


# A catalog that is not this run's, or not there.


def test_a_catalog_of_another_run_is_refused(layout: RunLayout, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    shutil.copy(other.catalog, layout.catalog)
    before = fingerprint(layout.root, but=("catalog.lock",))
    with pytest.raises(FormatError) as problem:
        Catalog.open(layout)
    one_line(problem, names=layout.catalog, remedy="put the right catalog back")
    assert other.info.run_id in str(problem.value) and layout.info.run_id in str(problem.value)
    assert [finding.what for finding in check(layout, level=CONTENTS)] == ["catalog_foreign"]
    assert fingerprint(layout.root, but=("catalog.lock",)) == before


@pytest.mark.parametrize(
    "content", [None, b"", b"SQLite format 3\0 and then something else" * 200, b"garbage" * 999]
)
def test_a_lost_catalog_is_never_begun_anew(layout: RunLayout, content: bytes | None) -> None:
    layout.catalog.unlink()
    if content is not None:
        layout.catalog.write_bytes(content)
    before = fingerprint(layout.root, but=("catalog.lock",))
    with pytest.raises(StoreError) as problem:
        Catalog.open(layout)
    one_line(problem, names=layout.catalog, remedy="gigpo rebuild")
    assert {finding.what for finding in check(layout, level=CONTENTS)} <= {
        "catalog_missing",
        "catalog_damaged",
    }
    with closing(connect(layout)) as views:
        assert views.sql("SELECT count(*) FROM steps").fetchall() == [(3 * 15,)]
    assert fingerprint(layout.root, but=("catalog.lock",)) == before
    assert main(["rebuild", str(layout.root)]) == 0
    assert check(layout, level=CONTENTS) == []


def test_two_coordinators_cannot_have_one_run(layout: RunLayout) -> None:
    script = """import pathlib, sys, store
store.Catalog.open(store.RunLayout.open(pathlib.Path(sys.argv[1])))"""
    with Catalog.open(layout) as catalog:
        open_train_group(catalog, 7)
        with pytest.raises(LockedError) as problem:
            Catalog.open(layout)
        one_line(problem, names=layout.catalog, remedy="stop it, or choose another run directory")
        assert f"process {os.getpid()} owns" in str(problem.value)
        second = subprocess.run(
            [sys.executable, "-c", script, str(layout.root)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 1
        assert f"LockedError: process {os.getpid()} owns" in second.stderr
        # the first one goes on as if nothing had been
        assert open_train_group(catalog, 8).epoch == catalog.epoch


# A full disk.


def writes_fail_and_then_work_again(
    layout: RunLayout, full: Callable[[], AbstractContextManager[None]]
) -> None:
    with Catalog.open(layout) as catalog:
        lsn = export(catalog, layout)
        group = catalog.lease_open_group(worker="w0", lease_s=60.0)
        assert group is not None
        # too large for 4 KiB
        catalog.log(component="test", what="to be exported", detail=os.urandom(8000).hex())
        before, counts = fingerprint(layout.root), catalog.counts()
        with full():
            with pytest.raises(StoreError) as problem:
                write_segment(layout, [make_trajectory(group, 2)], worker="w0", epoch=group.epoch)
            one_line(problem, names=layout.segments, remedy="free space")
            done = 0  # a few still fit into what the log has allocated
            refusal = "nothing of this transaction was written"
            with pytest.raises(StoreError, match=refusal) as problem:  # noqa: PT012
                while done < 2000:
                    open_train_group(catalog, 100 + done)
                    done += 1
            one_line(problem, names=layout.catalog, remedy="Check free space")
            with pytest.raises(StoreError) as problem:
                export(catalog, layout)
            one_line(problem, names=layout.exports, remedy="free space")
            with closing(connect(layout)) as views:  # readers keep what they had
                assert views.sql("SELECT count(*) FROM steps").fetchall() == [(3 * 15,)]
        after = fingerprint(layout.root)
        assert {
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        } <= {"catalog.sqlite"}
        assert catalog.counts().open == counts.open + done
        assert open_train_group(catalog, 100 + done).ordinal == 100 + done
        play(layout, catalog, group)
        assert export(catalog, layout) > lsn
    assert check(layout, level=CONTENTS) == []


def test_when_files_cannot_grow_nothing_is_half_written(layout: RunLayout) -> None:
    writes_fail_and_then_work_again(layout, no_file_may_grow)
    with no_file_may_grow(), pytest.raises(StoreError) as problem:
        Catalog.open(layout)
    one_line(problem, names=layout.catalog, remedy="Check free space")
    Catalog.open(layout).close()


def test_when_the_disk_is_full_nothing_is_half_written(intact: RunLayout) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        with mounted(directory, "-t", "tmpfs", "-o", "size=4m", "none"):
            layout = copy_run(intact, directory / "run")
            writes_fail_and_then_work_again(layout, lambda: no_space_left(directory))


# A directory that cannot be written to.


def test_a_read_only_run_can_be_read_and_checked_and_says_so_when_written(
    layout: RunLayout,
) -> None:
    # this run is a copy: its open.sql names it from here on
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    with mounted(layout.root, "--bind", str(layout.root)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(layout.root)], check=True)
        with pytest.raises(StoreError) as problem:
            Catalog.open(layout)
        one_line(problem, names=layout.catalog_lock, remedy="must be writable")
        for path in (layout.segments / "w0" / "x.parquet", layout.manifest):
            with pytest.raises(StoreError) as problem:
                write_atomically(path, b"x", mode=0o644, beneath=layout.root)
            one_line(problem, names=path, remedy="fix the permissions")
        with closing(connect(layout)) as views:
            assert views.sql("SELECT count(*) FROM steps").fetchall() == [(3 * 15,)]
        assert check(layout, level=CONTENTS) == []
        # nothing to repair: nothing is written
        assert main(["fsck", "--repair", str(layout.root)]) == 0
    assert check(layout, level=CONTENTS) == []


@pytest.mark.skipif(
    os.geteuid() == 0, reason="permissions do not bind the superuser; the read-only mount does"
)
def test_a_worker_without_permission_is_told_so(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 9)
        (layout.segments / "w0").chmod(0o555)
        with pytest.raises(StoreError) as problem:
            write_segment(layout, [make_trajectory(group, 0)], worker="w0", epoch=1)
        (layout.segments / "w0").chmod(0o755)
    one_line(problem, names=layout.segments, remedy="fix the permissions")


# A clock that goes back.

HOUR_US = 3600 * US_PER_S


def test_a_clock_that_goes_back_changes_no_order_and_frees_no_lease(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_us = [2_000_000_000 * US_PER_S]
    for module in (
        "store.catalog.database",
        "store.reading.manifest",
        "store.maintenance.sweep",
        "store.maintenance.fsck_segments",
    ):
        monkeypatch.setattr(f"{module}.now_us", lambda: clock_us[0])
    with Catalog.open(layout) as catalog:
        assert open_train_group(catalog, 7).ordinal == 7
        mine = catalog.lease_open_group(worker="a", lease_s=60.0)
        assert mine is not None and mine.ordinal == 6  # the oldest open one
        clock_us[0] -= HOUR_US
        open_train_group(catalog, 8)  # "opened" an hour before group 7
        next_one = catalog.lease_open_group(worker="b", lease_s=60.0)
        # the order is the lsn's; and 6 is still leased
        assert next_one is not None and next_one.ordinal == 7
        catalog.renew_leases(["a"], lease_s=60.0)
        clock_us[0] += 61 * US_PER_S
        again = catalog.lease_open_group(worker="c", lease_s=60.0)
        # renewed on the new clock, and run out on it
        assert again is not None and again.ordinal == 6
        play(layout, catalog, again, version=2)
        catalog.record_metrics(learner_step=1, policy_version=2, values={"loss": 9.0})
        assert catalog.latest_metrics()["loss"] == 9.0  # the newest one, not the latest
        lsn = export(catalog, layout)
        clock_us[0] -= HOUR_US
        batch = catalog.claim(n_groups=3, current_version=3, max_staleness=2)
        assert batch is not None and [group.ordinal for group in batch.groups] == [2, 3, 5]
        catalog.settle(batch.batch_id, learner_step=2, filtered={}, version_in=3)
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=2, path="checkpoints/step000002", version=2)
        )
        latest = next(reversed(catalog.live_checkpoints()), None)
        assert latest is not None and latest.learner_step == 2
        assert export(catalog, layout) > lsn
        # Files that were retired an hour "ahead" wait for the clock; none goes early.
        clock_us[0] += 2 * HOUR_US
        merged = compact_once(catalog, layout, policy=MERGE_TWO, skip=())
        assert merged is not None
        export(catalog, layout)
        clock_us[0] -= HOUR_US
        gone = sweep_retired(catalog, layout, window_s=60.0)
        assert not {f"{source}.parquet" for source in merged.sources} & {
            Path(path).name for path in gone
        }
        clock_us[0] += HOUR_US + 61 * US_PER_S
        gone = sweep_retired(catalog, layout, window_s=60.0)
        assert {f"{source}.parquet" for source in merged.sources} <= {
            Path(path).name for path in gone
        }
        export(catalog, layout)
    assert check(layout, level=CONTENTS) == []
