"""Only the primary directory of a run writes into its storage."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import store.maintenance.rebuild as rebuild_module
from store import (
    Catalog,
    CheckpointRecord,
    FencedError,
    FormatError,
    Maintainer,
    RunLayout,
    StoreError,
    UnavailableError,
    bring_run,
    export,
    is_brought,
    primary_directory,
    sign_run,
    write_open_sql,
)
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.maintenance.repair import repair
from tests.support.store_damage import ask
from tests.support.store_samples import open_train_group, play
from tests.support.stored_runs import (
    MAINTAINER,
    call_until_it_dies,
    die,
    hold_write,
    lose_the_owner,
    play_groups,
    states_of_catalog,
    uri_of,
)


def test_the_old_disk_is_no_longer_the_primary_one(lost: RunLayout, tmp_path: Path) -> None:
    """Neither a driver that was only cut off, nor one that is started there again, writes over what
    the run does elsewhere.
    """
    owner = Catalog.open(lost)  # alive, as far as it knows
    maintainer = Maintainer(owner, lost, settings=MAINTAINER)
    maintainer.work()
    root = tmp_path / "elsewhere"
    bring_run(uri_of(lost), root, trusts=False)
    backup = lost.storage.read("backup/catalog.sqlite").to_pybytes()
    message = f"was brought to {root} on .* and goes on there; stop this one"
    with pytest.raises(FencedError, match=message):
        owner.back_up()
    with pytest.raises(FencedError, match=message):
        maintainer.work()
    with pytest.raises(FencedError, match=message):
        owner.record_checkpoint(
            CheckpointRecord(learner_step=7, path="checkpoints/step000007", version=3)
        )
    owner.close()
    with pytest.raises(FencedError, match=message):
        Catalog.open(lost)
    assert lost.storage.read("backup/catalog.sqlite").to_pybytes() == backup
    with Catalog.open(RunLayout.open(root)) as catalog:
        assert catalog.counts().open == 1
    with pytest.raises(StoreError, match=r"has other things in it .*run_dir=NEW"):
        bring_run(uri_of(lost), lost.root, trusts=False)
    # and back again
    shutil.rmtree(lost.root)
    bring_run(uri_of(lost), lost.root, trusts=False)
    Catalog.open(lost).close()
    with pytest.raises(FencedError):
        Catalog.open(RunLayout.open(root))


def test_the_maintainers_thread_ends_the_run_that_was_brought_elsewhere(
    lost: RunLayout, tmp_path: Path
) -> None:
    with Catalog.open(lost) as owner:
        maintainer = Maintainer(owner, lost, settings=replace(MAINTAINER, pause_s=0.01))
        primary_directory.take(tmp_path, lost.storage)
        maintainer.start()
        maintainer._thread.join(30.0)
        with pytest.raises(FencedError, match="goes on there"):
            maintainer.check()


def test_an_owner_that_was_cut_off_shows_nothing_where_the_run_goes_on(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: its manifest came over the one of the directory where the run goes on, which was
    refused from then on.
    """
    owner = Catalog.open(lost)
    for _ in range(50):
        owner.log(component="driver", what="cut off", detail="")
    bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    new = RunLayout.open(tmp_path / "new")
    with Catalog.open(new) as catalog:
        play(new, catalog, open_train_group(catalog, 9))
        export(catalog, new)
        lsn = json.loads(new.manifest.read_text())["lsn"]
    before = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    with pytest.raises(FencedError, match=f"was brought to {new.root} on"):
        export(owner, lost)
    after = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    assert after == before
    # and if it was on its way when the run was brought
    late = json.loads(lost.storage.read("manifest.json").to_pybytes())
    late |= {"primary": primary_directory.token_of(lost.root), "lsn": lsn + 1_000}
    lost.storage.write("manifest.json", json.dumps(late).encode())
    lose_the_owner(owner)
    with Catalog.open(new) as catalog:
        play(new, catalog, open_train_group(catalog, 10))
        export(catalog, new)
    newest = lost.storage.read("manifest.json").to_pybytes()
    assert json.loads(newest)["lsn"] < lsn + 1_000
    # and also if the run has nothing new any more
    lost.storage.write("manifest.json", json.dumps(late).encode())
    with Catalog.open(new) as catalog:
        export(catalog, new)
    shown = json.loads(lost.storage.read("manifest.json").to_pybytes())
    for name in ("primary", "lsn", "segments", "tables"):
        assert shown[name] == json.loads(newest)[name]
    assert check(new, level=CONTENTS) == []


