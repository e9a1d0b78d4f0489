"""Let one process at a time make a run at a place, from another run or from a storage."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.atomic_write import make_directory
from store.errors import LockedError, StoreError
from store.run_names import OWN_COPIES, RUN_JSON, is_of_a_run
from store.untrusted.file_access import names, status, walk
from store.untrusted.own_directory import check_own_directory

LOCK_ENDING = ".making.lock"
NOT_OUR_LOCK = "remove it, or give run_dir=NEW in a directory of your own"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def making_alone(root: Path) -> Iterator[None]:
    """Hold the lock of whoever makes a run at `root`: a file beside it. Raises LockedError.

    Raises StoreError for a file that is not this user's: somebody else may hold its lock for ever,
    and in a directory for all, such as /tmp, nobody but its owner can remove it.
    """
    check_own_directory(root.parent, may_be_anothers=True, is_made=False)
    make_directory(root.parent, beneath=root.parent)
    path = root.parent / f".{root.name}{LOCK_ENDING}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # With fs.protected_regular Linux refuses to open somebody else's file in /tmp.
        if os.path.lexists(path):
            raise StoreError(
                f"{path} cannot be locked: {error.strerror}; {NOT_OUR_LOCK}"
            ) from error
        if error.errno not in NOT_WRITABLE:
            raise StoreError(
                f"cannot make the lock of {root}: {error.strerror}; free space or fix the "
                "permissions, then retry"
            ) from error
        yield  # `root` is a mounted volume, beside which nothing can be written
        return
    status = os.fstat(descriptor)
    # As for directories, everything passes for root, and root's files do for everybody.
    is_theirs = os.geteuid() != 0 and status.st_uid not in (os.geteuid(), 0)
    if is_theirs or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        whose = (
            f"belongs to another user (uid {status.st_uid})" if is_theirs else "is no ordinary file"
        )
        raise StoreError(f"{path}, the lock of {root}, {whose}; {NOT_OUR_LOCK}")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder removes the file: a lock on a removed one excludes nobody.
        is_held = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    except BlockingIOError:
        is_held = False
    if not is_held:
        os.close(descriptor)
        raise LockedError(
            f"another process makes a run at {root} at this moment; wait until it has ended, "
            "or give run_dir=NEW"
        )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def removable(root: Path) -> list[str]:
    """Return the names in the directory of an unfinished run that are the run's.

    Somebody's files may lie beside them, and another run in a directory of such a name.
    """
    return [
        name
        for name in names(root, root=root)
        if is_of_a_run(name) and not _holds_another_run(root / name, root=root)
    ]


def _holds_another_run(path: Path, *, root: Path) -> bool:
    found = status(path, root=root)
    if found is None or not stat.S_ISDIR(found.st_mode):  # a link is removed, and not followed
        return False
    return any(
        found.name == RUN_JSON and not _is_own_copy(found, root=root)
        for found, _ in walk(path, root=root)
    )


def _is_own_copy(run_json: Path, *, root: Path) -> bool:
    """Return whether it is a copy of the run's own run.json. Beside that no run has segments."""
    is_named_so = run_json.relative_to(root).as_posix() in OWN_COPIES
    return is_named_so and status(run_json.with_name("segments"), root=root) is None
