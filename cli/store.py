"""gigpo fsck, rebuild, compact, export, import and fetch: keep a run whole, and copy it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.arguments import (
    AT_LEAST_1,
    DAYS_ABOVE_ZERO,
    SECONDS,
    Command,
    RunPath,
    as_of_option,
    run_argument,
    where_option,
)
from printable import counted, printable, say
from store import SNAPSHOT_WINDOW_S, StoreError

if TYPE_CHECKING:
    from store import Finding

FINDINGS = 1  # exit status
EXPORT_EPILOG = """\b
Examples:
  gigpo export runs/a won_fast --where "won AND n_steps < 20"
  gigpo export runs/a new_policy --where "state = 'trained' AND version_min >= 10"
  gigpo export runs/a won --where won --groups
  gigpo export runs/a "s3://bucket/name?region=eu-central-1"
"""
FETCH_EPILOG = 'Example: gigpo fetch "s3://bucket/run?region=eu-central-1" runs/copy'


@click.command(cls=Command, epilog="Example: gigpo fsck runs/a --repair")
@run_argument
@click.option("--quick", is_flag=True, help="Check the catalog and file sizes, not the contents.")
@click.option("--repair", is_flag=True, help="Repair the run, which nobody else may be writing.")
@click.option(
    "--format",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="json writes one object a line.",
)
def fsck(*, run: Path, quick: bool, repair: bool, format: str) -> int:
    """Check whether a run is whole, or repair it.

    The catalog is checked against itself, every file against the catalog, and every row against its
    page's checksum, its trajectory and its state hash. The run may be training meanwhile. Exit
    status: 0 whole (leftovers are warnings), 1 errors found, 2 the run could not be checked.

    --repair moves damaged files to quarantine/ and deletes none. Groups that lose trajectories and
    are still to be trained on are played again. Groups that were trained on stay in the lineage.
    """
    from store import check_run, move_open_sql, needs_rebuild, needs_repair, repair_run

    findings = check_run(run, quick=quick)
    if repair and move_open_sql(run):
        _show_repair(f"open.sql names {run}, where the run is now", form=format)
    if repair and needs_repair(findings):
        _show_findings(findings, form=format)
        if needs_rebuild(findings):  # the remedy of the finding says so
            return FINDINGS
        for line in repair_run(run, quick=quick):
            _show_repair(line, form=format)
        findings = check_run(run, quick=quick)
    _show_findings(findings, form=format)
    n_errors = sum(finding.severity == "error" for finding in findings)
    if format == "table":
        state = counted(n_errors, "error") if n_errors else "whole"
        say(f"{run}: {state}, {counted(len(findings) - n_errors, 'warning')}")
    return FINDINGS if n_errors else 0


def _show_repair(line: str, *, form: str) -> None:
    print(json.dumps({"repaired": line}) if form == "json" else printable(f"repaired  {line}"))


def _show_findings(findings: Sequence[Finding], *, form: str) -> None:
    for finding in findings:
        if form == "json":
            print(json.dumps(dataclasses.asdict(finding)))
        else:
            about = f"{finding.severity:<9} {finding.what}: {finding.subject}: {finding.detail}"
            say(f"{about}; {finding.remedy}")


@click.command(cls=Command, epilog="Example: gigpo rebuild runs/a")
@run_argument
@click.option("--force", is_flag=True, help="Rebuild although the catalog can be read.")
def rebuild(run: Path, force: bool) -> None:
    """Make a lost catalog or run.json anew.

    Begins with the newest sound backup of the catalog, and adds the segment files that are newer.
    Shows what was recovered and what could not be. The old catalog and unusable files are moved to
    quarantine/; nothing is deleted.
    """
    from store import rebuild_run

    rebuild_run(run, force=force, say=say)


@click.command(cls=Command, epilog="Example: gigpo compact runs/a --keep-versions 50")
@run_argument
@click.option(
    "--keep-days",
    type=DAYS_ABOVE_ZERO,
    metavar="D",
    help="Drop consumed trajectories that are older (default: keep all).",
)
@click.option(
    "--keep-versions",
    type=AT_LEAST_1,
    metavar="N",
    help="Drop consumed trajectories of none of the newest N policy versions (default: keep all).",
)
@click.option(
    "--snapshot-window",
    type=SECONDS,
    metavar="S",
    default=SNAPSHOT_WINDOW_S,
    show_default=True,
    help="Keep replaced files for so many seconds, for readers that were told of them.",
)
def compact(
    *, run: Path, keep_days: float | None, keep_versions: int | None, snapshot_window: float
) -> None:
    """Merge small files, and remove files that nobody needs.

    A training run does this by itself. Replaced files stay for the snapshot window: call it again
    later, or give --snapshot-window 0 where nobody reads.
    """
    from store import compact_run

    done = compact_run(
        run,
        keep_days=keep_days,
        keep_versions=keep_versions,
        snapshot_window_s=snapshot_window,
    )
    say(f"live files    {done.n_files[0]} -> {done.n_files[1]}")
    say(f"live bytes    {done.n_bytes[0]:,} -> {done.n_bytes[1]:,}")
    say(f"expired files {done.n_expired}")
    say(f"removed files {done.n_removed}")
    for path in done.left_out:
        say(f"left out: damaged (see the events view), or too large: {path}")
    for path in done.foreign:
        say(f"not ours, left alone: {path}")


@click.command(cls=Command, epilog=EXPORT_EPILOG)
@run_argument
@click.argument("destination", metavar="DIR")
@where_option
@click.option("--groups", is_flag=True, help="Export all trajectories of the groups selected.")
@click.option("--text-uids", is_flag=True, help="Write uids as text, for other programs only.")
@as_of_option
def export(
    *,
    run: Path,
    destination: str,
    where: str | None,
    groups: bool,
    text_uids: bool,
    as_of: int | None,
) -> None:
    """Write trajectories of a run as plain Parquet files.

    DIR is a new directory or a URI; dataset.json in it has the digests of the files. The condition
    is SQL on the columns of the view `trajectories`, and of `groups` where the names differ. Only
    whole groups can be trained on (--groups, then gigpo train CONFIG source=DIR).
    """
    import pyarrow as pa

    from store import FormatError, export_selection

    try:
        dataset = export_selection(
            run, destination, where=where, as_of=as_of, whole_groups=groups, text_uids=text_uids
        )
    except (TypeError, ValueError, pa.ArrowException) as error:  # views that the store did not make
        raise FormatError(
            f"the views of {run} hold what no run has ({error}); gigpo fsck --repair {run}"
        ) from error
    n_bytes = sum(part.n_bytes for part in dataset.parts)
    say(
        f"{dataset.n_trajectories:,} trajectories of {len(dataset.groups):,} groups, "
        f"{dataset.n_steps:,} steps: {counted(len(dataset.parts), 'file')}, {n_bytes:,} bytes in "
        f"{destination}"
    )
    n_missing = sum(dataset.groups.values()) - dataset.n_trajectories
    if n_missing:
        why = "they were never played" if groups else "--groups exports whole groups"
        say(
            f"{n_missing:,} more trajectories of these groups are not in it, and only whole "
            f"groups can be trained on; {why}"
        )


@click.command("import", cls=Command, epilog="Example: gigpo import runs/b dataset")
@run_argument
@click.argument("source", type=RunPath(path_type=str), metavar="DIR")
def import_(run: Path, source: str) -> None:
    """Take exported trajectories into a run, to be read with SQL.

    DIR is a directory that `gigpo export` wrote. Nobody else may be writing the run. Imported
    trajectories keep their uids; they are never played, trained on or counted as outstanding.
    Trajectories that the run has stay as they are.
    """
    from store import import_selection, limited_memory

    with limited_memory([Path(source)]):  # also of a URI, which no argument's type counts
        report = import_selection(run, source)
    say(
        f"{report.n_trajectories:,} trajectories, {report.n_steps:,} steps are new; "
        f"{report.n_known:,} were known"
    )


@click.command(cls=Command, epilog=FETCH_EPILOG)
@click.argument("uri", metavar="URI")
@click.argument("destination", metavar="DIR", type=RunPath(path_type=Path))
def fetch(uri: str, destination: Path) -> None:
    """Copy a run from an object store, for reading.

    URI is the run's store.uri. DIR is a new directory or an earlier copy, which then catches up.
    Only you may enter a new one, as the run's settings may hold a secret.
    DuckDB's open.sql, the Python reader and `gigpo sql` work on the copy. Credentials come from the
    environment.
    """
    from store import fetch_run, read_manifest

    layout = fetch_run(uri, destination)
    manifest = read_manifest(layout)
    if manifest is None:
        raise StoreError(f"{destination} was removed while the run was fetched; fetch it again")
    say(
        f"run {layout.info.run_id} as of lsn {manifest.lsn}: {len(manifest.segments) - 1} "
        f"segments in {layout.root}"
    )
