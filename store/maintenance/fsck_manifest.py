"""fsck of what outside readers read: the manifest, and the exported tables it names."""

from __future__ import annotations

import re
import stat

import pyarrow as pa

from store.clock import NANOSECONDS_PER_US, US_PER_S, now_us
from store.errors import FormatError, StoreError, UnavailableError, UnsafePathError
from store.layout import RunLayout
from store.maintenance.finding import Finding, error, warning
from store.maintenance.fsck_segments import AGAIN, GRACE_S, Opener
from store.maintenance.sweep import unfinished_writes
from store.reading import open_sql
from store.reading.exported import read_part
from store.reading.manifest import Manifest, read_manifest
from store.untrusted.file_access import MAX_MANIFEST_BYTES, is_file, read_bytes, status

NAMED_FILE = re.compile(r'([^"/]+\.parquet)"')
CODES = frozenset(
    {"manifest_missing", "manifest_damaged", "manifest_foreign", "manifest_segment"}
    | {"export_missing", "export_damaged"}
)


def check_manifest(catalog: Opener, layout: RunLayout, *, contents: bool) -> list[Finding]:
    """The manifest against the catalog, and its files. It is read first: the catalog can only be
    ahead of it.
    """
    repair = f"gigpo fsck --repair {layout.root}"
    name = layout.relative(layout.manifest)
    seen = status(layout.manifest, root=layout.root)
    if seen is None:
        # nothing was ever shown of this run
        if not is_file(layout.open_sql, root=layout.root) and not _has_begun(catalog):
            return []
        missing = error("manifest_missing", name, "open.sql has nothing to read", remedy=repair)
        return [missing, *_check_open_sql(catalog, layout, remedy=repair)]
    try:
        manifest = read_manifest(layout)
    except FormatError as unreadable:
        return [error("manifest_damaged", name, str(unreadable), remedy=repair)]
    except (UnsafePathError, IsADirectoryError) as unsafe:
        # No owner opens a run with a link, so that nothing is written behind it.
        remedy = f"remove it, then: {repair}" if stat.S_ISLNK(seen.st_mode) else repair
        return [error("manifest_damaged", name, str(unsafe), remedy=remedy)]
    if manifest is None:  # of an older format: the next owner replaces it
        gone = _gone(layout)
        detail = f"it is of an older format, and {len(gone)} of its files are gone, e.g. {min(gone, default='')}"
        return [error("manifest_damaged", name, detail, remedy=repair)] if gone else []
    if manifest.run_id != layout.info.run_id:
        return [error("manifest_foreign", name, f"it is of run {manifest.run_id}", remedy=repair)]
    with catalog() as connection:
        lsn = connection.execute("SELECT lsn FROM meta").fetchone()[0]
        rows = connection.execute(
            "SELECT path, retired_lsn FROM segment WHERE removed_us IS NULL"
        ).fetchall()
    # A live file that is gone is check_segments' business; one that was retired may have been
    # swept.
    shown = set(manifest.segments)
    known = {
        path
        for path, retired in rows
        if path in shown and (retired is None or layout.storage.exists(path))
    }
    if manifest.lsn > lsn:
        detail = (
            f"it shows lsn {manifest.lsn}, the catalog is at {lsn}: an older catalog was put back"
        )
        newest = f"put the newest catalog back, or: gigpo rebuild --force {layout.root}"
        return [error("manifest_ahead", name, detail, remedy=newest)]
    found = [
        error(
            "manifest_segment", path, "the manifest names it, there is no such file", remedy=repair
        )
        for path in manifest.segments[1:]
        if path not in known
    ]
    found += _check_open_sql(catalog, layout, remedy=repair)
    return found + _check_exports(layout, manifest, contents=contents)


def _has_begun(catalog: Opener) -> bool:
    """Else a start that did not get further; the next one writes what is not there."""
    with catalog() as connection:
        return connection.execute("SELECT 1 FROM segment").fetchone() is not None


def _check_open_sql(catalog: Opener, layout: RunLayout, *, remedy: str) -> list[Finding]:
    if not _has_begun(catalog):
        return []
    if open_sql.is_whole(layout):
        if open_sql.is_unchanged(layout):
            return []
        detail = "its views are not those of this code: older code wrote them, or they were changed"
        return [warning("open_sql_changed", layout.open_sql.name, detail, remedy=remedy)]
    return [
        error(
            "open_sql_missing",
            layout.open_sql.name,
            "it is not there, or not whole: there are no views",
            remedy=remedy,
        )
    ]


def _gone(layout: RunLayout) -> set[str]:
    """Files that a manifest of an older format names, whatever its fields are called, and that are
    not there.
    """
    data = read_bytes(layout.manifest, root=layout.root, at_most=MAX_MANIFEST_BYTES)
    named = set(NAMED_FILE.findall(data.decode(errors="replace")))
    there = {
        file.path.rpartition("/")[2]
        for place in (layout.segments, layout.exports)
        for file in layout.storage.files(layout.relative(place))
    }
    return named - there


def check_unfinished(layout: RunLayout) -> list[Finding]:
    """What dead writers left beside the files they did not finish."""
    oldest_ns = (now_us() - GRACE_S * US_PER_S) * NANOSECONDS_PER_US
    remedy = "the running job or `gigpo compact` sweeps it"
    found = []
    for path, seen in sorted(unfinished_writes(layout), key=lambda one: one[0]):
        if seen.st_mtime_ns < oldest_ns:
            found.append(warning("unfinished", path, "its writer did not finish it", remedy=remedy))
    return found


def _check_exports(layout: RunLayout, manifest: Manifest, *, contents: bool) -> list[Finding]:
    remedy = f"gigpo fsck --repair {layout.root}"
    listed = {file.path for file in layout.storage.files(layout.relative(layout.exports))}
    expected = {manifest.segments[0]: 0} | {
        part.path: part.n_rows for parts in manifest.tables.values() for part in parts
    }
    found = []
    for path, n_rows in expected.items():
        if path not in listed:
            found.append(error("export_missing", path, "the manifest names it", remedy=remedy))
        elif contents:
            try:
                held = read_part(layout, path).num_rows
            except UnavailableError as unavailable:
                found.append(error("export_unavailable", path, str(unavailable), remedy=AGAIN))
                continue
            except (pa.ArrowException, OSError, StoreError) as unreadable:
                detail = f"it cannot be read: {' '.join(str(unreadable).split())}"
                found.append(error("export_damaged", path, detail, remedy=remedy))
                continue
            if held != n_rows:
                found.append(
                    error(
                        "export_damaged",
                        path,
                        f"it has {held} rows instead of {n_rows}",
                        remedy=remedy,
                    )
                )
    return found
