"""Retire old trajectories, file by file. The catalog keeps the rows of their groups.

A file is kept while it holds a group that is still to be played or trained on. It is also kept
while it holds a group that was trained on after the oldest checkpoint on disk: going back to that
checkpoint makes the group available again.
"""

from __future__ import annotations

from store.catalog.catalog import Catalog
from store.clock import US_PER_S, now_us
from store.layout import RunLayout
from store.untrusted.file_access import is_directory

COMPONENT = "retention"
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
    expired = catalog.expirable(
        completed_before_us=before_us,
        below_version=below,
        oldest_checkpoint=oldest_checkpoint(catalog, layout),
    )
    if expired:
        catalog.expire(expired)
        limits = f"keep_days={keep_days} keep_versions={keep_versions}"
        catalog.log(component=COMPONENT, what="expired", detail=f"{len(expired)} files by {limits}")
    return expired


def oldest_checkpoint(catalog: Catalog, layout: RunLayout) -> int:
    """Return the learner step of the oldest checkpoint on disk, 0 without any."""
    kept = [
        point.learner_step
        for point in catalog.live_checkpoints()
        if is_directory(layout.root / point.path, root=layout.root)
    ]
    return min(kept, default=0)
