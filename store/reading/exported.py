"""Read the exported tables back, to rebuild a lost catalog."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from store.catalog.snapshot import EXPORTS
from store.errors import StoreError, UnavailableError
from store.layout import RunLayout
from store.reading.manifest import Manifest, read_manifest
from store.untrusted.bounded_parquet import open_parquet, read_table

Row = Mapping[str, Any]  # one row of an exported table by column; times are UTC epoch microseconds
PART_NAME = re.compile(r"(?P<table>[a-z]+)-(?P<since>\d+)-(?P<until>\d+)\.parquet")
# Keys of the tables in which a row that changed later is in two parts.
KEYS: Mapping[str, tuple[str, ...]] = {
    "groups": ("group_uid",),
    "lineage": ("batch_id", "group_uid"),
    "metrics": ("learner_step", "policy_version", "name", "lsn"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The newest exports of a run."""

    lsn: int  # of the newest part; 0 if there is none
    # the live files, oldest first; None without a readable manifest
    segments: tuple[str, ...] | None
    tables: Mapping[str, Sequence[Row]]  # each of EXPORTS; empty where nothing could be read
    unreadable: tuple[str, ...]  # one line for each file that could not be


def read_exported(layout: RunLayout) -> Exported:
    """Return the exported tables that the manifest names, or all that are there without a manifest.

    Raises UnavailableError in an outage.
    """
    unreadable: list[str] = []
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(layout)
    except (StoreError, IsADirectoryError) as error:
        unreadable.append(str(error))
    if manifest is not None and manifest.run_id != layout.info.run_id:
        raise StoreError(
            f"{layout.manifest} is of run {manifest.run_id}; move it and export/ away, or put the "
            "right ones back"
        )
    if manifest is not None:
        paths = {name: [part.path for part in parts] for name, parts in manifest.tables.items()}
        lsn, segments = manifest.lsn, manifest.segments[1:]
    else:
        lsn, paths = _all_parts(layout)
        segments = None
    tables = {}
    for name in EXPORTS:
        rows: list[dict[str, Any]] = []
        for path in paths.get(name, ()):
            try:
                rows += _rows(layout, path)
            except UnavailableError:
                raise
            except (StoreError, pa.ArrowException, OSError) as error:
                unreadable.append(
                    f"{path} cannot be read ({' '.join(str(error).split())}); what only it held is "
                    "lost"
                )
        tables[name] = _newest(name, rows)
    return Exported(lsn=lsn, segments=segments, tables=tables, unreadable=tuple(unreadable))


def _all_parts(layout: RunLayout) -> tuple[int, dict[str, list[str]]]:
    found: dict[str, list[tuple[int, int, str]]] = {}
    for file in layout.storage.files(layout.relative(layout.exports)):
        match = PART_NAME.fullmatch(file.path.rpartition("/")[2])
        if match is not None and match["table"] in EXPORTS:
            found.setdefault(match["table"], []).append(
                (int(match["until"]), int(match["since"]), file.path)
            )
    paths = {
        name: [path for _, _, path in sorted(parts)] if EXPORTS[name].in_parts else [max(parts)[2]]
        for name, parts in found.items()
    }
    return max((until for parts in found.values() for until, _, _ in parts), default=0), paths


def read_part(layout: RunLayout, path: str) -> pa.Table:
    """Return one exported file. The checksums of its pages are compared. Arrow's errors pass
    through.
    """
    data = layout.storage.read(path)
    source = pa.BufferReader(data)
    file = open_parquet(source, n_bytes=data.size, name=path, verify=True)
    return read_table(file, source, n_bytes=data.size, name=path, columns=None)


def _rows(layout: RunLayout, path: str) -> list[dict[str, Any]]:
    table = read_part(layout, path)
    for position, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):  # a datetime would lose the unit
            table = table.set_column(position, field.name, table[field.name].cast(pa.int64()))
    return table.to_pylist()


def _newest(name: str, rows: list[dict[str, Any]]) -> Sequence[Row]:
    """Return each row once, in its newest version: parts overlap where a row changed."""
    if name not in KEYS:
        return [dict(row) for row in dict.fromkeys(tuple(row.items()) for row in rows)]
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row.get(column) for column in KEYS[name])
        if key not in newest or row.get("changed_lsn", 0) >= newest[key].get("changed_lsn", 0):
            newest[key] = row
    return list(newest.values())
