"""Open the catalog: one owner, one transaction at a time, each either whole or absent."""

from __future__ import annotations

import fcntl
import functools
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from printable import REASON_CHARACTERS, one_line, shell_word
from store.catalog.schema_check import SCHEMA, check_schema, let_ctrl_c_end_queries
from store.clock import now_us
from store.errors import FencedError, FormatError, LockedError, StoreError, UnsafePathError
from store.hashing import valid_text
from store.layout import RunLayout
from store.storage import check_own_storage, split_uri
from store.untrusted import json_values
from store.untrusted.file_access import MAX_MANIFEST_BYTES, is_file, open_file, read_bytes, status
from store.untrusted.signatures import made_by_this_user
from store.untrusted.trust import check_own_run

DAMAGED_PAGES = "*** in database"  # begins what SQLite says of pages, not of cells
COUNTS = Path(__file__).with_name("group_counts.sql")  # only for the owner's connection
_SYNCED = "PRAGMA synchronous = FULL"
_UNSYNCED = "PRAGMA synchronous = NORMAL"  # for leases and heartbeats: a power cut may undo them
# 16 MiB, four times the default: pages that change with every commit are copied less often.
_LOG_PAGES = 4000
_LOCK_MODE = 0o600  # whoever may open the file, also only to read it, can lock it
# The first bytes of a journal, and the last ones if it names a super-journal.
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
# Only a backup or a shell can hold SQLite's own lock, because we hold the owner's lock.
_OTHER_OWNER_WAIT_S = 5.0

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Transaction:
    """Execute the statements of one transaction, and know its lsn."""

    def __init__(
        self, connection: sqlite3.Connection, *, run_id: str, epoch: int, lsn: int
    ) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.lsn = lsn  # of this transaction, if it touches an exported table
        self.now_us = now_us()
        self.touched: set[str] = set()
        self._connection = connection

    def touch(self, *tables: str) -> None:
        """Note that these exported tables change."""
        self.touched.update(tables)

    def run(self, sql: str, **parameters: Any) -> int:
        """Execute one statement. Return the number of rows it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def insert(self, table: str, **values: Any) -> int:
        """Execute one INSERT. Return the rowid it made."""
        return self._connection.execute(_insert(table, values), values).lastrowid or 0

    def insert_many(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows with the same columns. The interpreter lock is released only once."""
        if rows:
            self._connection.executemany(_insert(table, rows[0]), rows)

    def rows(self, sql: str, **parameters: Any) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        return self._connection.execute(sql, parameters).fetchall()

    def row(self, sql: str, **parameters: Any) -> sqlite3.Row | None:
        """Return the first row of a query, None if there is none."""
        row: sqlite3.Row | None = self._connection.execute(sql, parameters).fetchone()
        return row

    def value(self, sql: str, **parameters: Any) -> Any:
        """Return the first cell of a query that gives one row."""
        return self._connection.execute(sql, parameters).fetchone()[0]

    def log(self, *, component: str, what: str, detail: str) -> None:
        """Append a line to the events view."""
        self.insert(
            "event",
            lsn=self.lsn,
            at_us=self.now_us,
            component=component,
            what=valid_text(what),
            detail=valid_text(detail),  # an error may quote what a program or a server wrote
        )
        self.touch("events")


def pick(row: Mapping[str, Any] | sqlite3.Row, names: Iterable[str]) -> dict[str, Any]:
    """Return some columns of a row by name."""
    return {name: row[name] for name in names}


def columns_of(record: Any) -> dict[str, Any]:
    """Return the fields of a slotted record by name, without copying their values."""
    return {name: getattr(record, name) for name in record.__slots__}


def _insert(table: str, columns: Iterable[str]) -> str:
    values = ", ".join(f":{name}" for name in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values})"


def one_transaction(
    function: Callable[Concatenate[Transaction, Given], Result],
) -> Callable[Concatenate[Any, Given], Result]:
    """Return a method that calls `function` in one transaction of `self._database`."""

    @functools.wraps(function)
    def method(self: Any, *given: Given.args, **named: Given.kwargs) -> Result:
        with self._database.transaction() as tx:
            return function(tx, *given, **named)

    return method


