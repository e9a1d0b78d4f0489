"""Check what outside readers see: the manifest, open.sql, the exported tables and their rows.

The exported tables are a second copy of the catalog's rows. A row that did not change since the
export is the same in both. Where they differ, one of them was changed behind the store's back.
Nobody can tell which, so neither is mended by itself.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator

import duckdb
import pyarrow as pa

from printable import REASON_CHARACTERS, one_line
from store.catalog.segment_states import NEEDED
from store.catalog.snapshot import EXPORTS, arrow_table, touched_name
from store.clock import NANOSECONDS_PER_US, US_PER_S, now_us
from store.errors import FormatError, StoreError, UnavailableError, UnsafePathError
from store.layout import RunLayout
from store.maintenance.finding import REPAIR, Finding, found
from store.maintenance.fsck_catalog import open_catalog
from store.maintenance.fsck_segments import GRACE_S
from store.maintenance.sweep import unfinished_writes
from store.reading import open_sql
from store.reading.manifest import Manifest, read_manifest
from store.reading.open_sql import sql_identifier
from store.records import uid_text
from store.shown_lsn import shown_lsn
from store.untrusted.bounded_parquet import open_parquet, read_table
from store.untrusted.file_access import is_file, status

# Columns that name a row of a table in which a row that changed later is in two parts.
KEYS = {
    "groups": ("group_uid",),
    "lineage": ("batch_id", "group_uid"),
    "metrics": ("learner_step", "policy_version", "name", "lsn"),
}
SHOWN = 5  # rows of one table that are named
NO_HISTORY = frozenset({"component"})  # heartbeats, of the last second
# Columns that come from another table, where a row may change later; they are compared there.
BORROWED = {"lineage": ("task_id", "staleness", "source"), "unfinished": ("split", "task_id")}
# Columns that name a row for people, of tables whose key is the whole row.
NAMES = {
    "critic": ("batch_id", "traj_uid"),
    "versions": ("version",),
    "checkpoints": ("learner_step",),
    "ledger": ("group_uid",),
    "unfinished": ("group_uid",),
}


def check_manifest(layout: RunLayout, *, contents: bool) -> list[Finding]:
    """Check the manifest against the catalog, and the files it names.

    The manifest is read first: the catalog can only be ahead of it.
    """
    name = layout.relative(layout.manifest)
    seen = status(layout.manifest, root=layout.root)
    if seen is None:
        # nothing was ever shown of this run
        if not is_file(layout.open_sql, root=layout.root) and not _has_begun(layout):
            return []
        missing = found("manifest_missing", name, "open.sql has nothing to read")
        return [missing, *_check_open_sql(layout)]
    try:
        manifest = read_manifest(layout)
    except (FormatError, UnsafePathError, IsADirectoryError) as unreadable:
        # No owner opens a run with a link, so nothing can be written behind it.
        remedy = f"remove it, then: {REPAIR}" if stat.S_ISLNK(seen.st_mode) else None
        damaged = found("manifest_damaged", name, str(unreadable), remedy=remedy)
        return [damaged, *_check_open_sql(layout)]
    if manifest is None:  # removed since
        return []
    if manifest.run_id != layout.info.run_id:
        return [found("manifest_foreign", name, f"it is of run {manifest.run_id}")]
    try:
        newest_shown = shown_lsn(layout)
    except UnavailableError as unavailable:
        return [found("export_unavailable", name, str(unavailable))]
    with open_catalog(layout) as connection:
        lsn = connection.execute("SELECT lsn FROM meta").fetchone()[0]
        rows = connection.execute(
            f"SELECT path, retired_lsn FROM segment WHERE {NEEDED}"
        ).fetchall()
    if newest_shown > lsn:
        detail = f"readers were shown lsn {newest_shown}, the catalog is at {lsn}"
        return [found("manifest_ahead", name, detail)]
    # check_segments finds a live file that is gone. A retired one may have been swept.
    shown = {*manifest.segments}
    named = [(path, retired) for path, retired in rows if path in shown]
    known = {path for path, retired in named if retired is None or layout.storage.exists(path)}
    gone = [path for path in manifest.segments[1:] if path not in known]
    detail = "the manifest names it, there is no such file"
    findings = [found("manifest_segment", path, detail) for path in gone]
    return findings + _check_open_sql(layout) + _check_parts(layout, manifest, contents=contents)


def _has_begun(layout: RunLayout) -> bool:
    """Return whether the run has a segment. An owner of one without may not have got further."""
    with open_catalog(layout) as connection:
        return connection.execute("SELECT 1 FROM segment").fetchone() is not None


def _check_open_sql(layout: RunLayout) -> list[Finding]:
    if not _has_begun(layout):
        return []
    if not open_sql.is_complete(layout):
        what, detail = "open_sql_missing", "it is not there, or not whole: there are no views"
    elif not open_sql.is_unchanged(layout):
        what, detail = "open_sql_changed", "older code wrote its views, or they were changed"
    else:
        return []
    return [found(what, layout.open_sql.name, detail)]


def check_unfinished(layout: RunLayout) -> list[Finding]:
    """Find files that dead writers did not finish."""
    oldest_ns = (now_us() - GRACE_S * US_PER_S) * NANOSECONDS_PER_US
    old = [path for path, seen in unfinished_writes(layout) if seen.st_mtime_ns < oldest_ns]
    return [found("unfinished", path, "its writer did not finish it") for path in sorted(old)]


def _check_parts(layout: RunLayout, manifest: Manifest, *, contents: bool) -> list[Finding]:
    listed = {file.path for file in layout.storage.files(layout.relative(layout.exports))}
    parts = [part for parts in manifest.tables.values() for part in parts]
    expected = {manifest.segments[0]: 0} | {part.path: part.n_rows for part in parts}
    findings = []
    for path, n_rows in expected.items():
        if path not in listed:
            findings.append(found("export_missing", path, "the manifest names it"))
        elif contents:
            findings += _check_part(layout, path, n_rows=n_rows)
    return findings


def _check_part(layout: RunLayout, path: str, *, n_rows: int) -> list[Finding]:
    """Check that an exported file can be read, and has the rows that the manifest says."""
    try:
        held = read_part(layout, path).num_rows
    except UnavailableError as unavailable:
        return [found("export_unavailable", path, str(unavailable))]
    except (pa.ArrowException, OSError, StoreError) as unreadable:
        detail = f"it cannot be read: {one_line(unreadable)}"
        return [found("export_damaged", path, detail)]
    if held != n_rows:
        return [found("export_damaged", path, f"it has {held} rows instead of {n_rows}")]
    return []


def read_part(layout: RunLayout, path: str) -> pa.Table:
    """Read one exported file and check its pages. Raises StoreError and Arrow's errors."""
    data = layout.storage.read(path)
    source = pa.BufferReader(data)
    file = open_parquet(source, n_bytes=data.size, name=path, verify=True)
    return read_table(file, source, n_bytes=data.size, name=path, columns=None)


