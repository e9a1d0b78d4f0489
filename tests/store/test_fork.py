"""A fork is the other run as it was at the checkpoint: compared with a copy that was made just
then.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

import store.exchange.fork as fork_module
from store import (
    Catalog,
    CheckpointRecord,
    LockedError,
    RunLayout,
    StoreError,
    VersionRecord,
    check_fork,
    export,
    fork,
    read_segments,
    write_open_sql,
    write_segment,
)
from store.file_rights import ACCESS_LISTS
from store.maintenance.compact import CompactionPolicy
from store.maintenance.fsck import check
from store.maintenance.rebuild import rebuild
from store.maintenance.repair import repair
from store.maintenance.sweep import expire_old
from tests.crash.commands import make_forkable_run
from tests.support.file_modes import let_one_user_read, modes_at_each_write
from tests.support.neighbours import Neighbour, look_while_away
from tests.support.run_views import connect
from tests.support.store_damage import ask, mounted
from tests.support.store_runs import compact_once, fingerprint
from tests.support.store_samples import make_trajectory, make_unfinished, open_train_group, play

MERGE_TWO = CompactionPolicy(fan_in=2, max_live_files=500, min_file_bytes=64 * 1024**2)
QUERIES = {
    "groups": "SELECT group_uid, split, ordinal, state, n_members, n_steps, version_min, version_max, completed_at FROM groups",
    "lineage": "SELECT learner_step, group_uid, outcome, live, batch_state, version_in, staleness FROM lineage WHERE live",
    "versions": "SELECT version, digest, learner_step FROM versions",
    "metrics": "SELECT learner_step, policy_version, name, value FROM metrics",
    "trajectories": "SELECT traj_uid, group_uid, n_steps, episode_return FROM trajectories",
    "steps": "SELECT count(*), sum(len(response_ids)) FROM steps",
    "unfinished": "SELECT group_uid, number, why, n_steps FROM unfinished",
}


class Life:
    """Random events of a run; `checkpoint` is the last of them that matters to a fork."""

    def __init__(self, root: Path, *, seed: int) -> None:
        self.layout = RunLayout.create(root, config_yaml="a: 1\n")
        self.random = random.Random(seed)
        self.catalog = Catalog.open(self.layout)
        write_open_sql(self.layout, macros=(), max_staleness=9)
        self.version = self.step = 0
        self.publish(0)

    def publish(self, version: int) -> None:
        directory = self.layout.weights_dir(version)
        directory.mkdir()
        (directory / "model.safetensors").write_text(str(version))
        path, step = self.layout.relative(directory), self.step
        self.catalog.record_version(
            VersionRecord(version=version, path=path, digest=f"d{version}", learner_step=step)
        )
        self.version = version

    def play_some(self, *, held_out: bool) -> None:
        """A group, of which a part may be left to be played later."""
        group = self.catalog.lease_open_group(worker="w0", lease_s=60.0)
        if held_out:
            group = self.catalog.open_group(
                ordinal=self.catalog.next_ordinal("heldout", evaluated_version=self.version),
                task_id="h",
                split="heldout",
                size=1,
                evaluated_version=self.version,
            )
        elif group is None or self.random.random() < 0.5:
            group = open_train_group(self.catalog, None, size=3)
        members = [member for member in group.missing if self.random.random() < 0.8]
        if members:
            trajectories = [
                make_trajectory(group, member, version=self.version) for member in members
            ]
            segment = write_segment(
                self.layout, trajectories, worker="w0", epoch=self.catalog.epoch
            )
            self.catalog.commit(segment, epoch=self.catalog.epoch)
        given_up = [
            make_unfinished(group, member, why="stopped")
            for member in group.missing
            if member not in members
        ]
        self.catalog.record_unfinished(given_up, worker="w0")
        self.catalog.release_leases("w0")

    def learn(self) -> None:
        batch = self.catalog.claim(n_groups=2, current_version=self.version, max_staleness=2)
        if batch is None or self.random.random() < 0.2:  # the learner claims ahead
            return
        self.step += 1
        self.publish(self.version + 1)
        signal = {batch.groups[0].group_uid: "alike"} if self.random.random() < 0.3 else {}
        self.catalog.settle(
            batch.batch_id, learner_step=self.step, filtered=signal, version_in=self.version - 1
        )
        self.catalog.record_metrics(
            learner_step=self.step,
            policy_version=self.version,
            values={"loss": self.random.random()},
        )

    def checkpoint(self, *, meanwhile: int) -> None:
        """Copy a checkpoint, and write it behind so many events."""
        lsn = export(self.catalog, self.layout)
        step, version = self.step, self.version
        self.live(meanwhile)
        directory = self.layout.checkpoint_dir(step)
        directory.mkdir(exist_ok=True)
        (directory / "checkpoint.json").write_text("{}")
        path = self.layout.relative(directory)
        self.catalog.record_checkpoint(
            CheckpointRecord(learner_step=step, path=path, version=version), lsn=lsn
        )

    def live(self, events: int) -> None:
        for _ in range(events):
            choice = self.random.random()
            if choice < 0.6:
                self.play_some(held_out=choice < 0.1)
            elif choice < 0.85:
                self.learn()
            else:
                compact_once(self.catalog, self.layout, policy=MERGE_TWO, skip=())


def shown(layout: RunLayout) -> dict[str, list[Any]]:
    with Catalog.open(layout) as catalog:
        export(catalog, layout)
    with connect(layout) as connection:
        return {
            name: sorted(map(repr, connection.sql(query).fetchall()))
            for name, query in QUERIES.items()
        }


@pytest.mark.parametrize("seed", range(6))
def test_a_fork_is_the_run_as_it_was_at_the_checkpoint(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path / "run", seed=seed)
    while life.step < 2:
        life.live(5)
    step = life.step
    shutil.copytree(life.layout.root, tmp_path / "then")
    life.checkpoint(meanwhile=10 * (seed % 2))
    life.live(40)
    if life.random.random() < 0.5:  # it went back there once
        life.catalog.roll_back(step)
        life.step = step
        life.publish(life.version + 1)
        life.live(20)
    export(life.catalog, life.layout)

    made = fork(life.layout, tmp_path / "fork", learner_step=step, config_yaml="a: 2\n")
    life.catalog.close()
    then = RunLayout.open(tmp_path / "then")
    for layout in (then, made):
        write_open_sql(layout, macros=(), max_staleness=9)
        with Catalog.open(layout) as catalog:  # what a learner that starts there does
            catalog.roll_back(step)
    assert shown(made) == shown(then)
    assert check(made, level=3) == []


@pytest.fixture
def run(tmp_path: Path) -> Life:
    life = Life(tmp_path / "run", seed=0)
    for _ in range(2):
        for _ in range(2):
            play(life.layout, life.catalog, open_train_group(life.catalog, None))
        life.random = random.Random(0)  # a batch is not left alone
        life.learn()
        life.checkpoint(meanwhile=0)
    export(life.catalog, life.layout)
    assert life.step == 2
    return life


def test_a_fork_goes_on_by_itself_and_leaves_the_other_run_alone(run: Life, tmp_path: Path) -> None:
    before = (run.catalog.counts(), run.catalog.latest_version())
    made = fork(run.layout, tmp_path / "fork", learner_step=1, config_yaml="a: 2\n")
    assert made.info.run_id != run.layout.info.run_id
    assert (made.info.forked_from, made.info.ancestors) == (
        f"{run.layout.info.run_id}@1",
        (run.layout.info.run_id,),
    )
    with Catalog.open(made) as catalog:
        assert [record.learner_step for record in catalog.live_checkpoints()] == [1]
        newest = catalog.latest_version()
        assert newest is not None and newest.version == 1 and (made.root / newest.path).is_dir()
        ours, theirs = (open_train_group(each, None) for each in (catalog, run.catalog))
        assert ours.ordinal == 2 and theirs.ordinal == 4
        assert ours.group_uid not in {
            name for (name,) in connect(run.layout).sql("SELECT group_uid FROM groups").fetchall()
        }
        play(made, catalog, ours, version=1)
        play(made, catalog, open_train_group(catalog, None), version=1)
        batch = catalog.claim(n_groups=2, current_version=1, max_staleness=1)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=2, filtered={}, version_in=1)
        write_open_sql(made, macros=(), max_staleness=1)
        export(catalog, made)
    with connect(made) as connection:
        found = connection.sql(
            "SELECT DISTINCT learner_step FROM lineage JOIN steps USING (group_uid) WHERE live "
            "ORDER BY 1"
        )
        assert found.fetchall() == [(1,), (2,)]
        assert connection.sql("SELECT count(*) FROM events WHERE what = 'forked'").fetchall() == [
            (1,)
        ]
    open_now = run.catalog.counts()
    assert (open_now.trained + open_now.filtered, run.catalog.latest_version()) == (
        before[0].trained + before[0].filtered,
        before[1],
    )


def test_a_fork_plays_groups_again_that_retention_took_after_the_checkpoint(tmp_path: Path) -> None:
    """The attack: they were complete as at the checkpoint, and no claim could read their files."""
    life = Life(tmp_path / "run", seed=0)
    life.random = random.Random(0)  # a batch is not left alone
    catalog, layout = life.catalog, life.layout
    for _ in range(4):
        play(layout, catalog, open_train_group(catalog, None))
    life.learn()
    life.checkpoint(meanwhile=0)
    half = open_train_group(catalog, None)
    segment = write_segment(layout, [make_trajectory(half, 0)], worker="w0", epoch=catalog.epoch)
    catalog.commit(segment, epoch=catalog.epoch)
    export(catalog, layout)
    life.checkpoint(meanwhile=0)
    play(layout, catalog, catalog.lease_open_group(worker="w0", lease_s=60.0) or half, version=0)
    for version in range(2, 8):
        life.publish(version)
    catalog.claim(n_groups=9, current_version=7, max_staleness=2)  # the groups are stale
    life.step = 9
    life.checkpoint(meanwhile=0)
    assert expire_old(catalog, layout, keep_days=None, keep_versions=1)
    export(catalog, layout)

    made = fork(layout, tmp_path / "fork", learner_step=1, config_yaml="")
    write_open_sql(made, macros=(), max_staleness=2)
    with Catalog.open(made) as forked:
        export(forked, made)
        assert forked.claim(n_groups=1, current_version=1, max_staleness=2) is None
        while group := forked.lease_open_group(worker="w0", lease_s=60.0):
            assert len(group.missing) == group.size
            play(made, forked, group, version=1)
        batch = forked.claim(n_groups=2, current_version=1, max_staleness=2)
        assert batch is not None
        assert {one.ordinal for one in batch.groups} <= {0, 1, 2, 3, 4}
        rows = read_segments(made, batch.segments)
        assert len(rows) == 12 and set(rows["version_min"].to_pylist()) == {1}
        export(forked, made)
    assert check(made, level=3) == []


def test_a_fork_plays_groups_again_whose_file_a_repair_took_after_the_checkpoint(
    run: Life, tmp_path: Path
) -> None:
    """The attack: they were complete without a member, and no batch could be claimed any more."""
    catalog, layout = run.catalog, run.layout
    groups = [open_train_group(catalog, None) for _ in range(3)]
    for group in groups:
        play(layout, catalog, group)
    run.checkpoint(meanwhile=0)
    for segment in catalog.segment_metas([one.segment_id for one in catalog.live_segments()]):
        if segment.trajectories[0].group_uid in {group.group_uid for group in groups[:2]}:
            (layout.root / segment.path).unlink()
    repair(catalog, layout, findings=check(layout, level=2))
    again = catalog.lease_open_group(worker="w0", lease_s=60.0)
    assert again is not None
    play(layout, catalog, again, version=2)  # one of them is played again, one is still open
    export(catalog, layout)

    made = fork(layout, tmp_path / "fork", learner_step=2, config_yaml="")
    write_open_sql(made, macros=(), max_staleness=9)
    with Catalog.open(made) as forked:
        export(forked, made)
        assert (forked.counts().open, forked.counts().complete) == (2, 1)
        while group := forked.lease_open_group(worker="w0", lease_s=60.0):
            play(made, forked, group, version=2)
        batch = forked.claim(n_groups=3, current_version=2, max_staleness=9)
        assert batch is not None and len(read_segments(made, batch.segments)) == 18
        export(forked, made)
    assert check(made, level=3) == []


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_fork_has_the_groups_whose_file_came_back_after_the_checkpoint(
    run: Life, tmp_path: Path, is_trained: bool
) -> None:
    """The attack: the file's rows had a new lsn, so the fork lost them, or could not be made."""
    play(run.layout, run.catalog, open_train_group(run.catalog, None))
    run.checkpoint(meanwhile=0)
    query = """SELECT path FROM trajectory JOIN segment USING (segment_id) JOIN grp USING (group_uid)
               WHERE state = 'trained' LIMIT 1"""
    (path,) = ask(run.layout, query if is_trained else query.replace("trained", "complete"))[0]
    for damage in (True, False):
        file, away = run.layout.root / path, tmp_path / "away"
        file.rename(away) if damage else away.rename(file)
        repair(run.catalog, run.layout, findings=check(run.layout, level=2))
    export(run.catalog, run.layout)
    groups = "SELECT state, n_members FROM grp ORDER BY ordinal"
    before = ask(run.layout, groups)
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    write_open_sql(made, macros=(), max_staleness=9)
    with Catalog.open(made) as forked:
        export(forked, made)
    # One that was complete is open in the other run.
    assert sorted(ask(made, groups)) == sorted(before)
    members = "SELECT count(*) FROM trajectory"
    assert ask(made, members) == ask(run.layout, members)
    assert check(made, level=3) == []


