"""`gigpo fetch` makes and updates copies, and touches nothing that is a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from store import Catalog, RunLayout, StoreError, export
from store.maintenance.rebuild import rebuild
from store.reading import mirror as mirror_module
from store.reading.mirror import fetch_run
from store.storage import LocalStorage, Storage
from tests.support.store_damage import ask
from tests.support.store_runs import fingerprint, make_run
from tests.support.store_samples import open_train_group, play


def test_a_run_that_lost_its_catalog_is_not_taken_for_a_copy_of_its_backup(tmp_path: Path) -> None:
    """`gigpo fetch BACKUP RUN` removed what the run had committed since, before a rebuild."""
    layout, backup = make_run(tmp_path / "run"), tmp_path / "backup"
    shutil.copytree(layout.root, backup)
    with Catalog.open(layout) as catalog:
        for ordinal in (7, 8):
            play(layout, catalog, open_train_group(catalog, ordinal), version=1)
    trajectories = ask(layout, "SELECT traj_uid FROM trajectory ORDER BY traj_uid")
    for path in layout.root.glob("catalog.sqlite*"):
        path.unlink()
    before = fingerprint(layout.root)
    with pytest.raises(StoreError, match="run is not a copy of file://.*; choose a new directory"):
        fetch_run(backup.as_uri(), layout.root)
    assert fingerprint(layout.root) == before
    rebuild(layout)
    assert ask(layout, "SELECT traj_uid FROM trajectory ORDER BY traj_uid") == trajectories


def test_a_copy_that_became_a_run_and_lost_its_catalog_is_no_copy_any_more(tmp_path: Path) -> None:
    backup = make_run(tmp_path / "backup")
    copy = fetch_run(backup.root.as_uri(), tmp_path / "copy")
    rebuild(copy)
    for lost in ("run.json", "catalog.sqlite*"):
        for path in copy.root.glob(lost):
            path.rename(tmp_path / path.name)
        before = fingerprint(copy.root)
        with pytest.raises(StoreError, match="copy is not a copy of file://"):
            fetch_run(backup.root.as_uri(), copy.root)
        assert fingerprint(copy.root) == before


def test_a_copy_that_becomes_a_run_during_a_fetch_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = make_run(tmp_path / "backup")
    copy = fetch_run(backup.root.as_uri(), tmp_path / "copy")
    with Catalog.open(backup) as catalog:  # there is something to fetch
        play(backup, catalog, open_train_group(catalog, 9), version=1)
        export(catalog, backup)
    update = mirror_module._update

    def rebuilt_before(storage: Storage, layout: RunLayout) -> None:
        rebuild(copy)
        with Catalog.open(copy) as catalog:
            play(copy, catalog, open_train_group(catalog, 8), version=1)
        update(storage, layout)

    monkeypatch.setattr(mirror_module, "in_limited_process", lambda act, *given, **_: act(*given))
    monkeypatch.setattr(mirror_module, "_update", rebuilt_before)
    fetch_run(backup.root.as_uri(), copy.root)
    for (path,) in ask(copy, "SELECT path FROM segment WHERE retired_lsn IS NULL"):
        assert (copy.root / path).is_file()


def test_a_fetch_that_was_killed_before_its_copy_was_one_begins_again(tmp_path: Path) -> None:
    backup, copy = make_run(tmp_path / "backup"), tmp_path / "copy"
    fetch_run(backup.root.as_uri(), copy)
    (copy / "run.json").unlink()  # it is written last of what makes a copy
    fetch_run(backup.root.as_uri(), copy)
    assert RunLayout.open(copy).info.run_id == backup.info.run_id


def test_what_no_run_writes_is_left_in_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a removed file that somebody reads under another name, and cannot remove that."""
    backup = make_run(tmp_path / "backup")
    copy = fetch_run(backup.root.as_uri(), tmp_path / "copy")
    foreign = copy.exports / ".nfs000000000001"
    foreign.write_bytes(b"")
    with Catalog.open(backup) as catalog:
        play(backup, catalog, open_train_group(catalog, 9), version=1)
        export(catalog, backup)
    before = set(copy.exports.iterdir())

    def refuse(storage: LocalStorage, path: str) -> None:
        raise StoreError(f"cannot remove {path}")

    monkeypatch.setattr(mirror_module, "in_limited_process", lambda act, *given, **_: act(*given))
    monkeypatch.setattr(mirror_module, "_has_gone_on", lambda copy: False)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "remove", refuse)
        fetch_run(backup.root.as_uri(), copy.root)
    assert set(copy.exports.iterdir()) > before
    shutil.rmtree(backup.exports)  # what the storage has is kept
    with Catalog.open(backup) as catalog:
        play(backup, catalog, open_train_group(catalog, 10), version=1)
        export(catalog, backup)
    fetch_run(backup.root.as_uri(), copy.root)
    assert foreign.exists() and not before - {foreign} <= set(copy.exports.iterdir())
