"""Keep a backup of the catalog in backup/catalog.sqlite, of every checkpoint and clean close.

If the run's files are in a remote storage, so is the backup. It is then made every minute too, for
the case that the owner's disk is lost (`Maintainer`).

A copy replaces the backup only if it passes fsck's check of the catalog, so a damaged catalog never
replaces a sound backup. Both are held in memory: about 1 KB for each trajectory of the run.
"""

from __future__ import annotations

import sqlite3

from printable import REASON_CHARACTERS, one_line
from store.catalog.connection import DAMAGED_PAGES, raise_if_interrupted
from store.catalog.schema_check import SCHEMA, check_schema, let_ctrl_c_end_queries
from store.clock import now_us
from store.errors import ForeignSchemaError, FormatError, StoreError, UnavailableError
from store.layout import RunLayout
from store.maintenance.database_bytes import bytes_of, copy_bytes
from store.maintenance.finding import Finding, found
from store.maintenance.fsck_catalog import check_catalog, check_identity


def write_backup(copy: sqlite3.Connection, layout: RunLayout) -> None:
    """Replace the backup by `copy`, a copy of the catalog. Raises StoreError if it is not sound.

    None is written while the run is brought to this directory: it goes if that fails.
    """
    if layout.is_being_brought:
        return
    copy.row_factory = sqlite3.Row
    check_schema(copy, path=layout.catalog)
    _check_sound(copy, layout)
    layout.storage.write(layout.relative(layout.backup), bytes_of(copy))


def read_backup(layout: RunLayout) -> sqlite3.Connection:
    """Return the backup as a database in memory, in today's format.

    Raises StoreError if there is none or it is not sound, UnavailableError in an outage or without
    room to check it.
    """
    data = layout.storage.read(layout.relative(layout.backup))
    if data.size == 0:
        raise FormatError(f"{layout.backup} is empty")
    connection = empty_database()
    try:
        copy_bytes(data, connection)
        check_schema(connection, path=layout.backup)
        # Before an index that is missing is made: if a table's pages share their children, that
        # fills the disk.
        fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if fault.startswith(DAMAGED_PAGES):
            raise sqlite3.DatabaseError(one_line(fault)[:REASON_CHARACTERS])
        connection.executescript(SCHEMA)
        _check_sound(connection, layout)
    except sqlite3.Error as error:
        connection.close()
        raise_if_interrupted(error)
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:  # of temporary files
            raise UnavailableError(
                f"{layout.backup} cannot be checked now: {error}; free space for temporary files, "
                "then retry"
            ) from error
        raise FormatError(f"{layout.backup} cannot be read as a catalog: {error}") from error
    except StoreError:
        connection.close()
        raise
    return connection


def check_backup(layout: RunLayout) -> list[Finding]:
    """Check that a rebuild could begin with the backup. Find nothing if none was made yet."""
    name = layout.relative(layout.backup)
    try:
        if layout.storage.exists(name):
            read_backup(layout).close()
    except UnavailableError as unavailable:
        return [found("backup_unavailable", name, str(unavailable))]
    except ForeignSchemaError as error:  # its remedy is for a catalog
        return [found("backup_damaged", name, str(error).rpartition("; ")[0])]
    except StoreError as error:
        return [found("backup_damaged", name, str(error).partition("; see gigpo fsck")[0])]
    return []


def empty_database() -> sqlite3.Connection:
    """Return a new database in memory that a catalog can be made in."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.create_function("now_us", 0, now_us)
    connection.execute("PRAGMA cell_size_check = ON")
    let_ctrl_c_end_queries(connection)
    return connection


def _check_sound(connection: sqlite3.Connection, layout: RunLayout) -> None:
    findings = check_identity(connection, layout) or check_catalog(connection)
    # A warning is an alarm about the log: a rebuild looks through all files then.
    if wrong := [one for one in findings if one.severity == "error"]:
        raise FormatError(
            f"{layout.backup}: the copy of the catalog is not sound "
            f"({wrong[0].what}: {wrong[0].subject}: {wrong[0].detail}); "
            f"see gigpo fsck {layout.root}"
        )