def test_a_run_with_an_alarm_about_its_log_can_be_forked_and_has_backups(
    run: Life, tmp_path: Path
) -> None:
    """The attack: it had neither any more, though the alarm may be a false one."""
    run.catalog.log(component="catalog", what="log damaged", detail="1 commit was not read")
    run.checkpoint(meanwhile=0)
    assert run.catalog.back_up()
    export(run.catalog, run.layout)
    assert [one.what for one in check(run.layout, level=1)] == ["log_damaged"]
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    write_open_sql(made, macros=(), max_staleness=9)
    assert check(made, level=1) == []


def test_a_fork_has_a_backup_so_that_a_rebuild_knows_the_groups_of_the_run_before(
    run: Life, tmp_path: Path
) -> None:
    """The attack: they became imported ones, which are not trained on."""
    play(run.layout, run.catalog, open_train_group(run.catalog, None))
    run.checkpoint(meanwhile=0)
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    write_open_sql(made, macros=(), max_staleness=9)
    ordinals = "SELECT split, ordinal FROM grp ORDER BY 1, 2"
    before = ask(made, ordinals)
    made.catalog.unlink()
    rebuild(made)
    assert ask(made, ordinals) == before and len(before) == 5


def test_a_rebuild_of_a_fork_takes_no_group_that_the_other_run_played_later(
    run: Life, tmp_path: Path
) -> None:
    """The attack: a merged file has them, and they became open or complete groups of the fork."""
    play(run.layout, run.catalog, open_train_group(run.catalog, None))
    begun = open_train_group(run.catalog, None)
    run.checkpoint(meanwhile=0)
    for group in begun, *(open_train_group(run.catalog, None) for _ in range(2)):
        play(run.layout, run.catalog, group, version=7)
    all_files = CompactionPolicy(fan_in=64, max_live_files=1, min_file_bytes=1 << 30)
    assert compact_once(run.catalog, run.layout, policy=all_files, skip=()).merged is not None
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    write_open_sql(made, macros=(), max_staleness=9)
    query = "SELECT split, ordinal, state, n_members FROM grp WHERE split <> 'imported' ORDER BY 2"
    before, version = ask(made, query), "SELECT max(version) FROM version"
    newest = ask(made, version)
    made.catalog.unlink()
    rebuild(made)
    assert ask(made, query) == before and len(before) == 6
    assert ask(made, version) == newest == [(2,)]


