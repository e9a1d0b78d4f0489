"""Write and read manifest.json: the segments and exported tables that outside readers may read.

The file is replaced in one rename and names whole files only. So a reader that reads it once has
one consistent snapshot: the live segments and the tables of one lsn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from store import primary_directory
from store.atomic_write import READ_WRITE, write_atomically
from store.catalog.snapshot import EXPORTS, ExportedPart, NewPart
from store.catalog.transaction import columns_of
from store.clock import US_PER_S, now_us
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.reading.pins import pinned
from store.records import SEGMENT_SCHEMA
from store.run_json import FORMAT, check_format
from store.run_names import EXPORT_PATH, MANIFEST, SEGMENT_PATH, checked_name
from store.shown_lsn import note_shown
from store.untrusted import json_values
from store.untrusted.file_access import MAX_MANIFEST_BYTES, read_bytes

if TYPE_CHECKING:
    from store.catalog.catalog import Catalog

# A shell opens the exports right after the manifest. Python readers are pinned, and need no grace.
GRACE_S = 60.0
WRITTEN_AT = re.compile(r"-(\d{1,19})\.parquet$")  # the lsn in the name of an exported file
# A file without rows, which gives the view `steps` its columns before the first segment.
EMPTY_STEPS = "empty_steps.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Superseded:
    """An exported file that the manifest of `lsn` no longer names."""

    lsn: int
    at_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of manifest.json. Paths are relative to the run's root."""

    run_id: str
    primary: str | None  # the token of the directory that wrote it, with store.uri
    lsn: int
    format: str
    segments: tuple[str, ...]  # the first has no rows, only the columns
    tables: Mapping[str, tuple[ExportedPart, ...]]  # by table, oldest part first, at least one
    # by path; they are removed after GRACE_S, once no pinned reader shows them
    superseded: Mapping[str, Superseded]


def read_manifest(layout: RunLayout) -> Manifest | None:
    """Return the current manifest, None before the first export. Raises FormatError."""
    try:
        data = read_bytes(layout.manifest, root=layout.root, at_most=MAX_MANIFEST_BYTES)
        return parse_manifest(data, name=str(layout.manifest))
    except FileNotFoundError:
        return None


def parse_manifest(data: bytes, *, name: str) -> Manifest:
    """Return the manifest in `data`. Raises FormatError naming the file."""
    try:
        content = json_values.parse_object(data)
        check_format(content, name=name)
        segments = json_values.texts(content, "segments")
        if not segments:
            raise ValueError("segments is empty; the first of them gives the columns")
        tables = json_values.objects(content, "tables")
        superseded = json_values.objects(content, "superseded")
        parts = {table: _parse_parts(tables, table, name=name) for table in tables}
        _check_named_once([*segments, *(part.path for some in parts.values() for part in some)])
        return Manifest(
            run_id=json_values.text(content, "run_id"),
            primary=json_values.text(content, "primary") if content.get("primary") else None,
            lsn=json_values.integer(content, "lsn"),
            format=FORMAT,
            segments=_segments(segments, name=name),
            tables=parts,
            # Of another file that lies in export/ nothing is read or removed, whoever names it.
            superseded={
                path: _parse_superseded(superseded, path)
                for path in superseded
                if EXPORT_PATH.fullmatch(path)
            },
        )
    except ValueError as error:
        raise FormatError(
            f"{name} is damaged ({error}); remove it: the next start, or fsck --repair, writes it "
            "anew"
        ) from error


def _check_named_once(paths: Sequence[str]) -> None:
    """Raise ValueError for a path named twice: its rows would count twice, and be held twice."""
    if len(set(paths)) < len(paths):
        path = next(path for path, n in Counter(paths).items() if n > 1)
        raise ValueError(f"it names {path:.80} twice")


def _segments(paths: Sequence[str], *, name: str) -> tuple[str, ...]:
    """Check the paths. The first one is an exported file without rows, which has the columns."""
    first, *others = paths
    return (
        checked_name(first, EXPORT_PATH, where=name),
        *(checked_name(path, SEGMENT_PATH, where=name) for path in others),
    )


def _parse_parts(tables: dict[str, object], table: str, *, name: str) -> tuple[ExportedPart, ...]:
    parts = json_values.entries(tables, table)
    if not parts:
        raise ValueError(f"table {table:.80} has no parts")
    return tuple(_parse_part(part, name=name) for part in parts)


def _parse_part(part: dict[str, object], *, name: str) -> ExportedPart:
    parsed = ExportedPart(
        path=checked_name(part.get("path"), EXPORT_PATH, where=name),
        since=json_values.integer(part, "since"),
        until=json_values.integer(part, "until"),
        n_rows=json_values.integer(part, "n_rows"),
    )
    # With a larger `until` the next export would leave out rows for good.
    if not parsed.path.endswith(f"-{parsed.since}-{parsed.until}.parquet"):
        raise ValueError(
            f"{parsed.path} is named as the file of lsn {parsed.since} to {parsed.until}"
        )
    return parsed


def _parse_superseded(superseded: dict[str, object], path: str) -> Superseded:
    entry = json_values.objects(superseded, path)
    return Superseded(
        lsn=json_values.integer(entry, "lsn"), at_us=json_values.integer(entry, "at_us")
    )


