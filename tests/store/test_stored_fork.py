"""A fork from a storage or into one: whole, or not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import store.exchange.fork as fork_module
from store import (
    Catalog,
    FormatError,
    RunLayout,
    StoreError,
    UnavailableError,
    bring_catalog,
    bring_run,
    export,
    fork,
    primary_directory,
    run_at,
    write_open_sql,
)
from store.exchange import bring
from store.maintenance import group_addresses
from store.maintenance.fsck import CONTENTS, check
from store.remote_directory import is_published
from store.run_names import BASE_POLICY
from store.storage import LocalStorage, open_storage
from store.storage_claim import is_unused
from tests.support.store_samples import open_train_group, play
from tests.support.stored_runs import (
    call_until_it_dies,
    catalog_paths,
    die,
    hold_write,
    lose_the_owner,
    play_groups,
    states,
    states_of_catalog,
    uri_of,
)


def options(uri: str) -> dict[str, Any]:
    """Return the arguments of a fork of learner step 2 into the storage at `uri`."""
    return {"learner_step": 2, "config_yaml": "a: 1\n", "storage_uri": uri}


@pytest.mark.parametrize("uri", ["", "own"])
def test_a_run_is_forked_from_its_uri(
    lost: RunLayout, tmp_path: Path, cache: Path, uri: str
) -> None:
    """Into a directory, or into a storage of its own."""
    shutil.rmtree(lost.root)
    before = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    own = (tmp_path / uri).as_uri() if uri else None
    root = tmp_path / "forked"
    bring_catalog(uri_of(lost))
    source = RunLayout.open(run_at(uri_of(lost)))
    made = fork(source, root, learner_step=1, config_yaml="a: 2\n", storage_uri=own)
    assert made.info.storage_uri == own
    assert states_of_catalog(made) == {0: "trained", 1: "complete", 2: "complete"}
    for path in ("checkpoints/step000001", "weights/v000001", BASE_POLICY):
        assert (root / path / "model.safetensors").is_file()
        assert is_published(made, path) is bool(own)
    errors = [one for one in check(made, level=CONTENTS) if one.severity == "error"]
    assert {one.what for one in errors} <= {"manifest_missing", "open_sql_missing"}
    assert before == {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    with pytest.raises(
        StoreError, match="no checkpoint of learner step 3: there are those of 1, 2"
    ):
        fork(source, tmp_path / "no", learner_step=3, config_yaml="a: 2\n")
    assert not (tmp_path / "no").exists()


def test_a_fork_that_is_whole_is_brought_with_its_checkpoint(
    lost: RunLayout, tmp_path: Path
) -> None:
    """Its disk was lost before its first owner made a backup."""
    uri = (tmp_path / "of-fork").as_uri()
    fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    shutil.rmtree(tmp_path / "fork")
    bring_run(uri, tmp_path / "new", trusts=False)
    new = RunLayout.open(tmp_path / "new")
    with Catalog.open(new) as catalog:
        assert [point.learner_step for point in catalog.live_checkpoints()] == [2]
    assert [state for state, _ in states(new.root).values()][:2] == ["trained", "trained"]


@pytest.fixture
def forked(lost: RunLayout, tmp_path: Path) -> RunLayout:
    """Return a fork with one group of its own, whose owner was killed."""
    uri = (tmp_path / "of-fork").as_uri()
    made = fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    write_open_sql(made, macros=(), max_staleness=9)
    assert not list(made.storage.files("unfinished_forks"))
    catalog = Catalog.open(made)
    play(made, catalog, open_train_group(catalog, 7))
    export(catalog, made)
    lose_the_owner(catalog)
    return made


def test_a_fork_with_the_run_json_of_another_run_loses_nothing(
    forked: RunLayout, tmp_path: Path
) -> None:
    """The files of the run before it count as its own, and are no witnesses."""
    text = forked.storage.read("run.json").to_pybytes().decode()
    digit = text.index(forked.info.run_id)
    other = "0" if text[digit] != "0" else "1"
    forked.storage.write("run.json", f"{text[:digit]}{other}{text[digit + 1 :]}".encode())
    before = {file.path for file in forked.storage.files("")}
    with pytest.raises(FormatError, match=f"its segments are of run {forked.info.run_id}"):
        bring_run(uri_of(forked), tmp_path / "new", trusts=True)
    assert {file.path for file in forked.storage.files("")} == before


def test_a_fork_that_was_killed_is_made_when_it_is_given_again(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "of-fork").as_uri()
    given = options(uri)
    for name in ("copy_until", "_link_files", "give_rights", "_put_in_place"):
        with monkeypatch.context() as patch:
            patch.setattr(fork_module, name, die)
            call_until_it_dies(fork, lost, tmp_path / "fork", **given)
    made = fork(lost, tmp_path / "fork", **given)
    assert not list(made.storage.files("unfinished_forks"))
    Catalog.open(made).close()


def test_a_fork_that_was_cut_short_leaves_nothing_in_its_storage(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    unfinished = tmp_path / "forked.unfinished"
    with monkeypatch.context() as patch:
        patch.setattr("store.exchange.fork._remove", lambda unfinished: None)  # as if killed
        patch.setattr("store.exchange.fork.publish_directory", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fork(
                lost,
                tmp_path / "forked",
                learner_step=1,
                config_yaml="",
                storage_uri=own.as_uri(),
            )
    assert unfinished.is_dir() and list(own.rglob("*.parquet"))
    made = fork(lost, tmp_path / "forked", learner_step=1, config_yaml="", storage_uri=own.as_uri())
    assert not unfinished.exists()
    assert {path.name for path in own.rglob("*.parquet")} == {
        Path(row).name for row in catalog_paths(made)
    }


def test_what_a_fork_left_keeps_no_later_run_of_its_storage_from_being_brought(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: one request of a fork failed, and its marker stayed."""
    uri = (tmp_path / "of-fork").as_uri()
    with monkeypatch.context() as patch:
        hold_write(patch, "run.json")
        with pytest.raises(UnavailableError):
            fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    assert list(open_storage(uri).files("unfinished_forks"))
    plain = RunLayout.create(tmp_path / "plain", config_yaml="a: 1\n", storage_uri=uri)
    write_open_sql(plain, macros=(), max_staleness=9)
    with Catalog.open(plain) as catalog:
        play(plain, catalog, open_train_group(catalog, 0))
        export(catalog, plain)
    bring_run(uri, tmp_path / "new", trusts=False)
    assert len(states(tmp_path / "new")) == 1


