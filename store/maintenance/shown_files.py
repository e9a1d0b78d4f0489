"""What the newest manifest says of files, for a rebuild: they are committed.

shown = shown_files(layout)
shown.places["segments/w0/5540.parquet"]             # files come in the order of their commits
("segments/w1/634d.parquet", traj_uid) in shown.excluded    # rows that do not count
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from store.errors import StoreError, UnavailableError
from store.layout import RunLayout
from store.maintenance.fsck_exports import read_part
from store.reading.manifest import Manifest, parse_manifest, read_manifest
from store.run_names import MANIFEST
from store.storage import read_or_none
from store.untrusted.file_access import MAX_MANIFEST_BYTES

EXCLUDED = "excluded"  # the table


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownFiles:
    """The live files of the newest manifest; nothing where it is gone or damaged."""

    places: Mapping[str, int]  # by path
    excluded: Collection[tuple[str, bytes]]  # path and traj_uid of rows that do not count


def shown_files(layout: RunLayout) -> ShownFiles:
    """Return what readers were shown last. Raises UnavailableError."""
    found = [one for one in _manifests(layout) if one.run_id == layout.info.run_id]
    if not found:
        return ShownFiles(places={}, excluded=())
    newest = max(found, key=lambda one: one.lsn)
    excluded: set[tuple[str, bytes]] = set()
    try:
        for part in newest.tables.get(EXCLUDED, ()):
            table = read_part(layout, part.path)
            paths, uids = (table[name].to_pylist() for name in ("path", "traj_uid"))
            excluded.update(zip(paths, uids, strict=True))
    except UnavailableError:
        raise
    except (pa.ArrowException, KeyError, OSError, StoreError):  # fsck reports the damage
        excluded.clear()
    places = {path: place for place, path in enumerate(newest.segments)}
    return ShownFiles(places=places, excluded=excluded)


def _manifests(layout: RunLayout) -> list[Manifest]:
    """Return the manifest here and that of the storage, as far as they are whole."""
    found: list[Manifest | None] = []
    with suppress(StoreError, OSError):
        found.append(read_manifest(layout))
    if layout.info.storage_uri is not None:
        data = read_or_none(layout.storage, MANIFEST, at_most=MAX_MANIFEST_BYTES)
        with suppress(StoreError):
            found.append(None if data is None else parse_manifest(data, name=MANIFEST))
    return [one for one in found if one is not None]
