"""Read from the newest manifest which files are committed, and which of their rows do not count.

shown = shown_files(layout)
shown.commit_order["segments/w0/5540.parquet"]              # 3: after three others
("segments/w1/634d.parquet", traj_uid) in shown.excluded    # this row does not count
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from store.errors import StoreError, UnavailableError
from store.layout import RunLayout
from store.maintenance.fsck_exports import read_part
from store.reading.manifest import Manifest, parse_manifest
from store.run_names import MANIFEST
from store.shown_lsn import manifest_here, manifest_there
from store.untrusted.file_access import MAX_MANIFEST_BYTES, names, read_bytes

EXCLUDED = "excluded"  # name of the exported table


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownFiles:
    """The live files of the newest manifest; nothing where it is gone or damaged."""

    commit_order: Mapping[str, int]  # by path
    excluded: Collection[tuple[str, bytes]]  # path and traj_uid of rows that do not count


def shown_files(layout: RunLayout) -> ShownFiles:
    """Return what readers were shown last. Raises UnavailableError."""
    found = [one for one in _manifests(layout) if one.run_id == layout.info.run_id]
    if not found:
        return ShownFiles(commit_order={}, excluded=())
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
    commit_order = {path: number for number, path in enumerate(newest.segments)}
    return ShownFiles(commit_order=commit_order, excluded=excluded)


def _manifests(layout: RunLayout) -> list[Manifest]:
    """Return the manifests here and in the storage, as far as they are whole.

    A rebuild that was killed may have moved the one here to quarantine/.
    """
    found = [manifest_here(layout)]
    for name in names(layout.quarantine, root=layout.root):
        if name.startswith("manifest."):
            with suppress(OSError):
                path = layout.quarantine / name
                found.append(read_bytes(path, root=layout.root, at_most=MAX_MANIFEST_BYTES))
    if layout.info.storage_uri is not None:
        found.append(manifest_there(layout))
    manifests = []
    for data in filter(None, found):
        with suppress(StoreError):  # fsck reports the damage
            manifests.append(parse_manifest(data, name=MANIFEST))
    return manifests