class Database:
    """The SQLite file that this process owns. Opening it fences the owner before."""

    def __init__(self, layout: RunLayout, *, place_is_checked: bool) -> None:
        self._path = layout.catalog
        self._run_id = layout.info.run_id
        self._mutex = threading.RLock()
        self._open: Transaction | None = None  # the transaction that is under way
        # Set when the disk has failed: commits behind a gap in the log would be lost with it.
        self._lost: StoreError | None = None
        self._lock_fd = take_lock(layout, place_is_checked=place_is_checked)
        try:
            check_owner(layout)
            _check_not_lost(layout)
            self._connection = _connect(layout)
            self.epoch = self._take_over(shown_lsn=shown_lsn(layout))
        except BaseException as error:
            os.close(self._lock_fd)
            raise_if_interrupted(error)
            if isinstance(error, sqlite3.OperationalError):
                raise _no_room(self._path, error) from error
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
                    yield from self._body()
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
            self._connection.execute(_UNSYNCED)
            try:
                with self.transaction() as transaction:
                    yield transaction
            finally:
                self._connection.execute(_SYNCED)

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

    def _body(self) -> Iterator[Transaction]:
        meta = self._connection.execute("SELECT epoch, lsn FROM meta").fetchone()
        if meta["epoch"] != self.epoch:
            raise FencedError(
                f"this owner has epoch {self.epoch}, the catalog is at {meta['epoch']}; stop this "
                "process"
            )
        lsn = meta["lsn"] + 1
        tx = Transaction(self._connection, run_id=self._run_id, epoch=self.epoch, lsn=lsn)
        self._open = tx
        try:
            yield tx
        finally:
            self._open = None
        if tx.touched:
            tx.run("UPDATE meta SET lsn = :lsn", lsn=lsn)
            for name in sorted(tx.touched):
                tx.run("INSERT OR REPLACE INTO changed VALUES (:name, :lsn)", name=name, lsn=lsn)

    def _take_over(self, *, shown_lsn: int) -> int:
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
                f"{shown_lsn}: it is an older copy; "
                f"put the newest back, or: gigpo rebuild --force {self._path.parent}"
            )
        self._connection.execute("UPDATE meta SET epoch = epoch + 1")
        self._connection.execute(
            "UPDATE grp SET lease_worker = NULL, lease_until_us = NULL WHERE lease_worker NOT NULL"
        )
        self._connection.execute("COMMIT")
        return int(meta["epoch"]) + 1


def shown_lsn(layout: RunLayout) -> int:
    """Return the lsn that readers were shown, 0 without a manifest."""
    try:
        data = read_bytes(layout.manifest, root=layout.root, at_most=MAX_MANIFEST_BYTES)
        content = json_values.parse_object(data)
        # The manifest of another run says nothing about this run.
        ours = content.get("run_id", layout.info.run_id) == layout.info.run_id
        return json_values.integer(content, "lsn") if ours else 0
    except (OSError, ValueError):  # export and fsck report the damage
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
        # trusted_schema = OFF would keep our triggers from calling now_us.
        connection.execute("PRAGMA cell_size_check = ON")
        let_ctrl_c_end_queries(connection)
        check_schema(connection, path=layout.catalog)
        connection.row_factory = sqlite3.Row
        # The triggers of the table group_state call it.
        connection.create_function("now_us", 0, lambda: now_us())
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(_SYNCED)
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        connection.execute("PRAGMA foreign_keys = ON")
        check_pages(connection, layout)  # an index that is missing is made from a whole table
        connection.executescript(SCHEMA)
        connection.executescript(COUNTS.read_text())
    except sqlite3.Error as error:
        raise_if_interrupted(error)
        if not is_damage(error):
            raise _no_room(layout.catalog, error) from error
        raise FormatError(
            f"{layout.catalog} cannot be opened as a catalog: {error}; restore it from a backup, "
            f"or gigpo rebuild {layout.root}"
        ) from error
    return connection


def connect_read_only(layout: RunLayout) -> sqlite3.Connection:
    """Open the catalog beside its owner, to read it.

    Without a -wal file nobody writes, so a directory without write permission can be read too.
    Raises OtherFormatError, and ForeignSchemaError for objects that this code never makes.
    """
    check_consent(layout)
    check_catalog_files(layout)
    wal = layout.catalog.with_name(f"{layout.catalog.name}-wal")
    mode = "mode=ro" if is_file(wal, root=layout.run_directory) else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{layout.catalog.as_uri()}?{mode}", uri=True)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        let_ctrl_c_end_queries(connection)
        check_schema(connection, path=layout.catalog)
    except BaseException:
        connection.close()
        raise
    return connection


def check_pages(connection: sqlite3.Connection, layout: RunLayout) -> None:
    """Raise FormatError for a catalog whose tables share pages.

    A query of such a table would go on for ever, and fill memory or disk. A signature does not
    cover the catalog, so this user's own runs are checked too: 0.08 s for 80,000 trajectories.
    """
    fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    # A cell that contradicts its column ends no query, and the reads name it themselves; a NULL may
    # be there by right. Only the first fault is named: of shared pages it may be that rows are out
    # of order.
    if fault.startswith(DAMAGED_PAGES) and not fault.endswith("is never used"):
        raise FormatError(
            f"{layout.catalog} is damaged ({one_line(fault)[:REASON_CHARACTERS]}); "
            f"restore it from a backup, or gigpo rebuild {layout.root}"
        )


