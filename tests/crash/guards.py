"""Ask the store, or a mutated copy of it, for one refusal that keeps a run whole.

Each function has its own process and directory, and raises AssertionError if nothing was refused.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from store import (
    Catalog,
    CheckpointRecord,
    DigestError,
    FencedError,
    LockedError,
    RunLayout,
    StoreError,
    VersionRecord,
    export,
    read_segment,
    write_open_sql,
    write_segment,
)
from store.atomic_write import READ_ONLY, write_once
from store.exchange.dataset_export import export_selection
from store.exchange.dataset_import import import_selection
from store.maintenance.compact import CompactionPolicy
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.maintenance.repair import repair
from store.reading.mirror import fetch_run
from store.segments import SegmentMeta
from tests.support.store_runs import compact_once
from tests.support.store_samples import make_step, make_trajectory, open_train_group

POLICY = CompactionPolicy(fan_in=2, max_live_files=500, min_file_bytes=1 << 20)
# For each unique index and key: a second row that only it forbids. What is not named is as in the
# row that is there.
SECOND_ROWS = {
    "segment.segment_id": ("segment", {"path": "'other'"}),
    "segment.path": ("segment", {"segment_id": "'other'"}),
    "grp.group_uid": ("grp", {}),
    "trajectory.traj_uid": ("trajectory", {"member": "member + 100"}),
    "trajectory_by_member": ("trajectory", {"traj_uid": "randomblob(16)"}),
    "duplicate": ("duplicate", {}),
    "batch_by_step": ("batch", {"batch_id": "NULL"}),
    "batch_group": ("batch_group", {"live": "0"}),
    "batch_group_once": ("batch_group", {"batch_id": "1 + (SELECT max(batch_id) FROM batch)"}),
    "version.version": ("version", {}),
    "checkpoint.lsn": ("checkpoint", {}),
    "metric": ("metric", {}),
}


def refuses(error: type[Exception], act: Callable[[], object]) -> None:
    """`act` must raise `error`."""
    try:
        act()
    except error:
        return
    raise AssertionError(f"{error.__name__} was to be raised")


def run_with_everything(
    root: str, *, storage_uri: str | None = None
) -> tuple[RunLayout, SegmentMeta]:
    """Make a small run with a row in every table. Return it and one of its segments."""
    layout = RunLayout.create(Path(root) / "run", config_yaml="a: 1\n", storage_uri=storage_uri)
    write_open_sql(layout, macros=(), max_staleness=0)
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
        early = write_segment(layout, [make_trajectory(group, 0)], worker="w0", epoch=catalog.epoch)
        both = write_segment(
            layout,
            [make_trajectory(group, member) for member in range(2)],
            worker="w0",
            epoch=catalog.epoch,
        )
        catalog.commit(early, epoch=catalog.epoch)
        catalog.commit(both, epoch=catalog.epoch)  # one of it is a duplicate
        catalog.record_version(
            VersionRecord(version=5, path="weights/v5", digest="", learner_step=None)
        )
        batch = catalog.claim(n_groups=1, current_version=5, max_staleness=5)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=5)
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=1, path="checkpoints/step1", version=5)
        )
        catalog.record_metrics(learner_step=1, policy_version=5, values={"loss": 1.0})
        export(catalog, layout)
    return layout, early


def no_second_row(root: str, key: str) -> None:
    """Check that the database itself forbids a second row."""
    layout, _ = run_with_everything(root)
    table, changes = SECOND_ROWS[key]
    connection = sqlite3.connect(layout.catalog)
    connection.create_function("now_us", 0, lambda: 0)
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    values = ", ".join(changes.get(column, column) for column in columns)
    refuses(
        sqlite3.IntegrityError,
        lambda: connection.execute(f"INSERT INTO {table} SELECT {values} FROM {table} LIMIT 1"),
    )


def stale_epochs_are_fenced(root: str) -> None:
    """Check that an older owner is refused, and commits under its leases are."""
    layout, segment = run_with_everything(root)
    with Catalog.open(layout) as old:
        refuses(FencedError, lambda: old.commit(segment, epoch=old.epoch - 1))
        layout.catalog_lock.unlink()
        with Catalog.open(layout) as new:
            assert new.epoch == old.epoch + 1
            refuses(FencedError, old.counts)


def one_owner(root: str) -> None:
    """Check that a second owner is refused."""
    layout, _ = run_with_everything(root)
    with Catalog.open(layout):
        refuses(LockedError, lambda: Catalog.open(layout))


def changed_bytes_are_noticed(root: str) -> None:
    """Check that the learner refuses a changed byte."""
    layout, segment = run_with_everything(root)
    read_segment(layout, segment)
    change_a_byte(layout.root / segment.path)
    refuses(DigestError, lambda: read_segment(layout, segment))


def fsck_notices_changed_bytes(root: str) -> None:
    """Check that fsck finds a changed byte, and nothing else."""
    layout, segment = run_with_everything(root)
    before = check(layout, level=CONTENTS)
    change_a_byte(layout.root / segment.path)
    assert [
        finding.subject for finding in check(layout, level=CONTENTS) if finding not in before
    ] == [segment.path]


def fsck_notices_wrong_state_hashes(root: str) -> None:
    """In a file whose bytes are as they were committed."""
    layout, _ = run_with_everything(root)
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 1, size=1)
        wrong = dataclasses.replace(
            make_trajectory(group, 0),
            steps=(make_step(0, n_steps=1, version=0, state_hash=b"0" * 16),),
        )
        catalog.commit(
            write_segment(layout, [wrong], worker="w0", epoch=catalog.epoch), epoch=catalog.epoch
        )
    assert "state_hash" in [finding.what for finding in check(layout, level=CONTENTS)]


def import_notices_changed_bytes(root: str) -> None:
    """In a dataset that was copied."""
    layout, _ = run_with_everything(root)
    other = RunLayout.create(Path(root) / "other", config_yaml="a: 1\n")
    dataset = export_selection(layout.root, Path(root) / "dataset", where=None, as_of=None)
    change_a_byte(Path(root) / "dataset" / dataset.parts[0].path)
    refuses(DigestError, lambda: import_selection(other.root, Path(root) / "dataset"))


def export_notices_changed_bytes(root: str) -> None:
    """In the run it copies from."""
    layout, segment = run_with_everything(root)
    change_a_byte(layout.root / segment.path)
    refuses(
        DigestError,
        lambda: export_selection(layout.root, Path(root) / "dataset", where=None, as_of=None),
    )


def fetch_notices_changed_bytes(root: str) -> None:
    """In a storage elsewhere."""
    remote = Path(root) / "remote"
    _, segment = run_with_everything(root, storage_uri=remote.as_uri())
    change_a_byte(remote / segment.path)
    refuses(DigestError, lambda: fetch_run(remote.as_uri(), Path(root) / "copy"))


def rebuild_notices_changed_bytes(root: str) -> None:
    """And sets the file aside."""
    layout, segment = run_with_everything(root)
    change_a_byte(layout.root / segment.path)
    rebuild(layout)
    assert (layout.quarantine / f"{segment.segment_id}.parquet").is_file()


def repair_rescues_no_changed_bytes(root: str) -> None:
    """Check that a repair rescues only trajectories that intact files from before a merge hold."""
    layout, early = run_with_everything(root)
    with Catalog.open(layout) as catalog:
        merged = compact_once(catalog, layout, policy=POLICY, skip=())
        assert merged is not None and merged.merged is not None
        change_a_byte(layout.root / merged.merged.path)
        change_a_byte(layout.root / early.path)
        repair(catalog, layout, findings=check(layout, level=CONTENTS))
        known = catalog.known_trajectories(
            [trajectory.traj_uid for trajectory in merged.merged.trajectories]
        )
    assert known == {trajectory.traj_uid for trajectory in merged.merged.trajectories} - {
        early.trajectories[0].traj_uid
    }


def change_a_byte(path: Path) -> None:
    """In the name of the program that wrote the file: no reader and no page checksum minds, only
    the digest does.
    """
    data = bytearray(path.read_bytes())
    data[data.rindex(b"parquet-cpp-arrow")] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def names_are_taken_once(root: str) -> None:
    """run.json of another process that creates the same run; a version number after a roll-back."""
    path = Path(root) / "once"
    write_once(path, b"first", mode=READ_ONLY, beneath=path.parent)
    refuses(
        FileExistsError, lambda: write_once(path, b"second", mode=READ_ONLY, beneath=path.parent)
    )
    assert path.read_bytes() == b"first" and os.listdir(root) == ["once"]
    layout, _ = run_with_everything(root)
    with Catalog.open(layout) as catalog:
        catalog.roll_back(0)
        refuses(
            StoreError,
            lambda: catalog.record_version(
                VersionRecord(version=4, path="weights/v4", digest="", learner_step=1)
            ),
        )
