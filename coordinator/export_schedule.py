"""Export for outside readers from time to time, and start the maintainer thread."""

from __future__ import annotations

import sys
import time

from configs import StoreConfig
from store import (
    COMPACTION_POLICY,
    SNAPSHOT_WINDOW_S,
    Catalog,
    Maintainer,
    MaintainerSettings,
    RunLayout,
    export,
)

MAINTENANCE_PAUSE_S = 5.0  # between two looks for files to merge or to remove
# Between two exports pass at least EXPORT_INTERVAL_S, and EXPORT_PAUSE times the last export's
# duration, because no call is answered during an export.
EXPORT_INTERVAL_S = 1.0
EXPORT_PAUSE = 20.0
LONGEST_EXPORT_PAUSE_S = 60.0

# Longest time that the maintainer's thread keeps the interpreter while a call waits. SQLite
# releases the lock at every statement: with Python's 5 ms, a call would wait dozens of such times.
SWITCH_S = 0.0002


def start_maintainer(catalog: Catalog, layout: RunLayout, *, config: StoreConfig) -> Maintainer:
    """Start the thread that compacts and removes files."""
    sys.setswitchinterval(SWITCH_S)
    maintainer = Maintainer(catalog, layout, settings=maintainer_settings(config))
    maintainer.start()
    return maintainer


def maintainer_settings(config: StoreConfig) -> MaintainerSettings:
    """Return the maintainer's settings; 0 days or versions in the config keep files for ever."""
    return MaintainerSettings(
        snapshot_window_s=SNAPSHOT_WINDOW_S,
        keep_days=config.keep_days or None,
        keep_versions=config.keep_versions or None,
        pause_s=MAINTENANCE_PAUSE_S,
        policy=COMPACTION_POLICY,
    )


class Exporter:
    """Export the catalog for outside readers. Call `when_due` after every change."""

    def __init__(self, catalog: Catalog, layout: RunLayout) -> None:
        self._catalog, self._layout = catalog, layout
        self._due_s = 0.0

    def when_due(self) -> None:
        """Export if the last one is long enough ago."""
        began_s = time.monotonic()
        if began_s >= self._due_s:
            export(self._catalog, self._layout)
            ended_s = time.monotonic()
            pause_s = min(EXPORT_PAUSE * (ended_s - began_s), LONGEST_EXPORT_PAUSE_S)
            self._due_s = max(began_s + EXPORT_INTERVAL_S, ended_s + pause_s)
