"""Write the slices of the timeline as a trace, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from analysis.view.text import plain


def to_trace(table: pa.Table) -> bytes:
    """Return the slices as Chrome trace events: a process for each lane, a thread for an episode.

    Every event has a name, ph, ts, dur, pid and tid, and they are sorted by time. Times are in us.
    """
    rows = table.to_pylist()
    pids: dict[str, int] = {}
    tids: dict[tuple[str, str], int] = {}
    for row in rows:
        pids.setdefault(row["lane"], len(pids) + 1)
        tids.setdefault((row["lane"], row["thread"]), len(tids) + 1)
    names = [("process_name", pid, 0, lane) for lane, pid in pids.items()]
    names += [("thread_name", pids[lane], tid, thread) for (lane, thread), tid in tids.items()]
    events: list[dict[str, Any]] = [
        {
            "name": name,
            "ph": "M",
            "ts": 0,
            "dur": 0,
            "pid": pid,
            "tid": tid,
            "args": {"name": plain(text)},
        }
        for name, pid, tid, text in names
    ]
    events += [
        {
            "name": plain(row["what"]),
            "ph": "X",
            "ts": row["begin_us"],
            "dur": row["duration_us"],
            "pid": pids[row["lane"]],
            "tid": tids[row["lane"], row["thread"]],
            "args": {"detail": plain(row["detail"] or "", at_most=300)},
        }
        for row in rows
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
