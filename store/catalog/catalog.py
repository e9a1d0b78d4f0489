"""The catalog: the small transactional database that says which segments, groups, claims and steps
exist.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from types import TracebackType

from store.catalog import batches, groups, imports
from store.catalog import counts as figures
from store.catalog import run_records as ledger
from store.catalog import segment_states as files
from store.catalog.database import Database
from store.catalog.imports import ImportedGroup
from store.catalog.records import (
    Batch,
    CheckpointRecord,
    CommitResult,
    Counts,
    Evaluation,
    GroupRecord,
    LiveSegment,
    RollBack,
    Unfinished,
    VersionRecord,
)
from store.catalog.repairs import Repairs
from store.catalog.snapshot import Part, Snapshot, take_snapshot
from store.catalog.stored_groups import StoredGroups
from store.errors import FencedError, StoreError
from store.layout import RunLayout
from store.maintenance.backup import write_backup
from store.segments import SegmentMeta


class Catalog:
    """The one owner of a run's catalog. Each call is one transaction: done when it returns, or as
    if never asked. (But see `synced_together`.)

        catalog = Catalog.open(layout)                                   # new epoch: old owners and leases are fenced
        catalog.open_group(ordinal=None, task_id=…, split="train", size=8, purpose_version=None)
        lease = catalog.lease_open_group(worker="w0", lease_s=60.0)
        catalog.commit(write_segment(…), epoch=lease.epoch)
        batch = catalog.claim(n_groups=16, current_version=7, max_staleness=4)
        catalog.settle(batch.batch_id, learner_step=8, no_signal={}, version_in=7)

    Calls may come from several threads of the owning process; they take turns.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._database = Database(layout)
        self.stored = StoredGroups(self._database)
        self.repairs = Repairs(self._database)

    @classmethod
    def open(cls, layout: RunLayout) -> Catalog:
        """Own the catalog; LockedError naming the process that has it already."""
        return cls(layout)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Make a backup and give the catalog back. Idempotent."""
        if not self._database.is_closed:
            with suppress(StoreError):  # a full disk must not make a failure of what was done
                self.back_up()
        self._database.close()

    def back_up(self) -> None:
        """Replace the run's backup by a copy of this catalog. An event says why, if it cannot."""
        try:
            with closing(self._database.copy()) as copy:
                write_backup(copy, self._layout)
        except FencedError:
            raise
        except (StoreError, sqlite3.Error, MemoryError) as error:
            self.log(component="backup", what="not made", detail=f"{type(error).__name__}: {error}")

    def at_once(self) -> AbstractContextManager[object]:
        """The calls within are one transaction, which a power cut may undo: for leases, the groups
        they open and heartbeats.
        """
        return self._database.unsynced_transaction()

    def synced_together(self) -> AbstractContextManager[None]:
        """The calls within are transactions of their own, which are synced at the end: until then a
        power cut may undo them.
        """
        return self._database.synced_together()

    @property
    def epoch(self) -> int:
        """What commits must carry; leases hand it out."""
        return self._database.epoch

    # Groups: open → (leased) → complete.

    def open_group(
        self,
        *,
        ordinal: int | None,
        task_id: str,
        split: str,
        size: int,
        purpose_version: int | None,
    ) -> GroupRecord:
        """Enter a group to be played: the next ordinal if None, the existing group if the ordinal
        is taken.

        `purpose_version` names the evaluation round and is set for split "heldout" only; those are
        never claimed.
        """
        with self._database.transaction() as tx:
            return groups.open_group(
                tx,
                ordinal=ordinal,
                task_id=task_id,
                split=split,
                size=size,
                purpose_version=purpose_version,
            )

    def open_round(self, task_ids: Sequence[str], *, episodes_per_task: int, version: int) -> None:
        """Enter a whole evaluation round of `version`: every task, one group of one episode each
        time.

        What is there of the round already stays: asking again with more episodes adds the missing
        ones.
        """
        with self._database.transaction() as tx:
            groups.open_round(tx, task_ids, episodes_per_task=episodes_per_task, version=version)

    def next_ordinal(self, split: str, *, purpose_version: int | None = None) -> int:
        """The ordinal the next group of the split (and evaluation round) gets."""
        with self._database.transaction() as tx:
            return groups.next_ordinal(tx, split=split, purpose_version=purpose_version)

    def lease_open_group(
        self,
        *,
        worker: str,
        lease_s: float,
        split: str | None = None,
        without: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> GroupRecord | None:
        """The oldest open group without a live lease, held-out ones first; None if there is none.
        After a crash this hands out what was dispatched but not finished before anything new. Not
        of the tasks `without`, and `only` of those, if given.
        """
        with self._database.transaction() as tx:
            return groups.lease_open_group(
                tx, worker=worker, lease_s=lease_s, split=split, without=without, only=only
            )

    def has_free_group(self, task_ids: Collection[str], *, split: str | None) -> bool:
        """Return whether an open group of one of the tasks is played by nobody."""
        if not task_ids:
            return False
        with self._database.transaction() as tx:
            return groups.has_free_group(tx, task_ids=task_ids, split=split)

    def times_lost(self) -> dict[str, int]:
        """Return how often a worker was lost while it played a task, by task id; tasks that were
        played since are left out.
        """
        with self._database.transaction() as tx:
            return groups.times_lost(tx)

    def renew_leases(self, workers: Collection[str], lease_s: float) -> int:
        """Extend all leases of living workers; how many they hold."""
        with self._database.transaction() as tx:
            return groups.renew_leases(tx, workers=workers, lease_s=lease_s)

    def release_leases(self, worker: str) -> int:
        """The worker is gone: others may play its groups at once. How many."""
        with self._database.transaction() as tx:
            return groups.release_leases(tx, worker=worker)

    def give_up(self, group_uid: bytes, *, worker: str, state: str, reason: str) -> None:
        """The worker stops playing a group: 'open' for others to take it, or for ever 'stale' or
        'abandoned'.
        """
        with self._database.transaction() as tx:
            groups.give_up(tx, group_uid=group_uid, worker=worker, state=state, reason=reason)

    def commit(self, segment: SegmentMeta, *, epoch: int) -> CommitResult:
        """Make a written segment count. A retry changes nothing; a stale epoch raises
        FencedError.
        """
        with self._database.transaction() as tx:
            return groups.commit(tx, segment=segment, epoch=epoch)

    def known_trajectories(self, traj_uids: Collection[bytes]) -> frozenset[bytes]:
        """Those of them that the run has or had."""
        with self._database.transaction() as tx:
            return imports.known_trajectories(tx, traj_uids)

    def import_groups(
        self, *, segment: SegmentMeta, groups: Sequence[ImportedGroup], source: str, own: bool
    ) -> None:
        """Make a segment of another run's trajectories, or of lost ones of this run, count. See
        catalog/imports.py.
        """
        with self._database.transaction() as tx:
            imports.import_groups(tx, segment=segment, groups=groups, source=source, own=own)

    def import_surplus(self, segment: SegmentMeta, *, task_id: str, of_group: bytes) -> None:
        """Make episodes count that ended when their group was whole, each as a group that is only
        read.
        """
        with self._database.transaction() as tx:
            imports.import_surplus(tx, segment=segment, task_id=task_id, of_group=of_group)

    # Batches: complete → claimed → trained or no_signal; stale on the way.

    def claim(self, *, n_groups: int, current_version: int, max_staleness: int) -> Batch | None:
        """The oldest `n_groups` complete training groups, or None (nothing claimed) if fewer are
        there.

        Groups whose oldest version is more than `max_staleness` behind `current_version`, that of
        the learner when it will train on the batch, become stale first.
        """
        with self._database.transaction() as tx:
            versions = {"current_version": current_version, "max_staleness": max_staleness}
            return batches.claim(tx, n_groups=n_groups, n_stored=0, uses=0, **versions)

    def settle(
        self, batch_id: int, *, learner_step: int, no_signal: Mapping[bytes, str], version_in: int
    ) -> None:
        """The batch was trained on as `learner_step` at `version_in`; groups in `no_signal` were
        left out, with the reason.
        """
        with self._database.transaction() as tx:
            batches.settle(
                tx,
                batch_id=batch_id,
                learner_step=learner_step,
                no_signal=no_signal,
                version_in=version_in,
            )

    def roll_back(self, learner_step: int) -> RollBack:
        """Make all that was claimed or trained after `learner_step` (that of the checkpoint)
        available again.
        """
        with self._database.transaction() as tx:
            return batches.roll_back(tx, learner_step=learner_step)

    # Ledgers.

    def record_version(
        self, *, version: int, path: str, digest: str, learner_step: int | None
    ) -> None:
        """A published set of weights; StoreError if the number is not new."""
        with self._database.transaction() as tx:
            ledger.record_version(
                tx, version=version, path=path, digest=digest, learner_step=learner_step
            )

    def latest_version(self) -> VersionRecord | None:
        """The newest published weights."""
        with self._database.transaction() as tx:
            return ledger.latest_version(tx)

    def record_checkpoint(self, *, learner_step: int, path: str, version: int) -> None:
        """Record a checkpoint that is complete on disk, and make a backup of this catalog."""
        with self._database.transaction() as tx:
            ledger.record_checkpoint(tx, learner_step=learner_step, path=path, version=version)
        self.back_up()

    def live_checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """Every checkpoint that no roll-back went behind; its directory may have been removed
        since.
        """
        with self._database.transaction() as tx:
            return ledger.live_checkpoints(tx)

    def record_metrics(
        self, *, learner_step: int, policy_version: int, values: Mapping[str, float]
    ) -> None:
        """Figures of a learner step, by name, for the metrics view."""
        with self._database.transaction() as tx:
            ledger.record_metrics(
                tx, learner_step=learner_step, policy_version=policy_version, values=values
            )

    def record_unfinished(self, episodes: Sequence[Unfinished], *, worker: str) -> None:
        """Enter episodes that `worker` began and that gave no trajectory."""
        with self._database.transaction() as tx:
            ledger.record_unfinished(tx, worker=worker, episodes=episodes)

    def heartbeats(self, waiting_on: Mapping[str, str | None]) -> None:
        """These components are alive, and what each waits for (None: it is working)."""
        with self._database.transaction() as tx:
            ledger.heartbeats(tx, waiting_on=waiting_on)

    # Questions.

    def counts(self) -> Counts:
        """Training groups by state."""
        with self._database.transaction() as tx:
            return figures.counts(tx)

    def outstanding(self) -> int:
        """Groups handed out and not yet trained on: what admission bounds."""
        with self._database.transaction() as tx:
            return figures.outstanding(tx)

    def open_heldout(self) -> int:
        """Held-out groups still to be played."""
        with self._database.transaction() as tx:
            return figures.open_heldout(tx)

    def finished_evaluations(self) -> list[Evaluation]:
        """Complete evaluation rounds whose success is not among the metrics yet."""
        with self._database.transaction() as tx:
            return figures.finished_evaluations(tx)

    def latest_metrics(self) -> dict[str, float]:
        """The newest figure of every name."""
        with self._database.transaction() as tx:
            return ledger.latest_metrics(tx)

    def learner_step(self) -> int:
        """The last settled learner step."""
        with self._database.transaction() as tx:
            return ledger.learner_step(tx)

    def snapshot(self, known: Mapping[str, tuple[Part, ...]]) -> Snapshot:
        """What outside readers may see, as of one moment; of the tables only what `known` parts do
        not have.

        No power cut undoes it: a catalog that is behind what was shown is refused.
        """
        with self._database.transaction() as tx:
            snapshot = take_snapshot(tx, known=known)
        self._database.sync()
        return snapshot

    # Files: live → retired → removed.

    def live_segments(self) -> tuple[LiveSegment, ...]:
        """The files that readers see, oldest first."""
        with self._database.transaction() as tx:
            return files.live_segments(tx)

    def segment_metas(self, segment_ids: Sequence[str]) -> tuple[SegmentMeta, ...]:
        """What `read_segment` needs to read all rows of these files that count."""
        with self._database.transaction() as tx:
            return files.segment_metas(tx, segment_ids)

    def replace_segments(self, *, old: Collection[str], new: SegmentMeta, level: int) -> None:
        """Compaction: the rows of `old` are read from `new` from now on."""
        with self._database.transaction() as tx:
            files.replace_segments(tx, old=old, new=new, level=level)

    def expirable(
        self, *, completed_before_us: int | None, below_version: int | None, oldest_checkpoint: int
    ) -> tuple[str, ...]:
        """Files that retention may take: nothing in them is younger, unconsumed, or trained on
        after that learner step.
        """
        limits = {"completed_before_us": completed_before_us, "below_version": below_version}
        with self._database.transaction() as tx:
            return files.expirable(tx, **limits, oldest_checkpoint=oldest_checkpoint)

    def expire(self, segment_ids: Collection[str]) -> None:
        """Retention: readers no longer see these files. The catalog keeps what it knows of their
        groups.
        """
        with self._database.transaction() as tx:
            files.retire(tx, segment_ids, why="expired")

    def removable(self, *, retired_before_us: int, pinned_lsn: int | None) -> dict[str, str]:
        """Segment id → path of retired files that no snapshot in the window and no reader needs."""
        with self._database.transaction() as tx:
            return files.removable(tx, retired_before_us=retired_before_us, pinned_lsn=pinned_lsn)

    def mark_removed(self, segment_ids: Collection[str]) -> None:
        """To be called before the files are removed: a crash in between leaves orphans, never
        promises.
        """
        with self._database.transaction() as tx:
            files.mark_removed(tx, segment_ids)

    def known_paths(self) -> frozenset[str]:
        """Files that must stay; others beneath segments/ are orphans."""
        with self._database.transaction() as tx:
            return files.known_paths(tx)

    def log(self, *, component: str, what: str, detail: str) -> None:
        """One more line in the events view."""
        with self._database.transaction() as tx:
            tx.log(component=component, what=what, detail=detail)