def test_a_fork_that_was_killed_removes_nothing_of_who_went_on_with_its_files(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it was brought to another directory, and the fork was given again."""
    uri = (tmp_path / "of-fork").as_uri()
    given = options(uri)
    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "_remove", lambda unfinished: None)  # as kill -9
        patch.setattr(fork_module, "give_rights", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fork(lost, tmp_path / "fork", **given)
    with pytest.raises(FormatError, match="has a fork that was cut short"):
        bring_run(uri, tmp_path / "new", trusts=False)
    shutil.rmtree(tmp_path / "of-fork" / "unfinished_forks")  # as of an earlier version
    # Its groups are the other run's, which no search finds.
    monkeypatch.setattr(group_addresses, "ADDRESSES_TRIED", 1000)
    bring_run(uri, tmp_path / "new", trusts=False)
    new = RunLayout.open(tmp_path / "new")
    with Catalog.open(new) as catalog:
        play(new, catalog, open_train_group(catalog, 9))
    before = {file.path for file in new.storage.files("")}
    with pytest.raises(StoreError, match="has files of another run"):
        fork(lost, tmp_path / "fork", **given)
    assert {file.path for file in new.storage.files("")} == before
    Catalog.open(new).close()


def test_a_fork_that_is_removed_while_it_is_brought_is_not_brought(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the files of the new directory were removed one by one."""
    uri = (tmp_path / "of-fork").as_uri()
    given = options(uri)
    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "_put_in_place", die)
        patch.setattr(Path, "unlink", die)  # its own marker stays
        call_until_it_dies(fork, lost, tmp_path / "fork", **given)
    assert not list(open_storage(uri).files("unfinished_forks"))
    fetch, remove = bring.local_directory, LocalStorage.remove

    def end(storage: LocalStorage, path: str) -> None:
        raise SystemExit

    def fetch_slowly(layout: RunLayout, path: str) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "remove", end)
            with pytest.raises(SystemExit):
                fork(lost, tmp_path / "fork", **given)
        return fetch(layout, path)

    with monkeypatch.context() as patch:
        patch.setattr(bring, "local_directory", fetch_slowly)
        with pytest.raises(FormatError, match="has a fork that was cut short"):
            bring_run(uri, tmp_path / "new", trusts=False)
    storage = open_storage(uri)
    files = {file.path for file in storage.files("")}

    def take_away(self: LocalStorage, path: str) -> None:
        monkeypatch.setattr(LocalStorage, "remove", remove)
        primary_directory.take(tmp_path, storage)
        remove(self, path)

    monkeypatch.setattr(LocalStorage, "remove", take_away)
    with pytest.raises(StoreError, match="was taken by another directory"):
        fork(lost, tmp_path / "fork", **given)
    assert len(files - {file.path for file in storage.files("")}) == 1


