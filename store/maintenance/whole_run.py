"""Check, repair, compact and rebuild one whole run. The `gigpo` commands call these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from store.catalog.catalog import Catalog
from store.clock import now_us
from store.errors import StoreError
from store.layout import RunLayout
from store.maintenance.compact import COMPACTION_POLICY, merges
from store.maintenance.finding import Finding
from store.maintenance.fsck import CATALOG, CONTENTS, FATAL, NAMES, check
from store.maintenance.rebuild import rebuild
from store.maintenance.rebuild_run_json import is_lost, rebuild_run_json
from store.maintenance.repair import REPAIRED_WARNINGS, repair
from store.maintenance.sweep import expire_old, sweep_orphans, sweep_retired
from store.reading import open_sql
from store.reading.manifest import export
from store.untrusted.trust import check_own_run


def check_run(run: Path, *, quick: bool) -> list[Finding]:
    """Return what is wrong with a run. `quick` looks at names and sizes, not into the files."""
    return check(RunLayout.open(run), level=NAMES if quick else CONTENTS)


def move_open_sql(run: Path) -> bool:
    """Write the run's present directory into its open.sql; return whether it named another one."""
    layout = RunLayout.open(run)
    check_own_run(layout.root)
    return open_sql.move(layout)


def needs_repair(findings: Sequence[Finding]) -> bool:
    """Return whether `repair_run` would change something."""
    return any(
        finding.severity == "error" or finding.what in REPAIRED_WARNINGS for finding in findings
    )


def needs_rebuild(findings: Sequence[Finding]) -> bool:
    """Return whether the catalog itself is damaged, so that only `rebuild_run` helps."""
    return any(finding.what.startswith("catalog") for finding in findings)


def repair_run(run: Path, *, quick: bool) -> list[str]:
    """Repair the run, which nobody else may be writing. Return a line for each repair."""
    layout = RunLayout.open(run)
    with Catalog.open(layout) as catalog:
        return repair(catalog, layout, findings=check_run(run, quick=quick))


@dataclass(frozen=True, kw_only=True, slots=True)
class Compacted:
    """Changes that `compact_run` made."""

    n_files: tuple[int, int]  # live segments before and after
    n_bytes: tuple[int, int]
    n_expired: int  # files whose trajectories were dropped
    n_removed: int
    left_out: Sequence[str]  # damaged, or too large to be merged
    foreign: Sequence[str]  # files that no run has made


def compact_run(
    run: Path, *, keep_days: float | None, keep_versions: int | None, snapshot_window_s: float
) -> Compacted:
    """Merge small segments, drop old trajectories if asked, and remove files that nobody needs."""
    layout = RunLayout.open(run)
    with Catalog.open(layout) as catalog:
        opened_us, before = now_us(), catalog.live_segments()
        expired = expire_old(catalog, layout, keep_days=keep_days, keep_versions=keep_versions)
        left_out: set[str] = set()
        for merge in merges(catalog, layout, policy=COMPACTION_POLICY, skip=()):
            left_out.update(merge.left_out)
        # only what neither the manifest nor the backup shows any longer may be removed
        export(catalog, layout)
        if layout.info.storage_uri is not None:
            catalog.back_up()
        removed = sweep_retired(catalog, layout, window_s=snapshot_window_s)
        look = sweep_orphans(catalog, layout, opened_us=opened_us, before=None)
        export(catalog, layout)
        after = catalog.live_segments()
    return Compacted(
        n_files=(len(before), len(after)),
        n_bytes=(sum(file.n_bytes for file in before), sum(file.n_bytes for file in after)),
        n_expired=len(expired),
        n_removed=len(removed),
        left_out=sorted(left_out),
        foreign=look.foreign,
    )


def rebuild_run(run: Path, *, force: bool, say: Callable[[str], None]) -> None:
    """Make a lost run.json and a lost catalog anew, and say what was recovered and what was not.

    Raises StoreError if the catalog can be read, unless `force`.
    """
    run_json = rebuild_run_json(run) if is_lost(run) else []
    for line in run_json:
        say(f"recovered  {line}")
    layout = RunLayout.open(run)
    of_catalog = [] if force else [finding.what for finding in check(layout, level=CATALOG)]
    if not force and FATAL.isdisjoint(of_catalog):
        if run_json:  # only run.json was lost
            return
        raise StoreError(
            f"{layout.catalog} can be read; a rebuild would lose what is newer than its backup "
            "(--force does it anyway)"
        )
    report = rebuild(layout)
    for line in report.recovered:
        say(f"recovered  {line}")
    for line in report.lost:
        say(f"lost       {line}")
