"""Compare a store with a model in dictionaries after random operations: commits, retries,
crashes, roll-backs, compaction, retention.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from store import (
    Batch,
    Catalog,
    CheckpointRecord,
    FencedError,
    ReusedGroups,
    SegmentMeta,
    Trajectory,
    VersionRecord,
    export,
    read_segment,
    read_segments,
    write_segment,
)
from store.maintenance.compact import CompactionPolicy
from store.maintenance.fsck import CATALOG, check
from store.maintenance.sweep import expire_old, sweep_orphans, sweep_retired
from tests.support.store_model import (
    SEEN_BY_SQL,
    STATES,
    TOO_OLD,
    US_PER_S,
    DisposableRun,
    Model,
    dies_within,
    look_at,
    new_run,
)
from tests.support.store_runs import compact_once
from tests.support.store_samples import from_table, in_play, make_trajectory, open_task_group

# Sequences of random operations, and the operations of each. `make test-crash`: 500 sequences.
EXAMPLES, STEPS = int(os.environ.get("STORE_MACHINE_EXAMPLES", "50")), 12
GROUP_SIZE, MAX_STALENESS, MAX_AGE, KEPT_CHECKPOINTS = 2, 1, 3, 2
# no worker retries a commit for LONG_S; the grace of orphans is shorter
LEASE_S, LONG_S = 10, 7_200
# also files that are not settled
POLICY = CompactionPolicy(fan_in=2, max_live_files=2, min_file_bytes=1 << 20)
pick, ages = st.integers(0, 99), st.integers(0, 2)  # of what there is; versions behind the newest
picks = st.lists(pick, min_size=1, max_size=2)


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run without any group, copied for every example; and one DuckDB: starting it takes longer
    than an example.
    """
    StoreMachine.template, StoreMachine.shell = (
        tmp_path_factory.mktemp("template") / "run",
        duckdb.connect(),
    )
    look_at(
        StoreMachine.shell,
        new_run(StoreMachine.template, max_staleness=MAX_STALENESS),
        also_views=True,
    )
    yield
    del StoreMachine.shell