def check_exported_rows(layout: RunLayout) -> list[Finding]:
    """Compare the catalog's rows with the exported ones. Meant for a run without other errors."""
    manifest = read_manifest(layout)
    if manifest is None:
        return []
    findings: list[Finding] = []
    with duckdb.connect() as views:
        for name in EXPORTS.keys() - NO_HISTORY:
            if name in manifest.tables:
                findings += _check_table(views, layout, manifest=manifest, name=name)
    return sorted(findings, key=lambda finding: finding.subject)


def _check_table(
    views: duckdb.DuckDBPyConnection, layout: RunLayout, *, manifest: Manifest, name: str
) -> Iterator[Finding]:
    """Compare one exported table with the catalog."""
    export = EXPORTS[name]
    shown = _shown_rows(layout, manifest, name=name)
    if isinstance(shown, Finding):
        yield shown
        return
    with open_catalog(layout) as connection:
        query = "SELECT (SELECT lsn FROM meta), (SELECT lsn FROM changed WHERE name = ?)"
        newest, changed = connection.execute(query, (touched_name(name),)).fetchone()
        rows = connection.execute(export.query, {"since": 0, "until": newest}).fetchall()
    if not export.in_parts and (changed or 0) > manifest.lsn:
        return  # rows of this table do not say when they changed
    views.register("here", arrow_table(export, rows))
    views.register("shown", shown)
    yield from _differences(views, name=name, lsn=manifest.lsn)


def _shown_rows(layout: RunLayout, manifest: Manifest, *, name: str) -> pa.Table | Finding:
    """Return the rows of a table that readers were shown, or the finding of a damaged part."""
    parts = []
    for part in manifest.tables[name]:
        try:
            parts.append(read_part(layout, part.path).cast(EXPORTS[name].schema))
        except MemoryError:  # Arrow's own is one of its exceptions, and says nothing about the file
            raise
        except (ValueError, pa.ArrowException) as problem:  # other columns, or unfit values
            why = one_line(problem)[:REASON_CHARACTERS]
            detail = f"it has other columns than an export of {name} ({why})"
            return found("export_damaged", part.path, detail)
    return pa.concat_tables(parts)


def _differences(views: duckdb.DuckDBPyConnection, *, name: str, lsn: int) -> Iterator[Finding]:
    """Compare the tables `here`, of the catalog, and `shown`, as of `lsn`, row by row."""
    export = EXPORTS[name]
    columns = [column for column in export.schema.names if column not in BORROWED.get(name, ())]
    names = _listed(columns)
    lsn_column = next((column for column in ("changed_lsn", "lsn") if column in columns), None)
    since = "" if lsn_column is None else f"WHERE {lsn_column} <= {int(lsn)}"
    differing = f"(SELECT {names} FROM here {since} EXCEPT SELECT {names} FROM shown)"
    if name in KEYS:  # of a row that changed since, the key is still there
        keys = _listed(KEYS[name])
        gone = f"(SELECT {keys} FROM shown EXCEPT SELECT {keys} FROM here)"
    else:
        keys = _listed(NAMES.get(name, columns))
        gone = f"(SELECT {names} FROM shown EXCEPT SELECT {names} FROM here)"
    for query, detail in (
        (differing, "the catalog has a row that is not the one that readers were shown"),
        (gone, "readers were shown a row that the catalog does not have"),
    ):
        lines = views.sql(f"SELECT DISTINCT {keys} FROM {query} ORDER BY ALL").fetchall()
        for line in lines[:SHOWN]:
            yield found("exported_row", f"{name} {' '.join(map(_text, line))}", detail)
        if len(lines) > SHOWN:
            detail = f"the same of {len(lines) - SHOWN} other rows"
            yield found("exported_row", f"{name} (others)", detail)


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(map(sql_identifier, columns))


def _text(value: object) -> str:
    text = uid_text(value) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 100 else f"{text[:99]}…"
