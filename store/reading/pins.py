"""Pin a snapshot while somebody reads it, so that none of its files is removed.

A pin is a file in `<run>/readers/` that the reading process holds locked. The lock ends with the
process, however that ends. The name has the oldest lsn that the reader may show. Once the reader
knows which lsn it shows, the file says so. Exports that were written and replaced later then need
not wait for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from store.atomic_write import PRIVATE
from store.errors import StoreError, UnsafePathError
from store.layout import RunLayout
from store.untrusted.file_access import (
    names,
    open_directory_in,
    open_file,
    open_file_in,
    remove,
)

_NAME = re.compile(r"(\d+)-\d+-[0-9a-f]+")
_SHOWN = re.compile(rb"(\d{1,19})\n")
_MAX_BYTES = 32  # of a pin's content
# Errors of a run that this user may not write, and of a file system without locks. Reading goes on
# without a pin.
NO_PIN = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinned:
    """The files that an open reader needs."""

    since: int
    shown: int | None  # the one lsn it needs; None: it is opening, and needs all from `since` on

    def needs(self, *, written: int, replaced: int) -> bool:
        """Return whether the reader needs a file of lsn `written` until before `replaced`."""
        if self.shown is None:
            return replaced > self.since
        return written <= self.shown < replaced


class Pin:
    """One reader's pin.

    There is none if this user may not write: on read-only media, and in another user's run. The
    owner of that run does not wait for this reader. It removes files after their grace and the
    snapshot window.
    """

    def __init__(self, layout: RunLayout, lsn: int) -> None:
        self._name = f"{lsn}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._readers = self._descriptor = -1
        # Under this name the pin is not found, and so not removed, before it is locked.
        unlocked = f".{self._name}"
        try:
            # The owner of a stranger's run can put a link in its place at any moment.
            with layout.opened() as run:
                # Its owner makes it, so that no reader's umask locks anybody out. A copied run may
                # lack it.
                with suppress(FileExistsError):
                    os.mkdir(layout.readers.name, dir_fd=run)
                self._readers = open_directory_in(run, layout.readers.name, path=layout.readers)
            self._descriptor = open_file_in(
                self._readers,
                unlocked,
                path=layout.readers / unlocked,
                flags=os.O_RDWR | os.O_CREAT | os.O_EXCL,
                mode=PRIVATE,  # somebody who may read it could lock it first, for good
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            self._show_to_owners()
            os.rename(unlocked, self._name, src_dir_fd=self._readers, dst_dir_fd=self._readers)
        except OSError as error:
            if self._descriptor >= 0:
                with suppress(OSError):  # nobody else would ever remove this name
                    os.unlink(unlocked, dir_fd=self._readers)
            self.close()
            # No owner opens a run that has a link, so none of its files is removed.
            if error.errno not in NO_PIN and not isinstance(error, UnsafePathError):
                raise StoreError(
                    f"cannot tell the owner of {layout.root} that its files are being read: "
                    f"{layout.readers}: {error.strerror}; free space, raise ulimit -n, or mend the "
                    "directory, then retry"
                ) from error

    def _show_to_owners(self) -> None:
        """Let whoever may own the run's catalog look whether the pin is locked.

        These are who may write in the run. Nobody else may open it: they could lock what a killed
        reader left, and the run would keep all files from then on.
        """
        found = os.fstat(self._readers)
        with suppress(OSError):  # this user is not in that group, or the file system has none
            owner = found.st_uid if os.geteuid() == 0 else -1
            os.fchown(self._descriptor, owner, found.st_gid)
        for_group = stat.S_IRGRP if found.st_mode & stat.S_IWGRP else 0
        for_all = stat.S_IROTH if found.st_mode & stat.S_IWOTH else 0
        os.fchmod(self._descriptor, PRIVATE | for_group | for_all)

    def settle(self, lsn: int) -> None:
        """Say that the reader shows this snapshot and no other."""
        if self._descriptor >= 0:
            with suppress(OSError):  # the disk is full: files from the pin's lsn on are kept
                os.pwrite(self._descriptor, b"%d\n" % lsn, 0)

    def close(self) -> None:
        """Remove the pin. May be called twice."""
        if self._descriptor >= 0:
            with suppress(OSError):  # `pinned` removes it, because it is no longer locked
                os.unlink(self._name, dir_fd=self._readers)
            os.close(self._descriptor)
            self._descriptor = -1
        if self._readers >= 0:
            os.close(self._readers)
            self._readers = -1


def oldest_pinned_lsn(layout: RunLayout) -> int | None:
    """Return the oldest lsn that an open reader may read, None without a reader."""
    return min((pin.since for pin in pinned(layout)), default=None)


def pinned(layout: RunLayout) -> Sequence[Pinned]:
    """Return the needs of open readers. Remove the pins of dead readers.

    Never raises OSError, because readers may be other users. A pin that cannot be read counts as
    held.
    """
    try:
        found = names(layout.readers, root=layout.root)
    except OSError:  # there may be pins of any age in it
        return [Pinned(since=0, shown=None)]
    held: list[Pinned] = []
    for match in filter(None, map(_NAME.fullmatch, found)):
        path = layout.readers / match[0]
        is_held, content = _look(path, root=layout.root)
        if is_held:
            shown = _SHOWN.fullmatch(content)
            held.append(Pinned(since=int(match[1]), shown=int(shown[1]) if shown else None))
        else:
            with suppress(OSError):  # another user's, but it is not held
                remove(path, root=layout.root)
    return held


def _look(path: Path, *, root: Path) -> tuple[bool, bytes]:
    """Return whether an open reader holds the pin, and the pin's content."""
    try:
        descriptor = open_file(path, root=root)
    # No reader of ours made it, or its reader has just finished.
    except (UnsafePathError, FileNotFoundError):
        return False, b""
    except OSError:  # another user's
        return True, b""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or on a file system without locks
        return True, _content(descriptor)
    finally:
        os.close(descriptor)
    return False, b""


def _content(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, _MAX_BYTES, 0)
    except OSError:  # files from the lsn in its name on are kept
        return b""
