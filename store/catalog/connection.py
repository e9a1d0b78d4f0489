"""Connect to the SQLite file of a run, as its owner or beside one. It may be a stranger's."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from printable import REASON_CHARACTERS, one_line
from store.catalog.catalog_files import check_catalog_files, make_catalog_file
from store.catalog.ownership import check_consent
from store.catalog.private_copy import copied, is_own_place
from store.catalog.schema_check import SCHEMA, check_schema, let_ctrl_c_end_queries
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.untrusted.file_access import is_file, status

DAMAGED_PAGES = "*** in database"  # begins what SQLite says of pages, not of cells
# What SQLite says of rows that only the table or only an index has, and of rows out of their order.
_OF_INDEXES = re.compile(r"\b(?:index|KEY order|end-of-record)\b")
_ALL_FAULTS = 2**31 - 1  # release 3.40 of SQLite says many that are none, of NULLs
COUNTS = Path(__file__).with_name("group_counts.sql")  # only for the owner's connection
SYNCED = "PRAGMA synchronous = FULL"
UNSYNCED = "PRAGMA synchronous = NORMAL"  # for leases and heartbeats: a power cut may undo them
# 16 MiB, four times the default: pages that change with every commit are copied less often.
_LOG_PAGES = 4000
_LOG_BYTES = _LOG_PAGES * 4096
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
        # Beside a long read the log grows. Its file would stay as long when it begins anew.
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        connection.execute("PRAGMA foreign_keys = ON")
        check_pages(connection, layout)  # an index that is missing is made from a whole table
        check_indexes(connection, layout)
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
            catalog = opened.enter_context(copied(layout))
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


def check_indexes(connection: sqlite3.Connection, layout: RunLayout) -> None:
    """Raise FormatError for a catalog in which a table and its indexes contradict each other.

    An owner removes files and rows that its queries do not find. After one changed byte a query
    finds too few, and committed files would be removed. It takes 6 s for a million trajectories.
    """
    faults = (line for (line,) in connection.execute(f"PRAGMA integrity_check({_ALL_FAULTS})"))
    if (fault := next(filter(_OF_INDEXES.search, faults), None)) is not None:
        raise FormatError(
            f"{layout.catalog} is damaged ({one_line(fault)[:REASON_CHARACTERS]}); nothing of it "
            f"is changed. Restore it from a backup, or gigpo rebuild --force {layout.root}"
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
        signs = ("no such", "malformed", "Could not decode to UTF-8")
        return any(sign in str(error) for sign in signs)
    return isinstance(error, sqlite3.DatabaseError)


def write_error(path: Path, error: sqlite3.Error) -> StoreError:
    """Return the error for a catalog that could not be written."""
    return StoreError(
        f"catalog {path}: {error}; it was not changed. Check free space and permissions, then retry"
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
