"""Copy a catalog as it was at a checkpoint, as that of a new run.

    find_checkpoint(source, catalog, learner_step=40)           # or say which there are
    version = copy_until(source, layout, learner_step=40)       # into the catalog of `layout`
    group_uids(source)                                          # which no source of a fork may have

Later groups, versions and numbers are not in the copy. Claimed groups are available again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing

from store.catalog.catalog_files import make_catalog_file
from store.catalog.connection import check_pages, opened_read_only
from store.catalog.groups import recompute, recompute_if_full
from store.catalog.log_check import FROM_OPEN_EVENTS
from store.catalog.missing_members import open_incomplete
from store.catalog.schema_check import SCHEMA
from store.catalog.transaction import Transaction
from store.clock import now_us
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.remote_directory import has_directory
from store.run_names import CHECKPOINT_PATH, checked_name

# A trajectory that was lost after the checkpoint and came back: its group had all members then, and
# the checkpoint's version or an earlier one sampled it.
CAME_BACK = """traj_uid IN (SELECT traj_uid FROM lost_trajectory WHERE lsn > :cut)
    AND (SELECT (source IS NOT NULL OR trajectory.version_max <= :version) AND 'open' <> (
             SELECT state FROM group_state s WHERE s.group_uid = g.group_uid AND s.lsn <= :cut
             ORDER BY seq DESC LIMIT 1)
         FROM grp g WHERE g.group_uid = trajectory.group_uid)"""
LATER = f"lsn > :cut AND ({CAME_BACK}) IS NOT TRUE"
# Go back to the lsn :cut. The order matters: files outlive their rows.
CUT = (
    f"""INSERT OR IGNORE INTO duplicate (segment_id, traj_uid)
            SELECT segment_id, traj_uid FROM trajectory WHERE {LATER}""",
    f"DELETE FROM trajectory WHERE {LATER}",
    "DELETE FROM critic_value WHERE lsn > :cut",
    """DELETE FROM batch_group
           WHERE batch_id IN (SELECT batch_id FROM batch WHERE claimed_lsn > :cut)""",
    "DELETE FROM batch WHERE claimed_lsn > :cut",
    """UPDATE batch_group SET live = 0, outcome = 'claimed'
           WHERE batch_id IN (SELECT batch_id FROM batch
                              WHERE trained_lsn IS NULL OR trained_lsn > :cut)""",
    """UPDATE batch SET state = 'rolled_back', learner_step = NULL, version_in = NULL,
                        trained_us = NULL, trained_lsn = NULL,
                        rolled_back_lsn = min(:cut, coalesce(rolled_back_lsn, :cut))
           WHERE trained_lsn IS NULL OR trained_lsn > :cut""",
    "DELETE FROM group_state WHERE lsn > :cut",
    "DELETE FROM unfinished WHERE lsn > :cut",
    """DELETE FROM lost_trajectory
           WHERE group_uid IN (SELECT group_uid FROM grp WHERE opened_lsn > :cut)""",
    "DELETE FROM grp WHERE opened_lsn > :cut",
    "UPDATE grp SET completed_lsn = NULL, completed_us = NULL WHERE completed_lsn > :cut",
    "UPDATE grp SET lease_worker = NULL, lease_until_us = NULL",
    """UPDATE grp SET (state, reason) = (
               SELECT state, reason FROM group_state s
               WHERE s.group_uid = grp.group_uid ORDER BY seq DESC LIMIT 1)
           WHERE state <> (SELECT state FROM group_state s
                           WHERE s.group_uid = grp.group_uid ORDER BY seq DESC LIMIT 1)""",
    "DELETE FROM version WHERE lsn > :cut",
    "DELETE FROM checkpoint WHERE lsn > :cut",
    "UPDATE checkpoint SET live = 0 WHERE lsn <> :cut",
    "DELETE FROM metric WHERE lsn > :cut",
    "DELETE FROM event WHERE lsn > :cut",
    "DELETE FROM component",
    # The files of the fork are those that its catalog names.
    f"DELETE FROM event WHERE event_id IN (SELECT event_id {FROM_OPEN_EVENTS})",
    """DELETE FROM segment WHERE lsn > :cut
           AND segment_id NOT IN (SELECT segment_id FROM trajectory)
           AND segment_id NOT IN (SELECT segment_id FROM lost_trajectory)""",
    """UPDATE segment SET removed_us = :now_us
           WHERE retired_lsn IS NOT NULL AND removed_us IS NULL""",
    """DELETE FROM duplicate
           WHERE segment_id NOT IN (SELECT segment_id FROM segment WHERE retired_lsn IS NULL)""",
    "UPDATE meta SET run_id = :run_id, horizon_lsn = lsn + 1",
)


def lsn_of(source: RunLayout) -> int:
    """Return the catalog's lsn. Raises FormatError if there is none."""
    with opened_read_only(source) as catalog:
        row = catalog.execute("SELECT lsn FROM meta").fetchone()
    if row is None or not isinstance(row[0], int):
        raise FormatError(
            f"{source.catalog} does not say at which lsn it is; restore it from a backup, "
            f"or gigpo rebuild {source.root}"
        )
    return row[0]


def group_uids(source: RunLayout) -> frozenset[bytes]:
    """Return the uids of all groups of a run, of which a fork has those until its checkpoint."""
    with opened_read_only(source) as catalog:
        return frozenset(row[0] for row in catalog.execute("SELECT group_uid FROM grp"))


