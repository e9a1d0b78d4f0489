"""A lost catalog comes back from its backup and the segments; the report says what does not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import warnings
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

import store.maintenance.rebuild as rebuild_module
from cli.__main__ import main
from store import (
    Catalog,
    FencedError,
    FormatError,
    Group,
    LockedError,
    RunLayout,
    StoreError,
    UnavailableError,
    VersionRecord,
    export,
    open_run,
    write_open_sql,
    write_segment,
)
from store.catalog.groups import uids_of_address
from store.exchange.dataset_export import export_selection
from store.exchange.dataset_import import import_selection
from store.exchange.fork import fork
from store.hashing import uid
from store.maintenance import group_addresses
from store.maintenance.compact import CompactionPolicy
from store.maintenance.finding import Finding
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.fsck_catalog import check_catalog
from store.maintenance.rebuild import rebuild
from store.maintenance.repair import repair
from store.maintenance.segment_rows import COLUMNS, NULLABLE
from store.maintenance.sweep import sweep_retired
from store.records import to_table
from store.segments import TrajectoryMeta, write_rows
from tests.support.run_views import connect
from tests.support.store_damage import edit, no_file_may_grow
from tests.support.store_runs import MERGE_TWO, compact_once, fingerprint, flip, make_run, rewrite
from tests.support.store_samples import make_trajectory, open_train_group, play

# Every row of the catalog, without its times of leases and heartbeats.
RECOVERED = (
    """SELECT group_uid, split, ordinal, task_id, size, evaluated_version, state, reason, n_members,
              n_steps, n_won, return_sum, version_min, version_max, opened_us, opened_lsn,
              completed_us, completed_lsn, changed_lsn FROM grp""",
    "SELECT * FROM trajectory",
    "SELECT * FROM segment",
    "SELECT * FROM duplicate",
    "SELECT * FROM group_state ORDER BY seq",
    "SELECT * FROM batch",
    "SELECT * FROM batch_group",
    "SELECT * FROM version",
    "SELECT * FROM checkpoint ORDER BY lsn",
    "SELECT * FROM metric",
    "SELECT * FROM event WHERE component NOT IN ('rebuild', 'fsck') ORDER BY event_id",
)
VIEWS = (
    "steps",
    "trajectories",
    "groups",
    "anchor_groups",
    "lineage",
    "critic_values",
    "versions",
    "checkpoints",
    "metrics",
    "ledger",
    "unfinished",
)


def ask(layout: RunLayout, query: str) -> list[tuple]:
    with closing(sqlite3.connect(layout.catalog)) as connection:
        return connection.execute(query).fetchall()


def shown(layout: RunLayout) -> dict[str, list]:
    with closing(connect(layout)) as views:
        return {name: sorted(views.sql(f"FROM {name}").fetchall(), key=repr) for name in VIEWS}


def rows_of(layout: RunLayout) -> dict[str, list]:
    """Return every row that readers see, by trajectory."""
    with closing(connect(layout)) as views:
        found: dict[str, list] = {}
        for row in views.sql("SELECT * FROM steps ORDER BY traj_uid, step_index").fetchall():
            found.setdefault(str(row[0]), []).append(row)
        return found


def states(layout: RunLayout) -> dict[int, str]:
    return dict(
        ask(layout, "SELECT ordinal, state FROM grp WHERE split = 'train' ORDER BY ordinal")
    )


def crashed() -> AbstractContextManager[object]:
    """Within, the owner of the catalog dies without a clean close: no backup is made."""
    return mock.patch("store.catalog.catalog.Catalog.back_up")


def test_a_closed_run_comes_back_as_it_was(layout: RunLayout, intact: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        lease = catalog.lease_open_group(worker="w5", lease_s=60.0)
        assert lease is not None
    before, files = shown(layout), fingerprint(layout.segments)
    layout.catalog.unlink()
    report = rebuild(layout)
    (line,) = report.lost
    assert "training goes on from the checkpoint of learner step 1" in line
    for query in RECOVERED:
        assert ask(layout, query) == ask(intact, query), query
    assert shown(layout) == before
    assert fingerprint(layout.segments) == files
    assert check(layout, level=CONTENTS) == []
    segment = write_segment(
        layout, [make_trajectory(lease, lease.missing[0])], worker="w5", epoch=lease.epoch
    )
    with Catalog.open(layout) as catalog:
        with pytest.raises(FencedError):
            catalog.commit(segment, epoch=lease.epoch)
        play(layout, catalog, catalog.lease_open_group(worker="w5", lease_s=60.0), version=1)
        batch = catalog.claim(n_groups=4, current_version=3, max_staleness=2)
        assert batch is not None and batch.batch_id > max(
            row[0] for row in ask(intact, "SELECT batch_id FROM batch")
        )
        catalog.settle(batch.batch_id, learner_step=2, filtered={}, version_in=3)
        latest = next(reversed(catalog.live_checkpoints()), None)
        assert latest is not None and latest.learner_step == 1
        catalog.record_version(
            VersionRecord(version=4, path="weights/v1", digest="d", learner_step=2)
        )
        export(catalog, layout)
    assert check(layout, level=CONTENTS) == []


def test_what_was_committed_after_the_backup_is_found_in_the_files(layout: RunLayout) -> None:
    with crashed(), Catalog.open(layout) as catalog:
        epoch = catalog.epoch
        # the member that was missing
        play(layout, catalog, open_train_group(catalog, 6, size=3), version=1)
        # 7 and 8 were dispatched, and nothing else
        play(layout, catalog, open_train_group(catalog, 9), version=1)
        play(
            layout,
            catalog,
            catalog.open_group(
                ordinal=3, task_id="h3", split="heldout", size=1, evaluated_version=4
            ),
        )
        assert catalog.claim(n_groups=1, current_version=3, max_staleness=2) is not None
        trajectories = ask(layout, "SELECT traj_uid, segment_id FROM trajectory ORDER BY traj_uid")
    (layout.weights / "v000007").mkdir()
    layout.catalog.unlink()
    report = rebuild(layout)
    assert (
        ask(layout, "SELECT traj_uid, segment_id FROM trajectory ORDER BY traj_uid") == trajectories
    )
    assert states(layout) == {
        **{
            0: "trained",
            1: "filtered",
            2: "complete",
            3: "complete",
            4: "stale",
            5: "complete",
            6: "complete",
            9: "complete",
        }
    }
    heldout = """SELECT ordinal, evaluated_version, task_id, state FROM grp WHERE split = 'heldout'
                 ORDER BY evaluated_version"""
    assert ask(layout, heldout) == [(0, 2, "h", "complete"), (3, 4, "h3", "complete")]
    assert any("4 trajectories that are newer than the backup" in line for line in report.recovered)
    assert check(layout, level=CONTENTS) == []
    with Catalog.open(layout) as catalog:
        assert catalog.epoch > epoch
        version = catalog.latest_version()
        assert version is not None and version.version == 7  # the next one is 8
        assert catalog.next_ordinal("train", evaluated_version=None) == 10


def test_a_step_after_the_backup_is_rolled_back_and_trained_again(layout: RunLayout) -> None:
    with crashed(), Catalog.open(layout) as catalog:
        batch = catalog.claim(n_groups=2, current_version=3, max_staleness=2)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=2, filtered={}, version_in=3)
        catalog.record_version(
            VersionRecord(version=4, path="weights/v000004", digest="d4", learner_step=2)
        )
        export(catalog, layout)
    (layout.weights / "v000004").mkdir()
    layout.catalog.unlink()
    rebuild(layout)
    with Catalog.open(layout) as catalog:
        assert catalog.learner_step() == 1
        again = catalog.claim(n_groups=2, current_version=4, max_staleness=3)
        assert again is not None
        assert [group.group_uid for group in again.groups] == [
            group.group_uid for group in batch.groups
        ]
        catalog.settle(again.batch_id, learner_step=2, filtered={}, version_in=4)
        with pytest.raises(StoreError, match="not after the latest, 4"):
            catalog.record_version(
                VersionRecord(version=4, path="weights/v000004", digest="d", learner_step=2)
            )
        export(catalog, layout)
    with closing(connect(layout)) as views:
        assert views.sql("SELECT count(*) FROM staleness_violations").fetchall() == [(0,)]
    assert check(layout, level=CONTENTS) == []


def test_files_that_were_merged_after_the_backup_are_read_from_the_merged_one(
    layout: RunLayout,
) -> None:
    rows = rows_of(layout)
    with crashed(), Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 9), version=1)
        while compact_once(catalog, layout, policy=MERGE_TWO, skip=()) is not None:
            pass
        export(catalog, layout)
        assert sweep_retired(catalog, layout, window_s=0.0)
    after = rows_of(layout)
    layout.catalog.unlink()
    report = rebuild(layout)
    assert any("from a file that replaced theirs" in line for line in report.recovered)
    assert rows_of(layout) == after
    assert rows.items() <= after.items() and len(after) > len(rows)
    assert check(layout, level=CONTENTS) == []


def test_a_learner_that_goes_on_rolls_a_claimed_batch_back_and_counts_it(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:
        assert catalog.claim(n_groups=2, current_version=3, max_staleness=2) is not None
    layout.catalog.write_bytes(b"not a database, but somebody may want to look at it")
    rebuild(layout)
    assert check(layout, level=CONTENTS) == []
    with Catalog.open(layout) as catalog:
        assert catalog.roll_back(1).groups == 2
    assert [states(layout)[ordinal] for ordinal in (2, 3)] == ["complete", "complete"]
    assert ask(layout, "SELECT count(*) FROM batch WHERE state = 'claimed'") == [(0,)]
    assert (layout.quarantine / "catalog.sqlite").read_bytes().startswith(b"not a database")
    assert check(layout, level=CONTENTS) == []


BAD_BACKUPS = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "torn": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "a text": lambda data: b"SQLite format 3\0 and then something else" * 200,
    "with a log": lambda data: data[:18] + b"\2\2" + data[20:],
}


@pytest.mark.parametrize("what", BAD_BACKUPS)
def test_without_a_sound_backup_the_files_alone_give_groups_and_trajectories(
    layout: RunLayout, intact: RunLayout, what: str
) -> None:
    data = BAD_BACKUPS[what](layout.backup.read_bytes())
    layout.catalog.unlink()
    layout.backup.unlink()
    if data is not None:
        layout.backup.write_bytes(data)
    report = rebuild(layout)
    assert any("there is no backup to begin with" in line for line in report.lost)
    # The close of the new catalog makes a new backup, and the old one is not lost with it.
    assert [file.read_bytes() for file in layout.quarantine.glob("catalog*")] == (
        [] if data is None else [data]
    )
    query = """SELECT group_uid, split, ordinal, task_id, evaluated_version, n_members, n_steps,
                      return_sum FROM grp"""
    assert ask(layout, query) == ask(intact, query)
    assert {
        ordinal: state for ordinal, state in states(layout).items() if ordinal < 6
    } == dict.fromkeys(range(6), "complete")
    rows = "SELECT traj_uid, group_uid, n_steps, episode_return FROM trajectory"
    assert ask(layout, rows) == ask(intact, rows)
    assert check(layout, level=CONTENTS) == []
    with Catalog.open(layout) as catalog:
        assert catalog.claim(n_groups=2, current_version=3, max_staleness=2) is not None


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE grp SET size = size + 1 WHERE ordinal = 3",
        "DELETE FROM group_state WHERE state = 'stale'",
        f"UPDATE meta SET run_id = '{'0' * 32}'",
        "CREATE TABLE planted (x)",
    ],
)
def test_a_damaged_catalog_never_replaces_a_sound_backup(layout: RunLayout, damage: str) -> None:
    before = layout.backup.read_bytes()
    with Catalog.open(layout) as catalog:
        connection = catalog._database._connection
        connection.execute("DROP TRIGGER group_state_only_grows")
        connection.execute(damage)
        catalog.back_up()
        if "run_id" not in damage:
            (line,) = ask(layout, "SELECT detail FROM event WHERE component = 'backup'")
            assert "not sound" in line[0] or "none that this code makes" in line[0]
    if "planted" not in damage:
        assert layout.backup.read_bytes() == before


def stop(*_: object) -> int:
    """Do what Ctrl-C does within a query: sqlite3 hides the exception of a progress handler."""
    raise KeyboardInterrupt


def test_ctrl_c_in_a_rebuild_changes_nothing(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(connection: sqlite3.Connection) -> list[Finding]:
        connection.set_progress_handler(stop, 1)
        return check_catalog(connection)

    layout.catalog.unlink()
    but = (layout.catalog_lock.name,)
    before = fingerprint(layout.root, but=but)
    with monkeypatch.context() as within:
        within.setattr("store.maintenance.backup.check_catalog", stopped)
        with pytest.raises(KeyboardInterrupt):
            rebuild(layout)
    assert fingerprint(layout.root, but=but) == before
    report = rebuild(layout)
    assert any("the checkpoint of learner step 1" in line for line in report.lost)


def test_a_full_disk_for_temporary_files_is_no_damage_of_the_backup(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: sqlite3.Connection) -> list[Finding]:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    layout.catalog.unlink()
    before = layout.backup.read_bytes()
    monkeypatch.setattr("store.maintenance.backup.check_catalog", full)
    with pytest.raises(UnavailableError, match="free space for temporary files"):
        rebuild(layout)
    assert layout.backup.read_bytes() == before and not layout.quarantine.exists()


def test_a_rebuild_that_is_killed_in_between_leaves_no_catalog_without_its_log(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the log was moved first, and then the manifest. The next start lost the commits
    in the log, or took an older copy of the catalog, and removed their files.
    """
    moved: list[str] = []
    move = rebuild_module.quarantine

    def move_one(layout: RunLayout, path: str) -> str:
        if moved:
            raise KeyboardInterrupt
        moved.append(path)
        return move(layout, path)

    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 60), version=1)
        catalog._database.close()  # as kill -9 leaves it
    Path(f"{layout.catalog}-wal").touch()
    with monkeypatch.context() as patch:
        patch.setattr(rebuild_module, "quarantine", move_one)
        with pytest.raises(KeyboardInterrupt):
            rebuild(layout)
    assert moved == ["catalog.sqlite"]
    with pytest.raises(StoreError, match="gigpo rebuild"):
        Catalog.open(layout)
    rebuild(layout)
    Catalog.open(layout).close()


