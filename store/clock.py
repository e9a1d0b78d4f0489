"""Return the time in UTC epoch microseconds. It gives durations only: the lsn gives the order."""

from __future__ import annotations

import time

NANOSECONDS_PER_US = 1_000
US_PER_S = 1_000_000
# Replaced files are kept so long, for queries AS OF an earlier lsn. The learner opens the files
# that it was told of within a minute.
SNAPSHOT_WINDOW_S = 900.0


def now_us() -> int:
    """Return the time as UTC epoch microseconds."""
    return time.time_ns() // NANOSECONDS_PER_US