def copy_until(source: RunLayout, layout: RunLayout, *, learner_step: int) -> int:
    """Copy the catalog as it was at the checkpoint. Return the checkpoint's version."""
    make_catalog_file(layout)
    with (
        opened_read_only(source) as original,
        closing(sqlite3.connect(layout.catalog, isolation_level=None)) as copy,
    ):
        check_pages(original, source)
        original.backup(copy)
        copy.row_factory = sqlite3.Row
        copy.create_function("now_us", 0, now_us)
        checkpoint = find_checkpoint(source, copy, learner_step=learner_step)
        changed_groups = _cut(copy, checkpoint=checkpoint, run_id=layout.info.run_id)
        copy.executescript(SCHEMA)  # the triggers again
        where = f"of {source.root} at learner step {learner_step}"
        copy.execute("BEGIN IMMEDIATE")
        lsn, epoch = copy.execute("SELECT lsn + 1, epoch FROM meta").fetchone()
        tx = Transaction(copy, run_id=layout.info.run_id, epoch=epoch, lsn=lsn, now_us=now_us())
        _restore_groups(tx, changed_groups, reason=f"fork {where}")
        detail = f"{where}, run {source.info.run_id}, version {checkpoint['version']}"
        tx.log(component="fork", what="forked", detail=detail)
        tx.change_all()
        copy.execute("COMMIT")
    return int(checkpoint["version"])


def _cut(catalog: sqlite3.Connection, *, checkpoint: sqlite3.Row, run_id: str) -> tuple[bytes, ...]:
    """Take the catalog back to the checkpoint, as the run `run_id`. Its triggers are dropped.

    Return the groups that lost trajectories: their sums are not those of their members.
    """
    catalog.execute("BEGIN IMMEDIATE")
    query = "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
    for (trigger,) in catalog.execute(query).fetchall():
        catalog.execute(f"DROP TRIGGER {trigger}")  # they keep a ledger from being cut
    cut, version = checkpoint["lsn"], checkpoint["version"]
    values = {"cut": cut, "version": version, "run_id": run_id, "now_us": now_us()}
    query = f"SELECT DISTINCT group_uid FROM trajectory WHERE {LATER}"
    changed_groups = tuple(row[0] for row in catalog.execute(query, values))
    for statement in CUT:
        catalog.execute(statement, values)
    catalog.execute("COMMIT")
    return changed_groups


def _restore_groups(tx: Transaction, changed: Sequence[bytes], *, reason: str) -> None:
    """Correct the sums of changed groups, and make every claimed group available.

    Groups that were complete at the checkpoint are played again if they lost members since.
    """
    consumed = """SELECT 1 FROM grp WHERE group_uid = :uid AND (state IN ('trained', 'filtered')
        OR split = 'heldout' AND state = 'complete' AND evaluated_version IN (
            SELECT policy_version FROM metric WHERE name = 'heldout/success'))"""
    for group_uid in changed:
        if tx.row(consumed, uid=group_uid):  # it keeps the sums that were taken from it
            recompute_if_full(tx, group_uid)
        else:
            recompute(tx, group_uid)
    tx.run(
        "UPDATE grp SET state = 'complete', reason = :reason WHERE state = 'claimed'",
        reason=reason,
    )
    open_incomplete(tx, why=f"the {reason}")
    # Their weights may be gone, so they are not played again.
    tx.run(
        """UPDATE grp SET state = 'abandoned', reason = 'members were lost before the ' || :reason
           WHERE split = 'heldout' AND state = 'complete' AND n_members <> size""",
        reason=reason,
    )


def find_checkpoint(
    source: RunLayout, catalog: sqlite3.Connection, *, learner_step: int
) -> sqlite3.Row:
    """Return the row of a live checkpoint. Raises StoreError naming those that there are."""
    rows = catalog.execute(
        "SELECT lsn, learner_step, path, version FROM checkpoint WHERE live = 1 ORDER BY lsn"
    ).fetchall()
    there: dict[int, sqlite3.Row] = {}
    for row in rows:
        _check_numbers(source, row, ("lsn", "learner_step", "version"))
        name = checked_name(row["path"], CHECKPOINT_PATH, where=str(source.catalog))
        if has_directory(source, name):
            there[row["learner_step"]] = row
    if learner_step not in there:
        before = max((step for step in there if step < learner_step), default=None)
        nearest = f"; the nearest before it is that of step {before}" if before is not None else ""
        steps = ", ".join(map(str, sorted(there)))
        which = f"there are those of {steps}{nearest}. learner.keep_every keeps more of them"
        if not there:
            which = "it has none; learner.checkpoint_every is the number of steps between two"
        raise StoreError(f"{source.root} has no checkpoint of learner step {learner_step}: {which}")
    row = there[learner_step]
    query = "SELECT lsn FROM version WHERE version = ?"
    published = catalog.execute(query, (row["version"],)).fetchone()
    if published is not None:
        _check_numbers(source, published, ("lsn",))
    if published is None or published["lsn"] > row["lsn"]:
        raise StoreError(
            f"{source.root} was rebuilt after learner step {learner_step}, "
            "and the order of its events is lost; use a later checkpoint"
        )
    return row


def _check_numbers(source: RunLayout, row: sqlite3.Row, columns: Sequence[str]) -> None:
    """Raise FormatError for a cell that a STRICT table would refuse: the file was edited."""
    wrong = [name for name in columns if not isinstance(row[name], int)]
    if wrong:
        raise unreadable(
            source, sqlite3.DatabaseError(f"malformed row: its {wrong[0]} is no whole number")
        )


def unreadable(source: RunLayout, error: sqlite3.Error) -> FormatError:
    """Return the error of a catalog that cannot be read."""
    return FormatError(
        f"{source.catalog} cannot be read ({error}); restore it from a backup, or "
        f"gigpo rebuild {source.root}"
    )
