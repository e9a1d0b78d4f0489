"""Connect to the SQLite file of a run, as its owner or beside one. It may be a stranger's."""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from printable import REASON_CHARACTERS, one_line, shell_word
from store.atomic_write import PRIVATE
from store.catalog.ownership import check_consent
from store.catalog.private_copy import copied, is_own_place
from store.catalog.schema_check import SCHEMA, check_schema, let_ctrl_c_end_queries
from store.errors import FormatError, PrivateCatalogError, StoreError, UnsafePathError
from store.layout import RunLayout
from store.untrusted.file_access import is_file, open_directory, open_file, open_file_in, status

DAMAGED_PAGES = "*** in database"  # begins what SQLite says of pages, not of cells
COUNTS = Path(__file__).with_name("group_counts.sql")  # only for the owner's connection
SYNCED = "PRAGMA synchronous = FULL"
UNSYNCED = "PRAGMA synchronous = NORMAL"  # for leases and heartbeats: a power cut may undo them
# 16 MiB, four times the default: pages that change with every commit are copied less often.
_LOG_PAGES = 4000
# The first bytes of a journal, and the last ones if it names a super-journal.
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
# A file may have holes, which read as zeros: SQLite takes them for pages, and a copy in memory has
# them all. A file system that compresses stores a catalog in a tenth of its size.
_MAX_RATIO_OF_HOLES, _SMALL_BYTES = 100, 64 << 20
_BLOCK_BYTES = 512  # of `st_blocks`, on every file system
# Only a backup or a shell can hold SQLite's own lock, because we hold the owner's lock.
_OTHER_OWNER_WAIT_S = 5.0


def connect_owner(layout: RunLayout, *, now_us: Callable[[], int]) -> sqlite3.Connection:
    """Open the catalog to change it, and make what its schema lacks. The caller has its lock.

    The triggers of the table group_state call `now_us`, in microseconds since 1970. Raises
    FormatError for a damaged catalog, StoreError if it is out of reach now.
    """
    check_catalog_files(layout)
    make_catalog_file(layout)
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
        _check_size(connection, layout, opened=layout.catalog)
        connection.row_factory = sqlite3.Row
        connection.create_function("now_us", 0, now_us)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(SYNCED)
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        connection.execute("PRAGMA foreign_keys = ON")
        check_pages(connection, layout)  # an index that is missing is made from a whole table
        connection.executescript(SCHEMA)
        connection.executescript(COUNTS.read_text())
    except sqlite3.Error as error:
        raise_if_interrupted(error)
        if not is_damage(error):
            raise write_error(layout.catalog, error) from error
        raise FormatError(
            f"{layout.catalog} cannot be opened as a catalog: {error}; restore it from a backup, "
            f"or gigpo rebuild {layout.root}"
        ) from error
    return connection


@contextmanager
def opened_read_only(layout: RunLayout, *, in_place: bool = False) -> Iterator[sqlite3.Connection]:
    """Give a connection to the catalog beside its owner, to read it.

    Without a -wal file nobody writes, so a directory without write permission can be read too. A
    catalog that another user could exchange is copied first, unless `in_place`: for a process that
    the kernel lets make no file. Raises OtherFormatError, ForeignSchemaError for objects that this
    code never makes, and PrivateCatalogError.
    """
    check_consent(layout)
    with ExitStack() as opened:
        if in_place or is_own_place(layout.run_directory):
            check_catalog_files(layout)
            catalog = layout.catalog
        else:
            catalog = opened.enter_context(copied(layout, open_checked=_open_checked))
        wal = catalog.with_name(f"{catalog.name}-wal")
        mode = "mode=ro" if is_file(wal, root=catalog.parent) else "mode=ro&immutable=1"
        connection = sqlite3.connect(f"{catalog.as_uri()}?{mode}", uri=True)
        opened.callback(connection.close)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        let_ctrl_c_end_queries(connection)
        check_schema(connection, path=layout.catalog)
        _check_size(connection, layout, opened=catalog)
        yield connection


def make_catalog_file(layout: RunLayout) -> None:
    """Make an empty catalog that only its owner may open, if there is none.

    Whoever may read its files can lock them: a lock of SQLite is one of the kernel, for which
    read permission suffices, and it would end the owner. SQLite gives the log and the shared
    memory the mode of the catalog. Raises StoreError.
    """
    try:
        os.close(
            open_file(
                layout.catalog,
                root=layout.run_directory,
                flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                mode=PRIVATE,
            )
        )
    except FileExistsError:  # its owner may have given it another mode, which stays
        return
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot make {layout.catalog}: {error.strerror}; check free space and permissions, "
            "then retry"
        ) from error


def check_pages(connection: sqlite3.Connection, layout: RunLayout) -> None:
    """Raise FormatError for a catalog whose tables share pages.

    A query of such a table would go on for ever, and fill memory or disk. A signature does not
    cover the catalog, so this user's own runs are checked too: 0.08 s for 80,000 trajectories.
    """
    fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    # A cell that contradicts its column ends no query, and the reads name it themselves; a NULL may
    # be there by right. Only the first fault is named. Of shared pages SQLite may say that rows are
    # out of order.
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


def write_error(path: Path, error: sqlite3.Error) -> StoreError:
    """Return the error for a catalog that could not be written."""
    return StoreError(
        f"catalog {path}: {error}; it was not changed. Check free space and permissions, then retry"
    )


