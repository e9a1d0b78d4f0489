"""Own a catalog: one process at a time, and only in a run that this user may change."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress

from printable import shell_word
from store.errors import LockedError, StoreError, UnsafePathError
from store.layout import RunLayout
from store.storage import check_own_storage, split_uri
from store.untrusted.file_access import is_file, names, open_file, status
from store.untrusted.trust import check_own_run

_LOCK_MODE = 0o600  # whoever may open the file, also only to read it, can lock it


def take_lock(layout: RunLayout, *, directory_is_checked: bool = False) -> int:
    """Take the lock of the catalog's owner and return its descriptor.

    Raises LockedError naming the process that has it, and StoreError for another user's directory.
    They could exchange it while the owner opens one file after the other, and so lead what it
    writes and removes to another run. Pass `directory_is_checked` after
    `check_own_run`.
    """
    if not directory_is_checked:
        check_own_run(layout.root)
    path = layout.catalog_lock
    try:
        flags = os.O_RDWR | os.O_CREAT
        descriptor = open_file(path, root=layout.root, flags=flags, mode=_LOCK_MODE)
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != _LOCK_MODE:  # of an earlier version
            with suppress(PermissionError):  # another user's
                os.fchmod(descriptor, _LOCK_MODE)
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot open {path}: {error.strerror}; the run directory must be writable"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        written = os.pread(descriptor, 32, 0)  # by the owner, who may be a stranger
        os.close(descriptor)
        owner = written.decode() if written.isdigit() else "unknown"
        raise LockedError(
            f"process {owner} owns {path.with_name('catalog.sqlite')}; stop it, or choose another "
            "run directory"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def check_unowned(layout: RunLayout) -> None:
    """Raise LockedError naming the process if a running one owns the catalog.

    The lock is held for that moment only. Raises as `take_lock`.
    """
    if is_file(layout.catalog_lock, root=layout.root):
        os.close(take_lock(layout))


def check_owner(layout: RunLayout) -> None:
    """Refuse to own a run behind a link, in a storage that this user did not choose, or elsewhere.

    An owner removes files that the catalog does not name. Raises StoreError; FencedError if the run
    was brought to another directory.
    """
    layout.check_no_links()
    check_own_storage(layout.storage)
    if layout.info.storage_uri is not None and not layout.is_made_by_this_user():
        raise StoreError(
            f"{layout.root} keeps its files at {layout.info.storage_uri}, and you did not make "
            "this run: going on would write and remove files there. If you trust it: gigpo train "
            f"--resume {layout.root} --trust"
        )
    layout.check_primary()


def check_consent(layout: RunLayout) -> None:
    """Refuse to read a stranger's run if that would make this user ask the network.

    Raises StoreError.
    """
    uri = layout.info.storage_uri or ""
    parts = split_uri(uri)
    asks_network = parts is not None and parts.scheme != "file"
    if asks_network and not layout.is_made_by_this_user():
        raise StoreError(
            f"{layout.root} keeps its files at {uri}, and you did not make this run: reading it "
            "would ask there with your "
            f"credentials. If you want that: gigpo fetch {shell_word(uri)} DIR, and read DIR"
        )


def check_not_lost(layout: RunLayout) -> None:
    """Refuse a new catalog for a run with segments, which would be swept: no row names them."""
    found = status(layout.catalog, root=layout.root)
    if found is not None and found.st_size > 0:
        return
    if next(iter(layout.storage.files(layout.relative(layout.segments))), None) is not None:
        # One that a rebuild moved there has no log any more, and so lacks the newest commits.
        aside = names(layout.quarantine, root=layout.root)
        is_aside = any(name.startswith("catalog.") for name in aside)
        remedy = "" if is_aside else "put it back, or "
        raise StoreError(
            f"{layout.catalog} is missing or empty, and the run has segments; {remedy}"
            f"gigpo rebuild {layout.root}"
        )
