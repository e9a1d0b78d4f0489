"""What the coordinator does beside answering: its maintainer's settings, and how often outside
readers see what is new.
"""

from __future__ import annotations

import sys
import time

from configs import StoreConfig
from store import COMPACTION_POLICY, Catalog, Maintainer, MaintainerSettings, RunLayout, export

MAINTENANCE_PAUSE_S = 5.0
EXPORT_INTERVAL_S = 1.0  # how far outside readers lag behind the catalog ...
# ... or this many times what an export takes, as nobody is answered meanwhile ...
EXPORT_PAUSE = 20.0
LONGEST_EXPORT_PAUSE_S = 60.0


# How long the maintainer's thread may keep the interpreter once an answer is wanted. SQLite lets go
# of it with every statement, and at Python's 5 ms every group would wait dozens of times so long.
SWITCH_S = 0.0002


def start_maintainer(catalog: Catalog, layout: RunLayout, config: StoreConfig) -> Maintainer:
    sys.setswitchinterval(SWITCH_S)
    maintainer = Maintainer(catalog, layout, maintainer_settings(config))
    maintainer.start()
    return maintainer


def maintainer_settings(config: StoreConfig) -> MaintainerSettings:
    """What a config says, with None for its "for ever"."""
    return MaintainerSettings(
        snapshot_window_s=config.snapshot_window_s,
        keep_days=config.keep_days or None,
        keep_versions=config.keep_versions or None,
        pause_s=MAINTENANCE_PAUSE_S,
        policy=COMPACTION_POLICY,
    )


class Exporter:
    """Shows outside readers what the catalog has; `when_due` is called with everything that changes
    it.
    """

    def __init__(self, catalog: Catalog, layout: RunLayout) -> None:
        self._catalog, self._layout = catalog, layout
        self._due_s = 0.0

    def when_due(self) -> None:
        began_s = time.monotonic()
        if began_s >= self._due_s:
            self.now()
            ended_s = time.monotonic()
            pause_s = min(EXPORT_PAUSE * (ended_s - began_s), LONGEST_EXPORT_PAUSE_S)
            self._due_s = max(began_s + EXPORT_INTERVAL_S, ended_s + pause_s)

    def now(self) -> int:
        """The catalog's lsn, which outside readers see from now on."""
        return export(self._catalog, self._layout)

    def last(self) -> None:
        """Once more, and then never again, as the catalog is closed next."""
        self.now()
        self._due_s = float("inf")