def test_a_round_of_episodes_that_retention_took_is_not_played_again(tmp_path: Path) -> None:
    """The attack: a kill opened an evaluation again, to be played with newer weights."""
    life = Life(tmp_path / "run", seed=0)
    catalog, layout = life.catalog, life.layout
    first, second = catalog.open_round(["a", "b"], episodes_per_task=1, version=0) or (
        catalog.lease_open_group(worker="w0", lease_s=60.0),
        catalog.lease_open_group(worker="w1", lease_s=60.0),
    )
    assert first is not None and second is not None
    play(layout, catalog, first)
    catalog.release_leases("w1")
    for version in range(1, 6):
        life.publish(version)
    play(layout, catalog, open_train_group(catalog, None), version=5)
    export(catalog, layout)
    assert expire_old(catalog, layout, keep_days=None, keep_versions=1)
    assert catalog.claim(n_groups=1, current_version=5, max_staleness=9) is not None
    catalog.roll_back(0)
    heldout = "SELECT state, n_members FROM grp WHERE split = 'heldout' ORDER BY ordinal"
    assert ask(layout, heldout) == [("complete", 1), ("open", 0)]


def test_a_fork_of_a_fork(run: Life, tmp_path: Path) -> None:
    first = fork(run.layout, tmp_path / "first", learner_step=2, config_yaml="")
    with Catalog.open(first) as catalog:
        export(catalog, first)
    second = fork(first, tmp_path / "second", learner_step=2, config_yaml="")
    write_open_sql(second, macros=(), max_staleness=1)
    assert second.info.ancestors == (run.layout.info.run_id, first.info.run_id)
    assert check(second, level=3) == []


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy files, as from one file system to another."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr("store.exchange.fork.link_file", refuse)


