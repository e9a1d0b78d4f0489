"""Own a run's catalog: its transactions, as the methods of one class."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, suppress

from store.catalog import (
    batches,
    groups,
    imported_groups,
    repairs,
    run_records,
    segment_states,
    task_results,
)
from store.catalog.connection import raise_if_interrupted
from store.catalog.database import Database
from store.catalog.records import CheckpointRecord
from store.catalog.snapshot import ExportedPart, Snapshot, take_snapshot
from store.catalog.transaction import Transaction, one_transaction
from store.errors import FencedError, StoreError
from store.layout import RunLayout
from store.maintenance.backup import write_backup


class Catalog:
    """Own a run's catalog. A call is done when it returns, or it has changed nothing.

        catalog = Catalog.open(layout)        # a new epoch: older owners and leases are fenced
        catalog.open_group(ordinal=0, task_id=…, split="train", size=8, evaluated_version=None)
        group = catalog.lease_open_group(worker="w0", lease_s=60.0)
        catalog.commit(write_segment(…), epoch=group.epoch)
        batch = catalog.claim(n_groups=16, current_version=7, max_staleness=4)
        catalog.settle(batch.batch_id, learner_step=8, filtered={}, version_in=7)

    Each method below is one transaction: the function that it names, without its first argument.
    Only `unsynced` lets a power cut undo a call that has returned. Threads of the owning process
    may share a catalog: their calls wait for one another.
    """

    def __init__(self, layout: RunLayout, *, directory_is_checked: bool = False) -> None:
        self._layout = layout
        self._database = Database(layout, directory_is_checked=directory_is_checked)
        self._backing_up = threading.Lock()  # an older copy must not replace a newer one
        self.backed_up_lsn = 0  # of the newest backup that this owner made

    @classmethod
    def open(cls, layout: RunLayout, *, directory_is_checked: bool = False) -> Catalog:
        """Become the owner. Raises LockedError naming the process that owns the catalog.

        Raises StoreError for another user's directory, unless this user trusts the run or another
        process of this user has looked at it (`directory_is_checked`).
        """
        return cls(layout, directory_is_checked=directory_is_checked)

    def close(self) -> None:
        """Make a backup and give up the ownership. May be called twice."""
        if not self._database.is_closed:
            try:
                with suppress(StoreError):  # a full disk must not make a failure of what was done
                    self.back_up()
            finally:
                self._database.close()

    def back_up(self) -> bool:
        """Replace the run's backup by a copy of this catalog. Return False if it cannot be done.

        An event says why. Raises FencedError if another owner has the run.
        """
        try:
            with self._backing_up, closing(self._database.copy()) as copy:
                self._layout.check_primary()
                write_backup(copy, self._layout)
                (self.backed_up_lsn,) = copy.execute("SELECT lsn FROM meta").fetchone()
        except FencedError:
            raise
        except (StoreError, sqlite3.Error, MemoryError) as error:
            raise_if_interrupted(error)
            self.log(component="backup", what="not made", detail=f"{type(error).__name__}: {error}")
            return False
        return True

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """Return the owner's number, which commits must carry. Leases hand it out."""
        return self._database.epoch

    def unsynced(self) -> AbstractContextManager[object]:
        """Make the calls within one transaction that a power cut may undo.

        Leases, the groups that they open, heartbeats and events need no more.
        """
        return self._database.unsynced_transaction()

    # Groups: open -> (leased) -> complete.
    open_group = one_transaction(groups.open_group)
    open_round = one_transaction(groups.open_round)
    next_ordinal = one_transaction(groups.next_ordinal)
    lease_open_group = one_transaction(groups.lease_open_group)
    has_free_group = one_transaction(groups.has_free_group)
    times_lost = one_transaction(groups.times_lost)
    renew_leases = one_transaction(groups.renew_leases)
    release_leases = one_transaction(groups.release_leases)
    give_up = one_transaction(groups.give_up)
    commit = one_transaction(groups.commit)

    # Results of tasks, for the order in which they are handed out.
    known_results = one_transaction(task_results.known_results)
    whole_groups = one_transaction(task_results.whole_groups)
    handed_out = one_transaction(task_results.handed_out)
    first_weighed = one_transaction(task_results.first_weighed)
    batch_success = one_transaction(task_results.batch_success)
    round_success = one_transaction(task_results.round_success)
    record_weight = one_transaction(task_results.record_weight)

    # Groups that another run played.
    known_trajectories = one_transaction(imported_groups.known_trajectories)
    splits_of = one_transaction(imported_groups.splits_of)
    check_members = one_transaction(imported_groups.check_members)
    import_segments = one_transaction(imported_groups.import_segments)
    import_extra = one_transaction(imported_groups.import_extra)
    has_offline_groups = one_transaction(imported_groups.has_offline_groups)
    take_offline_groups = one_transaction(imported_groups.take_offline_groups)
    offline_batches_left = one_transaction(imported_groups.offline_batches_left)

    # Batches: complete -> claimed -> trained or filtered. Groups become stale on the way.
    claim = one_transaction(batches.claim)
    refill = one_transaction(batches.refill)
    settle = one_transaction(batches.settle)
    roll_back = one_transaction(batches.roll_back)

    # Records of the run.
    record_version = one_transaction(run_records.record_version)
    latest_version = one_transaction(run_records.latest_version)
    live_checkpoints = one_transaction(run_records.live_checkpoints)
    record_metrics = one_transaction(run_records.record_metrics)
    latest_metrics = one_transaction(run_records.latest_metrics)
    record_unfinished = one_transaction(run_records.record_unfinished)
    heartbeats = one_transaction(run_records.heartbeats)
    learner_step = one_transaction(run_records.learner_step)
    log = one_transaction(Transaction.log)

    # Counts.
    counts = one_transaction(groups.counts)
    found_at_start = one_transaction(groups.found_at_start)
    outstanding = one_transaction(groups.outstanding)
    open_heldout = one_transaction(groups.open_heldout)
    finished_evaluations = one_transaction(groups.finished_evaluations)

    # Segments: live -> retired -> removed.
    live_segments = one_transaction(segment_states.live_segments)
    segment_metas = one_transaction(segment_states.segment_metas)
    replace_segments = one_transaction(segment_states.replace_segments)
    expirable = one_transaction(segment_states.expirable)
    expire = one_transaction(segment_states.expire)
    removable = one_transaction(segment_states.removable)
    mark_removed = one_transaction(segment_states.mark_removed)
    known_paths = one_transaction(segment_states.known_paths)
    may_lack_commits = one_transaction(segment_states.may_lack_commits)
    is_list_damaged = one_transaction(segment_states.is_list_damaged)

    # Repairs.
    replaced_files = one_transaction(repairs.replaced_files)
    set_aside = one_transaction(repairs.set_aside)
    take_back = one_transaction(repairs.take_back)
    exclude = one_transaction(repairs.exclude)
    correct_segment = one_transaction(repairs.correct_segment)
    correct_group = one_transaction(repairs.correct_group)

    def record_checkpoint(self, record: CheckpointRecord, *, lsn: int | None = None) -> bool:
        """Record a checkpoint that is complete on disk, and make a backup of this catalog.

        `lsn` is that of the catalog when it was copied, to which a fork goes back; None: now.
        Return whether the backup was made.
        """
        with self._database.transaction() as tx:
            run_records.record_checkpoint(tx, record, lsn=lsn)
        return self.back_up()

    def snapshot(self, known: Mapping[str, tuple[ExportedPart, ...]]) -> Snapshot:
        """Return the tables that outside readers may see, as of one moment, without `known` parts.

        No power cut undoes it afterwards: a catalog older than what was shown is refused.
        """
        with self._database.transaction() as tx:
            snapshot = take_snapshot(tx, known=known)
        self._database.sync()
        return snapshot
