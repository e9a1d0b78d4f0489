"""Open the catalog: one owner, one transaction at a time, each either whole or absent."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.atomic_write import make_directory
from store.catalog.connection import (
    SYNCED,
    UNSYNCED,
    connect_owner,
    raise_if_interrupted,
    write_error,
)
from store.catalog.log_check import (
    forget_unread_commits,
    note_unread_commits,
    record_unread_commits,
    unread_commits_of,
)
from store.catalog.ownership import check_not_lost, check_owner, take_lock
from store.catalog.schema_check import let_ctrl_c_end_queries
from store.catalog.transaction import Transaction
from store.clock import now_us
from store.errors import FencedError, FormatError, StoreError
from store.layout import RunLayout
from store.run_names import MANIFEST, SHOWN
from store.shown_lsn import drop_outdated_manifest, shown_lsn


class Database:
    """The SQLite file that this process owns. Opening it fences the previous owner."""

    def __init__(self, layout: RunLayout, *, directory_is_checked: bool) -> None:
        self._path = layout.catalog
        self._run_id = layout.info.run_id
        self._mutex = threading.RLock()
        self._open: Transaction | None = None  # the transaction that is under way
        # Set when the disk has failed: commits behind a gap in the log would be lost with it.
        self._lost: StoreError | None = None
        self._lock_fd = take_lock(layout, directory_is_checked=directory_is_checked)
        try:
            check_owner(layout)
            check_not_lost(layout)
            make_directory(layout.readers, beneath=layout.root)
            n_unread = unread_commits_of(layout)
            if n_unread:
                note_unread_commits(layout, n_unread)
            # Looked up at each call: tests exchange the clock of an open catalog.
            self._connection = connect_owner(layout, now_us=lambda: now_us())
            self.epoch: int
            self._take_over(shown_lsn=shown_lsn(layout), n_unread=n_unread)
            drop_outdated_manifest(layout)
            if n_unread:
                forget_unread_commits(layout)
        except BaseException as error:
            os.close(self._lock_fd)
            raise_if_interrupted(error)
            if isinstance(error, sqlite3.OperationalError):
                raise write_error(self._path, error) from error
            if isinstance(error, sqlite3.DatabaseError):
                raise FormatError(
                    f"{self._path} has cells that contradict its schema: {error}; restore it from "
                    f"a backup, or gigpo rebuild {layout.root}"
                ) from error
            raise

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Give a transaction that is committed as a whole, or rolled back if the body raises.

        The lsn moves only if the body touched an exported table. Within another transaction of the
        same thread this is part of that one, whose body must not catch its errors.
        """
        with self._mutex:
            if self._open is not None:
                yield self._open
                return
            if self._lost is not None:
                raise self._lost
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    with self._body() as tx:
                        yield tx
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise_if_interrupted(error)
                remedy = "Check free space and permissions, then retry"
                if isinstance(error, sqlite3.IntegrityError):
                    remedy = f"It contradicts what the catalog has: gigpo fsck {self._path.parent}"
                raise StoreError(
                    f"catalog {self._path}: {error}; nothing of this transaction was written. "
                    f"{remedy}"
                ) from error

    @contextmanager
    def unsynced_transaction(self) -> Iterator[Transaction]:
        """Give a transaction that a power cut may undo until the next. A kill undoes none."""
        with self._mutex:
            assert self._open is None, "SQLite takes no such setting inside a transaction"
            self._connection.execute(UNSYNCED)
            try:
                with self.transaction() as transaction:
                    yield transaction
            finally:
                self._connection.execute(SYNCED)

    def sync(self) -> None:
        """Make sure that no power cut undoes a committed transaction.

        Syncing the log is enough: SQLite syncs by itself when it copies the log into the file.
        """
        with self._mutex:
            if self._lost is not None:
                raise self._lost
            try:
                with Path(f"{self._path}-wal").open("rb") as log:
                    os.fsync(log.fileno())
            except OSError as error:
                self._lost = StoreError(
                    f"catalog {self._path} cannot be synced: {error.strerror}; what was not "
                    "acknowledged may be played again. Check the disk, then give the same command"
                )
                raise self._lost from error

    @property
    def is_closed(self) -> bool:
        """Return whether the catalog was given back."""
        return self._lock_fd < 0

    def copy(self) -> sqlite3.Connection:
        """Return a copy in memory, of one moment. Raises FencedError for an old owner."""
        with self.transaction():  # which refuses an old owner
            pass
        copy = sqlite3.connect(":memory:", isolation_level=None)
        let_ctrl_c_end_queries(copy)
        with self._mutex:
            self._connection.backup(copy)
        return copy

    def close(self) -> None:
        """Give up the ownership. May be called twice."""
        with self._mutex:
            if self._lock_fd < 0:
                return
            self._connection.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    @contextmanager
    def _body(self) -> Iterator[Transaction]:
        meta = self._connection.execute("SELECT epoch, lsn FROM meta").fetchone()
        if meta["epoch"] != self.epoch:
            raise FencedError(
                f"this owner has epoch {self.epoch}, the catalog is at {meta['epoch']}; stop this "
                "process"
            )
        lsn = meta["lsn"] + 1
        tx = Transaction(
            self._connection, run_id=self._run_id, epoch=self.epoch, lsn=lsn, now_us=now_us()
        )
        self._open = tx
        try:
            yield tx
        finally:
            self._open = None
        if tx.touched:
            tx.run("UPDATE meta SET lsn = :lsn", lsn=lsn)
            for name in sorted(tx.touched):
                tx.run("INSERT OR REPLACE INTO changed VALUES (:name, :lsn)", name=name, lsn=lsn)

    def _take_over(self, *, shown_lsn: int, n_unread: int) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(
            "INSERT OR IGNORE INTO meta (id, run_id, epoch, lsn) VALUES (1, ?, 0, 0)",
            (self._run_id,),
        )
        meta = self._connection.execute("SELECT run_id, epoch, lsn FROM meta").fetchone()
        if meta["run_id"] != self._run_id:
            raise FormatError(
                f"{self._path} belongs to run {meta['run_id']}, run.json says {self._run_id}; put "
                "the right catalog back"
            )
        # The files that were committed since would be swept, because no row names them.
        if meta["lsn"] < shown_lsn:
            raise FormatError(
                f"{self._path} is at lsn {meta['lsn']}, but readers were already shown "
                f"{shown_lsn} (by {MANIFEST}, or by {SHOWN}/ in the storage): it is an older copy; "
                f"put the newest back, or: gigpo rebuild --force {self._path.parent}"
            )
        self._connection.execute("UPDATE meta SET epoch = epoch + 1")
        self._connection.execute(
            "UPDATE grp SET lease_worker = NULL, lease_until_us = NULL WHERE lease_worker NOT NULL"
        )
        self.epoch = int(meta["epoch"]) + 1
        if n_unread:  # with the first write, which removes them
            with self._body() as tx:
                record_unread_commits(tx, n_unread)
        self._connection.execute("COMMIT")
