"""The catalog: no group lost, none doubled, whatever is retried, crashed and rolled back in
between.
"""

from __future__ import annotations

import errno
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from store import (
    Catalog,
    CheckpointRecord,
    FencedError,
    LockedError,
    ReusedGroups,
    RunLayout,
    StoreError,
    VersionRecord,
    export,
    read_segment,
    write_open_sql,
    write_segment,
)
from store.catalog.snapshot import read_as_of
from store.maintenance.fsck import CATALOG, check
from tests.support.run_views import connect
from tests.support.store_samples import in_play, make_trajectory, open_train_group, play


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")


def test_two_owners_are_refused_and_a_new_one_fences_the_old(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        with pytest.raises(LockedError, match=r"process \d+ owns"):
            Catalog.open(layout)
        open_train_group(catalog, 0)
        lease = catalog.lease_open_group(worker="w0", lease_s=60.0)
        assert lease is not None
    segment = write_segment(layout, [make_trajectory(lease, 0)], worker="w0", epoch=lease.epoch)
    with Catalog.open(layout) as catalog:
        assert catalog.epoch == lease.epoch + 1
        with pytest.raises(FencedError, match="take a new lease"):
            catalog.commit(segment, epoch=lease.epoch)
        # the dead worker's lease is gone
        again = catalog.lease_open_group(worker="w1", lease_s=60.0)
        assert again is not None and again.traj_uids == lease.traj_uids and again.missing == (0, 1)


def test_leases_run_out_and_held_out_groups_go_first(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Catalog.open(layout) as catalog:
        clock_us = [1_000_000]
        monkeypatch.setattr("store.catalog.database.now_us", lambda: clock_us[0])
        open_train_group(catalog, 0)
        catalog.open_group(ordinal=0, task_id="h", split="heldout", size=1, evaluated_version=3)
        first = catalog.lease_open_group(worker="a", lease_s=1.0)
        second = catalog.lease_open_group(worker="b", lease_s=1.0)
        assert first is not None and first.split == "heldout"
        assert second is not None and second.split == "train"
        assert catalog.lease_open_group(worker="c", lease_s=1.0) is None
        clock_us[0] += 999_999
        catalog.renew_leases(["b"], lease_s=1.0)
        clock_us[0] += 1
        assert catalog.lease_open_group(worker="c", lease_s=1.0, split="train") is None
        taken_over = catalog.lease_open_group(worker="c", lease_s=1.0)
        assert taken_over is not None and taken_over.group_uid == first.group_uid
        assert catalog.counts().leased == 1


def test_leases_do_not_wait_for_the_disk(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with Catalog.open(layout) as catalog:
        monkeypatch.setattr("store.catalog.database.os.fsync", synced.append)
        for worker in "ab":
            with catalog.unsynced():
                open_train_group(catalog, None)
                catalog.lease_open_group(worker=worker, lease_s=60.0)
        assert synced == []
        catalog.snapshot({})
        assert len(synced) == 1


def test_after_a_failed_sync_nothing_more_is_promised(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Catalog.open(layout) as catalog:
        with monkeypatch.context() as broken:
            broken.setattr("store.catalog.database.os.fsync", fails)
            catalog.log(component="w", what="lost", detail="")
            with pytest.raises(StoreError, match="cannot be synced: Input/output error"):
                catalog.snapshot({})
        with pytest.raises(StoreError, match="cannot be synced"):
            catalog.log(component="w", what="behind the gap", detail="")
        with pytest.raises(StoreError, match="cannot be synced"):
            catalog.snapshot({})
    with Catalog.open(layout) as catalog:
        catalog.log(component="w", what="a new owner goes on", detail="")


def test_a_retry_with_new_and_known_trajectories_counts_only_the_new(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0, size=3)
        early = write_segment(layout, [make_trajectory(group, 1)], worker="w0", epoch=catalog.epoch)
        mixed = write_segment(
            layout, [make_trajectory(group, m) for m in range(3)], worker="w1", epoch=catalog.epoch
        )
        late = write_segment(layout, [make_trajectory(group, 2)], worker="w2", epoch=catalog.epoch)
        catalog.commit(early, epoch=catalog.epoch)
        assert open_train_group(catalog, 0, size=3).missing == (0, 2)
        result = catalog.commit(mixed, epoch=catalog.epoch)
        assert (result.new, result.duplicates) == (
            (group.traj_uids[0], group.traj_uids[2]),
            (group.traj_uids[1],),
        )
        assert catalog.commit(mixed, epoch=catalog.epoch) == result
        assert catalog.commit(late, epoch=catalog.epoch).new == ()
        assert (
            catalog.counts().complete,
            catalog.counts().trajectories,
            catalog.counts().steps,
        ) == (1, 3, 9)
        batch = catalog.claim(n_groups=1, current_version=0, max_staleness=0)
        assert batch is not None
        rows = [
            uid
            for meta in batch.segments
            for uid in read_segment(layout, meta)["traj_uid"].to_pylist()
        ]
        # three steps each, the duplicate's rows left out
        assert sorted(rows) == sorted(group.traj_uids * 3)


def test_strangers_are_refused(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
        with pytest.raises(StoreError, match="use the task list and group size"):
            catalog.open_group(
                ordinal=0, task_id="another", split="train", size=2, evaluated_version=None
            )
        with pytest.raises(StoreError, match="'test'"):
            catalog.open_group(ordinal=0, task_id="t", split="test", size=2, evaluated_version=None)
        with pytest.raises(StoreError, match="evaluation round"):
            catalog.open_group(
                ordinal=0, task_id="t", split="heldout", size=2, evaluated_version=None
            )
        other = RunLayout.create(layout.root.parent / "other", config_yaml="a: 1\n")
        segment = write_segment(layout, [make_trajectory(group, 0)], worker="w0", epoch=1)
        with Catalog.open(other) as stranger, pytest.raises(StoreError, match="never opened"):
            stranger.commit(segment, epoch=stranger.epoch)


def test_stale_groups_are_set_aside_with_the_reason_and_the_bound_is_exact(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:
        for ordinal, version in enumerate((4, 5, 9)):
            play(layout, catalog, open_train_group(catalog, ordinal), version=version)
        assert catalog.claim(n_groups=3, current_version=9, max_staleness=4) is None
        assert (catalog.counts().stale, catalog.counts().complete, catalog.counts().claimed) == (
            1,
            2,
            0,
        )
        batch = catalog.claim(n_groups=1, current_version=9, max_staleness=4)
        # 9 - 5 is just allowed
        assert batch is not None and [group.version_min for group in batch.groups] == [5]


def test_a_refilled_batch_keeps_what_it_left_out_and_lets_others_be_played(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:
        for version in (1, 0, 1):
            play(layout, catalog, open_train_group(catalog, None), version=version)
        batch = catalog.claim(n_groups=2, current_version=1, max_staleness=1)
        assert batch is not None and catalog.outstanding() == 3
        silent = batch.groups[0].group_uid
        refill = partial(
            catalog.refill, batch.batch_id, filtered=[silent], current_version=1, max_staleness=1
        )
        assert refill(n_groups=0) is None
        assert (catalog.outstanding(), in_play(catalog.counts())) == (2, 3)
        assert check(layout, level=CATALOG) == []
        play(layout, catalog, open_train_group(catalog, None), version=0)
        assert refill(n_groups=3) is None
        lsn = export(catalog, layout)
        whole = refill(n_groups=2)
        assert whole is not None
        assert read_as_of(layout, lsn).tables["lineage"].num_rows == 2
        assert read_as_of(layout, export(catalog, layout)).tables["lineage"].num_rows == 4
        assert [(group.version_min, group.ordinal) for group in whole.groups] == [
            (0, 1),
            (0, 3),
            (1, 0),
            (1, 2),
        ]
        assert sum(len(segment.trajectories) for segment in whole.segments) == 8
        assert refill(n_groups=9) is None
        catalog.settle(batch.batch_id, learner_step=1, filtered={silent: "alike"}, version_in=1)
        assert (catalog.counts().trained, catalog.counts().filtered) == (3, 1)
        assert catalog.outstanding() == 0
        with pytest.raises(StoreError, match="batch 1 is not claimed, so it cannot be refilled"):
            refill(n_groups=1)
        assert check(layout, level=CATALOG) == []


def test_wins_of_groups_that_were_partly_won_are_replayed_the_least_used_first_then_the_newest(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:

        def play_won(n_won: int, *, version: int) -> None:
            group = open_train_group(catalog, None, size=3)
            members = [
                replace(make_trajectory(group, member, version=version), won=member < n_won)
                for member in group.missing
            ]
            segment = write_segment(layout, members, worker="w0", epoch=catalog.epoch)
            catalog.commit(segment, epoch=catalog.epoch)

        def replayed(learner_step: int, *, n_groups: int, n_replayed: int, max_age: int) -> list:
            batch = catalog.claim(
                n_groups=n_groups,
                current_version=5,
                max_staleness=9,
                reused=ReusedGroups(n_replayed=n_replayed, max_age_versions=max_age),
            )
            assert batch is not None
            catalog.settle(batch.batch_id, learner_step=learner_step, filtered={}, version_in=5)
            return sorted(group.ordinal for group in batch.replayed)

        for n_won, version in ((0, 5), (1, 4), (2, 5), (3, 5), (1, 5)):
            play_won(n_won, version=version)
        assert replayed(1, n_groups=5, n_replayed=9, max_age=9) == []
        chosen = []
        for learner_step in range(2, 7):
            play_won(0, version=5)
            chosen += replayed(learner_step, n_groups=1, n_replayed=1, max_age=1)
        # Groups 2 and 4 are of version 5, group 1 is of version 4. Of equals the later is newer.
        assert chosen == [4, 2, 1, 4, 2]
        play_won(0, version=5)
        assert replayed(7, n_groups=1, n_replayed=9, max_age=0) == [2, 4]
        play_won(0, version=5)
        assert replayed(8, n_groups=1, n_replayed=9, max_age=1) == [1, 2, 4]
        assert check(layout, level=CATALOG) == []


def test_a_refilled_batch_whose_file_is_damaged_is_given_back(layout: RunLayout) -> None:
    """Also if it is the file of a group that the batch left out."""
    with Catalog.open(layout) as catalog:
        for _ in range(2):
            play(layout, catalog, open_train_group(catalog, None), version=1)
        batch = catalog.claim(n_groups=2, current_version=1, max_staleness=1)
        assert batch is not None
        silent = batch.groups[0].group_uid
        catalog.refill(
            batch.batch_id, filtered=[silent], n_groups=1, current_version=1, max_staleness=1
        )
        (segment,) = (one for one in batch.segments if one.trajectories[0].group_uid == silent)
        aside = catalog.set_aside(segment.path, why="damaged", rescued=None)
        assert (aside.reopened, aside.released) == ((silent,), (batch.batch_id,))
        assert (catalog.counts().open, catalog.counts().complete) == (1, 1)
        assert catalog.outstanding() == 2
        assert check(layout, level=CATALOG) == []


def test_settling_needs_a_claimed_batch_and_a_later_step(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        for ordinal in range(2):
            play(layout, catalog, open_train_group(catalog, ordinal))
        one = catalog.claim(n_groups=1, current_version=0, max_staleness=0)
        two = catalog.claim(n_groups=1, current_version=0, max_staleness=0)
        assert one is not None and two is not None
        with pytest.raises(StoreError, match="not in batch"):
            catalog.settle(
                one.batch_id,
                learner_step=1,
                filtered={two.groups[0].group_uid: "alike"},
                version_in=0,
            )
        catalog.settle(
            one.batch_id, learner_step=1, filtered={one.groups[0].group_uid: "alike"}, version_in=0
        )
        with pytest.raises(StoreError, match="is trained"):
            catalog.settle(one.batch_id, learner_step=2, filtered={}, version_in=0)
        with pytest.raises(StoreError, match="learner step 1 is not after"):
            catalog.settle(two.batch_id, learner_step=1, filtered={}, version_in=0)
        assert (
            catalog.counts().filtered,
            catalog.counts().claimed,
            in_play(catalog.counts()),
        ) == (1, 1, 1)


def test_versions_are_never_reused_and_checkpoints_follow_a_roll_back(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d0", learner_step=None)
        )
        catalog.record_version(
            VersionRecord(version=1, path="weights/v1", digest="d1", learner_step=1)
        )
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=1, path="checkpoints/step1", version=1)
        )
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=5, path="checkpoints/step5", version=1)
        )
        assert catalog.roll_back(1).checkpoints == 1
        checkpoint = next(reversed(catalog.live_checkpoints()), None)
        assert checkpoint is not None and checkpoint.learner_step == 1
        with pytest.raises(StoreError, match="announce it as 2"):
            catalog.record_version(
                VersionRecord(version=1, path="weights/v1", digest="other", learner_step=1)
            )
        with pytest.raises(StoreError, match="NaN"):
            catalog.record_metrics(learner_step=1, policy_version=1, values={"loss": float("nan")})


def test_a_start_counts_the_trajectories_that_are_kept_whatever_they_are_of(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 0))
        play(
            layout,
            catalog,
            catalog.open_group(
                ordinal=0, task_id="h", split="heldout", size=1, evaluated_version=3
            ),
        )
        assert catalog.found_at_start().trajectories == 3
        assert catalog.counts().trajectories == 2, "of training groups"
        catalog.expire([catalog.live_segments()[0].segment_id])
        assert catalog.found_at_start().trajectories == 1, "those of the first expired"


def test_a_batch_is_claimed_refilled_and_settled_for_one_version_that_is_not_behind_the_newest(
    layout: RunLayout,
) -> None:
    """Otherwise the bound on staleness would be that of a version the learner has left behind."""
    with Catalog.open(layout) as catalog:
        for version in range(3):
            catalog.record_version(
                VersionRecord(
                    version=version, path=f"weights/v{version}", digest="", learner_step=1
                )
            )
        for _ in range(2):
            play(layout, catalog, open_train_group(catalog, None), version=0)
        with pytest.raises(
            StoreError, match=r"for policy version 1: the newest is 2; claim for it"
        ):
            catalog.claim(n_groups=1, current_version=1, max_staleness=1)
        assert catalog.counts().complete == 2, "a refused claim makes no group stale"
        batch = catalog.claim(n_groups=1, current_version=3, max_staleness=3)  # in advance
        assert batch is not None
        said = f"batch {batch.batch_id} was claimed for policy version 3, not 2"
        with pytest.raises(StoreError, match=said):
            catalog.refill(
                batch.batch_id, filtered=(), n_groups=1, current_version=2, max_staleness=3
            )
        with pytest.raises(StoreError, match=said):
            catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=2)
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=3)


def test_success_is_counted_per_round(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        heldout = [
            catalog.open_group(
                ordinal=k, task_id=f"h{k}", split="heldout", size=1, evaluated_version=7
            )
            for k in range(2)
        ]
        catalog.record_version(
            VersionRecord(version=7, path="weights/v7", digest="d7", learner_step=3)
        )
        play(layout, catalog, heldout[0])
        assert catalog.finished_evaluations() == []
        play(layout, catalog, heldout[1])
        (done,) = catalog.finished_evaluations()
        assert (
            done.version,
            done.learner_step,
            done.success.n_won,
            done.success.n_trajectories,
        ) == (7, 3, 2, 2)
        # Each has one trajectory of three steps, with rewards 0, 1 and 2.
        assert done.metrics() == {
            "heldout/success": 1.0,
            "heldout/return": 3.0,
            "heldout/episode_steps": 3.0,
            "heldout/episodes": 2.0,
            "heldout/newest_version": 1.0,  # the sample steps say so
        }
        catalog.record_metrics(
            learner_step=3, policy_version=7, values={"heldout/success": 1.0, "z": 2.0}
        )
        catalog.record_metrics(learner_step=4, policy_version=7, values={"z": 3.0, "a": 1.0})
        assert catalog.finished_evaluations() == []
        assert catalog.latest_metrics() == {"heldout/success": 1.0, "z": 3.0, "a": 1.0}
        # held-out ones are never claimed
        assert catalog.claim(n_groups=3, current_version=7, max_staleness=0) is None


def test_returns_that_cancel_out_at_infinity_keep_no_run_from_its_start(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        catalog.record_version(VersionRecord(version=7, path="v", digest="d", learner_step=3))
        for ordinal in range(2):
            group = catalog.open_group(
                ordinal=ordinal, task_id="h", split="heldout", size=1, evaluated_version=7
            )
            play(layout, catalog, group)
    # as an earlier version of the program stored them
    with closing(sqlite3.connect(layout.catalog)) as raw, raw:
        raw.execute("UPDATE grp SET return_sum = CASE ordinal WHEN 0 THEN 1e999 ELSE -1e999 END")
    with Catalog.open(layout) as catalog:
        (done,) = catalog.finished_evaluations()
        assert done.return_sum is None
        catalog.record_metrics(learner_step=3, policy_version=7, values=done.metrics())
        assert "heldout/return" not in catalog.latest_metrics()
        assert catalog.latest_metrics()["heldout/episodes"] == 2.0


def test_abandoned_episodes_do_not_keep_a_round_from_its_result_and_a_roll_back_does(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:
        for version, step in ((7, 3), (8, 4)):
            catalog.record_version(
                VersionRecord(
                    version=version, path=f"weights/v{version}", digest="d", learner_step=step
                )
            )
            catalog.open_round(["h0", "h1"], episodes_per_task=1, version=version)
        broken = catalog.lease_open_group(worker="w", lease_s=60.0)
        assert broken is not None and broken.evaluated_version == 7
        catalog.give_up(broken.group_uid, worker="w", state="abandoned", reason="it broke")
        played = catalog.lease_open_group(worker="w", lease_s=60.0)
        assert played is not None and played.evaluated_version == 7
        play(layout, catalog, played, version=9)
        (done,) = catalog.finished_evaluations()
        assert (
            done.version,
            done.newest_version,
            done.n_abandoned,
            done.success.n_trajectories,
        ) == (7, 10, 1, 1)
        assert done.metrics()["heldout/abandoned"] == 1.0
        catalog.record_metrics(learner_step=3, policy_version=7, values=done.metrics())
        catalog.roll_back(3)
        assert catalog.finished_evaluations() == []


def test_lineage_keeps_what_was_claimed_when_members_are_played_anew(layout: RunLayout) -> None:
    """A group that lost members and was played again by a newer policy was trained on as it was
    then.
    """
    write_open_sql(layout, macros=[], max_staleness=2)
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 0), version=1)
        batch = catalog.claim(n_groups=1, current_version=2, max_staleness=2)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=2)
        with catalog._database.transaction() as tx:
            tx.run("UPDATE grp SET version_min = 7, version_max = 8")
            tx.touch("groups", "lineage")
        export(catalog, layout)
    with connect(layout) as views:
        assert views.sql("SELECT version_min, staleness FROM lineage").fetchall() == [(1, 1)]


def test_what_contradicts_the_catalog_is_not_called_a_full_disk(layout: RunLayout) -> None:
    with (
        Catalog.open(layout) as catalog,
        pytest.raises(StoreError, match=r"contradicts.*fsck"),
        catalog._database.transaction() as tx,
    ):
        tx.run("INSERT INTO duplicate (segment_id, traj_uid) VALUES ('no such segment', x'00')")
