"""The one clock: UTC epoch microseconds. Order is never taken from it (that is the lsn's job), only
durations are.
"""

from __future__ import annotations

import time

NANOSECONDS_PER_US = 1_000
US_PER_S = 1_000_000


def now_us() -> int:
    """Now, as UTC epoch microseconds."""
    return time.time_ns() // NANOSECONDS_PER_US