def raise_if_interrupted(error: BaseException) -> None:
    """Raise KeyboardInterrupt if the error is Ctrl-C, which says nothing about the catalog.

    The progress handler hears it, and sqlite3 makes an OperationalError of what a handler raises.
    """
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
        raise KeyboardInterrupt from error


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the error means a damaged catalog, not one that is out of reach now."""
    if isinstance(error, sqlite3.OperationalError):
        return "no such" in str(error) or "malformed" in str(error)
    return isinstance(error, sqlite3.DatabaseError)


def _no_room(path: Path, error: sqlite3.Error) -> StoreError:
    return StoreError(
        f"catalog {path}: {error}; it was not changed. Check free space and permissions, then retry"
    )


def _check_not_lost(layout: RunLayout) -> None:
    """Refuse a new catalog for a run with segments, which would be swept: no row names them."""
    found = status(layout.catalog, root=layout.root)
    if found is not None and found.st_size > 0:
        return
    if next(iter(layout.storage.files(layout.relative(layout.segments))), None) is not None:
        raise StoreError(
            f"{layout.catalog} is missing or empty, and the run has segments; put it back, "
            f"or gigpo rebuild {layout.root}"
        )


def check_unowned(layout: RunLayout) -> None:
    """Raise LockedError naming the process if a running one owns the catalog.

    The lock is held for that moment only. Raises as `take_lock`.
    """
    if is_file(layout.catalog_lock, root=layout.root):
        os.close(take_lock(layout))


def check_owner(layout: RunLayout) -> None:
    """Refuse to own a run behind a link, in a storage that this user did not choose, or elsewhere.

    An owner removes files that the catalog does not name. Raises StoreError; FencedError if the run
    was brought to another directory.
    """
    layout.check_no_links()
    check_own_storage(layout.storage)
    if layout.info.storage_uri is not None and not made_by_this_user(layout.root):
        raise StoreError(
            f"{layout.root} keeps its files at {layout.info.storage_uri}, and you did not make "
            "this run: going on would write and remove files there. If you trust it: gigpo train "
            f"--resume {layout.root} --trust"
        )
    layout.check_primary()


def check_consent(layout: RunLayout) -> None:
    """Refuse to read a stranger's run if that would make this user ask the network.

    Raises StoreError.
    """
    uri = layout.info.storage_uri or ""
    parts = split_uri(uri)
    asks_network = parts is not None and parts.scheme != "file"
    if asks_network and not made_by_this_user(layout.root):
        raise StoreError(
            f"{layout.root} keeps its files at {uri}, and you did not make this run: reading it "
            "would ask there with your "
            f"credentials. If you want that: gigpo fetch {shell_word(uri)} DIR, and read DIR"
        )


def check_catalog_files(layout: RunLayout) -> None:
    """Raise UnsafePathError or FormatError if SQLite would open or remove files outside the run.

    SQLite follows links. After a transaction of several databases it removes the file that a
    journal names.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):
        path = layout.catalog.with_name(f"{layout.catalog.name}{suffix}")
        if status(path, root=layout.run_directory) is not None:
            with open(open_file(path, root=layout.run_directory), "rb") as file:
                if suffix == "-journal" and _names_another_file(file):
                    raise FormatError(
                        f"{path} names another file, which SQLite would remove; no run of ours "
                        f"writes such a journal. Remove it, or: gigpo rebuild --force {layout.root}"
                    )


def _names_another_file(journal: BinaryIO) -> bool:
    """Return whether a rollback journal is of several files, and so names a super-journal."""
    size = journal.seek(0, os.SEEK_END)
    journal.seek(max(0, size - len(_JOURNAL_MAGIC)))
    return journal.read() == _JOURNAL_MAGIC


def take_lock(layout: RunLayout, *, place_is_checked: bool = False) -> int:
    """Take the lock of the catalog's owner and return its descriptor.

    Raises LockedError naming the process that has it, and StoreError for another user's directory.
    They could exchange it while the owner opens one file after the other, and so lead what it
    writes and removes to another run. A caller that has looked at the place says so.
    """
    if not place_is_checked:
        check_own_run(layout.root)
    path = layout.catalog_lock
    try:
        flags = os.O_RDWR | os.O_CREAT
        descriptor = open_file(path, root=layout.root, flags=flags, mode=_LOCK_MODE)
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != _LOCK_MODE:  # of an earlier version
            with suppress(PermissionError):  # another user's
                os.fchmod(descriptor, _LOCK_MODE)
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot open {path}: {error.strerror}; the run directory must be writable"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        written = os.pread(descriptor, 32, 0)  # by the owner, who may be a stranger
        os.close(descriptor)
        owner = written.decode() if written.isdigit() else "unknown"
        raise LockedError(
            f"process {owner} owns {path.with_name('catalog.sqlite')}; stop it, or choose another "
            "run directory"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