def test_a_rebuild_that_is_killed_once_its_catalog_is_there_shows_nothing_of_the_old_one(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the next owner's export added to the manifest of the catalog that was lost."""
    with crashed(), Catalog.open(layout) as catalog:
        batch = catalog.claim(n_groups=2, current_version=3, max_staleness=2)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=2, filtered={}, version_in=3)
        export(catalog, layout)
    layout.catalog.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(rebuild_module, "check", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rebuild(layout)
    with Catalog.open(layout) as catalog:
        export(catalog, layout)
        assert catalog.learner_step() == 1
        seen = shown(layout)
        layout.manifest.unlink()  # the next one shows the catalog, and nothing else
        export(catalog, layout)
    assert seen == shown(layout)
    assert check(layout, level=CONTENTS) == []


def test_a_full_disk_leaves_a_catalog_where_it_is(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it was in quarantine/ without its log, and "put it back" lost the newest commits."""
    before = fingerprint(layout.root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(StoreError, match="full"):
            rebuild(layout)
    assert fingerprint(layout.root) == before
    set_aside = rebuild_module._set_catalog_aside

    def set_aside_and_end(layout: RunLayout) -> None:
        set_aside(layout)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rebuild_module, "_set_catalog_aside", set_aside_and_end)
        with pytest.raises(KeyboardInterrupt):
            rebuild(layout)
    with pytest.raises(StoreError, match="and the run has segments; gigpo rebuild"):
        Catalog.open(layout)
    rebuild(layout)
    Catalog.open(layout).close()


def test_a_foreign_program_in_a_backup_is_never_started(layout: RunLayout) -> None:
    rewrite(layout.backup, with_a_trigger(layout.backup.read_bytes()))
    layout.catalog.unlink()
    report = rebuild(layout)
    assert any("none that this code makes" in line for line in report.lost)
    assert check(layout, level=CONTENTS) == []


def with_a_trigger(data: bytes) -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(data)
        connection.execute(
            "CREATE TRIGGER planted AFTER UPDATE ON meta BEGIN DELETE FROM metric; END"
        )
        return connection.serialize()


def test_figures_that_were_changed_before_the_backup_are_those_of_the_rows_again(
    layout: RunLayout, intact: RunLayout
) -> None:
    edit(
        "UPDATE trajectory SET episode_return = 99",
        "UPDATE grp SET return_sum = 99 * n_members",
    )(layout)
    Catalog.open(layout).close()  # the catalog agrees with itself, so this is the backup now
    assert {finding.what for finding in check(layout, level=CONTENTS)} == {"figures"}
    rebuild(layout)
    query = "SELECT traj_uid, episode_return FROM trajectory"
    assert ask(layout, query) == ask(intact, query)
    assert check(layout, level=CONTENTS) == []


def test_a_damaged_manifest_does_not_matter(layout: RunLayout, intact: RunLayout) -> None:
    layout.catalog.unlink()
    layout.manifest.write_text("{")
    shutil.rmtree(layout.exports)
    layout.exports.mkdir()
    rebuild(layout)
    for query in RECOVERED:
        assert ask(layout, query) == ask(intact, query), query
    assert check(layout, level=CONTENTS) == []


def test_files_that_cannot_be_used_are_set_aside_and_said(
    layout: RunLayout, tmp_path: Path
) -> None:
    query = """SELECT path FROM segment JOIN trajectory USING (segment_id)
               JOIN grp USING (group_uid)
               WHERE ordinal = 5 AND split = 'train' AND member = 0"""
    ((path,),) = ask(layout, query)
    flip(layout.root / path, 4321)
    other = make_run(tmp_path / "other")
    foreign = ask(other, "SELECT path FROM segment WHERE worker = 'w2'")[0][0]
    shutil.copy(other.root / foreign, layout.root / foreign)
    layout.catalog.unlink()
    report = rebuild(layout)
    assert {Path(path).name, Path(foreign).name} <= {
        file.name for file in layout.quarantine.iterdir()
    }
    said = "\n".join(report.lost)
    assert (
        "name is that of another content" in said
        and other.info.run_id in said
        and "1 groups are played again" in said
    )
    assert states(layout)[5] == "open"
    assert check(layout, level=CONTENTS) == []


def test_what_retention_removed_stays_in_the_figures_of_its_groups(layout: RunLayout) -> None:
    figures = """SELECT ordinal, state, n_members, n_steps, return_sum FROM grp
                 WHERE split = 'train' ORDER BY ordinal"""
    with crashed(), Catalog.open(layout) as catalog:
        (merged,) = [segment for segment in catalog.live_segments() if segment.level]
        catalog.expire([merged.segment_id])
        export(catalog, layout)
        for path in catalog.removable(retired_before_us=2**62, pinned_lsn=None).values():
            (layout.root / path).unlink()
    before = ask(layout, figures)
    layout.catalog.unlink()
    report = rebuild(layout)
    assert ask(layout, figures) == before
    assert any("0 trajectories rescued, 4 lost" in line for line in report.lost)
    assert check(layout, level=CONTENTS) == []


def test_a_rebuild_that_was_interrupted_is_begun_again(
    layout: RunLayout, intact: RunLayout
) -> None:
    layout.catalog.rename(layout.root / ".catalog.sqlite.1-1.tmp")  # killed before the last rename
    rebuild(layout)
    assert ask(layout, RECOVERED[0]) == ask(intact, RECOVERED[0])
    rebuild(layout)  # of a catalog that nobody lost
    assert ask(layout, RECOVERED[0]) == ask(intact, RECOVERED[0])
    with Catalog.open(layout), pytest.raises(LockedError, match="owns"):
        rebuild(layout)
    assert json.loads(layout.manifest.read_text())["lsn"] > 0
    assert check(layout, level=CONTENTS) == []


def test_an_older_copy_of_the_catalog_is_refused_and_nothing_committed_since_is_lost(
    layout: RunLayout,
) -> None:
    backup = layout.catalog.read_bytes()
    with crashed(), Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 9), version=1)
        export(catalog, layout)
        trajectories = ask(layout, "SELECT traj_uid FROM trajectory ORDER BY traj_uid")
    layout.catalog.write_bytes(backup)
    with pytest.raises(FormatError, match=r"older copy.*rebuild --force"):
        Catalog.open(layout)
    assert "manifest_ahead" in {finding.what for finding in check(layout, level=CONTENTS)}
    rebuild(layout)
    assert ask(layout, "SELECT traj_uid FROM trajectory ORDER BY traj_uid") == trajectories
    with Catalog.open(layout) as catalog:
        assert catalog.counts().complete > 0


def test_versions_of_imported_groups_are_none_of_this_run(
    layout: RunLayout, tmp_path: Path
) -> None:
    other = RunLayout.create(tmp_path / "other", config_yaml="a: 1\n")
    with Catalog.open(other) as catalog:
        write_open_sql(other, macros=(), max_staleness=4)
        play(other, catalog, open_train_group(catalog, 0), version=70)
        export(catalog, other)
    export_selection(other.root, tmp_path / "dataset", where=None, as_of=None)
    for with_backup in (True, False):
        import_selection(layout.root, tmp_path / "dataset")
        layout.catalog.unlink()
        if not with_backup:
            layout.backup.unlink()
        rebuild(layout)
        newest = max(ask(layout, "SELECT version FROM version"), default=None)
        assert newest == ((3,) if with_backup else None)


def lines_of(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.out + said.err


DEEP = '{"a":' * 100_000
BAD_RUN_JSON = {
    "missing": None,
    "empty": "",
    "deep": DEEP,
    "a list": "[]",
    "no text": {"config_yaml": 3},
    "format is no text": {"format": ["async-gigpo/1"]},
    "below zero": {"created_us": -1},
    "beyond int64": {"created_us": 10**30},
    "no run id": {"run_id": "../../etc"},
    "no list": {"ancestors": {"a": 1}},
    "another run's": {"run_id": "0" * 32},
}


@pytest.mark.parametrize("what", BAD_RUN_JSON)
def test_a_lost_run_json_is_rebuilt(
    layout: RunLayout, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = BAD_RUN_JSON[what]
    before = fingerprint(layout.segments)
    layout.run_json.chmod(0o644)
    if content is None:
        layout.run_json.unlink()
    else:
        known = json.loads(layout.run_json.read_text())
        layout.run_json.write_text(
            content if isinstance(content, str) else json.dumps({**known, **content})
        )
    with warnings.catch_warnings():
        status = main(["fsck", str(layout.root)])
    said = lines_of(capsys)
    assert status and " rebuild " in said
    assert main(["rebuild", str(layout.root)]) == 0
    assert f"run.json of run {layout.info.run_id}" in lines_of(capsys)
    again = RunLayout.open(layout.root)
    assert again.info == layout.info
    assert check(again, level=CONTENTS) == []
    assert fingerprint(layout.segments) == before
    assert len(list(layout.root.glob("quarantine/run*.json"))) == (content is not None)


def test_the_name_of_a_run_does_not_decide_whether_it_is_damaged(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    root = layout.root.rename(layout.root.with_name("update the code"))
    (root / "run.json").unlink()
    (root / "run.json").write_text("{")
    assert main(["rebuild", str(root)]) == 0, capsys.readouterr().err
    (root / "run.json").unlink()
    (root / "run.json").write_text('{"format": "async-gigpo/1000"}')
    assert main(["rebuild", str(root)]) != 0
    assert "has format 'async-gigpo/1000', and this version reads" in capsys.readouterr().err


def test_a_lost_run_json_and_a_lost_catalog_are_rebuilt(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (layout.run_json, layout.catalog, layout.manifest):
        path.unlink()
    assert main(["rebuild", str(layout.root)]) == 0
    assert f"run.json of run {layout.info.run_id}" in lines_of(capsys)
    assert check(RunLayout.open(layout.root), level=CONTENTS) == []


def test_a_lost_run_json_without_a_copy_is_not_guessed(
    layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout.run_json.unlink()
    layout.run_json_backup.unlink()
    assert main(["rebuild", str(layout.root)]) == 2
    assert "put a backup of run.json back" in lines_of(capsys)
    assert main(["rebuild", str(tmp_path)]) == 2
    assert "is not a run directory" in lines_of(capsys)


def test_a_fork_whose_run_json_is_lost_keeps_its_ancestors(
    layout: RunLayout, tmp_path: Path
) -> None:
    for name in ("child", "grandchild"):
        (layout.root / "checkpoints/step000001").mkdir(parents=True, exist_ok=True)
        layout = fork(layout, tmp_path / name, learner_step=1, config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=4)
    with Catalog.open(layout) as catalog:
        export(catalog, layout)
    assert len(layout.info.ancestors) == 2
    for without_catalog in (False, True):
        layout.run_json.unlink()
        if without_catalog:
            layout.catalog.unlink()
        assert main(["rebuild", str(layout.root)]) == 0
        again = RunLayout.open(layout.root)
        assert (again.info.ancestors, again.info.forked_from) == (
            layout.info.ancestors,
            layout.info.forked_from,
        )


FORGED_NUMBERS = ("ordinal", "round", "version")


def plant_unknown_groups(layout: RunLayout) -> None:
    """Write segments of a training and a held-out group that no search by address finds."""
    for number, split in enumerate(("train", "heldout")):
        group_uid = uid("f" * 32, split, number, None)
        group = Group.imported(group_uid=group_uid, task_id="t", size=2)
        planted = replace(make_trajectory(group, 0), split=split)
        write_segment(layout, [planted], worker="w9", epoch=1)


@pytest.mark.parametrize("number", FORGED_NUMBERS)
def test_a_backup_that_counts_without_end_is_refused(tmp_path: Path, number: str) -> None:
    """Name the number instead of trying every smaller one."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=9)
    version = 2**62 if number != "ordinal" else 0
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=version, path="weights/v0", digest="d", learner_step=None)
        )
        if number == "ordinal":
            open_train_group(catalog, 2**62)
        elif number == "round":
            catalog.open_round(["t"], episodes_per_task=1, version=version)
        export(catalog, layout)
    plant_unknown_groups(layout)
    layout.catalog.unlink()
    with pytest.raises(StoreError, match=f"counts to .* {2**62}, as no run does"):
        rebuild(layout)
    assert layout.backup.exists()
    if number == "ordinal":  # the search for the planted groups takes as long with the others
        layout.backup.unlink()
        rebuild(layout)
        assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize(
    ("index", "value"),
    [
        ("trajectory_by_segment", "SELECT segment_id FROM trajectory"),
        ("trajectory_by_member", "SELECT group_uid FROM trajectory"),
        ("segment", "SELECT path FROM segment WHERE retired_lsn IS NULL"),
    ],
)
def test_an_owner_changes_nothing_in_a_catalog_whose_indexes_are_damaged(
    tmp_path: Path, index: str, value: str
) -> None:
    """After one changed byte a merge took a trajectory for a doubled one and removed its file, and
    a learner trained a group without one of its members.
    """
    layout = make_run(tmp_path / "run")
    with closing(sqlite3.connect(layout.catalog)) as connection:
        expected = connection.execute("SELECT traj_uid FROM trajectory ORDER BY 1").fetchall()
        (found,) = connection.execute(f"{value} LIMIT 1").fetchone()
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = ?", (index,)
        ).fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    sought = found if isinstance(found, bytes) else found.encode()
    data = bytearray(layout.catalog.read_bytes())
    data[data.index(sought, (page - 1) * 4096) + len(sought) - len("0.parquet")] ^= 1
    layout.catalog.write_bytes(data)
    with pytest.raises(FormatError, match=f"gigpo rebuild --force {layout.root}"):
        Catalog.open(layout)
    rebuild(layout)
    Catalog.open(layout).close()
    assert ask(layout, "SELECT traj_uid FROM trajectory ORDER BY 1") == expected


