"""Retention: old trajectories leave the run, file by file. What the catalog knows of their groups
stays.

Never taken: a file with a group that is still to be played or trained on, or that was trained on
after the oldest checkpoint on disk, since going back to that one makes the group available again. A
file goes only when all of it may.
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
    """Retire what is older than `keep_days` and was sampled by none of the newest `keep_versions`
    policy versions.

    Of two limits both must be passed. Returns the segment ids; their files stay for the snapshot
    window.
    """
    newest = catalog.latest_version()
    before_us = (
        None if keep_days is None else now_us() - round(keep_days * SECONDS_PER_DAY * US_PER_S)
    )
    below = None if keep_versions is None or newest is None else newest.version - keep_versions + 1
    if before_us is None and below is None:  # asking without a limit would mean everything
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
    """Learner step of the oldest checkpoint that a restart could still begin from; 0 without any:
    back to the start.
    """
    points = catalog.live_checkpoints()
    kept = [
        point.learner_step
        for point in points
        if is_directory(layout.root / point.path, root=layout.root)
    ]
    return min(kept, default=0)