def test_a_fork_shares_no_file_into_which_others_can_write(run: Life, tmp_path: Path) -> None:
    """The attack: who had made the run emptied his files, and so those of the fork."""
    checkpoint = run.layout.checkpoint_dir(2)
    changed = [checkpoint / name for name in ("of the group", "of everybody")]
    for path, mode in zip(changed, (0o664, 0o646), strict=True):
        path.write_text("kept")
        path.chmod(mode)
    if os.geteuid() == 0:  # only root can give a file away
        changed.append(next(run.layout.segments.rglob("*.parquet")))
        os.chown(changed[-1], 1234, 1234)
    before = [path.read_bytes() for path in changed]
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    copies = [made.root / run.layout.relative(path) for path in changed]
    for path in changed:
        path.write_bytes(b"")
    assert [path.read_bytes() for path in copies] == before
    shared = [path for path in made.segments.rglob("*.parquet") if path not in copies]
    assert shared and all(path.stat().st_nlink > 1 for path in shared)


@pytest.mark.usefixtures("no_links")
def test_without_links_files_are_copied(run: Life, tmp_path: Path) -> None:
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    write_open_sql(made, macros=(), max_staleness=1)
    with Catalog.open(made) as catalog:
        export(catalog, made)
    assert check(made, level=3) == []