def export(catalog: Catalog, layout: RunLayout) -> int:
    """Bring manifest.json up to the catalog's lsn, and return the lsn.

    The cost is that of the changes since the last call. The owner calls it at most once a second.
    Nothing is done while the run is brought to this directory; 0 is returned. Raises FencedError if
    it was brought to another one, whose rows readers are shown by now.
    """
    if layout.is_being_brought:
        return 0
    previous = read_manifest(layout)
    if previous is not None and not _is_complete(layout, previous):
        previous = None
    known = previous.tables if previous is not None else {}
    snapshot = catalog.snapshot(known)
    if previous is not None and previous.lsn == snapshot.lsn:
        return snapshot.lsn
    layout.check_primary()
    tables = dict(known)
    for name, part in snapshot.new_parts.items():
        kept = (old for old in known.get(name, ()) if old.until <= part.since)
        tables[name] = (*kept, _write_part(layout, name=name, part=part, until=snapshot.lsn))
    empty = _empty_steps(layout) if previous is None else previous.segments[0]
    superseded = previous.superseded if previous is not None else {}
    manifest = Manifest(
        run_id=layout.info.run_id,
        primary=_primary(layout),
        lsn=snapshot.lsn,
        format=FORMAT,
        segments=(empty, *snapshot.segments),
        tables=tables,
        superseded=_sweep(layout, tables, superseded=superseded, lsn=snapshot.lsn),
    )
    layout.check_primary()
    _write_manifest(layout, manifest)
    return snapshot.lsn


def _primary(layout: RunLayout) -> str | None:
    return None if layout.info.storage_uri is None else primary_directory.token_of(layout.root)


def export_nothing(layout: RunLayout) -> None:
    """Write the manifest of a run without commits, so that readers find typed, empty views."""
    tables = {}
    for name, export in EXPORTS.items():
        nothing = NewPart(since=0, table=export.schema.empty_table())
        tables[name] = (_write_part(layout, name=name, part=nothing, until=0),)
    manifest = Manifest(
        run_id=layout.info.run_id,
        primary=_primary(layout),
        lsn=0,
        format=FORMAT,
        segments=(_empty_steps(layout),),
        tables=tables,
        superseded={},
    )
    _write_manifest(layout, manifest)


def _is_complete(layout: RunLayout, manifest: Manifest) -> bool:
    there = {file.path for file in layout.storage.files(layout.relative(layout.exports))}
    paths = {part.path for parts in manifest.tables.values() for part in parts}
    has_all = {manifest.segments[0], *paths} <= there
    return has_all and manifest.tables.keys() >= EXPORTS.keys()


def _write_manifest(layout: RunLayout, manifest: Manifest) -> None:
    # Not `asdict`, which would copy every path: records within the manifest are converted below.
    data = json.dumps(columns_of(manifest), default=columns_of).encode()
    if len(data) > MAX_MANIFEST_BYTES:  # DuckDB reads no larger one
        raise StoreError(
            f"the manifest of {layout.root} would have {len(data):,} bytes, more than "
            f"{MAX_MANIFEST_BYTES:,}: it names {len(manifest.segments):,} segments; stop the run, "
            f"and merge them: gigpo compact {layout.root}"
        )
    # The remote storage first: after a crash in between, the write is repeated.
    if layout.info.storage_uri is not None:
        if manifest.primary is not None:
            note_shown(layout, token=manifest.primary, lsn=manifest.lsn)
        layout.storage.write(MANIFEST, data)
    write_atomically(layout.manifest, data, mode=READ_WRITE, beneath=layout.root)


def _write_part(layout: RunLayout, *, name: str, part: NewPart, until: int) -> ExportedPart:
    path = _write_table(layout, part.table, name=f"{name}-{part.since}-{until}.parquet")
    return ExportedPart(path=path, since=part.since, until=until, n_rows=part.table.num_rows)


def _write_table(layout: RunLayout, table: pa.Table, *, name: str) -> str:
    sink = pa.BufferOutputStream()
    labelled = table.replace_schema_metadata({"format": FORMAT})
    pq.write_table(labelled, sink, compression="zstd", write_page_checksum=True)
    path = layout.relative(layout.exports / name)
    layout.storage.write(path, sink.getvalue())
    return path


def _empty_steps(layout: RunLayout) -> str:
    path = layout.exports / EMPTY_STEPS
    relative = layout.relative(path)
    if layout.storage.exists(relative):
        return relative
    return _write_table(layout, SEGMENT_SCHEMA.empty_table(), name=path.name)


def _sweep(
    layout: RunLayout,
    tables: Mapping[str, tuple[ExportedPart, ...]],
    *,
    superseded: Mapping[str, Superseded],
    lsn: int,
) -> dict[str, Superseded]:
    """Remove exported files that nobody can be reading. Return the others that no table names.

    Files that no export writes are left alone: NFS makes one of a removed file that somebody reads.
    """
    now, pins = now_us(), pinned(layout)
    keep = {part.path for parts in tables.values() for part in parts}
    waiting: dict[str, Superseded] = {}
    for file in layout.storage.files(layout.relative(layout.exports)):
        if file.path in keep or file.path.endswith(EMPTY_STEPS):
            continue
        if not EXPORT_PATH.fullmatch(file.path):
            continue
        entry = superseded.get(file.path, Superseded(lsn=lsn, at_us=now))
        written = WRITTEN_AT.search(file.path)
        since = int(written[1]) if written else 0
        needed = any(pin.needs(written=since, replaced=entry.lsn) for pin in pins)
        if now - entry.at_us > GRACE_S * US_PER_S and not needed:
            layout.storage.remove(file.path)
        else:
            waiting[file.path] = entry
    return waiting
