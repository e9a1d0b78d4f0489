"""Test that one of two runs goes on that are made in one storage at once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import store.storage_claim as claim_module
from store import (
    Catalog,
    FencedError,
    RunLayout,
    StoreError,
    UnavailableError,
    bring_run,
    export,
    primary_directory,
)
from store.exchange import bring
from store.run_json import parse_run_json
from tests.support.store_samples import open_train_group, play
from tests.support.stored_runs import hold_write, lose_the_owner


@pytest.mark.parametrize(
    "when", ["before it is primary", "before, and has played", "then", "before its run.json"]
)
def test_of_two_runs_that_are_made_at_once_in_one_storage_one_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the run.json of the refused one, or its PRIMARY, came last, and stayed."""
    uri = (tmp_path / "shared").as_uri()
    take, is_unused = primary_directory.take, claim_module.is_unused
    made: list[RunLayout] = []

    def make_quick() -> None:
        monkeypatch.undo()
        quick = RunLayout.create(tmp_path / "quick", config_yaml="", storage_uri=uri)
        with Catalog.open(quick) as catalog:
            if when == "before, and has played":
                play(quick, catalog, open_train_group(catalog, 0))
        made.append(quick)

    def take_slowly(root: Path, storage: Any, **more: object) -> None:
        if when.startswith("before, ") or when == "before it is primary":
            make_quick()
        take(root, storage, **more)
        if when == "then":
            make_quick()

    def find_slowly(uri: str) -> bool:
        found = is_unused(uri)
        if when == "before its run.json" and (tmp_path / "slow" / "primary.json").exists():
            make_quick()
        return found

    monkeypatch.setattr(primary_directory, "take", take_slowly)
    monkeypatch.setattr(claim_module, "is_unused", find_slowly)
    with pytest.raises(StoreError, match="quick|has files of another run"):
        RunLayout.create(tmp_path / "slow", config_yaml="", storage_uri=uri)
    (quick,) = made
    with Catalog.open(quick) as catalog:
        play(quick, catalog, open_train_group(catalog, 1))
        export(catalog, quick)
        assert len(catalog.live_segments()) == 1 + (when == "before, and has played")
    assert (
        parse_run_json(quick.storage.read("run.json").to_pybytes(), name="run.json").run_id
        == quick.info.run_id
    )
    with pytest.raises(StoreError):
        RunLayout.open(tmp_path / "slow")
    with Catalog.open(quick):
        pass


def create_at_once(root: Path, uri: str, go: Any) -> None:
    go.wait()
    RunLayout.create(root, config_yaml="", storage_uri=uri)


@pytest.mark.parametrize("attempt", range(5))
def test_of_two_processes_that_make_a_run_in_one_storage_one_has_it(
    attempt: int, tmp_path: Path
) -> None:
    """Each refused the other, because each had found what the other had written by then."""
    context = multiprocessing.get_context("fork")
    uri, go = (tmp_path / "shared").as_uri(), context.Barrier(2)
    roots = [tmp_path / name for name in ("one", "other")]
    makers = [context.Process(target=create_at_once, args=(root, uri, go)) for root in roots]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    having = []
    for root in filter(RunLayout.exists, roots):
        try:
            Catalog.open(RunLayout.open(root)).close()
        except FencedError:
            continue
        having.append(root)
    assert len(having) == 1
    Catalog.open(RunLayout.open(having[0])).close()


def test_a_bring_that_fails_leaves_a_run_whose_storage_another_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: PRIMARY was removed, and the run was told to mount its volume."""
    uri, take = (tmp_path / "shared").as_uri(), primary_directory.take
    made: list[RunLayout] = []

    def take_slowly(root: Path, storage: Any, **more: object) -> None:
        monkeypatch.undo()
        made.append(RunLayout.create(tmp_path / "quick", config_yaml="", storage_uri=uri))
        catalog = Catalog.open(made[0])
        play(made[0], catalog, open_train_group(catalog, 0))
        lose_the_owner(catalog)
        take(root, storage, **more)

    monkeypatch.setattr(primary_directory, "take", take_slowly)
    with pytest.raises(StoreError, match="has files of another run"):
        RunLayout.create(tmp_path / "slow", config_yaml="", storage_uri=uri)
    with monkeypatch.context() as patch:
        patch.setattr(bring, "rebuild", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bring_run(uri, tmp_path / "new", trusts=False)
    Catalog.open(made[0]).close()
    primary_directory.take(tmp_path / "slow", made[0].storage)  # the late one, once more
    primary_directory.revoke(tmp_path / "slow", made[0].storage)
    with monkeypatch.context() as patch:
        held = hold_write(patch, primary_directory.PRIMARY)
        with pytest.raises(UnavailableError):
            bring_run(uri, tmp_path / "new", trusts=False)
    made[0].storage.write(primary_directory.PRIMARY, held[0])  # it arrives
    with Catalog.open(made[0]) as catalog:
        assert len(catalog.live_segments()) == 1