def test_on_a_full_disk_a_fork_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=4m", "none"):
        make_forkable_run(disk)
        source = RunLayout.open(disk / "run")
        before = fingerprint(source.root)
        # for nothing, for directories, and for part of the catalog
        for room in (0, 1 << 14, 1 << 16, 1 << 17):
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - room))
            with pytest.raises(StoreError, match="disk/made.*free space") as full:
                fork(source, disk / "made", learner_step=1, config_yaml="")
            assert "\n" not in str(full.value)
            (disk / "filler").unlink()
            assert sorted(path.name for path in disk.iterdir()) == ["run"]
        assert fingerprint(source.root) == before
        fork(source, disk / "made", learner_step=1, config_yaml="")
        assert ask(RunLayout.open(disk / "made"), "SELECT count(*) FROM checkpoint") == [(1,)]


def test_two_forks_to_one_place_at_once_are_one(
    run: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took the other's directory for what a killed fork had left, and removed it."""
    made, copied, seen = tmp_path / "fork", fork_module.copy_until, []

    def copy_catalog(source: RunLayout, layout: RunLayout, *, learner_step: int) -> int:
        with pytest.raises(LockedError, match=f"another process makes a run at {made}"):
            fork(run.layout, made, learner_step=2, config_yaml="")
        seen.append(sorted(path.name for path in tmp_path.glob("fork*")))
        return copied(source, layout, learner_step=learner_step)

    monkeypatch.setattr(fork_module, "copy_until", copy_catalog)
    fork(run.layout, made, learner_step=2, config_yaml="")
    assert seen == [["fork.unfinished"]]
    assert not list(tmp_path.glob(".*"))
    assert len(ask(RunLayout.open(made), "SELECT * FROM checkpoint WHERE live")) == 1


@pytest.mark.parametrize("what", ["a directory", "a run", "a link", "a file"])
def test_a_fork_removes_nothing_that_no_fork_left(what: str, run: Life, tmp_path: Path) -> None:
    """It removed NEW.unfinished, whatever that was."""
    place = tmp_path / "fork.unfinished"
    (tmp_path / "precious").mkdir()
    if what == "a run":
        RunLayout.create(place, config_yaml="")
    elif what == "a link":
        place.symlink_to(tmp_path / "precious")
    elif what == "a directory":
        place.mkdir()
    if what == "a file":
        place.write_text("precious")
    else:
        (place / "precious").write_text("precious")
    before = fingerprint(tmp_path)
    with pytest.raises(StoreError, match=r"fork\.unfinished is in the way.*move it") as refused:
        fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    assert "\n" not in str(refused.value)
    assert fingerprint(tmp_path) == before
    assert place.is_symlink() == (what == "a link")


def test_a_fork_removes_nothing_in_a_directory_of_another_user(
    run: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the neighbour put a link to the user's files in its place during the removal.

    A FIFO as run.json made the fork wait for ever.
    """
    place = tmp_path / "fork.unfinished"
    place.mkdir()
    (place / "fork.unfinished").touch()
    (place / "precious").write_text("precious")
    os.mkfifo(place / "run.json")
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(place)
    with pytest.raises(StoreError, match=r"fork\.unfinished belongs to another user \(uid 65534\)"):
        fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    assert (place / "precious").exists() and not (tmp_path / "fork").exists()


def test_a_fork_that_a_neighbour_gets_ahead_of_removes_nothing(
    run: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He makes the directory just after the fork saw that none is there."""
    place, neighbour = tmp_path / "fork.unfinished", Neighbour(monkeypatch)

    def make_first(above: Path, *, beneath: Path) -> None:
        place.mkdir()
        (place / "precious").write_text("precious")
        neighbour.gets(place)

    monkeypatch.setattr("store.exchange.fork.make_directory", make_first)
    with pytest.raises(StoreError, match="belongs to another user"):
        fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    assert [path.name for path in place.iterdir()] == ["precious"]


def test_a_fork_removes_nothing_in_a_directory_that_was_away_while_it_was_looked_at(
    run: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack emptied a directory of the user, through a link that came after the look."""
    place = tmp_path / "fork.unfinished"
    place.mkdir()
    (place / "fork.unfinished").touch()
    (place / "precious").write_text("precious")
    Neighbour(monkeypatch).gets(place)
    monkeypatch.setattr("store.exchange.fork.check_own_directory", look_while_away(place))
    with pytest.raises(StoreError, match=r"fork\.unfinished is not there \(any more\)"):
        fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    assert (place / "precious").exists() and not (tmp_path / "fork").exists()


@pytest.mark.parametrize("private", [True, False])
def test_nobody_else_enters_a_private_fork_from_its_first_file(
    run: Life, tmp_path: Path, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the key in run.json was read while the fork was made."""
    root = tmp_path / "fork"
    modes = modes_at_each_write(lambda: [root, tmp_path / "fork.unfinished"], monkeypatch)
    fork(run.layout, root, learner_step=2, config_yaml="", private=private)
    assert len(modes) > 1 and set(modes) == {0o700}
    assert stat.S_IMODE(root.stat().st_mode) == (0o700 if private else 0o755)


@pytest.mark.usefixtures("no_links")
def test_a_fork_has_no_more_rights_than_its_source_and_no_setuid_program(
    run: Life, tmp_path: Path
) -> None:
    """The attack: a neighbour's program, setuid, lay in the checkpoint. In the fork it was the user's."""
    checkpoint = run.layout.checkpoint_dir(2)
    (checkpoint / "tool").write_bytes(b"program")
    (checkpoint / "tool").chmod(0o6755)
    run.layout.root.chmod(0o700)
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    assert (made.checkpoint_dir(2) / "tool").stat().st_mode & 0o7777 == 0o755
    assert made.root.stat().st_mode & 0o7777 == 0o700
    if os.geteuid() == 0:  # only root can give a file to another group
        os.chown(checkpoint / "tool", 0, 1234)
        (checkpoint / "tool").chmod(0o640)
        made = fork(run.layout, tmp_path / "another", learner_step=2, config_yaml="")
        assert (made.checkpoint_dir(2) / "tool").stat().st_mode & 0o7777 == 0o600


def test_who_is_kept_out_of_a_part_of_a_run_is_kept_out_of_it_in_the_fork(
    run: Life, tmp_path: Path
) -> None:
    """The attack: of a run for everybody the owner had closed three folders. In the fork they were
    open.
    """
    closed = [run.layout.segments, run.layout.checkpoints, run.layout.checkpoint_dir(2)]
    for path in (run.layout.catalog, run.layout.run_json):
        path.chmod(0o600)
    for path in closed:
        path.chmod(0o700)
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    for path in closed:
        there = made.root / run.layout.relative(path)
        assert there.stat().st_mode & 0o777 == 0o700, path
    assert made.catalog.stat().st_mode & 0o777 == 0o600
    assert made.run_json.stat().st_mode & 0o077 == 0
    assert made.root.stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("no_links")
def test_a_fork_is_not_for_a_group_that_an_access_list_kept_out(run: Life, tmp_path: Path) -> None:
    """The attack: a run was for one colleague. Its fork was for the whole group."""
    checkpoint = run.layout.checkpoint_dir(2)
    (checkpoint / "notes").write_text("notes")
    for path in (checkpoint / "notes", run.layout.root):
        let_one_user_read(path, user=1234, rights=5)
    let_one_user_read(tmp_path, user=1234, rights=5, name=ACCESS_LISTS[1])
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    assert (made.checkpoint_dir(2) / "notes").stat().st_mode & 0o7777 == 0o700
    assert made.root.stat().st_mode & 0o7777 == 0o700
    for path in (made.root, *made.root.rglob("*")):
        assert not set(ACCESS_LISTS) & set(os.listxattr(path)) or os.stat(path).st_nlink > 1, path


def test_a_fork_replaces_what_a_killed_one_left(run: Life, tmp_path: Path) -> None:
    place = tmp_path / "fork.unfinished"
    (place / "segments" / "w0").mkdir(parents=True)
    (place / "segments" / "w0" / "part").write_text("a part")
    (place / "fork.unfinished").touch()
    (place / "weights").symlink_to(run.layout.root)
    before = fingerprint(run.layout.root)
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="")
    assert not (made.root / "segments" / "w0" / "part").exists()
    assert fingerprint(run.layout.root) == before and not place.exists()


def test_a_fork_that_was_killed_before_its_rename_is_put_in_its_place(
    run: Life, tmp_path: Path
) -> None:
    made = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="a: 1")
    whole = made.root.rename(tmp_path / "fork.unfinished")
    before = fingerprint(whole)
    with pytest.raises(StoreError, match="is in the way"):  # it is of other settings
        fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="a: 2")
    again = fork(run.layout, tmp_path / "fork", learner_step=2, config_yaml="a: 1")
    assert again.info == made.info and fingerprint(again.root) == before


