"""Return the time in UTC epoch microseconds, and say how long replaced files stay.

Times give durations only: the lsn gives the order.
"""

from __future__ import annotations

import time

NANOSECONDS_PER_US = 1_000
US_PER_S = 1_000_000
# Replaced and retired files stay so long. A query AS OF an earlier lsn needs them, and so does a
# process that was told their paths and has yet to open them: the learner does within a minute.
# It stands here because `gigpo compact --help` shows it, and this module loads no Arrow.
SNAPSHOT_WINDOW_S = 900.0


def now_us() -> int:
    """Return the time as UTC epoch microseconds."""
    return time.time_ns() // NANOSECONDS_PER_US
