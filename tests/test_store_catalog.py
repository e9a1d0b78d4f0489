"""The catalog: no group lost, none doubled, whatever is retried, crashed and rolled back in between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from store import Catalog, FencedError, LockedError, RunLayout, StoreError, read_segment, write_segment
from tests.store_samples import make_trajectory, open_train_group, play


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
        again = catalog.lease_open_group(worker="w1", lease_s=60.0)  # the dead worker's lease is gone
        assert again is not None and again.traj_uids == lease.traj_uids and again.missing == (0, 1)


def test_leases_run_out_and_held_out_groups_go_first(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with Catalog.open(layout) as catalog:
        clock_us = [1_000_000]
        monkeypatch.setattr("store.catalog.database.now_us", lambda: clock_us[0])
        open_train_group(catalog, 0)
        catalog.open_group(ordinal=0, task_id="h", split="heldout", size=1, purpose_version=3)
        first = catalog.lease_open_group(worker="a", lease_s=1.0)
        second = catalog.lease_open_group(worker="b", lease_s=1.0)
        assert first is not None and first.split == "heldout"
        assert second is not None and second.split == "train"
        assert catalog.lease_open_group(worker="c", lease_s=1.0) is None
        clock_us[0] += 999_999
        assert catalog.renew_leases("b", 1.0) == 1
        clock_us[0] += 1
        assert catalog.lease_open_group(worker="c", lease_s=1.0, split="train") is None
        taken_over = catalog.lease_open_group(worker="c", lease_s=1.0)
        assert taken_over is not None and taken_over.group_uid == first.group_uid
        assert catalog.counts().leased == 1


def test_a_retry_with_new_and_known_trajectories_counts_only_the_new(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0, size=3)
        early = write_segment(layout, [make_trajectory(group, 1)], worker="w0", epoch=catalog.epoch)
        mixed = write_segment(layout, [make_trajectory(group, m) for m in range(3)], worker="w1", epoch=catalog.epoch)
        late = write_segment(layout, [make_trajectory(group, 2)], worker="w2", epoch=catalog.epoch)
        catalog.commit(early, epoch=catalog.epoch)
        assert open_train_group(catalog, 0, size=3).missing == (0, 2)
        result = catalog.commit(mixed, epoch=catalog.epoch)
        assert (result.new, result.duplicates) == ((group.traj_uids[0], group.traj_uids[2]), (group.traj_uids[1],))
        assert catalog.commit(mixed, epoch=catalog.epoch) == result
        assert catalog.commit(late, epoch=catalog.epoch).new == ()
        assert (catalog.counts().complete, catalog.counts().trajectories, catalog.counts().steps) == (1, 3, 9)
        batch = catalog.claim(n_groups=1, current_version=0, max_staleness=0)
        assert batch is not None
        rows = [uid for meta in batch.segments for uid in read_segment(layout, meta)["traj_uid"].to_pylist()]
        assert sorted(rows) == sorted(group.traj_uids * 3)  # three steps each, the duplicate's rows left out


def test_strangers_are_refused(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
        with pytest.raises(StoreError, match="use the task list and group size"):
            catalog.open_group(ordinal=0, task_id="another", split="train", size=2, purpose_version=None)
        with pytest.raises(StoreError, match="'test'"):
            catalog.open_group(ordinal=0, task_id="t", split="test", size=2, purpose_version=None)
        with pytest.raises(StoreError, match="evaluation round"):
            catalog.open_group(ordinal=0, task_id="t", split="heldout", size=2, purpose_version=None)
        other = RunLayout.create(layout.root.parent / "other", config_yaml="a: 1\n")
        segment = write_segment(layout, [make_trajectory(group, 0)], worker="w0", epoch=1)
        with Catalog.open(other) as stranger, pytest.raises(StoreError, match="never opened"):
            stranger.commit(segment, epoch=stranger.epoch)


def test_stale_groups_are_set_aside_with_the_reason_and_the_bound_is_exact(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        for ordinal, version in enumerate((4, 5, 9)):
            play(layout, catalog, open_train_group(catalog, ordinal), version=version)
        assert catalog.claim(n_groups=3, current_version=9, max_staleness=4) is None
        assert (catalog.counts().stale, catalog.counts().complete, catalog.counts().claimed) == (1, 2, 0)
        batch = catalog.claim(n_groups=1, current_version=9, max_staleness=4)
        assert batch is not None and [group.version_min for group in batch.groups] == [5]  # 9 - 5 is just allowed


def test_settling_needs_a_claimed_batch_and_a_later_step(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        for ordinal in range(2):
            play(layout, catalog, open_train_group(catalog, ordinal))
        one = catalog.claim(n_groups=1, current_version=0, max_staleness=0)
        two = catalog.claim(n_groups=1, current_version=0, max_staleness=0)
        assert one is not None and two is not None
        with pytest.raises(StoreError, match="not in batch"):
            catalog.settle(one.batch_id, learner_step=1, no_signal=[two.groups[0].group_uid], version_in=0)
        catalog.settle(one.batch_id, learner_step=1, no_signal=[one.groups[0].group_uid], version_in=0)
        with pytest.raises(StoreError, match="is trained"):
            catalog.settle(one.batch_id, learner_step=2, no_signal=(), version_in=0)
        with pytest.raises(StoreError, match="learner step 1 is not after"):
            catalog.settle(two.batch_id, learner_step=1, no_signal=(), version_in=0)
        assert (catalog.counts().no_signal, catalog.counts().claimed, catalog.counts().outstanding) == (1, 1, 1)


def test_versions_are_never_reused_and_checkpoints_follow_a_roll_back(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        catalog.record_version(version=0, path="w0", digest="d0", learner_step=None)
        catalog.record_version(version=1, path="w1", digest="d1", learner_step=1)
        catalog.record_checkpoint(learner_step=1, path="c1", version=1)
        catalog.record_checkpoint(learner_step=5, path="c5", version=1)
        assert catalog.roll_back(1).checkpoints == 1
        checkpoint = catalog.latest_checkpoint()
        assert checkpoint is not None and checkpoint.learner_step == 1
        with pytest.raises(StoreError, match="publish as 2"):
            catalog.record_version(version=1, path="w1", digest="other", learner_step=1)
        with pytest.raises(StoreError, match="NaN"):
            catalog.record_metrics(learner_step=1, policy_version=1, values={"loss": float("nan")})


def test_success_is_counted_per_round(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        heldout = [catalog.open_group(ordinal=k, task_id=f"h{k}", split="heldout", size=1, purpose_version=7) for k in range(2)]
        play(layout, catalog, heldout[0])
        assert not catalog.heldout_success(purpose_version=7).complete
        play(layout, catalog, heldout[1])
        done = catalog.heldout_success(purpose_version=7)
        assert done.complete and (done.n_won, done.n_trajectories) == (2, 2)
        assert catalog.heldout_success(purpose_version=8).rate is None
        assert catalog.claim(n_groups=3, current_version=0, max_staleness=0) is None  # held-out ones are never claimed


GROUP_SIZE = 2


class CatalogMachine(RuleBasedStateMachine):
    """The catalog against a dict: state of each group, members committed, batches by learner step."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.layout = RunLayout.create(self.root / "run", config_yaml="a: 1\n")
        self.catalog = Catalog.open(self.layout)
        self.state: dict[int, str] = {}
        self.members: dict[int, set[int]] = {}
        self.version: dict[int, int] = {}
        self.claimed: dict[int, list[int]] = {}
        self.settled: dict[int, list[int]] = {}
        self.segments: list = []

    def teardown(self) -> None:
        self.catalog.close()
        shutil.rmtree(self.root)

    @rule()
    def open_one(self) -> None:
        ordinal = open_train_group(self.catalog, None, size=GROUP_SIZE).ordinal
        assert ordinal == len(self.state)
        self.state[ordinal], self.members[ordinal] = "open", set()

    @rule(pick=st.integers(0, 99), members=st.sets(st.integers(0, GROUP_SIZE - 1), min_size=1), age=st.integers(0, 2))
    def write_and_commit(self, pick: int, members: set[int], age: int) -> None:
        if not self.state:
            return
        ordinal = pick % len(self.state)
        group = open_train_group(self.catalog, ordinal, size=GROUP_SIZE)
        trajectories = [make_trajectory(group, member, version=5 - age, n_steps=1) for member in sorted(members)]
        segment = write_segment(self.layout, trajectories, worker="w", epoch=self.catalog.epoch)
        new = members - self.members[ordinal]
        assert set(self.catalog.commit(segment, epoch=self.catalog.epoch).new) >= {group.traj_uids[m] for m in new}
        self.segments.append((segment, self.catalog.epoch))
        self.members[ordinal] |= members
        if new:
            self.version[ordinal] = min(self.version.get(ordinal, 9), 5 - age)
        if self.state[ordinal] == "open" and len(self.members[ordinal]) == GROUP_SIZE:
            self.state[ordinal] = "complete"

    @rule(pick=st.integers(0, 99))
    def retry(self, pick: int) -> None:
        if self.segments:
            segment, epoch = self.segments[pick % len(self.segments)]
            if epoch == self.catalog.epoch:
                self.catalog.commit(segment, epoch=epoch)
            else:
                with pytest.raises(FencedError):
                    self.catalog.commit(segment, epoch=epoch)

    @rule(n_groups=st.integers(1, 2), current_version=st.integers(4, 6))
    def claim(self, n_groups: int, current_version: int) -> None:
        batch = self.catalog.claim(n_groups=n_groups, current_version=current_version, max_staleness=1)
        for ordinal, state in self.state.items():
            if state == "complete" and self.version[ordinal] < current_version - 1:
                self.state[ordinal] = "stale"
        ready = sorted((self.version[o], o) for o, state in self.state.items() if state == "complete")
        if len(ready) < n_groups:
            assert batch is None
            return
        expected = [ordinal for _, ordinal in ready[:n_groups]]
        assert batch is not None and [group.ordinal for group in batch.groups] == expected
        listed = sorted(t.traj_uid for segment in batch.segments for t in segment.trajectories)
        assert len(listed) == len(set(listed)) == n_groups * GROUP_SIZE
        self.claimed[batch.batch_id] = expected
        self.state.update(dict.fromkeys(expected, "claimed"))

    @rule()
    def settle(self) -> None:
        if self.claimed:
            batch_id = min(self.claimed)
            step = max(self.settled, default=0) + 1
            self.catalog.settle(batch_id, learner_step=step, no_signal=(), version_in=5)
            self.settled[step] = self.claimed.pop(batch_id)
            self.state.update(dict.fromkeys(self.settled[step], "trained"))

    @rule()
    def crash(self) -> None:
        self.catalog.close()
        self.catalog = Catalog.open(self.layout)

    @rule(back=st.integers(0, 2))
    def roll_back(self, back: int) -> None:
        step = max(0, max(self.settled, default=0) - back)
        self.catalog.roll_back(step)
        gone = [*self.claimed.values(), *(groups for s, groups in self.settled.items() if s > step)]
        self.state.update({ordinal: "complete" for groups in gone for ordinal in groups})
        self.claimed, self.settled = {}, {s: groups for s, groups in self.settled.items() if s <= step}

    @invariant()
    def agrees(self) -> None:
        counts = self.catalog.counts()
        for name in ("open", "complete", "claimed", "trained", "stale"):
            assert getattr(counts, name) == list(self.state.values()).count(name), name
        assert counts.trajectories == counts.steps == sum(map(len, self.members.values()))


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
