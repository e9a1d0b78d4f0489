"""`trained_step` tells afterwards exactly the groups that were claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import (
    Batch,
    Catalog,
    CheckpointRecord,
    RunLayout,
    StoreError,
    VersionRecord,
    published_version,
    read_segments,
    restart_points,
    trained_step,
)
from tests.support.store_runs import MERGE_TWO, compact_once
from tests.support.store_samples import open_train_group, play


def claim(catalog: Catalog, *, version: int) -> Batch:
    batch = catalog.claim(n_groups=3, current_version=version, max_staleness=4)
    assert batch is not None
    return batch


def settle(
    catalog: Catalog, batch: Batch, *, learner_step: int, version_in: int, loss: float
) -> None:
    """Publish a version, then settle, as the learner does."""
    version = version_in + 1
    catalog.record_version(
        VersionRecord(
            version=version,
            path=f"weights/v{version}",
            digest=f"d{version}",
            learner_step=learner_step,
        )
    )
    catalog.settle(batch.batch_id, learner_step=learner_step, filtered={}, version_in=version_in)
    catalog.record_metrics(
        learner_step=learner_step, policy_version=version_in, values={"loss": loss}
    )


def test_groups_come_in_the_order_of_the_claim_and_rows_from_where_they_are_now(
    tmp_path: Path,
) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d0", learner_step=0)
        )
        for ordinal, version in enumerate((2, 0, 1)):
            play(layout, catalog, open_train_group(catalog, ordinal), version=version)
        batch = claim(catalog, version=3)
        assert [group.version_min for group in batch.groups] == [0, 1, 2], (
            "not the order they were played in"
        )
        with pytest.raises(StoreError, match="was trained to learner step 0; there is no 1"):
            trained_step(layout, 1)
        settle(catalog, batch, learner_step=1, version_in=3, loss=0.5)
        step = trained_step(layout, 1)  # the catalog is open, and goes on
        assert (step.batch, step.version_in, step.figures) == (batch, 3, {"loss": 0.5})
        assert (step.published, step.published.digest) == (published_version(layout, 4), "d4")

        assert compact_once(catalog, layout, policy=MERGE_TWO, skip=()) is not None
        moved = trained_step(layout, 1).batch
        assert moved.groups == batch.groups
        assert {segment.path for segment in moved.segments} != {
            segment.path for segment in batch.segments
        }
        order = [("traj_uid", "ascending"), ("step_index", "ascending")]
        before, after = (
            read_segments(layout, found.segments).sort_by(order) for found in (batch, moved)
        )
        assert after.equals(before)


def test_of_a_step_that_was_trained_again_the_last_time_counts(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d0", learner_step=0)
        )
        for ordinal in range(6):
            play(layout, catalog, open_train_group(catalog, ordinal), version=0)
        settle(catalog, claim(catalog, version=0), learner_step=1, version_in=0, loss=0.5)
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=1, path="checkpoints/step000001", version=1)
        )
        settle(catalog, claim(catalog, version=1), learner_step=2, version_in=1, loss=0.25)
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=2, path="checkpoints/step000002", version=2)
        )
        assert [point.learner_step for point in restart_points(layout)] == [2, 1]
        catalog.roll_back(1)
        assert [point.learner_step for point in restart_points(layout)] == [1]
        with pytest.raises(StoreError, match="trained to learner step 1"):
            trained_step(layout, 2)
        # a restart publishes again
        catalog.record_version(
            VersionRecord(version=3, path="weights/v3", digest="d1", learner_step=1)
        )
        again = claim(catalog, version=3)
        settle(catalog, again, learner_step=2, version_in=3, loss=0.125)
        step = trained_step(layout, 2)
        assert (step.batch.batch_id, step.version_in, step.published.version) == (
            again.batch_id,
            3,
            4,
        )
        assert step.figures == {"loss": 0.125}


def test_lost_rows_are_named(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        for ordinal in range(3):
            play(layout, catalog, open_train_group(catalog, ordinal), version=0)
        batch = claim(catalog, version=0)
        settle(catalog, batch, learner_step=1, version_in=0, loss=0.5)
        catalog.set_aside(batch.segments[0].path, why="damaged", rescued=None)
        with pytest.raises(
            StoreError,
            match=r"learner step 1 has 0 of its 2 trajectories; put the damaged file back",
        ):
            trained_step(layout, 1)
