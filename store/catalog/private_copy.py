"""Copy a catalog that another user could exchange to a place of our own, where SQLite opens it.

    with copied(layout) as catalog: sqlite3.connect(catalog)

SQLite opens a catalog, its log and its shared memory by their paths, one after the other, makes
those that are missing, and waits for a FIFO. Who exchanges the directory between two of them would
have it write the shared memory of another run, from a log of their own. So each file is opened
beneath one descriptor of the directory, and only the copy is SQLite's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from store.catalog.catalog_files import open_checked
from store.errors import StoreError
from store.layout import RunLayout
from store.untrusted.file_access import copy_first
from store.untrusted.own_directory import check_own_directory
from store.user_cache import private_directory

LOG_HEAD_BYTES = 32  # of a log: its salts change when it begins anew
TRIES = 5


def is_own_place(directory: Path) -> bool:
    """Return whether nobody else can exchange what is in a directory, or the directory itself."""
    try:
        check_own_directory(directory, with_ancestors=True)
    except StoreError:
        return False
    return True


@contextmanager
def copied(layout: RunLayout) -> Iterator[Path]:
    """Give the path of a copy of a catalog and its log as they were at one moment.

    The owner may write meanwhile. Then pages move from the log to the catalog, and all of them are
    in the log that is copied after it, unless it began anew: that is looked for at the end. A
    journal is not copied, as none is played back. Raises StoreError if the log begins anew each
    time, or if there is no room for the copy.
    """
    with private_directory("gigpo-catalog-") as place:
        to = place / layout.catalog.name
        for _ in range(TRIES):
            if _copy_once(layout, to):
                break
        else:
            raise StoreError(
                f"{layout.catalog} is written faster than it can be copied; try again when its "
                "run trains no more"
            )
        yield to


def _copy_once(layout: RunLayout, to: Path) -> bool:
    """Copy both files. Return whether they are of one moment."""
    catalog, log = layout.catalog, _log(layout.catalog)
    with ExitStack() as opened:
        # Not a run of this user to which the owner leads the path meanwhile.
        directory = opened.enter_context(layout.opened(layout.run_directory))
        # Looked at once: its owner may make it longer, or full of holes, after that.
        catalog_file, n_catalog_bytes = open_checked(directory, catalog)
        opened.callback(os.close, catalog_file)
        try:
            log_before, _ = open_checked(directory, log)
        except FileNotFoundError:
            before = os.fstat(catalog_file).st_mtime_ns
            _copy(catalog_file, to, n_bytes=n_catalog_bytes)
            _log(to).unlink(missing_ok=True)
            is_still = os.fstat(catalog_file).st_mtime_ns == before
            return is_still and _status(log.name, directory) is None
        opened.callback(os.close, log_before)
        head = os.pread(log_before, LOG_HEAD_BYTES, 0)
        _copy(catalog_file, to, n_bytes=n_catalog_bytes)
        # Its size now: it has grown by what was written meanwhile, which may be in the catalog too.
        try:
            log_now, n_log_bytes = open_checked(directory, log)
        except FileNotFoundError:
            return False
        opened.callback(os.close, log_now)
        _copy(log_now, _log(to), n_bytes=n_log_bytes)
        is_same = os.path.samestat(os.fstat(log_before), os.fstat(log_now))
        return is_same and head == os.pread(log_now, LOG_HEAD_BYTES, 0)


def _log(catalog: Path) -> Path:
    return catalog.with_name(f"{catalog.name}-wal")


def _copy(source: int, to: Path, *, n_bytes: int) -> None:
    try:
        with open(to, "wb") as file:
            copy_first(source, file, n_bytes=n_bytes)
    except OSError as error:
        raise StoreError(
            f"cannot copy a catalog to {to}: {error.strerror}; it needs room there"
        ) from error


def _status(name: str, directory: int) -> os.stat_result | None:
    """Return the status of a file of an open directory, None if it is not there."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
