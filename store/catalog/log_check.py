"""Look in a catalog's log for commits that SQLite does not read.

    n = unread_commits_of(layout)    # 0 for a run that was killed

An owner counts them before its first write, which removes them, and records an event. From then on
files that no row names are kept until a rebuild has looked for what they hold. A power cut may
leave a log that looks the same: nothing is lost by a false alarm.

SQLite reads the log up to the first frame whose checksum is wrong, and takes what follows for a
write that a crash cut short. After one changed byte that would be transactions that were committed.
The file format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct

from store.errors import StoreError
from store.layout import RunLayout
from store.untrusted.file_access import read_bytes

COMPONENT, LOG_DAMAGED = "catalog", "log damaged"  # of the event
# The events that no rebuild has answered.
OPEN_EVENTS = f"""FROM event WHERE component = '{COMPONENT}' AND what = '{LOG_DAMAGED}'
    AND event_id > coalesce((SELECT max(event_id) FROM event WHERE component = 'rebuild'), 0)"""
MAX_LOG_BYTES = 256 << 20  # to be looked at; an owner keeps it at 16 MiB
HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
PAGE_BYTES = 4096  # of a catalog that this code made
MAGIC = (0x377F0682, 0x377F0683)  # checksums of little-endian and of big-endian numbers
UINT32 = 2**32 - 1


def unread_commits_of(layout: RunLayout) -> int:
    """Return the number of commits in a run's log that SQLite does not read.

    0 without a log, and for one that cannot be looked at: opening the catalog names the reason.
    """
    log = layout.catalog.with_name(f"{layout.catalog.name}-wal")
    try:
        return unread_commits(read_bytes(log, root=layout.run_directory, at_most=MAX_LOG_BYTES))
    except (OSError, StoreError):
        return 0


def unread_commits(log: bytes) -> int:
    """Return the number of commits after the first frame that is not as it was written."""
    if len(log) < HEADER_BYTES + FRAME_HEADER_BYTES:
        return 0
    magic = int.from_bytes(log[:4])
    order = ">" if magic == MAGIC[1] else "<"
    sums = _checksum(log[:24], (0, 0), order=order)
    is_read = magic in MAGIC and sums == struct.unpack_from(">2I", log, 24)
    # A changed header's salts say nothing: every frame may be of the last round of the log then.
    salts = log[16:24] if is_read else None
    n_unread, frame_bytes = 0, FRAME_HEADER_BYTES + PAGE_BYTES
    for at in range(HEADER_BYTES, len(log) - frame_bytes + 1, frame_bytes):
        its = log[at + 8 : at + 16]
        # Frames of an earlier round have two other salts. With one changed byte, only one is other.
        is_of_round = salts is None or its[:4] == salts[:4] or its[4:] == salts[4:]
        if is_read:
            sums = _checksum(log[at : at + 8], sums, order=order)
            sums = _checksum(log[at + FRAME_HEADER_BYTES : at + frame_bytes], sums, order=order)
            is_read = its == salts and sums == struct.unpack_from(">2I", log, at + 16)
        is_commit = log[at + 4 : at + 8] != b"\0\0\0\0"  # the database's size after it
        n_unread += is_commit and is_of_round and not is_read
    return n_unread


def _checksum(data: bytes, sums: tuple[int, int], *, order: str) -> tuple[int, int]:
    first, second = sums
    for one, another in struct.iter_unpack(f"{order}2I", data):
        first = (first + one + second) & UINT32
        second = (second + another + first) & UINT32
    return first, second
