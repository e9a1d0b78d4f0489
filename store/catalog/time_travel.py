"""Time travel: the catalog as it was at an earlier lsn, read beside its owner without disturbing
it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from store.catalog.database import check_catalog_files, check_consent
from store.catalog.schema_check import check_schema
from store.catalog.snapshot import EXPORTS, arrow_table
from store.errors import FormatError, StoreError
from store.layout import SEGMENT_PATH, RunLayout, checked_name
from store.untrusted.file_access import is_file

# What was true at :lsn, with the columns of EXPORTS. A table that is not here had no history to
# look up: it only ever grew.
QUERIES: Mapping[str, str] = {
    "groups": """
        SELECT g.group_uid, g.split, g.ordinal, g.task_id, g.purpose_version, g.size, count(t.traj_uid),
               coalesce(sum(t.n_steps), 0), coalesce(sum(t.won), 0), coalesce(sum(t.episode_return), 0.0),
               s.state, s.reason, min(t.version_min), max(t.version_max), g.opened_us,
               CASE WHEN g.completed_lsn <= :lsn THEN g.completed_us END, s.lsn, g.source
        FROM grp g
        JOIN group_state s ON s.seq = (SELECT max(seq) FROM group_state WHERE group_uid = g.group_uid AND lsn <= :lsn)
        LEFT JOIN trajectory t ON t.group_uid = g.group_uid AND t.lsn <= :lsn
        WHERE g.opened_lsn <= :lsn GROUP BY g.group_uid ORDER BY g.opened_lsn, g.ordinal""",
    "ledger": "SELECT group_uid, state, reason, lsn, at_us FROM group_state WHERE lsn <= :lsn ORDER BY seq",
    "lineage": """
        SELECT CASE WHEN b.trained_lsn <= :lsn THEN b.learner_step END, b.batch_id,
               CASE WHEN b.rolled_back_lsn <= :lsn THEN 'rolled_back' WHEN b.trained_lsn <= :lsn THEN 'trained'
                    ELSE 'claimed' END,
               CASE WHEN b.trained_lsn <= :lsn THEN l.outcome ELSE 'claimed' END,
               coalesce(b.rolled_back_lsn > :lsn, 1), l.group_uid, g.task_id, l.version_min, l.version_max,
               iif(b.trained_lsn <= :lsn, b.version_in, b.claimed_version),
               iif(g.source IS NULL, iif(b.trained_lsn <= :lsn, b.version_in, b.claimed_version) - l.version_min, NULL),
               b.claimed_us, CASE WHEN b.trained_lsn <= :lsn THEN b.trained_us END, l.changed_lsn, l.use, g.source
        FROM batch b JOIN batch_group l USING (batch_id) JOIN grp g USING (group_uid)
        WHERE b.claimed_lsn <= :lsn ORDER BY b.batch_id, g.ordinal""",
    "versions": """
        SELECT version, path, digest, learner_step, epoch, published_us FROM version WHERE lsn <= :lsn ORDER BY version""",
    "checkpoints": """
        SELECT learner_step, path, version, live OR changed_lsn > :lsn, saved_us FROM checkpoint
        WHERE lsn <= :lsn ORDER BY lsn""",
    "metrics": """
        SELECT learner_step, policy_version, name, value, live OR changed_lsn > :lsn, lsn, changed_lsn FROM metric
        WHERE lsn <= :lsn ORDER BY learner_step, name""",
    "events": "SELECT at_us, component, what, detail, lsn FROM event WHERE lsn <= :lsn ORDER BY event_id",
    "unfinished": """
        SELECT u.group_uid, g.split, g.task_id, u.number, u.worker, u.version, u.why, u.n_steps, u.n_response_tokens,
               u.begun_us, u.ended_us, u.lsn
        FROM unfinished u JOIN grp g USING (group_uid) WHERE u.lsn <= :lsn ORDER BY u.unfinished_id""",
    "excluded": """
        SELECT s.path, d.traj_uid FROM duplicate d JOIN segment s USING (segment_id) WHERE s.lsn <= :lsn ORDER BY s.path""",
}
SEGMENTS = """SELECT path FROM segment
              WHERE lsn <= :lsn AND (retired_lsn IS NULL OR retired_lsn > :lsn) ORDER BY lsn"""
_STEPS_BETWEEN_SIGNALS = 1_000_000  # of SQLite's machine: some 20 ms


@dataclass(frozen=True, kw_only=True, slots=True)
class AsOf:
    """The run at one lsn: which files were live, and the exported tables (all but heartbeats, which
    have no history).
    """

    segments: tuple[str, ...]
    tables: Mapping[str, pa.Table]


def read_as_of(layout: RunLayout, lsn: int) -> AsOf:
    """What readers would have seen at `lsn`. StoreError if that is in the future, or so old that
    files of it are gone.
    """
    try:
        with closing(connect_read_only(layout)) as connection:
            connection.execute("BEGIN")  # one moment for all queries
            newest, horizon = connection.execute("SELECT lsn, horizon_lsn FROM meta").fetchone()
            if not horizon <= lsn <= newest:
                raise StoreError(
                    f"lsn {lsn} is not between {horizon} and {newest}; files of older snapshots "
                    "were removed, "
                    "store.snapshot_window_s says how long they are kept"
                )
            tables = {
                name: arrow_table(EXPORTS[name], connection.execute(query, {"lsn": lsn}).fetchall())
                for name, query in QUERIES.items()
            }
            segments = connection.execute(SEGMENTS, {"lsn": lsn}).fetchall()
    except sqlite3.Error as error:
        raise FormatError(
            f"{layout.catalog} cannot be read ({error}); leave out the lsn to read the manifest"
        ) from error
    paths = tuple(checked_name(row[0], SEGMENT_PATH, where=str(layout.catalog)) for row in segments)
    return AsOf(segments=paths, tables=tables)


def connect_read_only(layout: RunLayout) -> sqlite3.Connection:
    """Open the catalog beside its owner. FormatError if it holds what this code never makes, or
    newer code made it.

    Without a -wal file nobody writes, and a directory we may not write to can still be read.
    """
    check_consent(layout)
    check_catalog_files(layout)
    wal = layout.catalog.with_name(f"{layout.catalog.name}-wal")
    mode = "mode=ro" if is_file(wal, root=layout.run_directory) else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{layout.catalog.as_uri()}?{mode}", uri=True)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        # Pages that share their children can make a query endless. Only between Python's lines does
        # Ctrl-C end it.
        connection.set_progress_handler(lambda: 0, _STEPS_BETWEEN_SIGNALS)
        check_schema(connection, path=layout.catalog)
    except BaseException:
        connection.close()
        raise
    return connection
