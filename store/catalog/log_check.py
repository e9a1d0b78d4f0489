"""Look in a catalog's log for commits that SQLite does not read.

    n = unread_commits_of(layout)    # 0 for a run that was killed
    if n:
        note_unread_commits(layout, n)
    ...                              # open the catalog, and record_unread_commits
    forget_unread_commits(layout)

An owner counts them and records an event. From then on files that no row names are kept until a
rebuild has looked for what they hold. A power cut may leave a log that looks the same: nothing is
lost by a false alarm.

SQLite removes the log with the first write, and also when an owner gives up before that, because of
Ctrl-C or another fault. So the number is in a file until the event is committed.

SQLite reads the log up to the first frame whose checksum is wrong, and takes what follows for a
write that a crash cut short. After one changed byte that would be transactions that were committed.
The file format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from printable import counted
from store.atomic_write import READ_WRITE, write_atomically
from store.catalog.transaction import Transaction
from store.errors import StoreError
from store.layout import RunLayout
from store.run_names import UNREAD_FILE
from store.untrusted.file_access import read_bytes, remove, status

_EVENT = {"component": "catalog", "what": "log damaged"}
# The events that no rebuild has answered.
FROM_OPEN_EVENTS = f"""FROM event
    WHERE component = '{_EVENT["component"]}' AND what = '{_EVENT["what"]}'
    AND event_id > coalesce((SELECT max(event_id) FROM event WHERE component = 'rebuild'), 0)"""
_NOTE_BYTES = 20
MAX_LOG_BYTES = 256 << 20  # they take 5 s; an owner keeps the log at 16 MiB, see connection.py
HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
PAGE_BYTES = 4096  # of a catalog that this code made
FRAME_BYTES = FRAME_HEADER_BYTES + PAGE_BYTES
MAGIC = (0x377F0682, 0x377F0683)  # checksums of little-endian and of big-endian numbers
UINT32 = 2**32 - 1


class _Frame(NamedTuple):
    """One page of a transaction."""

    salts: bytes  # those of the header when it was written
    is_commit: bool  # the last one of its transaction
    is_read: bool  # by SQLite: this frame and all before are as they were written


def unread_commits_of(layout: RunLayout) -> int:
    """Return the number of commits in a run's log that SQLite does not read.

    0 without a log, and 1 for one that is too long to be looked at. Those that an earlier owner
    noted count too.
    """
    return max(_unread_now(layout), _noted(layout))


def _unread_now(layout: RunLayout) -> int:
    log = layout.catalog.with_name(f"{layout.catalog.name}-wal")
    try:
        seen = status(log, root=layout.run_directory)
        if seen is not None and seen.st_size > MAX_LOG_BYTES:
            return 1
        return unread_commits(read_bytes(log, root=layout.run_directory, at_most=MAX_LOG_BYTES))
    except (OSError, StoreError):  # there is none, or opening the catalog names the reason
        return 0


def _noted(layout: RunLayout) -> int:
    """Return the number that `note_unread_commits` wrote, 1 for a file that says another thing."""
    try:
        text = read_bytes(_note(layout), root=layout.run_directory, at_most=_NOTE_BYTES)
        return max(1, int(text))
    except FileNotFoundError:
        return 0
    except (OSError, StoreError, ValueError):
        return 1


def note_unread_commits(layout: RunLayout, n_unread: int) -> None:
    """Keep the number on disk before the catalog is opened. Raises StoreError."""
    data = str(n_unread).encode()
    write_atomically(_note(layout), data, mode=READ_WRITE, beneath=layout.run_directory)


def forget_unread_commits(layout: RunLayout) -> None:
    """Remove the note. Call it after `record_unread_commits` is committed."""
    with suppress(OSError, StoreError):  # a second event harms nobody
        remove(_note(layout), root=layout.run_directory)


def _note(layout: RunLayout) -> Path:
    return layout.run_directory / UNREAD_FILE


def record_unread_commits(tx: Transaction, n_unread: int) -> None:
    """Record the event that keeps files which no row names, until a rebuild."""
    tx.log(**_EVENT, detail=f"{counted(n_unread, 'commit')} in the log could not be read")


def unread_commits(log: bytes) -> int:
    """Return the number of commits after the first frame that is not as it was written."""
    if len(log) < HEADER_BYTES:
        return 0
    # A changed header's salts say nothing: every frame may be of the last round of the log then.
    salts = log[16:24] if _has_sound_header(log) else None
    return sum(
        frame.is_commit and not frame.is_read and (salts is None or _share(frame.salts, salts))
        for frame in _frames(log)
    )


def _share(salts: bytes, others: bytes) -> bool:
    """Return whether one of two salts is the same.

    Frames of an earlier round of the log have two others. With one changed byte, only one is other.
    """
    return salts[:4] == others[:4] or salts[4:] == others[4:]


def _frames(log: bytes) -> Iterator[_Frame]:
    """Yield the frames of a log. Each one's checksum goes on with that of the one before."""
    is_read, sums = _has_sound_header(log), struct.unpack_from(">2I", log, 24)
    for at in range(HEADER_BYTES, len(log) - FRAME_BYTES + 1, FRAME_BYTES):
        salts = log[at + 8 : at + 16]
        is_first_unread = False
        if is_read:
            before = sums
            sums = _checksum(log, log[at : at + 8], sums)
            sums = _checksum(log, log[at + FRAME_HEADER_BYTES : at + FRAME_BYTES], sums)
            is_read = salts == log[16:24] and sums == struct.unpack_from(">2I", log, at + 16)
            is_first_unread = not is_read
        is_commit = any(log[at + 4 : at + 8])  # the size of the database after it
        if is_first_unread and not is_commit:  # it may be this size that is damaged
            is_commit = _fitting_size(log, at, before) != 0
        yield _Frame(salts=salts, is_commit=is_commit, is_read=is_read)


def _fitting_size(log: bytes, at: int, before: tuple[int, ...]) -> int:
    """Return the size with which a frame has the checksum that it says, 0 if there is none.

    `before` is the checksum of the frame before. The one of this frame is followed back to it.
    """
    first, second = struct.unpack_from(">2I", log, at + 16)
    words = list(_words(log, log[at + FRAME_HEADER_BYTES : at + FRAME_BYTES]))
    for one, another in reversed(words):
        second = (second - another - first) & UINT32
        first = (first - one - second) & UINT32
    ((page_number, _),) = _words(log, log[at : at + 8])
    fits = first == (sum(before) + page_number) & UINT32
    return (second - before[1] - first) & UINT32 if fits else 0


def _has_sound_header(log: bytes) -> bool:
    is_a_log = int.from_bytes(log[:4]) in MAGIC
    return is_a_log and _checksum(log, log[:24], (0, 0)) == struct.unpack_from(">2I", log, 24)


def _checksum(log: bytes, data: bytes, sums: tuple[int, ...]) -> tuple[int, ...]:
    """Return the checksum of a part of a log, which goes on with `sums`."""
    first, second = sums
    for one, another in _words(log, data):
        first = (first + one + second) & UINT32
        second = (second + another + first) & UINT32
    return first, second


def _words(log: bytes, data: bytes) -> Iterator[tuple[int, int]]:
    """Yield pairs of numbers, in the byte order that the log says."""
    order = ">" if int.from_bytes(log[:4]) == MAGIC[1] else "<"
    return struct.iter_unpack(f"{order}2I", data)
