"""Weights, checkpoints and backups of a run in its storage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from store import (
    Catalog,
    Maintainer,
    RunLayout,
    StoreError,
    bring_run,
    local_directory,
    publish_directory,
)
from store.maintenance.maintainer import BACKUP_EVERY_S
from store.remote_directory import has_directory, is_published, prune_published
from store.storage import LocalStorage
from tests.support.stored_runs import MAINTAINER, uri_of


def test_a_checkpoint_that_is_uploaded_again_is_whole_or_not_there(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went back writes another checkpoint of the same learner step."""
    directory = lost.checkpoint_dir(2)
    (directory / "model.safetensors").write_bytes(b"another way there")
    plain = type(lost.storage).write

    def cut(self: object, path: str, data: bytes) -> None:
        plain(self, path, data[: len(data) // 2])  # type: ignore[arg-type]
        raise StoreError("the machine dies here")

    monkeypatch.setattr(type(lost.storage), "write", cut)
    with pytest.raises(StoreError, match="dies here"):
        publish_directory(lost, directory)
    monkeypatch.undo()
    assert not is_published(lost, "checkpoints/step000002")
    shutil.rmtree(lost.root)
    bring_run(uri_of(lost), lost.root, trusts=False)
    assert not has_directory(lost, "checkpoints/step000002")
    with pytest.raises(StoreError, match="restore it from a backup"):
        local_directory(lost, "checkpoints/step000002")
    assert local_directory(lost, "checkpoints/step000001").is_dir()
    prune_published(lost, lost.checkpoints, kept=lambda names: names[-1:])
    left = {file.path for file in lost.storage.files("checkpoints")}
    assert left == {"checkpoints/step000002/model.safetensors"}


def test_what_nobody_published_is_left_in_the_storage(
    lost: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that NFS made ended the run. A person's directories took the place of the newest."""
    foreign = (
        "checkpoints/.nfs000000000001",
        "checkpoints/best/a",
        "checkpoints/x/step000009/a",
        "checkpoints/step000009/primary.json",  # another run's
        "checkpoints/step000009/segments/w0/a.parquet",
        "checkpoints/step000009/run.json",
    )
    for path in foreign:
        lost.storage.write(path, b"theirs")
    names: list[str] = []
    before = {file.path for file in lost.storage.files("checkpoints")}

    def keep_none(found: list[str]) -> set[str]:
        names.extend(found)
        return set()

    def refuse(storage: LocalStorage, path: str) -> None:
        raise StoreError(f"cannot remove {path}: Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "remove", refuse)
        prune_published(lost, lost.checkpoints, kept=keep_none)
    assert names == ["step000001", "step000002"]
    assert {file.path for file in lost.storage.files("checkpoints")} == before
    prune_published(lost, lost.checkpoints, kept=keep_none)
    assert {file.path for file in lost.storage.files("checkpoints")} == set(foreign)


def test_a_backup_is_made_every_minute(lost: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint as well; of a run on its own disk only with one."""
    clock = [0.0]
    monkeypatch.setattr("store.maintenance.maintainer.time.monotonic", lambda: clock[0])
    with Catalog.open(lost) as owner:
        maintainer = Maintainer(owner, lost, settings=MAINTAINER)
        made = []
        for clock[0] in (0.0, 1.0, BACKUP_EVERY_S - 1, BACKUP_EVERY_S, BACKUP_EVERY_S + 1):
            owner.log(component="test", what="something", detail="new")
            before = owner.backed_up_lsn
            maintainer.work()
            made.append(owner.backed_up_lsn > before)
    assert made == [True, False, False, True, False]