@pytest.mark.parametrize(
    "moment", ["store.primary_directory.take", "store.maintenance.rebuild._replace_catalog"]
)
def test_a_run_that_could_not_be_brought_stays_where_it_was(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Press Ctrl-C while the directory becomes the primary one, or when the catalog is written.

    A full disk is the same.
    """
    take = primary_directory.take

    def interrupted(*given: Any, **_: object) -> None:
        if moment == "store.primary_directory.take":
            take(*given)
        uri = re.escape(uri_of(lost))
        with pytest.raises(FencedError, match=f"goes on there.*--resume {uri} run_dir=NEW"):
            lost.check_primary()
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    assert not (tmp_path / "new").exists()
    Catalog.open(lost).close()


def test_a_directory_that_does_not_say_whose_it_is_owns_nothing(
    lost: RunLayout, tmp_path: Path
) -> None:
    """No file says where the run goes on, or only that somebody else gave it up."""
    other, storage = tmp_path / "other", lost.storage
    other.mkdir()
    (lost.root / primary_directory.PRIMARY).unlink()
    refused = f"primary.json is not there; .*--resume {re.escape(uri_of(lost))} run_dir=NEW"
    storage.remove(primary_directory.PRIMARY)
    with pytest.raises(StoreError, match=refused):
        Catalog.open(lost)
    primary_directory.take(other, storage)
    primary_directory.revoke(other, storage)
    with pytest.raises(StoreError, match=refused):
        Catalog.open(lost)
    bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    Catalog.open(RunLayout.open(tmp_path / "new")).close()


def test_a_late_second_maker_gives_the_run_to_no_older_directory(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: nobody owned the run then, and the first directory that started had it."""
    bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    play_groups(RunLayout.open(tmp_path / "new"), 50)
    (tmp_path / "slow").mkdir()
    primary_directory.take(tmp_path / "slow", lost.storage)
    primary_directory.revoke(tmp_path / "slow", lost.storage)
    with pytest.raises(FencedError, match="was brought to another directory and goes on there"):
        Catalog.open(lost)
    Catalog.open(RunLayout.open(tmp_path / "new")).close()
    with pytest.raises(FencedError, match="was brought to .*new on"):
        Catalog.open(lost)


def test_a_run_that_two_could_not_bring_in_one_outage_stays_where_it_was(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the second gave the run back to the first, which had given it up as well."""
    late: list[bytes] = []

    def bring_second() -> None:
        lost.storage.write(primary_directory.PRIMARY, first[0])  # it arrives
        with monkeypatch.context() as inner:
            held = hold_write(inner, primary_directory.PRIMARY)
            with pytest.raises(UnavailableError):
                bring_run(uri_of(lost), tmp_path / "second", trusts=False)
        late.extend(held)

    with monkeypatch.context() as patch:
        first = hold_write(patch, primary_directory.PRIMARY, nth=2, meanwhile=bring_second)
        with pytest.raises(UnavailableError):
            bring_run(uri_of(lost), tmp_path / "first", trusts=False)
    Catalog.open(lost).close()
    lost.storage.write(primary_directory.PRIMARY, late[0])  # and so does that of the second
    Catalog.open(lost).close()


@pytest.mark.parametrize("first_is_whole", [False, True])
def test_a_run_that_two_could_not_bring_at_once_stays_where_it_was(
    lost: RunLayout, tmp_path: Path, first_is_whole: bool
) -> None:
    """The second one found the first, which never was whole, and gave the run back to it."""
    brings = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        brings.append(primary_directory.taken(tmp_path / name, lost.storage))
        brings[-1].__enter__()
    first, second = brings
    interrupt = KeyboardInterrupt()
    if first_is_whole:
        with pytest.raises(FencedError, match=r"was brought to .*second .* meanwhile"):
            first.__exit__(None, None, None)
    else:
        assert not first.__exit__(KeyboardInterrupt, interrupt, None)
    with pytest.raises(FencedError):
        lost.check_primary()
    assert not second.__exit__(KeyboardInterrupt, interrupt, None)
    Catalog.open(lost).close()
    bring_run(uri_of(lost), tmp_path / "third", trusts=False)
    assert b"before" not in lost.storage.read(primary_directory.PRIMARY).to_pybytes()
    Catalog.open(RunLayout.open(tmp_path / "third")).close()


def test_a_bring_that_is_killed_before_it_says_that_it_is_whole_is_whole(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given again and interrupted, it gave the run to the directory that it had emptied."""
    root = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(primary_directory, "_finish", die)
        call_until_it_dies(bring_run, uri_of(lost), root, trusts=False)
    assert is_brought(uri_of(lost), root)
    Catalog.open(RunLayout.open(root)).close()
    content = json.loads(lost.storage.read(primary_directory.PRIMARY).to_pybytes())
    assert content.keys() == {"token", "where", "past"}, "it needs the directory before it no more"
    with pytest.raises(FencedError, match=f"was brought to {root} on"):
        Catalog.open(lost)


@pytest.mark.parametrize("which", [1, 2])  # when it is taken, and when it is whole
def test_a_bring_whose_primary_is_written_late_takes_nothing(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The attack: a server held the request until the bring had failed. It fenced the run."""
    with monkeypatch.context() as patch:
        held = hold_write(patch, primary_directory.PRIMARY, nth=which)
        with pytest.raises(UnavailableError, match="no answer"):
            bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    Catalog.open(lost).close()
    lost.storage.write(primary_directory.PRIMARY, held[0])  # now it comes
    Catalog.open(lost).close()
    with Catalog.open(lost) as owner:
        owner.back_up()
    bring_run(uri_of(lost), tmp_path / "newer", trusts=False)
    with pytest.raises(FencedError, match="was brought to .*newer on"):
        Catalog.open(lost)
    Catalog.open(RunLayout.open(tmp_path / "newer")).close()


def test_a_bring_that_gave_up_and_was_killed_then_is_no_second_owner(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it was whole, and removed what the first directory had committed since."""
    root, read = tmp_path / "new", primary_directory.read_or_none
    with monkeypatch.context() as patch:
        held = hold_write(patch, primary_directory.PRIMARY, nth=2)

        def read_until_then(storage: Any, path: str, *, at_most: int) -> bytes | None:
            if held:
                die()
            return read(storage, path, at_most=at_most)

        patch.setattr(primary_directory, "read_or_none", read_until_then)
        call_until_it_dies(bring_run, uri_of(lost), root, trusts=False)
    assert is_brought(uri_of(lost), root)
    with Catalog.open(lost) as owner:
        play(lost, owner, open_train_group(owner, 9))
    with pytest.raises(FencedError, match=f"was brought to {lost.root} on"):
        Catalog.open(RunLayout.open(root))
    Catalog.open(lost).close()


def test_a_bring_that_ends_late_has_shown_readers_nothing(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest and its backup stayed, and the directory where the run was counted as older."""
    names = ("manifest.json", lost.relative(lost.backup), primary_directory.PRIMARY)
    before = {name: lost.storage.read(name).to_pybytes() for name in names}
    token = json.loads(before[primary_directory.PRIMARY])["token"]
    with monkeypatch.context() as patch:
        patch.setattr(primary_directory, "_finish", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    after = {name: lost.storage.read(name).to_pybytes() for name in names}
    assert json.loads(after.pop(primary_directory.PRIMARY))["token"] == token
    assert all(before[name] == after[name] for name in after)
    Catalog.open(lost).close()


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_slow_bring_gives_the_run_to_no_directory_that_is_older_than_another(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """The attack: it gave the run back to the first directory, which removed what the second one
    had committed meanwhile.
    """
    quick, slow = tmp_path / "quick", tmp_path / "slow"

    def bring_quickly() -> None:
        bring_run(uri_of(lost), quick, trusts=False)
        play_groups(RunLayout.open(quick), 50, 51)
        if is_answered:
            lost.storage.write(primary_directory.PRIMARY, held[0])
            raise KeyboardInterrupt

    held = hold_write(monkeypatch, primary_directory.PRIMARY, meanwhile=bring_quickly)
    with pytest.raises((StoreError, KeyboardInterrupt)):
        bring_run(uri_of(lost), slow, trusts=False)
    lost.storage.write(primary_directory.PRIMARY, held[0])
    with pytest.raises(FormatError, match="is an older copy; put the newest back"):
        Catalog.open(lost)
    bring_run(uri_of(lost), tmp_path / "newest", trusts=False)
    newest = RunLayout.open(tmp_path / "newest")
    Catalog.open(newest).close()
    assert {50, 51} <= states_of_catalog(newest).keys()


@pytest.mark.parametrize("at", ["_base", "_scan"])
def test_a_rebuild_whose_volume_goes_meanwhile_changes_nothing(
    at: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the new catalog named fewer files, and the next owner removed the others."""
    shared, done = tmp_path / "shared", getattr(rebuild_module, at)
    catalog = lost.catalog.read_bytes()

    def unmount(*given: Any, **named: Any) -> Any:
        shared.rename(tmp_path / "aside")
        shared.mkdir()
        return done(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(rebuild_module, at, unmount)
        with pytest.raises(UnavailableError, match="primary.json is not there; mount the volume"):
            rebuild(lost)
    shared.rmdir()
    (tmp_path / "aside").rename(shared)
    assert lost.catalog.read_bytes() == catalog
    Catalog.open(lost).close()


def test_a_repair_whose_volume_goes_while_it_checks_takes_no_file_for_lost(
    lost: RunLayout, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    with Catalog.open(lost) as catalog:
        shared.rename(tmp_path / "aside")
        shared.mkdir()
        findings = check(lost, level=CONTENTS)
        assert "segment_missing" in {finding.what for finding in findings}
        with pytest.raises(UnavailableError, match="primary.json is not there; mount the volume"):
            repair(catalog, lost, findings=findings)
        shared.rmdir()
        (tmp_path / "aside").rename(shared)
    assert [one for one in check(lost, level=CONTENTS) if one.severity == "error"] == []


def test_an_older_copy_is_refused_also_beside_a_late_manifest(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: the late one was the only witness, and it does not count."""
    late = lost.storage.read("manifest.json").to_pybytes()
    root = tmp_path / "new"
    bring_run(uri_of(lost), root, trusts=False)
    play_groups(RunLayout.open(root), 50)
    shutil.copytree(root, tmp_path / "copy")
    play_groups(RunLayout.open(root), 51)
    lost.storage.write("manifest.json", late)
    shutil.rmtree(root)
    (tmp_path / "copy").rename(root)
    with pytest.raises(FormatError, match="is an older copy; put the newest back"):
        Catalog.open(RunLayout.open(root))


@pytest.mark.parametrize("has_own_manifest", [True, False])
def test_an_older_copy_of_the_directory_removes_nothing_of_the_storage(
    tmp_path: Path, has_own_manifest: bool
) -> None:
    """The directory was restored from a backup, and `gigpo compact` removed what its catalog did
    not know: all that was committed since.
    """
    root, copy = tmp_path / "run", tmp_path / "copy"
    layout = RunLayout.create(root, config_yaml="a: 1\n", storage_uri=(tmp_path / "s").as_uri())
    sign_run(root)
    write_open_sql(layout, macros=(), max_staleness=9)
    for ordinal in range(3):
        with Catalog.open(layout) as catalog:
            play(layout, catalog, open_train_group(catalog, ordinal))
            export(catalog, layout)
        if ordinal == 0:
            shutil.copytree(root, copy)
            for _ in range(5):  # a later owner than the original's, and not a newer catalog
                Catalog.open(RunLayout.open(copy)).close()
    trajectories = ask(layout, "SELECT traj_uid FROM trajectory ORDER BY 1")
    files = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.parquet")}
    for path in files:
        os.utime(path, (1, 1))
    if not has_own_manifest:
        (copy / "published.json").unlink()
    restored = RunLayout.open(copy)
    # A start does that first. The attack: it showed readers nothing, and so the copy was the newest.
    write_open_sql(restored, macros=(), max_staleness=9)
    with pytest.raises(FormatError, match="is an older copy; put the newest back, or: gigpo reb"):
        Catalog.open(restored)
    if has_own_manifest:
        assert "manifest_ahead" in {finding.what for finding in check(restored, level=CONTENTS)}
    assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.parquet")} == files
    rebuild(restored)
    with Catalog.open(restored):
        pass
    assert ask(restored, "SELECT traj_uid FROM trajectory ORDER BY 1") == trajectories


def test_a_storage_that_is_not_there_is_no_empty_one(lost: RunLayout, tmp_path: Path) -> None:
    """The attack: a volume that was not mounted. The owner wrote run.json beneath its place, a
    rebuild found nothing, and with the volume back all its files were swept.
    """
    storage = tmp_path / "shared"
    storage.rename(tmp_path / "aside")
    storage.mkdir()
    for act in (lost.check_primary, lambda: Catalog.open(lost), lambda: rebuild(lost)):
        with pytest.raises(UnavailableError, match=r"primary.json is not there; mount the volume"):
            act()
    assert not list(storage.iterdir())
    storage.rmdir()
    (tmp_path / "aside").rename(storage)
    Catalog.open(lost).close()
