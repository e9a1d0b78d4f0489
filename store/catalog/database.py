"""The catalog's connection: one owner, one transaction at a time, each either whole or absent."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from store.catalog.foreign_schema import check_schema
from store.catalog.migrate import SCHEMA, migrate
from store.clock import now_us
from store.errors import FencedError, FormatError, LockedError, StoreError, UnsafePathError
from store.hashing import whole_text
from store.layout import FORMAT_VERSION, RunLayout
from store.untrusted import json_values
from store.untrusted.file_access import MAX_MANIFEST_BYTES, is_file, open_file, read_bytes, status
from store.untrusted.signatures import made_by_this_user

COUNTS = Path(__file__).with_name("counts.sql")  # what only the owner's connection has
_SYNCED = "PRAGMA synchronous = FULL"
_UNSYNCED = "PRAGMA synchronous = NORMAL"  # of leases and heartbeats: a power cut may undo them
# 16 MiB: pages that change with every commit go into the file four times more seldom than by
# default
_LOG_PAGES = 4000
_LOCK_MODE = 0o644
# begins a journal, and ends the name of a super-journal
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
# only a backup or a stray shell can hold SQLite's own lock: ours is held by the owner
_OTHER_OWNER_WAIT_S = 5.0


class Transaction:
    """What one transaction works with: rows in, rows out, and the lsn it will have if it changes
    anything visible.
    """

    def __init__(
        self, connection: sqlite3.Connection, *, run_id: str, epoch: int, lsn: int
    ) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.lsn = lsn  # that of this transaction; spent only if something is touched
        self.now_us = now_us()
        self.touched: set[str] = set()
        self._connection = connection

    def touch(self, *tables: str) -> None:
        """Note that readers will see these exported tables change."""
        self.touched.update(tables)

    def run(self, sql: str, **parameters: Any) -> int:
        """Execute one statement; the number of rows it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def run_many(self, sql: str, parameters: Iterable[Mapping[str, Any]]) -> None:
        """One statement for every row: the interpreter is let go of once, not once a row."""
        self._connection.executemany(sql, parameters)

    def insert(self, sql: str, **parameters: Any) -> int:
        """Execute one INSERT; the rowid it made."""
        rowid = self._connection.execute(sql, parameters).lastrowid
        assert rowid is not None
        return rowid

    def rows(self, sql: str, **parameters: Any) -> list[sqlite3.Row]:
        """All rows of a query."""
        return self._connection.execute(sql, parameters).fetchall()

    def row(self, sql: str, **parameters: Any) -> sqlite3.Row | None:
        """The first row of a query, if any."""
        row: sqlite3.Row | None = self._connection.execute(sql, parameters).fetchone()
        return row

    def log(self, *, component: str, what: str, detail: str) -> None:
        """Append to the audit."""
        self.run(
            "INSERT INTO event (lsn, at_us, component, what, detail) VALUES (:lsn, :at_us, "
            ":component, :what, :detail)",
            lsn=self.lsn,
            at_us=self.now_us,
            component=component,
            what=whole_text(what),
            detail=whole_text(detail),  # an error may quote what a program or a server wrote
        )
        self.touch("events")


