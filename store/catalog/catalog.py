"""The catalog: the small transactional database that says which segments, groups, claims and steps exist."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType

from store.catalog import batches, groups, ledger
from store.catalog.database import Database
from store.catalog.records import (
    Batch,
    CheckpointRecord,
    CommitResult,
    Counts,
    Evaluation,
    GroupRecord,
    RollBack,
    SuccessRate,
    VersionRecord,
)
from store.layout import RunLayout
from store.reading.exports import Snapshot, take_snapshot
from store.segments import SegmentMeta


class Catalog:
    """The one owner of a run's catalog. Each call is one transaction: done when it returns, or as if never asked.

        catalog = Catalog.open(layout)                                   # new epoch: old owners and leases are fenced
        catalog.open_group(ordinal=None, task_id=…, split="train", size=8, purpose_version=None)
        lease = catalog.lease_open_group(worker="w0", lease_s=60.0)
        catalog.commit(write_segment(…), epoch=lease.epoch)
        batch = catalog.claim(n_groups=16, current_version=7, max_staleness=4)
        catalog.settle(batch.batch_id, learner_step=8, no_signal=(), version_in=7)

    Calls may come from several threads of the owning process; they take turns.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._database = Database(layout)

    @classmethod
    def open(cls, layout: RunLayout) -> Catalog:
        """Own the catalog; LockedError naming the process that has it already."""
        return cls(layout)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the catalog back. Idempotent."""
        self._database.close()

    @property
    def epoch(self) -> int:
        """What commits must carry; leases hand it out."""
        return self._database.epoch

    # Groups: open → (leased) → complete.

    def open_group(
        self, *, ordinal: int | None, task_id: str, split: str, size: int, purpose_version: int | None
    ) -> GroupRecord:
        """Enter a group to be played: the next ordinal if None, the existing group if the ordinal is taken.

        `purpose_version` names the evaluation round and is set for split "heldout" only; those are never claimed.
        """
        with self._database.transaction() as tx:
            return groups.open_group(
                tx, ordinal=ordinal, task_id=task_id, split=split, size=size, purpose_version=purpose_version
            )

    def open_round(self, task_ids: Sequence[str], *, episodes_per_task: int, version: int) -> None:
        """Enter a whole evaluation round of `version`: every task, one group of one episode each time.

        What is there of the round already stays: asking again with more episodes adds the missing ones.
        """
        with self._database.transaction() as tx:
            for number, task_id in enumerate(task_ids):
                for episode in range(episodes_per_task):
                    groups.open_group(
                        tx,
                        ordinal=episode * len(task_ids) + number,
                        task_id=task_id,
                        split=groups.HELDOUT,
                        size=1,
                        purpose_version=version,
                    )

    def next_ordinal(self, split: str, *, purpose_version: int | None = None) -> int:
        """The ordinal the next group of the split (and evaluation round) gets; how a restart finds its place."""
        with self._database.transaction() as tx:
            return groups.next_ordinal(tx, split=split, purpose_version=purpose_version)

    def lease_open_group(self, *, worker: str, lease_s: float, split: str | None = None) -> GroupRecord | None:
        """The oldest open group without a live lease, held-out ones first; None if there is none.

        After a crash this hands out what was dispatched but not finished before anything new.
        """
        with self._database.transaction() as tx:
            return groups.lease_open_group(tx, worker=worker, lease_s=lease_s, split=split)

    def renew_leases(self, worker: str, lease_s: float) -> int:
        """Extend all leases of a living worker; how many it holds."""
        with self._database.transaction() as tx:
            return groups.renew_leases(tx, worker=worker, lease_s=lease_s)

    def commit(self, segment: SegmentMeta, *, epoch: int) -> CommitResult:
        """Make a written segment count. A retry changes nothing; a stale epoch raises FencedError."""
        with self._database.transaction() as tx:
            return groups.commit(tx, segment=segment, epoch=epoch)

    # Batches: complete → claimed → trained or no_signal; stale on the way.

    def claim(self, *, n_groups: int, current_version: int, max_staleness: int) -> Batch | None:
        """The oldest `n_groups` complete training groups, or None (nothing claimed) if fewer are there.

        Groups whose oldest version is more than `max_staleness` behind `current_version` become stale first. Pass the
        version the learner will have when it trains on the batch: that is what staleness is measured against.
        """
        with self._database.transaction() as tx:
            return batches.claim(tx, n_groups=n_groups, current_version=current_version, max_staleness=max_staleness)

    def settle(self, batch_id: int, *, learner_step: int, no_signal: Collection[bytes], version_in: int) -> None:
        """The batch was trained on as `learner_step` by a learner at `version_in`; `no_signal` groups had no gradient."""
        with self._database.transaction() as tx:
            batches.settle(tx, batch_id=batch_id, learner_step=learner_step, no_signal=no_signal, version_in=version_in)

    def roll_back(self, learner_step: int) -> RollBack:
        """Make all that was claimed or trained after `learner_step` (that of the checkpoint) available again."""
        with self._database.transaction() as tx:
            return batches.roll_back(tx, learner_step=learner_step)

    # Ledgers.

    def record_version(self, *, version: int, path: str, digest: str, learner_step: int | None) -> None:
        """A published set of weights; StoreError if the number is not new."""
        with self._database.transaction() as tx:
            ledger.record_version(tx, version=version, path=path, digest=digest, learner_step=learner_step)

    def latest_version(self) -> VersionRecord | None:
        """The newest published weights."""
        with self._database.transaction() as tx:
            return ledger.latest_version(tx)

    def record_checkpoint(self, *, learner_step: int, path: str, version: int) -> None:
        """A checkpoint that is complete on disk."""
        with self._database.transaction() as tx:
            ledger.record_checkpoint(tx, learner_step=learner_step, path=path, version=version)

    def latest_checkpoint(self) -> CheckpointRecord | None:
        """Where a restart begins."""
        with self._database.transaction() as tx:
            return ledger.latest_checkpoint(tx)

    def record_metrics(self, *, learner_step: int, policy_version: int, values: Mapping[str, float]) -> None:
        """Figures of a learner step, by name, for the metrics view."""
        with self._database.transaction() as tx:
            ledger.record_metrics(tx, learner_step=learner_step, policy_version=policy_version, values=values)

    def heartbeat(self, component: str, waiting_on: str | None) -> None:
        """`component` is alive, and what it waits for (None: it is working)."""
        with self._database.transaction() as tx:
            ledger.heartbeat(tx, component=component, waiting_on=waiting_on)

    # Questions.

    def counts(self) -> Counts:
        """Training groups by state; `counts().outstanding` is what admission bounds."""
        with self._database.transaction() as tx:
            return groups.counts(tx)

    def heldout_success(self, *, purpose_version: int) -> SuccessRate:
        """Success of one evaluation round, and whether all its groups are complete."""
        with self._database.transaction() as tx:
            return groups.heldout_success(tx, purpose_version=purpose_version)

    def open_heldout(self) -> int:
        """Held-out groups still to be played."""
        with self._database.transaction() as tx:
            return groups.open_heldout(tx)

    def finished_evaluations(self) -> list[Evaluation]:
        """Complete evaluation rounds whose success is not among the metrics yet."""
        with self._database.transaction() as tx:
            return groups.finished_evaluations(tx)

    def latest_metrics(self) -> dict[str, float]:
        """The newest figure of every name."""
        with self._database.transaction() as tx:
            return ledger.latest_metrics(tx)

    def waiting(self) -> dict[str, str]:
        """Component -> what it waits for; those that work are left out."""
        with self._database.transaction() as tx:
            return ledger.waiting(tx)

    def learner_step(self) -> int:
        """The last settled learner step."""
        with self._database.transaction() as tx:
            return ledger.learner_step(tx)

    def snapshot(self, known: Mapping[str, int]) -> Snapshot:
        """What outside readers may see, as of one moment; tables that did not change since `known` are left out."""
        with self._database.transaction() as tx:
            return take_snapshot(tx, known=known)