def test_a_large_number_in_a_backup_costs_no_search_from_zero(tmp_path: Path) -> None:
    """Try the addresses around the largest known ones only."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=9)
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=2**39, path="weights/v0", digest="d", learner_step=None)
        )
        open_train_group(catalog, 2**39)
        export(catalog, layout)
    with crashed(), Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 2**39 + 1))
        export(catalog, layout)
    plant_unknown_groups(layout)
    layout.catalog.unlink()
    with mock.patch(
        "store.maintenance.group_addresses.uids_of_address", wraps=uids_of_address
    ) as tried:
        rebuild(layout)
    assert states(layout)[2**39 + 1] == "complete"
    assert tried.call_count < 1_000_000


def test_a_file_that_counts_versions_without_end_is_set_aside(tmp_path: Path) -> None:
    """Take no version number from a segment that no run can have written."""
    layout = make_run(tmp_path / "run")
    group = Group.imported(group_uid=uid("f" * 32, "train", 0, None), task_id="t", size=1)
    planted = make_trajectory(group, 0, version=2**62)
    write_segment(layout, [planted], worker="w9", epoch=1)
    layout.catalog.unlink()
    report = rebuild(layout)
    assert any("as no run does" in line for line in report.lost)
    assert ask(layout, "SELECT max(version) < 100 FROM version") == [(1,)]


@pytest.mark.parametrize("column", [name for name in COLUMNS if name not in NULLABLE])
def test_a_file_without_what_each_row_must_say_is_named_and_set_aside(
    column: str, tmp_path: Path
) -> None:
    """The attack: a null uid ended fsck with a traceback, a null group or member each rebuild."""
    layout = make_run(tmp_path / "run")
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 60, size=1)
        played = make_trajectory(group, 0, version=0)
        table = to_table([played])
        field = table.schema.field(column)
        nothing = table.set_column(
            table.schema.get_field_index(column), field, pa.nulls(table.num_rows, field.type)
        )
        metas = (TrajectoryMeta.of(played),)
        planted = write_rows(layout, nothing, trajectories=metas, worker="w9", epoch=catalog.epoch)
        catalog.commit(planted, epoch=catalog.epoch)
        export(catalog, layout)
    fault = f"no {column} in a row"
    assert any(
        fault in one.detail and planted.path in one.detail for one in check(layout, level=CONTENTS)
    )
    layout.catalog.unlink()
    layout.backup.unlink()  # it knows the file's size, so the file would not be read
    report = rebuild(layout)
    assert any(planted.path in line and fault in line for line in report.lost)
    assert (layout.quarantine / Path(planted.path).name).exists()


def test_a_manifest_that_counts_too_far_is_refused_by_name(tmp_path: Path) -> None:
    """The rebuilt catalog would have had the finding again that fsck had sent the user for."""
    layout = make_run(tmp_path / "run")
    shown = json.loads(layout.manifest.read_text())
    rewrite(layout.manifest, json.dumps({**shown, "lsn": 2**54}).encode())
    layout.catalog.unlink()
    with pytest.raises(StoreError, match=r"as no run does; remove manifest.json"):
        rebuild(layout)
    layout.manifest.unlink()
    rebuild(layout)
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_rebuild_takes_the_attempt_that_was_committed(tmp_path: Path, is_shown: bool) -> None:
    """The attack: it took a larger attempt, which a killed owner had not committed."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    with crashed(), Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=9)
        group = open_train_group(catalog, 0)
        assert catalog.back_up()
        larger = [make_trajectory(group, member, n_steps=6) for member in range(2)]
        if not is_shown:  # of this owner; the next one plays the group again
            write_segment(layout, larger, worker="w0", epoch=catalog.epoch)
    with crashed(), Catalog.open(layout) as catalog:
        play(layout, catalog, group, worker="w1")
        if is_shown:  # of this very owner, whose worker is too late
            write_segment(layout, larger, worker="w0", epoch=catalog.epoch)
            export(catalog, layout)
    committed = """SELECT t.n_steps, worker
                   FROM trajectory t JOIN segment USING (segment_id)"""
    before = ask(layout, committed)
    layout.catalog.unlink()
    rebuild(layout)
    assert ask(layout, committed) == before == [(3, "w1"), (3, "w1")]