def test_what_cannot_be_forked_is_one_line_and_leaves_nothing(run: Life, tmp_path: Path) -> None:
    with pytest.raises(
        StoreError,
        match=r"no checkpoint of learner step 3: there are those of 1, 2; .* before it is that of step 2",
    ):
        fork(run.layout, tmp_path / "fork", learner_step=3, config_yaml="")
    check_fork(run.layout, tmp_path / "fork", learner_step=1)
    shutil.rmtree(run.layout.checkpoint_dir(1))
    with pytest.raises(StoreError, match="no checkpoint of learner step 1"):
        check_fork(run.layout, tmp_path / "fork", learner_step=1)
    with pytest.raises(
        StoreError,
        match=r"no checkpoint of learner step 1: there are those of 2\. learner.keep_every",
    ):
        fork(run.layout, tmp_path / "fork", learner_step=1, config_yaml="")
    kept = run.layout.checkpoint_dir(2).rename(tmp_path / "kept")
    with pytest.raises(StoreError, match="step 1: it has none; learner.checkpoint_every is"):
        fork(run.layout, tmp_path / "fork", learner_step=1, config_yaml="")
    kept.rename(run.layout.checkpoint_dir(2))
    (tmp_path / "there").mkdir()
    with pytest.raises(StoreError, match="there exists; choose another"):
        fork(run.layout, tmp_path / "there", learner_step=2, config_yaml="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]
