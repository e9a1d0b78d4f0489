"""Pins: a reader says which snapshot it reads, so that no file of it is removed while it does.

A pin is a file in `<run>/readers/` that its process holds locked. The lock goes with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from store.beneath import names, open_file, opened_parent, remove, rename
from store.errors import UnsafePathError
from store.layout import RunLayout

_NAME = re.compile(r"(\d+)-\d+-[0-9a-f]+")


class Pin:
    """One reader's pin. Where the run directory is not writable there is no pin, and the files' grace has to do."""

    def __init__(self, layout: RunLayout, lsn: int) -> None:
        self._path = layout.readers / f"{lsn}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._descriptor = -1
        self._root = layout.root
        try:
            make_readers(layout)
            unlocked = self._path.with_name(f".{self._path.name}")  # not seen, and so not swept, before it is locked
            self._descriptor = open_file(unlocked, root=layout.root, flags=os.O_RDWR | os.O_CREAT | os.O_EXCL)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            rename(unlocked, self._path, root=layout.root)
        except OSError:  # a read-only run: nobody compacts it either
            self.close()

    def close(self) -> None:
        """Let go. Idempotent."""
        if self._descriptor >= 0:
            with suppress(OSError):  # whoever asks for pins removes it, as it is no longer locked
                remove(self._path, root=self._root)
            os.close(self._descriptor)
            self._descriptor = -1


def oldest_pinned_lsn(layout: RunLayout) -> int | None:
    """The oldest lsn that a living reader reads, None if there is none. Pins of dead readers are removed.

    Never raises OSError: readers may be other users. What cannot be looked at counts as held.
    """
    try:
        found = names(layout.readers, root=layout.root)
    except OSError:  # somebody's pins may be in it, of whatever age
        return 0
    pinned: list[int] = []
    for match in filter(None, map(_NAME.fullmatch, found)):
        path = layout.readers / match[0]
        if _is_held(path, root=layout.root):
            pinned.append(int(match[1]))
        else:
            with suppress(OSError):  # another user's; it is not held, which is all that matters
                remove(path, root=layout.root)
    return min(pinned, default=None)


def make_readers(layout: RunLayout) -> None:
    """Make the directory of the pins if it is not there."""
    with opened_parent(layout.readers, root=layout.root) as (directory, name), suppress(FileExistsError):
        os.mkdir(name, dir_fd=directory)


def _is_held(path: Path, *, root: Path) -> bool:
    try:
        descriptor = open_file(path, root=root)
    except UnsafePathError:  # no reader of ours made it
        return False
    except FileNotFoundError:  # its reader has just finished
        return False
    except OSError:  # another user's
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or on a file system that does not say
        return True
    finally:
        os.close(descriptor)
    return False
