"""SQLite ends a log at the first changed byte. fsck says so while the commits can be found."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import store.catalog.connection as connection_module
import store.catalog.log_check as log_check
from store import Catalog, FormatError, RunLayout, StoreError, export, now_us
from store.catalog.log_check import (
    FRAME_BYTES,
    FRAME_HEADER_BYTES,
    HEADER_BYTES,
    unread_commits,
)
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.maintenance.sweep import sweep_orphans
from store.run_names import UNREAD_FILE
from tests.support.store_damage import ask, no_file_may_grow
from tests.support.store_runs import make_run
from tests.support.store_samples import open_train_group, play


@pytest.fixture
def killed(tmp_path: Path) -> RunLayout:
    """Give a run as a kill leaves it, with commits in the log that no export has."""
    layout = make_run(tmp_path / "run")
    with Catalog.open(layout) as catalog:
        for ordinal in (50, 51):
            play(layout, catalog, open_train_group(catalog, ordinal), version=1)
        shutil.copytree(layout.root, tmp_path / "killed")
    (tmp_path / "killed" / "catalog.sqlite-shm").unlink()
    return RunLayout.open(tmp_path / "killed")


def log_of(layout: RunLayout) -> Path:
    return layout.catalog.with_name("catalog.sqlite-wal")


def trajectories(layout: RunLayout) -> list[tuple]:
    return ask(layout, "SELECT traj_uid FROM trajectory ORDER BY 1")


def test_the_log_of_a_killed_run_is_read_to_its_end(killed: RunLayout) -> None:
    log = log_of(killed).read_bytes()
    n_frames = (len(log) - HEADER_BYTES) // FRAME_BYTES
    assert n_frames > 10 and unread_commits(log) == 0
    for n_bytes in (0, 31, HEADER_BYTES, HEADER_BYTES + 3 * FRAME_BYTES + 100):  # a torn write
        assert unread_commits(log[:n_bytes]) == 0
    assert not [one for one in check(killed, level=CONTENTS) if one.what == "log_damaged"]


def test_each_changed_bit_before_the_last_commit_is_found(killed: RunLayout) -> None:
    log = log_of(killed).read_bytes()
    drawn = random.Random(0)
    last_frame = len(log) - FRAME_BYTES
    places = [0, 9, 17, 25, HEADER_BYTES + 9, last_frame + FRAME_HEADER_BYTES]
    for at in places + [drawn.randrange(last_frame) for _ in range(40)]:
        changed = bytearray(log)
        changed[at] ^= 1 << drawn.randrange(8)
        assert unread_commits(bytes(changed)) >= 1, at


def test_a_last_commit_that_no_longer_says_that_it_is_one_is_found(killed: RunLayout) -> None:
    """The attack: one byte of the size that a commit has and no other frame."""
    log = bytearray(log_of(killed).read_bytes())
    at = len(log) - FRAME_BYTES
    assert log[at + 4 : at + 7] == bytes(3) and log[at + 7]
    log[at + 7] = 0
    assert unread_commits(bytes(log)) == 1
    log[at + FRAME_HEADER_BYTES + 100] ^= 1  # as a crash leaves it while it is written
    assert unread_commits(bytes(log)) == 0


def test_a_changed_header_of_a_log_that_began_anew_hides_nothing(tmp_path: Path) -> None:
    """After the frames of this round come those of an earlier one, which had other salts."""
    layout = make_run(tmp_path / "run")
    with Catalog.open(layout) as catalog:
        for ordinal in range(46, 50):
            play(layout, catalog, open_train_group(catalog, ordinal), version=1)
        with closing(sqlite3.connect(layout.catalog)) as connection:
            assert connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()[0] == 0
        for ordinal in (50, 51):
            play(layout, catalog, open_train_group(catalog, ordinal), version=1)
        log = log_of(layout).read_bytes()
    assert unread_commits(log) == 0
    frames = range(HEADER_BYTES, len(log) - FRAME_BYTES + 1, FRAME_BYTES)
    ours = [at for at in frames if log[at + 8 : at + 16] == log[16:24]]
    assert len(ours) < len(frames)
    last_commit = max(at for at in ours if any(log[at + 4 : at + 8]))
    for first, n_bytes in (
        (10, 1),  # the size of a page
        (16, 1),  # the salts
        (0, 512),  # a sector: the first frame's salts too
        (0, 4096),
        (last_commit + 8, 1),  # its salts
        (last_commit + 15, 1),
    ):
        changed = bytearray(log)
        changed[first : first + n_bytes] = bytes(n_bytes)
        assert changed == log or unread_commits(bytes(changed)) >= 1, first


@pytest.mark.parametrize("by", [KeyboardInterrupt, FormatError, None])
def test_an_owner_that_gives_up_while_it_opens_hides_no_commit(
    killed: RunLayout, monkeypatch: pytest.MonkeyPatch, by: type[BaseException] | None
) -> None:
    """The attack: Ctrl-C while a large catalog is checked. SQLite removed the log, the only proof,
    and the next owner removed the committed files. `None`: a disk that fills up.
    """
    log = bytearray(log_of(killed).read_bytes())
    log[HEADER_BYTES + FRAME_HEADER_BYTES + 100] ^= 1
    log_of(killed).write_bytes(log)
    for path in killed.segments.rglob("*.parquet"):
        os.utime(path, (1, 1))
    before = sorted(killed.segments.rglob("*.parquet"))
    with monkeypatch.context() as patch:
        if by is None:
            with no_file_may_grow(), pytest.raises(StoreError):
                Catalog.open(killed)
        else:

            def give_up(*_: object) -> None:
                raise by()

            patch.setattr(connection_module, "check_indexes", give_up)
            with pytest.raises(by):
                Catalog.open(killed)
            gc.collect()  # the traceback holds the connection
            assert not log_of(killed).exists()
    found = [one for one in check(killed, level=CONTENTS) if one.what == "log_damaged"]
    assert len(found) == 1
    with Catalog.open(killed) as catalog:
        sweep_orphans(catalog, killed, opened_us=now_us(), before=None)
        assert catalog.may_lack_commits()
    assert sorted(killed.segments.rglob("*.parquet")) == before
    assert not (killed.root / UNREAD_FILE).exists()


def test_a_log_that_is_too_long_to_be_looked_at_keeps_the_files(
    killed: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: one changed byte in a log that had grown beside a long read. It was not looked
    at, so the next owner removed the committed files.
    """
    monkeypatch.setattr(log_check, "MAX_LOG_BYTES", log_of(killed).stat().st_size - 1)
    with Catalog.open(killed) as catalog:
        assert catalog.may_lack_commits()


