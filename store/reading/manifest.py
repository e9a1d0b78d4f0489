"""The manifest: what outside readers may read. One file, replaced in one step, naming whole files only.

Whoever reads manifest.json once has one consistent snapshot: the live segments and the exported tables of one lsn.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from store.catalog.catalog import Catalog
from store.clock import US_PER_S, now_us
from store.durable import READ_ONLY, READ_WRITE, write_atomically
from store.errors import FormatError
from store.layout import FORMAT_VERSION, RunLayout
from store.reading.exports import empty_tables
from store.records import SEGMENT_SCHEMA

GRACE_S = 60  # a reader opens the exports right after the manifest; nobody takes a minute for that
EMPTY_STEPS = "empty_steps.parquet"  # no rows: gives the steps view its types before the first segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of manifest.json; paths are relative to the run's root."""

    lsn: int
    format_version: int
    segments: tuple[str, ...]  # the first has no rows, only the schema
    exports: Mapping[str, str]  # table name → file
    export_lsns: Mapping[str, int]
    superseded_us: Mapping[str, int]  # file in export/ → when it was replaced; removed GRACE_S later


def read_manifest(layout: RunLayout) -> Manifest | None:
    """The current manifest, None before the first export."""
    try:
        content = json.loads(layout.manifest.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FormatError(f"{layout.manifest} is damaged ({error}); delete it, the running coordinator rewrites it") from error
    content["segments"] = tuple(content["segments"])
    return Manifest(**content)


def export(catalog: Catalog, layout: RunLayout) -> int:
    """Bring manifest.json up to the catalog's lsn, which is returned. Costs nothing if nothing changed.

    Meant to be called at most once a second by the owner of the catalog. Tables that did not change keep their file.
    """
    previous = read_manifest(layout)
    whole = previous is not None and all((layout.root / path).is_file() for path in previous.exports.values())
    snapshot = catalog.snapshot(previous.export_lsns if previous is not None and whole else {})
    if previous is not None and whole and previous.lsn == snapshot.lsn:
        return snapshot.lsn
    exports = dict(previous.exports) if previous is not None else {}
    for name, table in snapshot.tables.items():
        exports[name] = _write_table(layout, table, name=f"{name}-{snapshot.table_lsns[name]}.parquet")
    _write_manifest(
        layout,
        Manifest(
            lsn=snapshot.lsn,
            format_version=FORMAT_VERSION,
            segments=(_empty_steps(layout), *snapshot.segments),
            exports=exports,
            export_lsns=snapshot.table_lsns,
            superseded_us=_sweep(layout, current=exports, superseded_us=previous.superseded_us if previous else {}),
        ),
    )
    return snapshot.lsn


def export_nothing(layout: RunLayout) -> None:
    """A manifest of a run without any commit, so that readers find typed, empty views from the start."""
    exports = {name: _write_table(layout, table, name=f"{name}-0.parquet") for name, table in empty_tables().items()}
    _write_manifest(
        layout,
        Manifest(
            lsn=0,
            format_version=FORMAT_VERSION,
            segments=(_empty_steps(layout),),
            exports=exports,
            export_lsns=dict.fromkeys(exports, 0),
            superseded_us={},
        ),
    )


def _write_manifest(layout: RunLayout, manifest: Manifest) -> None:
    write_atomically(layout.manifest, json.dumps(dataclasses.asdict(manifest)).encode(), mode=READ_WRITE)


def _write_table(layout: RunLayout, table: pa.Table, *, name: str) -> str:
    path = layout.exports / name
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomically(path, memoryview(sink.getvalue()), mode=READ_ONLY)
    return layout.relative(path)


def _empty_steps(layout: RunLayout) -> str:
    path = layout.exports / EMPTY_STEPS
    return layout.relative(path) if path.is_file() else _write_table(layout, SEGMENT_SCHEMA.empty_table(), name=EMPTY_STEPS)


def _sweep(layout: RunLayout, *, current: Mapping[str, str], superseded_us: Mapping[str, int]) -> dict[str, int]:
    """Remove the export files nobody can still be opening; the others, with the moment they were superseded."""
    now = now_us()
    keep = {Path(path).name for path in current.values()} | {EMPTY_STEPS}
    waiting: dict[str, int] = {}
    for path in layout.exports.glob("*.parquet"):
        if path.name in keep:
            continue
        since_us = superseded_us.get(path.name, now)
        if now - since_us > GRACE_S * US_PER_S:
            path.unlink(missing_ok=True)
        else:
            waiting[path.name] = since_us
    return waiting