class Database:
    """The owned SQLite file. Only one process has it at a time; opening it fences whoever had it
    before.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._path = layout.catalog
        self._run_id = layout.info.run_id
        self._mutex = threading.RLock()
        self._open: Transaction | None = None  # the one that is under way
        self._syncs_later = self._owes_sync = False
        # the disk has failed: what is behind a gap in the log would be lost with it
        self._lost: StoreError | None = None
        self._lock_fd = take_lock(layout)
        try:
            check_owner(layout)
            _check_not_lost(layout)
            self._connection = _connect(layout)
            self.epoch = self._take_over(shown_lsn=_shown_lsn(layout))
        except sqlite3.OperationalError as error:
            os.close(self._lock_fd)
            raise _no_room(self._path, error) from error
        except BaseException:
            os.close(self._lock_fd)
            raise

    @contextmanager
    def transaction(self, *, may_be_undone: bool = False) -> Iterator[Transaction]:
        """BEGIN IMMEDIATE … COMMIT; rolled back as a whole if the body raises. The lsn moves only
        if it touched.

        Inside another one of the same thread it is a part of that one, whose body must not catch
        its errors.
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
                    yield from self._body()
                    self._connection.execute("COMMIT")
                    self._owes_sync |= self._syncs_later and not may_be_undone
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.IntegrityError as error:
                raise StoreError(
                    f"catalog {self._path}: {error}; nothing of this transaction was written. "
                    f"It contradicts what the catalog has: gigpo fsck {self._path.parent}"
                ) from error
            except sqlite3.Error as error:
                raise StoreError(
                    f"catalog {self._path}: {error}; nothing of this transaction was written. "
                    "Check free space and permissions, then retry"
                ) from error

    @contextmanager
    def unsynced_transaction(self) -> Iterator[Transaction]:
        """One that a power cut may undo, until the next other one, which brings it along; a killed
        process loses none.
        """
        with self._mutex, self._unsynced(), self.transaction(may_be_undone=True) as transaction:
            yield transaction

    @contextmanager
    def synced_together(self) -> Iterator[None]:
        """One wait for the disk for all transactions within, at the end: until then nobody may be
        told of them.

        Those of other threads wait for it, as theirs would not be synced either.
        """
        with self._mutex:
            try:
                with self._unsynced():
                    yield
            finally:
                if self._owes_sync:
                    self.sync()

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        if self._syncs_later:
            yield
            return
        assert self._open is None, "SQLite takes no such setting inside a transaction"
        self._connection.execute(_UNSYNCED)
        self._syncs_later = True
        try:
            yield
        finally:
            self._syncs_later = False
            self._connection.execute(_SYNCED)

    def sync(self) -> None:
        """Nothing until now can be undone by a power cut. The log has it: a checkpoint into the
        file syncs by itself.
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
                    "acknowledged may be played again. "
                    "Check the disk, then give the same command"
                )
                raise self._lost from error
            self._owes_sync = False

    def close(self) -> None:
        """Give the catalog back. Idempotent."""
        with self._mutex:
            if self._lock_fd < 0:
                return
            self._connection.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _body(self) -> Iterator[Transaction]:
        meta = self._connection.execute("SELECT epoch, lsn FROM meta").fetchone()
        if meta["epoch"] != self.epoch:
            raise FencedError(
                f"this owner has epoch {self.epoch}, the catalog is at {meta['epoch']}; stop this "
                "process"
            )
        transaction = Transaction(
            self._connection, run_id=self._run_id, epoch=self.epoch, lsn=meta["lsn"] + 1
        )
        self._open = transaction
        try:
            yield transaction
        finally:
            self._open = None
        if transaction.touched:
            self._connection.execute("UPDATE meta SET lsn = ?", (transaction.lsn,))
            self._connection.executemany(
                "INSERT OR REPLACE INTO changed (name, lsn) VALUES (?, ?)",
                [(name, transaction.lsn) for name in sorted(transaction.touched)],
            )

    def _take_over(self, *, shown_lsn: int) -> int:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(
            "INSERT OR IGNORE INTO meta (id, run_id, format_version, epoch, lsn) VALUES (1, ?, ?, "
            "0, 0)",
            (self._run_id, FORMAT_VERSION),
        )
        meta = self._connection.execute("SELECT run_id, epoch, lsn FROM meta").fetchone()
        if meta["run_id"] != self._run_id:
            raise FormatError(
                f"{self._path} belongs to run {meta['run_id']}, run.json says {self._run_id}; put "
                "the right catalog back"
            )
        # going on would lose what was committed since: its files would pass for orphans
        if meta["lsn"] < shown_lsn:
            raise FormatError(
                f"{self._path} is at lsn {meta['lsn']}, but readers were already shown "
                f"{shown_lsn}: it is an older copy; "
                f"put the newest back, or: gigpo rebuild --force {self._path.parent}"
            )
        self._connection.execute("UPDATE meta SET epoch = epoch + 1")
        self._connection.execute(
            "UPDATE grp SET lease_worker = NULL, lease_until_us = NULL WHERE lease_worker NOT NULL"
        )
        self._connection.execute("COMMIT")
        return int(meta["epoch"]) + 1


def _shown_lsn(layout: RunLayout) -> int:
    """That of the manifest, which is written after the commits it shows; 0 without a readable
    one.
    """
    try:
        content = json_values.parse_object(
            read_bytes(layout.manifest, root=layout.root, at_most=MAX_MANIFEST_BYTES)
        )
        # another run's says nothing of this one
        ours = content.get("run_id", layout.info.run_id) == layout.info.run_id
        return json_values.whole(content, "lsn") if ours else 0
    except (OSError, ValueError):  # export and fsck say what is wrong with it
        return 0


def _connect(layout: RunLayout) -> sqlite3.Connection:
    check_catalog_files(layout)
    try:
        connection = sqlite3.connect(
            layout.catalog,
            isolation_level=None,
            timeout=_OTHER_OWNER_WAIT_S,
            check_same_thread=False,
        )
        # trusted_schema = OFF would refuse now_us to our triggers
        connection.execute("PRAGMA cell_size_check = ON")
        check_schema(connection, path=layout.catalog)
        connection.row_factory = sqlite3.Row
        # the ledger's triggers ask for it
        connection.create_function("now_us", 0, lambda: now_us())
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(_SYNCED)
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        migrate(connection, path=layout.catalog)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.executescript(SCHEMA.read_text())
        connection.executescript(COUNTS.read_text())
    except sqlite3.Error as error:
        if not is_damage(error):
            raise _no_room(layout.catalog, error) from error
        raise FormatError(
            f"{layout.catalog} cannot be opened as a catalog: {error}; restore it from a backup, "
            f"or gigpo rebuild {layout.root}"
        ) from error
    return connection


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the error says that a catalog is damaged, and not that it cannot be reached or
    written now.
    """
    if isinstance(error, sqlite3.OperationalError):
        return "no such" in str(error) or "malformed" in str(error)
    return isinstance(error, sqlite3.DatabaseError)