@pytest.mark.parametrize("is_killed", [False, True])
def test_of_two_attempts_that_were_both_committed_the_first_counts(
    tmp_path: Path, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the second had one member more, and replaced committed trajectories.

    A rebuild that was killed had moved the manifest, which tells.
    """
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    with crashed(), Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=9)
        group = open_train_group(catalog, 0, size=3)
        assert catalog.back_up()
        for worker, members, n_steps in (("w0", (0, 1), 3), ("w1", (0, 1, 2), 5)):
            played = [make_trajectory(group, member, n_steps=n_steps) for member in members]
            segment = write_segment(layout, played, worker=worker, epoch=catalog.epoch)
            catalog.commit(segment, epoch=catalog.epoch)
        export(catalog, layout)
    counted = """SELECT member, t.n_steps, worker
                 FROM trajectory t JOIN segment USING (segment_id) ORDER BY member"""
    before = ask(layout, counted)
    layout.catalog.unlink()
    if is_killed:
        with monkeypatch.context() as patch:
            patch.setattr(rebuild_module, "replace_atomically", lambda *_, first, **__: first())
            with pytest.raises(StoreError):  # the new catalog has no name yet
                rebuild(layout)
        assert not layout.manifest.exists()
    rebuild(layout)
    assert ask(layout, counted) == before == [(0, 3, "w0"), (1, 3, "w0"), (2, 5, "w1")]


@pytest.mark.parametrize("has_backup", [False, True])
def test_the_attempt_that_counts_is_taken_before_a_merged_file_that_came_back(
    layout: RunLayout, tmp_path: Path, has_backup: bool
) -> None:
    """The attack: it has the attempt that was given up, and the next start swept the other file."""
    with Catalog.open(layout) as catalog:
        groups = [open_train_group(catalog, None) for _ in range(2)]
        for group in groups:
            play(layout, catalog, group)
        whole = CompactionPolicy(fan_in=64, max_live_files=1, min_file_bytes=1 << 30)
        result = compact_once(catalog, layout, policy=whole, skip=())
        assert result is not None and result.merged is not None
        merged = layout.root / result.merged.path
        export(catalog, layout)
        assert catalog.back_up()
    shutil.copy(layout.backup, tmp_path / "backup")
    merged.rename(tmp_path / "away")
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=check(layout, level=2))
        again = catalog.lease_open_group(worker="w0", lease_s=60.0)
        assert again is not None
        played = [make_trajectory(again, member, n_steps=5) for member in again.missing]
        segment = write_segment(layout, played, worker="w0", epoch=catalog.epoch)
        catalog.commit(segment, epoch=catalog.epoch)
        (tmp_path / "away").rename(merged)
        repair(catalog, layout, findings=check(layout, level=2))
        export(catalog, layout)
    counted = """SELECT traj_uid, t.n_steps, segment_id
                 FROM trajectory t JOIN segment USING (segment_id) ORDER BY 1"""
    before = ask(layout, counted)
    assert segment.segment_id in {segment_id for _, _, segment_id in before}
    layout.catalog.unlink()
    layout.backup.unlink()
    if has_backup:  # from before the file was away
        shutil.copy(tmp_path / "backup", layout.backup)
    rebuild(layout)
    after = ask(layout, counted)
    assert [row[:2] for row in after] == [row[:2] for row in before]
    assert segment.segment_id in {segment_id for _, _, segment_id in after}


def test_a_trajectory_that_was_played_again_has_the_figures_of_its_new_attempt(
    tmp_path: Path,
) -> None:
    """The attack: a rebuild kept those of the attempt that a repair had set aside."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=9)
        play(layout, catalog, open_train_group(catalog, 0))
        assert catalog.back_up()
    with crashed(), Catalog.open(layout) as catalog:
        (live,) = catalog.segment_metas([one.segment_id for one in catalog.live_segments()])
        (layout.root / live.path).unlink()
        repair(catalog, layout, findings=check(layout, level=2))
        group = catalog.lease_open_group(worker="w0", lease_s=60.0)
        assert group is not None
        again = [make_trajectory(group, member, version=5, n_steps=5) for member in range(2)]
        segment = write_segment(layout, again, worker="w0", epoch=catalog.epoch)
        catalog.commit(segment, epoch=catalog.epoch)
        export(catalog, layout)
    layout.catalog.unlink()
    rebuild(layout)
    assert check(layout, level=CONTENTS) == []
    query = "SELECT n_members, n_steps, version_min, version_max FROM grp"
    assert ask(layout, query) == [(2, 10, 5, 6)]


@pytest.mark.parametrize("first", [0, 45])  # retention removed the files before
def test_without_a_backup_groups_are_found_however_many_there_are(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: all groups behind the first 100,000 became imported ones, and were not trained on."""
    monkeypatch.setattr(group_addresses, "ORDINALS_TRIED", 10)
    monkeypatch.setattr(group_addresses, "ROUNDS_TRIED", 5)
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=9)
        for ordinal in first, first + 7, first + 16, first + 25:
            play(layout, catalog, open_train_group(catalog, ordinal))
        for ordinal in range(9):
            group = catalog.open_group(
                ordinal=ordinal, task_id="t", split="heldout", size=1, evaluated_version=40
            )
            play(layout, catalog, group, version=47)  # with weights that came meanwhile
        query = "SELECT split, ordinal FROM groups ORDER BY ALL"
        export(catalog, layout)
        with open_run(layout.root) as reader:
            before = reader.rows(query)
    shutil.rmtree(layout.root / "backup")
    for path in layout.root.glob("catalog.sqlite*"):
        path.unlink()
    rebuild(layout)
    with open_run(layout.root) as reader:
        assert reader.rows(query) == before


def test_a_catalog_that_is_too_large_for_memory_at_once_has_a_backup_and_is_rebuilt(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: above 2 GiB no backup was made any more, and no rebuild worked."""
    monkeypatch.setattr("store.maintenance.database_bytes.IN_MEMORY_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout.backup.unlink(missing_ok=True)
    with Catalog.open(layout) as catalog:
        assert catalog.back_up()
    query = "SELECT traj_uid FROM trajectory ORDER BY 1"
    before = ask(layout, query)
    layout.catalog.unlink()
    rebuild(layout)
    assert ask(layout, query) == before and before
    assert [one for one in check(layout, level=CONTENTS) if one.severity == "error"] == []
    assert not list((tmp_path / "cache").rglob("*.sqlite"))


def test_no_room_for_a_copy_of_a_large_backup_is_no_damage(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a full disk of the cache was a traceback."""
    monkeypatch.setattr("store.maintenance.database_bytes.IN_MEMORY_BYTES", 0)
    with Catalog.open(layout) as catalog:
        assert catalog.back_up()
    with no_file_may_grow():
        (finding,) = check(layout, level=CONTENTS)
    assert finding.what == "backup_unavailable"
    assert "free space there, or set XDG_CACHE_HOME" in finding.detail
