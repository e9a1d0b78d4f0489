"""A run of somebody else, or a place of somebody else, when a run is brought from a storage."""

from __future__ import annotations

import json
import os
import resource
import stat
import tempfile
from pathlib import Path

import pytest

from cli.__main__ import main
from store import (
    Catalog,
    RunLayout,
    StoreError,
    bring_catalog,
    bring_run,
    run_at,
    sign_run,
    signed_texts,
    trust,
    trusted_texts,
)
from store.exchange import bring
from store.exchange.offline_import import parse_source, take_sources
from store.run_names import BRING_MARKER, SIGNED
from store.storage import MAX_FILE_BYTES, LocalStorage
from store.untrusted.file_access import MAX_TEXT_BYTES
from store.untrusted.signatures import MAX_SIGNED_BYTES
from tests.support.file_modes import modes_at_each_write
from tests.support.neighbours import Neighbour, as_user
from tests.support.stored_runs import uri_of


def test_a_strangers_run_is_not_brought_unasked(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings would be followed, and its storage written."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    before = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    root = tmp_path / "new"
    with pytest.raises(StoreError, match="was not made by you on this machine.*--trust"):
        bring_run(uri_of(lost), root, trusts=False)
    assert not root.exists()
    assert before == {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    bring_run(uri_of(lost), root, trusts=True)
    Catalog.open(RunLayout.open(root)).close()  # signed, so that the next start asks no more


def test_of_a_strangers_run_at_a_uri_only_small_files_are_fetched_unasked(
    lost: RunLayout,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A backup may be larger than memory. It takes no room in the storage if it is sparse."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    read: dict[str, int] = {}
    limits = []
    plain = LocalStorage.read

    def noted(self: LocalStorage, path: str, *, at_most: int = MAX_FILE_BYTES) -> object:
        read[path] = at_most
        return plain(self, path, at_most=at_most)

    def checked(run: Path) -> object:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA))
        return trusted_texts(run)

    monkeypatch.setattr(LocalStorage, "read", noted)
    for name in ("store.layout.trusted_texts", "driver.resume.trusted_texts"):
        monkeypatch.setattr(name, checked)
    new = f"run_dir={tmp_path / 'new'}"
    for asked in (["--fork", f"{uri_of(lost)}@1", "--dry-run"], ["--resume", uri_of(lost)]):
        assert main(["train", *asked, new]) == 2
        assert "was not made by you on this machine" in capsys.readouterr().err
    root = run_at(uri_of(lost))
    with pytest.raises(StoreError, match="was not made by you"):
        bring_catalog(uri_of(lost))
    assert "run.json" in read and max(read.values()) <= MAX_TEXT_BYTES
    assert resource.getrlimit(resource.RLIMIT_DATA) not in limits[:2]
    target = RunLayout.create(tmp_path / "target", config_yaml="a: 1\n")
    take_sources(target.root, [parse_source(uri_of(lost))], order="ordinal")
    assert "backup/catalog.sqlite" not in read and not (root / "catalog.sqlite").exists()
    trust(root)
    bring_catalog(uri_of(lost))
    assert (root / "catalog.sqlite").is_file()


def test_signatures_of_a_storage_do_not_stay_if_they_are_no_signatures(
    lost: RunLayout, tmp_path: Path, cache: Path
) -> None:
    """A larger signed.json here would be refused for ever, also when the storage is mended."""
    good = lost.storage.read(SIGNED).to_pybytes()
    many = [f"{i:04}" + "x" * MAX_SIGNED_BYTES for i in range(2)]
    lost.storage.write(SIGNED, json.dumps({"signatures": many}).encode())
    with pytest.raises(StoreError, match=r"signed.json has 2,\d+,\d+ bytes"):
        run_at(uri_of(lost))
    lost.storage.write(SIGNED, json.dumps({"signatures": ["x" * 900_000]}).encode())
    assert not signed_texts(run_at(uri_of(lost)))
    run_at.cache_clear()
    lost.storage.write(SIGNED, good)
    assert signed_texts(run_at(uri_of(lost)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_users_run_is_read_without_their_signatures() -> None:
    """Only its owner can read them. To everybody else it is a run of somebody else."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # others cannot enter pytest's
        Path(shared).chmod(0o755)
        storage = (Path(shared) / "storage").as_uri()
        layout = RunLayout.create(Path(shared) / "run", config_yaml="a: 1\n", storage_uri=storage)
        layout.storage.write("config.yaml", b"a: 1\n")
        theirs = as_user(1234, lambda: " ".join(bring._read_small_files(storage) or {}))
        assert theirs == "run.json config.yaml"
        own = bring._read_small_files(storage)
        assert own is not None and SIGNED in own


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_run_is_not_brought_into_a_directory_of_another_user(
    lost: RunLayout, tmp_path: Path, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a link to the user's files came in its place while what was in it was removed."""
    root = tmp_path / "theirs"
    root.mkdir()
    if is_begun:
        (root / BRING_MARKER).touch()
        (root / "precious").touch()
    before = sorted(root.iterdir())
    Neighbour(monkeypatch).gets(root)
    with pytest.raises(StoreError, match=r"theirs belongs to another user \(uid 65534\)"):
        bring_run(uri_of(lost), root, trusts=False)
    assert sorted(root.iterdir()) == before


@pytest.mark.parametrize("secret", ["newest", "first", ""])
def test_nobody_else_enters_a_brought_run_with_a_secret_from_its_first_file(
    lost: RunLayout, tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the key in config.yaml was read until the run had started."""
    root = tmp_path / "new"
    texts = {"newest": "a: 2\n", "first": "a: 1\n"}
    (lost.root / "config.yaml").write_text(texts["newest"])
    sign_run(lost.root)
    for name in ("config.yaml", "signed.json"):
        lost.storage.write(name, (lost.root / name).read_bytes())
    modes = modes_at_each_write(lambda: [root], monkeypatch)
    bring_run(uri_of(lost), root, trusts=False, is_secret=lambda text: text == texts.get(secret))
    assert len(modes) > 1
    assert {*modes, stat.S_IMODE(root.stat().st_mode)} == {0o700 if secret else 0o755}
