"""Return the time in UTC epoch microseconds. It gives durations only: the lsn gives the order."""

from __future__ import annotations

import time

NANOSECONDS_PER_US = 1_000
US_PER_S = 1_000_000


def now_us() -> int:
    """Return the time as UTC epoch microseconds."""
    return time.time_ns() // NANOSECONDS_PER_US
