"""A node that does not see the owner's directory works for a run with a storage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from store import (
    Catalog,
    FencedError,
    FormatError,
    RunLayout,
    StoreError,
    UnavailableError,
    check_written,
    local_directory,
    local_model,
    sign_run,
    write_segment,
)
from store.run_names import BASE_POLICY
from tests.support.store_samples import make_trajectory, open_train_group
from tests.support.stored_runs import uri_of


def test_a_node_that_sees_nothing_of_the_directory_joins_the_run(
    lost: RunLayout, tmp_path: Path
) -> None:
    """For a worker or the learner; nobody can own the run there."""
    root = tmp_path / "node" / "run"
    layout = RunLayout.join(root, storage_uri=uri_of(lost), run_id=lost.info.run_id)
    again = RunLayout.join(root, storage_uri=uri_of(lost), run_id=lost.info.run_id)
    assert layout.info == lost.info == again.info
    policy = root / BASE_POLICY
    assert local_model(layout, str(policy)) == str(policy)
    assert (policy / "model.safetensors").read_bytes() == b"base"
    assert local_model(layout, "/models/other") == "/models/other"
    assert local_directory(layout, "checkpoints/step000002").is_dir()
    with pytest.raises(StoreError, match="you did not make this run"):
        Catalog.open(layout)
    sign_run(root)
    with pytest.raises(FencedError, match=f"was brought to {lost.root} on"):
        Catalog.open(layout)
    with pytest.raises(FormatError, match="is not a run directory"):
        RunLayout.join(tmp_path / "none", storage_uri="", run_id=lost.info.run_id)


def test_a_node_that_joined_an_earlier_run_there_does_not_work_for_it(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: the driver began a run anew at the same path, with the same storage or another.

    The node still had the earlier one, so what it played was lost with the driver's disk.
    """
    root, uri = tmp_path / "node" / "run", (tmp_path / "second storage").as_uri()
    RunLayout.join(root, storage_uri=uri_of(lost), run_id=lost.info.run_id)
    second = RunLayout.create(tmp_path / "second", config_yaml="", storage_uri=uri).info
    for storage_uri in (uri, uri_of(lost), ""):
        with pytest.raises(
            StoreError, match=f"{root}, as .* sees it, is of run {lost.info.run_id}.*move it away"
        ):
            RunLayout.join(root, storage_uri=storage_uri, run_id=second.run_id)
    with pytest.raises(StoreError, match=r"run\.json, as .* check store\.uri"):
        RunLayout.join(tmp_path / "other", storage_uri=uri_of(lost), run_id=second.run_id)
    assert not (tmp_path / "other").exists()


def test_a_node_without_the_volume_does_not_work_for_the_run(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: its segments lay beneath the mount point, and were committed."""
    storage = tmp_path / "shared"
    with Catalog.open(lost) as catalog:
        group = open_train_group(catalog, 9)
    storage.rename(tmp_path / "aside")
    with pytest.raises(UnavailableError, match=r"shared is not there; mount the volume"):
        write_segment(lost, [make_trajectory(group, 0)], worker="w1", epoch=1)
    assert not storage.exists()
    storage.mkdir()
    with pytest.raises(UnavailableError, match=r"run\.json, as .* sees it, is not there; mount"):
        RunLayout.join(lost.root, storage_uri=uri_of(lost), run_id=lost.info.run_id)
    with pytest.raises(UnavailableError, match=r"primary\.json is not there; mount .* here, then"):
        write_segment(lost, [make_trajectory(group, 0)], worker="w1", epoch=1)
    (unseen,) = [path.relative_to(storage) for path in storage.rglob("*.parquet")]
    shutil.rmtree(storage)
    (tmp_path / "aside").rename(storage)
    with pytest.raises(UnavailableError, match=rf"{unseen} is not there; .* where w1 runs"):
        check_written(lost, str(unseen), worker="w1")
    write_segment(lost, [make_trajectory(group, 0)], worker="w1", epoch=1)
