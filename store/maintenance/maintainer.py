"""Keep a run small while it is being written: merge, retire and remove files in a thread."""

from __future__ import annotations

import errno
import itertools
import sqlite3
import threading
import time
from dataclasses import dataclass

from store.catalog.catalog import Catalog
from store.clock import now_us
from store.errors import FencedError, StoreError, UnavailableError
from store.layout import RunLayout
from store.maintenance.compact import CompactionPolicy, merges
from store.maintenance.sweep import OrphanLook, expire_old, sweep_orphans, sweep_retired

COMPONENT = "maintainer"
# Orphans were written before the catalog was opened, so there is no hurry. It is longer than the
# minutes within which a worker commits a file or gives it up: see `before` of sweep_orphans.
ORPHANS_EVERY_S = 600.0
# Backups of the catalog of a run whose files are in a remote storage. A backup reads the whole
# catalog, so the pause is BACKUP_PAUSE times as long as the backup took.
BACKUP_EVERY_S = 60.0
BACKUP_PAUSE = 20.0
PATIENCE = 10  # pauses between two tries; each try reads and encodes a merge again
# About 1,000 files. Fast writers must not keep retention and sweeping from being done.
MERGES_PER_LOOK = 16
CLOSE_TIMEOUT_S = 30.0  # the largest merge takes a few seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class MaintainerSettings:
    snapshot_window_s: float  # replaced and expired files are kept so long
    keep_days: float | None  # None: for ever
    keep_versions: int | None  # policy versions; None: all
    pause_s: float  # between two looks
    policy: CompactionPolicy


class Maintainer:
    """One thread of the process that owns the catalog.

        maintainer = Maintainer(catalog, layout, settings=settings)
        maintainer.start()
        maintainer.check()     # now and then, from the owner: raises the thread's error
        maintainer.close()     # before the catalog is closed

    Consumes the live files, every `pause_s`. Produces merged files, retired files, fewer files on
    disk, and an event for each; backups of the catalog in a remote storage. Waits for the catalog,
    which a call holds for milliseconds, and for the pause, which `close` ends. It removes only
    files that the owner's manifest no longer shows, so the owner must go on exporting. It ends if
    the run was brought to another directory.

    A full disk or storage that does not answer is an event, and the work is tried again later:
    training must not end because a merge fails. Any other error ends the thread.
    """

    def __init__(
        self, catalog: Catalog, layout: RunLayout, *, settings: MaintainerSettings
    ) -> None:
        self.catalog = catalog
        self.layout = layout
        self.settings = settings
        self._opened_us = now_us()
        self._stop = threading.Event()
        # A daemon, so that an owner that forgets to close it can end. The catalog is crash safe,
        # and a merge under way leaves an orphan.
        self._thread = threading.Thread(target=self._run, name=COMPONENT, daemon=True)
        self._failure: BaseException | None = None
        self._left_out: frozenset[str] = frozenset()
        self._orphan_look = OrphanLook()
        self._orphans_at = self._backup_at = time.monotonic()
        # the kind of failure and its error, from the first failure until the first success
        self._waits_for: tuple[str, str] | None = None
        self._said: str | None = None  # the kind of failure that is an event already

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise StoreError, with the cause, if the thread has failed.

        FencedError says that the run was brought to another directory.
        """
        if isinstance(self._failure, FencedError):
            raise self._failure
        if self._failure is not None:
            raise StoreError(
                f"the maintainer of {self.layout.root} stopped: {self._failure!r}; "
                "mend that and start the run again"
            ) from self._failure

    def close(self) -> None:
        """Stop after the merge under way; wait for it at most CLOSE_TIMEOUT_S. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def work(self) -> None:
        """Merge, retire and remove what is due, as the thread does after each pause.

        An unavailable source is raised at the end: one file must not keep the rest from being done.
        """
        unavailable: UnavailableError | None = None
        self.layout.check_primary()
        if self.layout.info.storage_uri is not None and time.monotonic() >= self._backup_at:
            self._back_up()
        try:
            self._merge()
        except UnavailableError as error:
            unavailable = error
        keep_days, keep_versions = self.settings.keep_days, self.settings.keep_versions
        expire_old(self.catalog, self.layout, keep_days=keep_days, keep_versions=keep_versions)
        sweep_retired(self.catalog, self.layout, window_s=self.settings.snapshot_window_s)
        if time.monotonic() >= self._orphans_at:
            self._orphan_look = sweep_orphans(
                self.catalog, self.layout, opened_us=self._opened_us, before=self._orphan_look
            )
            self._orphans_at = time.monotonic() + ORPHANS_EVERY_S
        if unavailable is not None:
            raise unavailable

    def _back_up(self) -> None:
        began_s = time.monotonic()
        self.catalog.back_up()
        ended_s = time.monotonic()
        self._backup_at = ended_s + max(BACKUP_EVERY_S, BACKUP_PAUSE * (ended_s - began_s))

    def _merge(self) -> None:
        policy = self.settings.policy
        results = merges(self.catalog, self.layout, policy=policy, skip=self._left_out)
        for result in itertools.islice(results, MERGES_PER_LOOK):
            self._left_out |= {*result.left_out}
            if self._stop.is_set():
                break

    def _run(self) -> None:
        try:
            pause_s = self.settings.pause_s
            while not self._stop.wait(pause_s if self._waits_for is None else PATIENCE * pause_s):
                self._work_or_wait()
        # The border of a thread: `check` raises the error in the owner's thread.
        except BaseException as error:  # noqa: BLE001
            self._failure = error

    def _work_or_wait(self) -> None:
        try:
            # Logged at the next try: the disk of the catalog may have been full too.
            if self._waits_for is not None and self._waits_for[0] != self._said:
                self._said, reason = self._waits_for
                detail = f"tried again until it works: {reason}"
                self.catalog.log(component=COMPONENT, what=self._said, detail=detail)
            self.work()
            self._waits_for = self._said = None
        except (StoreError, OSError) as error:
            if is_disk_full(error):
                self._waits_for = ("disk full", str(error))
            elif isinstance(error, UnavailableError):
                self._waits_for = ("unavailable", str(error))
            else:
                raise


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk or quota caused the error, of a file or of the catalog."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return True
        error = error.__cause__
    return False