def check_catalog_files(layout: RunLayout) -> None:
    """Raise UnsafePathError or FormatError if SQLite would open or remove files outside the run.

    SQLite follows links. After a transaction of several databases it removes the file that a
    journal names. Raises FormatError too for files that stand for many more bytes than they have,
    and PrivateCatalogError for one that this user may not read.
    """
    n_bytes = 0
    directory = open_directory(layout.run_directory, root=layout.run_directory)
    try:
        for suffix in ("", "-wal", "-shm", "-journal"):
            path = layout.catalog.with_name(f"{layout.catalog.name}{suffix}")
            with suppress(FileNotFoundError), open(_open_checked(directory, path), "rb") as file:
                n_bytes += os.fstat(file.fileno()).st_size
                if suffix == "-journal":
                    _check_journal(file, path, n_bytes=n_bytes, root=layout.root)
    finally:
        os.close(directory)


def _open_checked(directory: int, path: Path) -> int:
    """Open a file of a catalog beneath the descriptor of its directory. The caller closes it.

    Raises FileNotFoundError, PrivateCatalogError, UnsafePathError for what is no file, and
    FormatError for one that stands for many more bytes than it has.
    """
    catalog = path.with_name(path.name.partition("-")[0])
    try:
        descriptor = open_file_in(directory, path.name, path=path)
    except PermissionError as error:
        owner = os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_uid
        if owner == os.geteuid():
            raise StoreError(
                f"{path} may not be read: chmod u+rw {shell_word(str(catalog))}*"
            ) from error
        raise PrivateCatalogError(
            f"{path} may not be read by you: it belongs to uid {owner}, and a catalog "
            "is made for its owner alone, because who may read it can lock it. Its owner can "
            f"share it: chmod g+r {shell_word(str(catalog))}*"
        ) from error
    try:
        found = os.fstat(descriptor)
        if found.st_size > _SMALL_BYTES + _MAX_RATIO_OF_HOLES * found.st_blocks * _BLOCK_BYTES:
            _check_holes(descriptor, path, n_bytes=found.st_size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_holes(descriptor: int, path: Path, *, n_bytes: int) -> None:
    """Raise FormatError if a file of `n_bytes` is almost nothing but holes.

    Some file systems count a new file's blocks late or never, so the holes themselves are asked
    for. Where there are none, the whole file is one extent.
    """
    stored = at = 0
    while at < n_bytes:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # this file system knows no holes
                return
            break  # the rest is a hole
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        stored += at - begin
    if n_bytes > _SMALL_BYTES + _MAX_RATIO_OF_HOLES * stored:
        raise FormatError(
            f"{path} has {n_bytes:,} bytes, of which {stored:,} are not holes; no run wrote it. "
            f"Restore it from a backup, or gigpo rebuild {path.parent}"
        )


def _check_journal(journal: BinaryIO, path: Path, *, n_bytes: int, root: Path) -> None:
    """Raise FormatError for a journal whose catalog SQLite must not play back.

    `n_bytes` is the size of the catalog and the journal together.
    """
    played_back = _bytes_when_played_back(journal)
    if _names_another_file(journal):
        fault = "names another file, which SQLite would remove"
    elif played_back > n_bytes:
        fault = f"makes a file of {played_back:,} bytes of {n_bytes:,}"
    else:
        return
    raise FormatError(
        f"{path} {fault}; no run of ours writes such a journal. Remove it, or: gigpo rebuild "
        f"--force {root}"
    )


def _check_size(connection: sqlite3.Connection, layout: RunLayout, *, opened: Path) -> None:
    """Raise FormatError if the catalog says that it has more pages than its files hold.

    `opened` is the catalog's path, or that of a copy of it. The last frame of a log may say any
    number. A copy in memory would have them all, as zeros.
    """
    (n_pages,) = connection.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    n_bytes = 0
    for suffix in ("-wal", ""):  # in this order, as an owner who closes it moves pages
        path = opened.with_name(f"{opened.name}{suffix}")
        found = status(path, root=opened.parent)
        n_bytes += found.st_size if found is not None else 0
    if n_pages * page_bytes > n_bytes:
        raise FormatError(
            f"{layout.catalog} says that it has {n_pages:,} pages, and its files have "
            f"{n_bytes:,} bytes; restore it from a backup, or gigpo rebuild {layout.root}"
        )


def _bytes_when_played_back(journal: BinaryIO) -> int:
    """Return the size that a rollback journal gives the database, 0 for one that is not valid."""
    journal.seek(0)
    header = journal.read(len(_JOURNAL_MAGIC) + 20)
    if len(header) < len(_JOURNAL_MAGIC) + 20 or not header.startswith(_JOURNAL_MAGIC):
        return 0
    _, _, n_pages, _, page_bytes = struct.unpack_from(">5I", header, len(_JOURNAL_MAGIC))
    return int(n_pages * (page_bytes or 65536))  # the largest page that there is


def _names_another_file(journal: BinaryIO) -> bool:
    """Return whether a rollback journal is of several files, and so names a super-journal."""
    size = journal.seek(0, os.SEEK_END)
    journal.seek(max(0, size - len(_JOURNAL_MAGIC)))
    return journal.read() == _JOURNAL_MAGIC
