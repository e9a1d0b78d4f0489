"""What the coordinator's maintainer is told by a config."""

from __future__ import annotations

from configs import StoreConfig
from store import COMPACTION_POLICY, MaintainerSettings

MAINTENANCE_PAUSE_S = 5.0


def maintainer_settings(config: StoreConfig) -> MaintainerSettings:
    """What a config says, with None for its "for ever"."""
    return MaintainerSettings(
        snapshot_window_s=config.snapshot_window_s,
        keep_days=config.keep_days or None,
        keep_versions=config.keep_versions or None,
        pause_s=MAINTENANCE_PAUSE_S,
        policy=COMPACTION_POLICY,
    )
