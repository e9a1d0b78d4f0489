"""Catalogs of older format versions become today's, in one transaction, when their owner opens
them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from store.clock import now_us
from store.errors import NewerFormatError
from store.layout import FORMAT_VERSION

SCHEMA = Path(__file__).with_name("schema.sql")
SCHEMA_TEXT = SCHEMA.read_text()  # a sandboxed query cannot read the file later

# What turns a catalog of version n into one of n + 1. What is new as a whole is made by schema.sql.
MIGRATIONS = {
    1: """
        ALTER TABLE meta ADD COLUMN horizon_lsn INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE segment ADD COLUMN level INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE segment ADD COLUMN retired_us INTEGER;
        ALTER TABLE segment ADD COLUMN retired_why TEXT CHECK (retired_why IN ('compacted', 'expired', 'quarantined'));
        ALTER TABLE segment ADD COLUMN removed_us INTEGER;
        ALTER TABLE grp ADD COLUMN changed_lsn INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE batch ADD COLUMN rolled_back_lsn INTEGER;
        ALTER TABLE batch_group ADD COLUMN changed_lsn INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE batch_group ADD COLUMN version_min INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE batch_group ADD COLUMN version_max INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE checkpoint ADD COLUMN changed_lsn INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE metric ADD COLUMN changed_lsn INTEGER NOT NULL DEFAULT 0;
        -- A CHECK cannot be altered in place. Removing the constraint's old text is safe: every old row passes the new one.
        PRAGMA writable_schema = ON;
        UPDATE sqlite_schema SET sql = replace(sql, 'IN (''train'', ''heldout'')', 'IN (''train'', ''heldout'', ''imported'')')
        WHERE name = 'grp';
        PRAGMA writable_schema = RESET;
        -- What is known of the past: where each group stands now.
        CREATE TABLE group_state (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            group_uid BLOB NOT NULL REFERENCES grp,
            state TEXT NOT NULL,
            reason TEXT NOT NULL,
            lsn INTEGER NOT NULL,
            at_us INTEGER NOT NULL
        ) STRICT;
        INSERT INTO group_state (group_uid, state, reason, lsn, at_us)
        SELECT group_uid, 'open', 'dispatched', opened_lsn, opened_us FROM grp ORDER BY opened_lsn, ordinal;
        INSERT INTO group_state (group_uid, state, reason, lsn, at_us)
        SELECT group_uid, state, coalesce(reason, state) || ' (before format 2)', (SELECT lsn FROM meta),
               coalesce(completed_us, opened_us)
        FROM grp WHERE state <> 'open' ORDER BY opened_lsn, ordinal;
        UPDATE grp SET changed_lsn = (SELECT lsn FROM meta);
        UPDATE batch_group SET (changed_lsn, version_min, version_max) =
            (SELECT meta.lsn, g.version_min, g.version_max FROM meta, grp g WHERE g.group_uid = batch_group.group_uid);
        UPDATE checkpoint SET changed_lsn = (SELECT lsn FROM meta);
        UPDATE metric SET changed_lsn = (SELECT lsn FROM meta);
        UPDATE batch SET rolled_back_lsn = (SELECT lsn FROM meta) WHERE state = 'rolled_back';
        -- Snapshots of before cannot be told: the ledger begins here.
        UPDATE meta SET horizon_lsn = lsn, format_version = 2;
    """,
    2: """
        ALTER TABLE grp ADD COLUMN source TEXT CHECK (source IS NULL OR split = 'imported');
        ALTER TABLE batch_group ADD COLUMN use INTEGER NOT NULL DEFAULT 1;
        DROP INDEX IF EXISTS batch_group_once;  -- these two have another text now
        DROP TRIGGER IF EXISTS grp_changed;
        -- All is exported anew, with the new columns: the lsn is in the files' names, which must not be those of before.
        UPDATE meta SET lsn = lsn + 1, format_version = 3;
    """,
    # The table `unfinished` is new. Nothing is known of episodes that were given up before.
    3: "UPDATE meta SET lsn = lsn + 1, format_version = 4;",
}


def migrate(connection: sqlite3.Connection, *, path: Path) -> None:
    """Bring an existing catalog to FORMAT_VERSION; FormatError if it is newer. A new, empty file is
    left alone.
    """
    if (
        connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'meta'").fetchone()[0]
        == 0
    ):
        return
    row = connection.execute("SELECT format_version FROM meta").fetchone()
    version = FORMAT_VERSION if row is None else int(row[0])
    if version > FORMAT_VERSION:
        raise newer_format(path, version)
    for older in range(version, FORMAT_VERSION):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[older]} COMMIT;")


def newer_format(path: Path, version: int) -> NewerFormatError:
    """Return the error for a catalog that newer code wrote."""
    return NewerFormatError(
        f"{path} has format version {version}, this code reads up to {FORMAT_VERSION}; update the "
        "code"
    )


@contextmanager
def in_todays_format(connection: sqlite3.Connection, *, path: Path) -> Iterator[sqlite3.Connection]:
    """The catalog that `connection` reads; one of an older format as an upgraded copy in memory:
    the file is its owner's.
    """
    version = connection.execute("SELECT format_version FROM meta").fetchone()
    if version is None or version[0] >= FORMAT_VERSION:
        yield connection
        return
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        connection.backup(copy)
        copy.row_factory = connection.row_factory
        copy.create_function("now_us", 0, now_us)
        migrate(copy, path=path)
        copy.executescript(SCHEMA_TEXT)
        yield copy