@pytest.mark.parametrize(
    "name", ["other/deeper", "export/deeper", "backup", "quarantine", "catalog.v2/deeper"]
)
def test_a_fork_that_is_removed_leaves_a_run_beneath_its_storage(
    name: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it removed every file that lay there."""
    uri = (tmp_path / "shared-by-two").as_uri()
    other: list[RunLayout] = []

    def make_other(*given: object, **named: object) -> None:
        made = RunLayout.create(tmp_path / "other", config_yaml="", storage_uri=f"{uri}/{name}")
        write_open_sql(made, macros=(), max_staleness=9)
        play_groups(made, 0)
        (tmp_path / "shared-by-two" / "mine.txt").write_text("mine")
        (tmp_path / "fork.unfinished" / "mine.txt").write_text("mine")
        other.append(made)
        raise OSError("full disk")

    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "give_rights", make_other)
        with pytest.raises(StoreError, match="full disk"):
            fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    (made,) = other
    Catalog.open(made).close()
    assert check(made, level=CONTENTS) == []
    left = {file.path.split("/")[0] for file in open_storage(uri).files("")}
    assert left == {name.split("/")[0], "mine.txt", "primary.json", "revoked"}
    assert (tmp_path / "fork.unfinished" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("at", ["give_rights", "_put_in_place"])  # before it is whole, and after
def test_a_removal_of_a_fork_that_is_killed_leaves_nothing_to_bring(
    at: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: only run.json was left, and was brought as a run without anything."""
    remove = LocalStorage.remove
    for n_removed in range(40):
        uri = (tmp_path / f"storage{n_removed}").as_uri()
        given = options(uri)
        left = [n_removed]

        def remove_some(storage: LocalStorage, path: str, left: list[int] = left) -> None:
            if not left[0]:
                raise SystemExit
            left[0] -= 1
            remove(storage, path)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "remove", remove_some)
            patch.setattr(fork_module, at, mock.Mock(side_effect=OSError("full disk")))
            with pytest.raises((SystemExit, StoreError)) as ended:
                fork(lost, tmp_path / f"fork{n_removed}", **given)
        if ended.type is not SystemExit:
            break
        if {file.path for file in open_storage(uri).files("")}:
            refused = r"has a fork that was cut short|run.json is not there"
            with pytest.raises(FormatError, match=refused):
                bring_run(uri, tmp_path / f"new{n_removed}", trusts=False)
        Catalog.open(fork(lost, tmp_path / f"fork{n_removed}", **given)).close()
    assert n_removed > 5 and is_unused(uri)


@pytest.mark.parametrize("path", ["run.json", "unfinished_forks"])
def test_a_run_that_is_made_while_a_fork_is_removed_goes_on(
    path: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the removal took away its primary.json and run.json."""
    uri, remove = (tmp_path / "of-fork").as_uri(), LocalStorage.remove
    given = options(uri)
    made: list[RunLayout] = []
    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "_back_up", die)
        call_until_it_dies(fork, lost, tmp_path / "fork", **given)

    def remove_slowly(storage: LocalStorage, removed: str) -> None:
        if removed.startswith(path):
            monkeypatch.setattr(LocalStorage, "remove", remove)
            made.append(RunLayout.create(tmp_path / "other", config_yaml="", storage_uri=uri))
            write_open_sql(made[0], macros=(), max_staleness=9)
            play_groups(made[0], 0)
        remove(storage, removed)

    monkeypatch.setattr(LocalStorage, "remove", remove_slowly)
    with pytest.raises(StoreError, match="was taken by another directory|has files of another run"):
        fork(lost, tmp_path / "fork", **given)
    play_groups(made[0], 1)
    assert check(made[0], level=CONTENTS) == []


def test_a_killed_fork_is_not_brought_also_if_two_took_its_storage(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the marker of the second one said nothing about the first."""
    uri = (tmp_path / "of-fork").as_uri()
    given = options(uri)
    write = LocalStorage.write

    def write_slowly(there: LocalStorage, path: str, data: bytes, **more: bool) -> None:
        if not path.startswith("unfinished_forks"):
            write(there, path, data, **more)
            return
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "write", write)
            patch.setattr(fork_module, "_back_up", die)
            call_until_it_dies(fork, lost, tmp_path / "quick", **given)
        write(there, path, data, **more)
        die()

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", write_slowly)
        call_until_it_dies(fork, lost, tmp_path / "slow", **given)
    assert len(list(open_storage(uri).files("unfinished_forks"))) == 2
    with pytest.raises(FormatError, match="has a fork that was cut short"):
        bring_run(uri, tmp_path / "new", trusts=False)
    Catalog.open(fork(lost, tmp_path / "quick", **given)).close()


def test_a_fork_whose_volume_goes_while_it_is_made_is_not_made(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: its files lay beneath the mount point, and nothing could bring it or make it."""
    volume, copy_until = tmp_path / "of-fork", fork_module.copy_until
    given = options(volume.as_uri())

    def unmount(*of: Any, **named: Any) -> int:
        version = copy_until(*of, **named)
        volume.rename(tmp_path / "aside")
        volume.mkdir()
        return version

    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "copy_until", unmount)
        with pytest.raises(UnavailableError, match="primary.json is not there; mount the volume"):
            fork(lost, tmp_path / "fork", **given)
    assert not (tmp_path / "fork").exists()
    shutil.rmtree(volume)
    (tmp_path / "aside").rename(volume)
    Catalog.open(fork(lost, tmp_path / "fork", **given)).close()
