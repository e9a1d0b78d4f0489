"""List everything that fsck can find: one table of code, severity, meaning and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]

REBUILD = "gigpo rebuild {root}, or put a backup back"
PUT_RIGHT_CATALOG = "put the right catalog back, or gigpo rebuild {root}"
REBUILD_FORCE = "gigpo rebuild --force {root}, or put a backup of catalog.sqlite back"
REBUILD_LOG = "gigpo rebuild --force {root}, which finds in the segments what was committed"
PUT_BACKUP_BACK = "put a backup of catalog.sqlite back, or gigpo rebuild --force {root}"
PUT_NEWEST_CATALOG = "put the newest catalog back, or gigpo rebuild --force {root}"
REPAIR = "gigpo fsck --repair {root}"
RESTORE = "restore it from a backup, or gigpo fsck --repair {root}"
SWEPT = "the running job or `gigpo compact` sweeps it"
BACKUP = "the next checkpoint makes another, or gigpo fsck --repair {root}"
RETRY = "make it readable, then check again; --repair leaves it alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One deviation. Errors break a guarantee of the store; warnings are harmless leftovers."""

    severity: Severity
    what: str  # a code of CODES
    subject: str  # a path relative to the run's root, or a row, e.g. "group 6f1c..."
    detail: str
    remedy: str  # with {root} for the run directory, until `fsck.check` puts it in


# code: (severity, meaning, remedy)
CODES: Mapping[str, tuple[Severity, str, str]] = {
    # The catalog as a file. Without it nothing else can be judged.
    "catalog_missing": ("error", "there is no catalog.sqlite", REBUILD),
    "catalog_damaged": ("error", "catalog.sqlite is no whole SQLite file", REBUILD),
    "catalog_foreign": ("error", "the catalog of another run", PUT_RIGHT_CATALOG),
    "catalog_schema": ("error", "a schema that this code never makes", REBUILD_FORCE),
    "log_damaged": ("warning", "commits in the catalog's log were not read", REBUILD_LOG),
    # Rows of the catalog that contradict each other.
    "foreign_key": ("error", "a row refers to one that does not exist", REBUILD_FORCE),
    "segment_name": ("error", "a segment whose path is another file's", REBUILD_FORCE),
    "epoch": ("error", "a row of a later epoch than the catalog's", REBUILD_FORCE),
    "counter": ("error", "a counter is at a number that no run counts to", REBUILD_FORCE),
    "group_sums": ("error", "a group's sums are not those of its trajectories", REPAIR),
    "group_not_whole": (
        "error", "a group's state does not fit its number of members", REBUILD_FORCE
    ),
    "group_batch": ("error", "a group's state does not fit its batch", REBUILD_FORCE),
    "doubly_claimed": ("error", "a group counts in two batches", REBUILD_FORCE),
    "replayed_group": (
        "error", "a batch replays wins of a group that is not trained", REBUILD_FORCE
    ),
    "batch_step": ("error", "a batch's state does not fit its learner step", REBUILD_FORCE),
    "ledger": ("error", "a group's state is not its newest line in the ledger", REBUILD_FORCE),
    "drawn_by": ("error", "a weight is not of the moment its group was opened", REBUILD_FORCE),
    "success_before": ("error", "a task's success before a draw is not its result", REBUILD_FORCE),
    "critic_value": ("error", "a critic's values are not those of a batch's steps", REBUILD_FORCE),
    "unknown_version": ("error", "a trained version was never published", REBUILD_FORCE),
    "future_lsn": ("error", "a row is later than the catalog", REBUILD_FORCE),
    # Segment files against the catalog.
    "segment_missing": ("error", "a live file is gone", RESTORE),
    "segment_damaged": ("error", "a live file is not as committed", RESTORE),
    "segment_unavailable": ("error", "a file cannot be reached now", RETRY),
    "segment_unreadable": ("error", "a file is as committed and no segment", RESTORE),
    "segment_foreign": ("error", "a file was written for another run", RESTORE),
    "segment_row": ("error", "a file is whole and its row is wrong", REPAIR),
    "segment_returned": ("error", "a file that was set aside is there again", REPAIR),
    "step_index": ("error", "rows of a trajectory are not its steps 0..n-1", RESTORE),
    "episode_steps": ("error", "a trajectory lacks rows", RESTORE),
    "state_hash": ("error", "a state hash is not that of its text", RESTORE),
    "missing_rows": ("error", "a trajectory is counted and has no row", RESTORE),
    "uncounted_rows": ("error", "a trajectory has rows and is not counted", RESTORE),
    "figures": ("error", "the catalog and the rows differ in figures", REBUILD_FORCE),
    "retired_missing": ("warning", "a retired file is gone; older snapshots miss it", RESTORE),
    "retired_damaged": ("warning", "a retired file is not as committed", RESTORE),
    "orphan": ("warning", "a file was never committed", SWEPT),
    "unknown_file": ("warning", "no part of the store writes such a file", "move it elsewhere"),
    "unfinished": ("warning", "a writer did not finish this file", SWEPT),
    # The manifest and the tables that outside readers see.
    "manifest_missing": ("error", "open.sql has nothing to read", REPAIR),
    "manifest_damaged": ("error", "the manifest cannot be read", REPAIR),
    "manifest_foreign": ("error", "the manifest of another run", REPAIR),
    "manifest_segment": ("error", "the manifest names a file that is gone", REPAIR),
    "manifest_ahead": ("error", "readers saw more than this older catalog has", PUT_NEWEST_CATALOG),
    "open_sql_missing": ("error", "open.sql is gone or not whole", REPAIR),
    "open_sql_changed": ("warning", "the views of open.sql are not those of this code", REPAIR),
    "backup_damaged": ("error", "no rebuild can begin with the backup", BACKUP),
    "backup_unavailable": ("error", "the backup cannot be reached now", RETRY),
    "export_missing": ("error", "an exported table is gone", REPAIR),
    "export_damaged": ("error", "an exported table is not as written", REPAIR),
    "export_unavailable": ("error", "an exported table cannot be reached now", RETRY),
    "exported_row": ("error", "the catalog and an exported table differ in a row", PUT_BACKUP_BACK),
}  # fmt: skip


def found(what: str, subject: str, detail: str, *, remedy: str | None = None) -> Finding:
    """Make a finding. `remedy` replaces the one of the table where a case needs another."""
    severity, _, usual = CODES[what]
    return Finding(
        severity=severity, what=what, subject=subject, detail=detail, remedy=remedy or usual
    )