def test_a_log_that_grew_beside_a_long_read_is_short_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_LOG_PAGES", 20)
    monkeypatch.setattr(connection_module, "_LOG_BYTES", 20 * FRAME_BYTES)
    layout = make_run(tmp_path / "run")
    with Catalog.open(layout) as catalog:
        with closing(sqlite3.connect(layout.catalog, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM segment").fetchone()
            for ordinal in range(50, 60):
                play(layout, catalog, open_train_group(catalog, ordinal), version=1)
            grown = log_of(layout).stat().st_size
        for ordinal in range(60, 64):
            play(layout, catalog, open_train_group(catalog, ordinal), version=1)
        assert log_of(layout).stat().st_size < grown / 2


@pytest.mark.parametrize("content", [b"", b"x", b"0", b"-3", b"9" * 100])
def test_a_note_of_any_content_keeps_the_files(killed: RunLayout, content: bytes) -> None:
    (killed.root / UNREAD_FILE).write_bytes(content)
    with Catalog.open(killed) as catalog:
        assert catalog.may_lack_commits()


@pytest.mark.parametrize("is_started", [False, True])
def test_a_rebuild_finds_what_the_log_had_committed(
    killed: RunLayout, tmp_path: Path, is_started: bool
) -> None:
    """One changed bit, and the next start threw committed trajectories away; fsck said: whole."""
    shutil.copytree(killed.root, tmp_path / "sound")
    expected = trajectories(RunLayout.open(tmp_path / "sound"))
    log = bytearray(log_of(killed).read_bytes())
    log[HEADER_BYTES + FRAME_HEADER_BYTES + 100] ^= 1
    log_of(killed).write_bytes(log)
    (finding,) = [one for one in check(killed, level=CONTENTS) if one.what == "log_damaged"]
    assert finding.severity == "warning"
    assert finding.remedy.startswith(f"gigpo rebuild --force {killed.root}, which finds in")
    if is_started:  # from now on the log is a new one
        for path in killed.segments.rglob("*.parquet"):
            os.utime(path, (1, 1))
        for _ in range(2):
            with Catalog.open(killed) as catalog:
                sweep_orphans(catalog, killed, opened_us=now_us(), before=None)
                export(catalog, killed)
        found = [one for one in check(killed, level=CONTENTS) if one.what == "log_damaged"]
        assert [one.subject.partition(" ")[0] for one in found] == ["event"]
    rebuild(killed)
    assert trajectories(killed) == expected
    after = check(killed, level=CONTENTS)
    assert not [one for one in after if one.severity == "error" or one.what == "log_damaged"]
