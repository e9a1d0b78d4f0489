"""Retire old trajectories, and remove files that nobody needs.

Trajectories are retired file by file. The catalog keeps the rows of their groups. A file is kept
while it holds a group that is still to be played or trained on. It is also kept while it holds a
group that was trained on after the oldest checkpoint on disk: going back to that checkpoint makes
the group available again.

A retired file goes when the snapshot window has passed and neither a pinned reader nor the manifest
shows it. In a remote storage it stays while the newest backup of the catalog names it. An orphan
was written and never committed. One from before this owner opened the catalog belongs to an older
epoch, so it can never be committed. Its time is that of the storage's clock, which may be hours
behind. So while workers write, a file goes only if it was there at the look before, too. None goes
after commits were lost with a damaged log, or while the catalog's list of files is damaged, until a
rebuild. Files that this code would not have written are left alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from store.atomic_write import TEMPORARY_SUFFIX
from store.catalog.catalog import Catalog
from store.clock import US_PER_S, now_us
from store.layout import RunLayout
from store.reading.manifest import read_manifest
from store.reading.pins import oldest_pinned_lsn
from store.remote_directory import has_directory
from store.run_names import SEGMENT_PATH
from store.untrusted.file_access import names, remove, status, walk

COMPONENT = "sweep"
ORPHAN_GRACE_S = 3600.0  # the clock of a file server may differ from ours
NAMED_AT_MOST = 5  # in one event
SECONDS_PER_DAY = 86_400


def expire_old(
    catalog: Catalog, layout: RunLayout, *, keep_days: float | None, keep_versions: int | None
) -> tuple[str, ...]:
    """Retire files older than `keep_days` that none of the newest `keep_versions` versions sampled.

    If both limits are given, both must be passed. Return the segment ids. Their files stay on disk
    for the snapshot window.
    """
    newest = catalog.latest_version()
    before_us = below = None
    if keep_days is not None:
        before_us = now_us() - round(keep_days * SECONDS_PER_DAY * US_PER_S)
    if keep_versions is not None and newest is not None:
        below = newest.version - keep_versions + 1
    if before_us is None and below is None:  # the catalog would take every file
        return ()
    kept = [
        point.learner_step
        for point in catalog.live_checkpoints()
        if has_directory(layout, point.path)
    ]
    expired = catalog.expirable(
        completed_before_us=before_us, below_version=below, oldest_checkpoint=min(kept, default=0)
    )
    if expired:
        catalog.expire(expired)
        detail = f"{len(expired)} files by keep_days={keep_days} keep_versions={keep_versions}"
        catalog.log(component="retention", what="expired", detail=detail)
    return expired


def sweep_retired(catalog: Catalog, layout: RunLayout, *, window_s: float) -> tuple[str, ...]:
    """Remove the files of segments that were retired more than `window_s` ago. Return their paths.

    Nothing is removed before the owner has exported a manifest without them. Raises StoreError if a
    file cannot be removed; it is an orphan then.
    """
    # The manifest is read before the pins. A reader pins a manifest's lsn and then reads the
    # manifest again: either its pin is seen here, or it reads a manifest that is no older.
    manifest = read_manifest(layout)
    if manifest is None:
        return ()
    pinned = oldest_pinned_lsn(layout)
    shown = manifest.lsn if pinned is None else min(pinned, manifest.lsn)
    if layout.info.storage_uri is not None:  # whoever goes on from a backup needs what it names
        shown = min(shown, catalog.backed_up_lsn)
    before_us = now_us() - round(window_s * US_PER_S)
    retired = catalog.removable(retired_before_us=before_us, pinned_lsn=shown)
    if not retired:
        return ()
    catalog.mark_removed(retired)
    for path in retired.values():
        layout.storage.remove(path)
    _log(catalog, what="removed", paths=retired.values(), kind="retired files")
    return tuple(retired.values())


@dataclass(frozen=True, kw_only=True)
class OrphanLook:
    """Files that one look for orphans found."""

    foreign: tuple[str, ...] = ()  # files beneath segments/ that no run writes
    # what no commit names, and when it was written, in microseconds by the clock of its storage
    uncommitted: Mapping[str, int] = field(default_factory=dict)


def sweep_orphans(
    catalog: Catalog, layout: RunLayout, *, opened_us: int, before: OrphanLook | None
) -> OrphanLook:
    """Remove orphans and unfinished writes that are past the grace.

    `opened_us` is the time when the owner opened the catalog; younger files stay. `before` is the
    last look, longer ago than a commit takes: only what was uncommitted then too goes. Give None if
    no worker writes. Each foreign file becomes an event, unless `before` has it.
    """
    before_us = min(opened_us, now_us() - round(ORPHAN_GRACE_S * US_PER_S))
    files = list(layout.storage.files(layout.relative(layout.segments)))
    known = catalog.known_paths()  # after the list, which a commit may come in between
    unknown = {file.path: file.modified_us for file in files if file.path not in known}
    foreign = tuple(path for path in unknown if not SEGMENT_PATH.fullmatch(path))
    uncommitted = {path: at_us for path, at_us in unknown.items() if path not in foreign}
    writes = {path: seen.st_mtime_ns // 1_000 for path, seen in unfinished_writes(layout)}
    found = OrphanLook(foreign=foreign, uncommitted={**uncommitted, **writes})
    stayed = (found if before is None else before).uncommitted
    orphans, unfinished = (
        [path for path, at_us in some.items() if at_us < before_us and stayed.get(path) == at_us]
        for some in (uncommitted, writes)
    )
    if orphans and catalog.may_lack_commits():  # one of them may have been of such a file
        orphans = []
    if orphans and catalog.is_list_damaged():
        new = [path for path in orphans if before is None or path not in before.uncommitted]
        kind = f"files that the damaged catalog does not name (gigpo rebuild --force {layout.root})"
        _log(catalog, what="kept", paths=new, kind=kind)
        orphans = []
    for path in orphans:
        layout.storage.remove(path)
    for path in unfinished:
        remove(layout.root / path, root=layout.root)
    removed = [*orphans, *unfinished]
    _log(catalog, what="removed", paths=removed, kind="files that were never committed")
    new = [path for path in foreign if before is None or path not in before.foreign]
    _log(catalog, what="foreign", paths=new, kind="files left alone, not ours")
    return found


def unfinished_writes(layout: RunLayout) -> Iterator[tuple[str, os.stat_result]]:
    """Yield temporary files with their status. Another storage makes none in the run directory."""
    found = [
        (layout.root / name, status(layout.root / name, root=layout.root))
        for name in names(layout.root, root=layout.root)
    ]
    for directory in (layout.exports, layout.segments, layout.backup.parent):
        found += walk(directory, root=layout.root)
    for path, seen in found:
        is_aside = path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX)
        if is_aside and seen is not None and stat.S_ISREG(seen.st_mode):
            yield layout.relative(path), seen


def _log(catalog: Catalog, *, what: str, paths: Collection[str], kind: str) -> None:
    if paths:
        some = ", ".join(sorted(paths)[:NAMED_AT_MOST])
        more = ", ..." if len(paths) > NAMED_AT_MOST else ""
        catalog.log(component=COMPONENT, what=what, detail=f"{len(paths)} {kind}: {some}{more}")
