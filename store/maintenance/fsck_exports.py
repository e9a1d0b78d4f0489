"""fsck, level 3: whether the catalog says what readers were shown. The exported tables are a second
copy of its rows.

A row that did not change since the export is the same in both. Where they differ, one of them was
changed behind the store's back: nobody can tell which, so neither is mended by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import duckdb
import pyarrow as pa

from store.catalog.snapshot import EXPORTS, arrow_table, export_trigger
from store.layout import FORMAT_VERSION, RunLayout
from store.maintenance.finding import Finding, error
from store.maintenance.fsck_segments import Opener
from store.reading.exported import KEYS, read_part
from store.reading.manifest import Manifest, read_manifest
from store.reading.open_sql import sql_identifier
from store.records import uid_text

SHOWN_CHARACTERS = 200  # of a message of Arrow, which lists all columns
SHOWN = 5  # rows of one table that are named
NO_HISTORY = frozenset({"component"})  # heartbeats, of the last second
# Columns that are taken from another table, where a row may change later; they are compared there.
BORROWED = {"lineage": ("task_id", "staleness", "source"), "unfinished": ("split", "task_id")}
# What names a row for people, of tables whose key in the exports is all of it.
NAMES = {
    "versions": ("version",),
    "checkpoints": ("learner_step",),
    "ledger": ("group_uid",),
    "unfinished": ("group_uid",),
}


def check_exported(catalog: Opener, layout: RunLayout) -> list[Finding]:
    """Compare the catalog's rows with those of the exported tables. To be asked where fsck found no
    other error.
    """
    manifest = read_manifest(layout)
    # the next owner exports everything anew
    if manifest is None or manifest.format_version != FORMAT_VERSION:
        return []
    found = []
    with duckdb.connect() as views:
        for name in EXPORTS.keys() - NO_HISTORY:
            if name in manifest.tables:
                found += list(_check_table(views, catalog, layout, manifest, name=name))
    return sorted(found, key=lambda finding: finding.subject)


def _check_table(
    views: duckdb.DuckDBPyConnection,
    catalog: Opener,
    layout: RunLayout,
    manifest: Manifest,
    *,
    name: str,
) -> Iterator[Finding]:
    export = EXPORTS[name]
    parts = []
    for part in manifest.tables[name]:
        try:
            table = read_part(layout, part.path)
            parts.append(table.cast(export.schema))
        # other columns, or values that do not fit them
        except (ValueError, pa.ArrowException) as problem:
            detail = f"it has other columns than an export of {name} ({' '.join(str(problem).split())[:SHOWN_CHARACTERS]})"
            yield error(
                "export_damaged",
                part.path,
                detail,
                remedy=f"gigpo fsck --repair {layout.root}",
            )
            return
    shown = pa.concat_tables(parts)
    with catalog() as connection:
        query = """SELECT (SELECT lsn FROM meta), (SELECT lsn FROM changed WHERE name = ?)"""
        newest, changed = connection.execute(query, (export_trigger(name),)).fetchone()
        bounds = {"since": 0, "until": newest} if export.in_parts else {}
        rows = connection.execute(export.query, bounds).fetchall()
    # what changed cannot be told from the rows
    if not export.in_parts and (changed or 0) > manifest.lsn:
        return
    here = arrow_table(export, rows)
    columns = [column for column in export.schema.names if column not in BORROWED.get(name, ())]
    names = _listed(columns)
    lsn = next((column for column in ("changed_lsn", "lsn") if column in columns), None)
    since = "" if lsn is None else f"WHERE {lsn} <= {int(manifest.lsn)}"
    views.register("here", here)
    views.register("shown", shown)
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
            yield _finding(layout, f"{name} {' '.join(map(_text, line))}", detail)
        if len(lines) > SHOWN:
            yield _finding(
                layout, f"{name} (others)", f"the same of {len(lines) - SHOWN} other rows"
            )


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(map(sql_identifier, columns))


def _finding(layout: RunLayout, subject: str, detail: str) -> Finding:
    remedy = f"put a backup of catalog.sqlite back, or, to take the exported row: gigpo rebuild --force {layout.root}"
    return error("exported_row", subject, detail, remedy=remedy)


def _text(value: object) -> str:
    text = uid_text(value) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 100 else f"{text[:99]}…"