def _no_room(path: Path, error: sqlite3.Error) -> StoreError:
    return StoreError(
        f"catalog {path}: {error}; it was not changed. Check free space and permissions, then retry"
    )


def _check_not_lost(layout: RunLayout) -> None:
    """A new catalog is for a new run: in another one all segments would be orphans, and be
    swept.
    """
    found = status(layout.catalog, root=layout.root)
    if found is not None and found.st_size > 0:
        return
    if next(iter(layout.storage.files(layout.relative(layout.segments))), None) is not None:
        raise StoreError(
            f"{layout.catalog} is missing or empty, and the run has segments; put it back, "
            f"or gigpo rebuild {layout.root}"
        )


def check_unowned(layout: RunLayout) -> None:
    """Raises LockedError, naming the process, if a live one owns the catalog; takes nothing."""
    if is_file(layout.catalog_lock, root=layout.root):
        os.close(take_lock(layout))


def check_owner(layout: RunLayout) -> None:
    """Refuse to write for a run that leads elsewhere: by a link, or by a storage that this user did
    not choose.

    An owner removes files there that the catalog does not name. Raises StoreError.
    """
    layout.check_no_links()
    if layout.info.storage_uri is not None and not made_by_this_user(layout.root):
        raise StoreError(
            f"{layout.root} keeps its files at {layout.info.storage_uri}, and you did not make "
            "this run: going on would "
            "write and remove files there. If you trust it: gigpo train --resume "
            f"{layout.root} --trust"
        )


def check_consent(layout: RunLayout) -> None:
    """Refuse to read a stranger's run that would have this user ask the network. A path of this
    machine is only read.

    Raises StoreError.
    """
    uri = layout.info.storage_uri or ""
    if (
        "://" in uri
        and urllib.parse.urlsplit(uri).scheme != "file"
        and not made_by_this_user(layout.root)
    ):
        raise StoreError(
            f"{layout.root} keeps its files at {uri}, and you did not make this run: reading it "
            "would ask there with your "
            f"credentials. If you want that: gigpo fetch {uri} DIR, and read DIR"
        )


def check_catalog_files(layout: RunLayout) -> None:
    """Raise UnsafePathError or FormatError if SQLite would open or remove other files than those of
    the run.

    SQLite follows links by itself. After a transaction of several databases it removes the file
    that a journal names.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):
        path = layout.catalog.with_name(f"{layout.catalog.name}{suffix}")
        if status(path, root=layout.run_directory) is not None:
            with open(open_file(path, root=layout.run_directory), "rb") as file:
                if suffix == "-journal" and _names_another_file(file):
                    raise FormatError(
                        f"{path} names another file, which SQLite would remove; no run of ours "
                        "writes such a journal. "
                        f"Remove it, or: gigpo rebuild --force {layout.root}"
                    )


def _names_another_file(journal: BinaryIO) -> bool:
    """Return whether a rollback journal ends with the name of a super-journal: only transactions of
    several files do.
    """
    size = journal.seek(0, os.SEEK_END)
    journal.seek(max(0, size - len(_JOURNAL_MAGIC)))
    return journal.read() == _JOURNAL_MAGIC


def take_lock(layout: RunLayout) -> int:
    """Return the descriptor of the lock of the catalog's owner. Raises LockedError naming the
    process that has it.
    """
    path = layout.catalog_lock
    try:
        descriptor = open_file(
            path, root=layout.root, flags=os.O_RDWR | os.O_CREAT, mode=_LOCK_MODE
        )
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot open {path}: {error.strerror}; the run directory must be writable"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
        os.close(descriptor)
        raise LockedError(
            f"process {owner} owns {path.with_name('catalog.sqlite')}; stop it, or choose another "
            "run directory"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