class StoreMachine(RuleBasedStateMachine):
    template: Path
    shell: duckdb.DuckDBPyConnection

    def __init__(self) -> None:
        super().__init__()
        self.run = DisposableRun(self.template)
        self.layout, self.model = self.run.layout, Model()
        # with its epoch and what is in it
        self.written: list[tuple[SegmentMeta, int, list[Trajectory]]] = []
        self.verified: dict[str, SegmentMeta] = {}  # files never change: one look at each is enough

    @property
    def catalog(self) -> Catalog:
        return self.run.catalog

    def teardown(self) -> None:
        try:
            self.sql_says_the_same()
        finally:
            self.run.remove()

    def wait(self, seconds: int) -> None:
        self.run.clock_us += seconds * US_PER_S
        if seconds == LONG_S:
            self.written = [entry for entry in self.written if not self.model.unknown(entry[2])]

    # Groups: opened, leased, played, committed.

    @initialize(
        n_groups=st.integers(1, 4), n_played=st.integers(0, 3), age=ages, whole=st.booleans()
    )
    def begin(self, n_groups: int, n_played: int, age: int, whole: bool) -> None:
        for number in range(n_groups):
            self.dispatch(0)
            if number < n_played:
                self.write([number], age, 1, whole, True)

    @rule(n_heldout=st.integers(0, 2))
    def dispatch(self, n_heldout: int) -> None:
        """One more group to train on, or an evaluation round, which may be there in part."""
        if n_heldout == 0:
            group = open_task_group(self.catalog, "t", size=GROUP_SIZE)
            assert group.ordinal == sum(known.is_train for known in self.model.groups.values())
            self.model.opened(group)
            return
        version, tasks = self.model.version, [f"h{k}" for k in range(n_heldout)]
        self.catalog.open_round(tasks, episodes_per_task=1, version=version)
        for k, task in enumerate(tasks):
            group = self.catalog.open_group(
                ordinal=k, task_id=task, split="heldout", size=1, evaluated_version=version
            )
            self.model.opened(group)

    @rule(
        worker=st.sampled_from("ab"),
        renews=st.booleans(),
        after_s=st.sampled_from([0, -3, 6, LEASE_S, LONG_S]),
    )
    def lease(self, worker: str, renews: bool, after_s: int) -> None:
        """Time passes, or goes back; then a worker renews its leases or asks for one more."""
        self.wait(after_s)
        until_us = self.run.clock_us + LEASE_S * US_PER_S
        if renews:
            self.catalog.renew_leases([worker], lease_s=LEASE_S)
            self.model.lease(self.model.held_by(worker), worker=worker, until_us=until_us)
            return
        expected = self.model.next_free(self.run.clock_us)
        leased = self.catalog.lease_open_group(worker=worker, lease_s=LEASE_S)
        assert (leased and leased.group_uid) == (expected and expected.record.group_uid)
        if leased is not None and expected is not None:
            assert set(leased.missing) == set(range(leased.size)) - expected.members.keys()
            self.model.lease([expected], worker=worker, until_us=until_us)

    @rule(
        number=pick,
        worker=st.sampled_from("ab"),
        state=st.sampled_from(["open", "open", "stale", "abandoned"]),
    )
    def give_up(self, number: int, worker: str, state: str) -> None:
        """A worker stops playing a group, its own or, as one that was taken for dead, another's."""
        group = (held := self.model.held_by(worker) or list(self.model.groups.values()))[
            number % len(held)
        ]
        self.catalog.give_up(group.record.group_uid, worker=worker, state=state, reason="too old")
        self.model.give_up(group, worker=worker, state=state)

    @rule(
        picks=picks, age=ages, n_steps=st.integers(1, 2), whole=st.booleans(), commits=st.booleans()
    )
    def write(self, picks: list[int], age: int, n_steps: int, whole: bool, commits: bool) -> None:
        """A file of one or two groups. What is known of them already is in it too, with other
        contents.
        """
        groups = list(self.model.groups.values())
        trajectories = [
            make_trajectory(
                groups[number].record, member, version=self.model.version - age, n_steps=n_steps
            )
            for number in {number % len(groups) for number in picks}
            for member in range(groups[number].record.size if whole else 1)
        ]
        segment = write_segment(self.layout, trajectories, worker="w", epoch=self.catalog.epoch)
        os.utime(self.layout.root / segment.path, (self.run.clock_us / US_PER_S,) * 2)
        self.written.append((segment, self.catalog.epoch, trajectories))
        if commits:
            self.commit_or_retry(len(self.written) - 1)

    @precondition(lambda self: self.written)
    @rule(number=pick)
    def commit_or_retry(self, number: int) -> None:
        segment, epoch, trajectories = self.written[number % len(self.written)]
        if epoch != self.catalog.epoch:
            with pytest.raises(FencedError):
                self.catalog.commit(segment, epoch=epoch)
            return
        unknown = self.model.unknown(trajectories)
        result = self.catalog.commit(segment, epoch=epoch)
        assert sorted((*result.new, *result.duplicates)) == sorted(t.traj_uid for t in trajectories)
        assert set(result.new) >= {t.traj_uid for t in unknown}
        assert self.catalog.commit(segment, epoch=epoch) == result
        self.model.commit(trajectories)

    @rule(n=st.integers(1, 2))
    def play(self, n: int) -> None:
        """Play the rest of open groups, then new groups, each into a file of its own."""
        for _ in range(n):
            opened = [
                number
                for number, group in enumerate(self.model.groups.values())
                if group.state == "open"
            ]
            if not opened:
                self.dispatch(0)
            self.write([opened[0] if opened else len(self.model.groups) - 1], 0, 1, True, True)

    # Batches and what the learner leaves behind.

    @rule(n_groups=st.integers(1, 2), n_replayed=st.integers(0, 2))
    def claim(self, n_groups: int, n_replayed: int) -> None:
        """Claim as a learner that prefetches: each earlier claimed batch will publish a version
        first.
        """
        version = self.model.version + len(self.model.claimed)
        expected = self.model.expect_claim(n_groups, version=version, max_staleness=MAX_STALENESS)
        batch = self.catalog.claim(
            n_groups=n_groups,
            current_version=version,
            max_staleness=MAX_STALENESS,
            reused=ReusedGroups(n_replayed=n_replayed, max_age_versions=MAX_AGE),
        )
        assert (batch and [group.group_uid for group in batch.groups]) == expected
        if batch is not None and expected is not None:
            rows = from_table(read_segments(self.layout, batch.segments))
            members = [
                t for group_uid in expected for t in self.model.groups[group_uid].members.values()
            ]
            assert sorted(rows, key=lambda t: t.traj_uid) == sorted(
                members, key=lambda t: t.traj_uid
            )
            self.model.claim(batch.batch_id, expected)
            self.replay(batch, n_replayed, version=version)

    def replay(self, batch: Batch, n_replayed: int, *, version: int) -> None:
        """The batch replays trained groups that are young enough and have all their rows."""
        replayable = {
            group_uid
            for group_uid, group in self.model.groups.items()
            if group.is_train and group.state == "trained" and not group.expired
            if group.version_min >= version - MAX_AGE
        }
        uids = [group.group_uid for group in batch.replayed]
        assert set(uids) <= replayable and len(set(uids)) == min(n_replayed, len(replayable))
        if uids:
            read_segments(self.layout, batch.replayed_segments)
            self.model.replayed[batch.batch_id] = uids

    @precondition(lambda self: self.model.claimed)
    @rule(number=pick, n_groups=st.integers(0, 2))
    def refill(self, number: int, n_groups: int) -> None:
        """One of the claimed batches finds that its first group teaches nothing, and asks for more.

        Those behind it are claimed for a version that is not there yet.
        """
        ahead = number % len(self.model.claimed)
        batch_id = sorted(self.model.claimed)[ahead]
        group_uids = self.model.claimed[batch_id]
        version = self.model.version + ahead
        self.model.set_aside.add(group_uids[0])
        ready = self.model.ready(version=version, max_staleness=MAX_STALENESS)
        added = ready[:n_groups] if len(ready) >= n_groups else []
        batch = self.catalog.refill(
            batch_id,
            filtered=group_uids[:1],
            n_groups=n_groups,
            current_version=version,
            max_staleness=MAX_STALENESS,
        )
        if not added:
            assert batch is None
            return
        self.model.claim(batch_id, [*group_uids, *added])
        assert batch is not None
        assert {group.group_uid for group in batch.groups} == {*group_uids, *added}
        n_rows = sum(len(self.model.groups[uid].members) for uid in (*group_uids, *added))
        assert sum(len(segment.trajectories) for segment in batch.segments) == n_rows

    @precondition(lambda self: self.model.claimed)
    @rule(silent=st.booleans(), saved=st.booleans())
    def settle(self, silent: bool, saved: bool) -> None:
        """A learner step, the version it publishes, and perhaps a checkpoint, of which two stay on
        disk.
        """
        batch_id, step = min(self.model.claimed), self.model.step + 1
        filtered = dict.fromkeys(self.model.claimed[batch_id][:1], "alike") if silent else {}
        self.catalog.settle(
            batch_id, learner_step=step, filtered=filtered, version_in=self.model.version
        )
        self.model.settle(batch_id, step=step, filtered=filtered)
        version = self.model.version
        self.catalog.record_version(
            VersionRecord(
                version=version, path=f"weights/v{version}", digest=f"d{version}", learner_step=step
            )
        )
        if saved:
            directory = self.layout.checkpoint_dir(step)
            directory.mkdir(exist_ok=True)
            self.catalog.record_checkpoint(
                CheckpointRecord(
                    learner_step=step, path=self.layout.relative(directory), version=version
                )
            )
            self.model.checkpoints.append(step)
            self.model.kept.add(step)
            for old in self.model.checkpoints[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(self.layout.checkpoint_dir(old), ignore_errors=True)
                self.model.kept.discard(old)

    @rule(n=st.integers(1, 2), saved=st.sampled_from([True, True, False]))
    def learn(self, n: int, saved: bool) -> None:
        for _ in range(n):
            self.play(1)
            self.claim(1, 0)
            if self.model.claimed:
                self.settle(False, saved)

    @rule(
        n_unsaved=st.integers(0, 2),
        back=st.integers(0, KEPT_CHECKPOINTS),
        after_s=st.sampled_from([0, LONG_S]),
    )
    def crash(self, n_unsaved: int, back: int, after_s: int) -> None:
        """The process is gone: nothing is closed, the kernel drops its lock. The next one may go
        back to a checkpoint.
        """
        if n_unsaved:
            self.learn(n_unsaved, False)
        self.run.kill()
        self.wait(after_s)
        self.run.start()
        self.model.lose_leases()
        checkpoint = next(reversed(self.catalog.live_checkpoints()), None)
        assert (checkpoint.learner_step if checkpoint else 0) == max(
            self.model.checkpoints, default=0
        )
        if back:
            step = self.model.checkpoints[-back:][0] if self.model.checkpoints else 0
            self.catalog.roll_back(step)
            self.model.roll_back(step)

    @rule(
        n_writes=st.integers(0, 8),
        what=st.sampled_from(["commit", "claim", "refill", "settle", "compact"]),
    )
    def crash_within(self, n_writes: int, what: str) -> None:
        """The process ends after some writes of a transaction, at the latest before its COMMIT: as
        if it had never begun.
        """
        if what == "commit":
            self.write([0], 0, 2, True, False)
        with dies_within(self.catalog, n_writes=n_writes):
            if what == "commit":
                self.catalog.commit(self.written[-1][0], epoch=self.catalog.epoch)
            elif what == "claim":
                self.catalog.claim(
                    n_groups=1,
                    current_version=self.model.version,
                    max_staleness=MAX_STALENESS,
                    reused=ReusedGroups(n_replayed=1, max_age_versions=MAX_AGE),
                )
            elif what == "refill" and self.model.claimed:
                batch_id = min(self.model.claimed)
                self.catalog.refill(
                    batch_id,
                    filtered=self.model.claimed[batch_id][:1],
                    n_groups=1,
                    current_version=self.model.version,
                    max_staleness=MAX_STALENESS,
                )
            elif what == "settle" and self.model.claimed:
                batch_id, step = min(self.model.claimed), self.model.step + 1
                self.catalog.settle(
                    batch_id, learner_step=step, filtered={}, version_in=self.model.version
                )
            elif what == "compact":
                compact_once(self.catalog, self.layout, policy=POLICY, skip=())
        self.crash(0, 0, 0)

    @rule(
        works=st.lists(
            st.sampled_from(["compact", "expire all", "expire old", "export", "sweep"]),
            min_size=1,
            max_size=4,
        )
    )
    def maintain(self, works: list[str]) -> None:
        for work in works:
            self.run.clock_us += 1
            if work == "compact":
                compact_once(self.catalog, self.layout, policy=POLICY, skip=())
            elif work.startswith("expire"):
                self.expire(keep_versions=1 if work == "expire all" else 2)
            elif work == "export":
                export(self.catalog, self.layout)
            else:
                sweep_retired(self.catalog, self.layout, window_s=0)
                sweep_orphans(self.catalog, self.layout, opened_us=self.run.opened_us, before=None)
            self.each_trajectory_is_read_once_as_it_was_first_committed()

    def expire(self, *, keep_versions: int) -> None:
        """Retention takes a file if and only if the model says so of every trajectory in it."""
        below = self.model.version - keep_versions + 1
        files = self.live()
        taken = expire_old(self.catalog, self.layout, keep_days=None, keep_versions=keep_versions)
        for meta in files:
            allowed = all(
                self.model.may_expire(trajectory, below_version=below)
                for trajectory in meta.trajectories
            )
            assert allowed == (meta.segment_id in taken), meta.path
            for trajectory in meta.trajectories if allowed else ():
                self.model.groups[trajectory.group_uid].expired.add(trajectory.member)

    # Invariants: they hold after every rule.

    def live(self) -> tuple[SegmentMeta, ...]:
        return self.catalog.segment_metas(
            [segment.segment_id for segment in self.catalog.live_segments()]
        )

    @invariant()
    def each_trajectory_is_read_once_as_it_was_first_committed(self) -> None:
        committed = self.model.readable()
        seen: list[bytes] = []
        for meta in self.live():
            seen.extend(trajectory.traj_uid for trajectory in meta.trajectories)
            assert (self.layout.root / meta.path).is_file(), meta.path
            if self.verified.get(meta.segment_id) != meta:
                rows = from_table(read_segment(self.layout, meta))
                assert {t.traj_uid: t for t in rows} == {
                    t.traj_uid: committed[t.traj_uid] for t in meta.trajectories
                }
                self.verified[meta.segment_id] = meta
        assert sorted(seen) == sorted(committed)

    @invariant()
    def states_counts_and_claims_agree(self) -> None:
        counts = self.catalog.counts()
        assert counts == self.model.counts(self.run.clock_us)
        assert self.catalog.outstanding() == in_play(counts) - len(self.model.set_aside)
        with self.catalog._database.transaction() as tx:
            assert {
                group_uid: tuple(rest) for group_uid, *rest in tx.rows(STATES)
            } == self.model.states()
            assert tx.rows(TOO_OLD, bound=MAX_STALENESS) == []

    def sql_says_the_same(self) -> None:
        """At the end of each example, as a shell with open.sql sees it."""
        export(self.catalog, self.layout)
        look_at(self.shell, self.layout, also_views=False)
        for name, query in SEEN_BY_SQL.items():
            assert dict(self.shell.execute(query).fetchall()) == self.model.seen_by_sql()[name]
        assert check(self.layout, level=CATALOG) == []


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None
)
