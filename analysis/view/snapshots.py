"""Keep readers of the runs' snapshots, and their answers.

A reader answers one query at a time. Queries that may take long are asked of a second reader of the
same snapshot, so that no page waits for them; it is opened when the first of them comes.

The newest snapshot of a run is looked for in the background while somebody looks at the run. A few
older ones are kept for links. A snapshot never changes, so an answer is kept under its lsn and
query, also after its reader was closed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa

from analysis.view import memory
from analysis.view.kept_answers import AnswerKey, KeptAnswers
from analysis.view.sql_text import Tables, with_tables
from store import (
    PrivateCatalogError,
    Reader,
    RunLayout,
    StoreError,
    UnsafePathError,
    open_run,
    read_manifest,
)

REFRESH_S = 3.0  # between two looks for a newer snapshot
# A newer snapshot takes a new reader, and the page that follows it is drawn again. The next one is
# looked for when all that, and what else was asked, is this share of the machine's CPU time since:
# a training beside it is to lose less than 2 %.
CPU_SHARE = 0.015
# But not later than this: other users of this machine can ask for pages without an end.
MAX_BEHIND_S = 60.0
REMOTE_REFRESH_S = 15.0  # a run in an object store is asked by opening it
LOOKED_AT_S = 30.0  # after the last request nobody looks any more
# Readers of a run beside the newest and the one that was just opened: somebody who compares moments
# goes to and fro between two or three. Each is a process with its own memory.
KEPT_READERS = 3
KEPT_BYTES = 128 << 20  # of all answers of a run: a page that is drawn again asks nothing
QUERY_TIMEOUT_S = 30.0  # of one panel: nobody looks at an empty one for longer
LACKS_RESOURCES = "newer rows cannot be read just now: this server is out of memory or open files"
MAX_ROWS = 1_000_000  # of one answer, which a page draws as a picture
# Of one answer. Others can ask for MAX_LONG at a time, and each is there several times until its
# page is written. The server may have no more than a GiB.
MAX_BYTES = 64 << 20
# Queries of a run that may take long and are not answered yet. Each has one of the 40 threads that
# answer all pages.
MAX_LONG = 8
# Older snapshots of a run that are asked for and not open yet, and requests that wait for them.
# Opening one takes a second or two. A page with its panels needs two, and six connections.
MAX_OPENING = 4
MAX_WAITING = 16


class ShortMemoryError(StoreError):
    """A query is not begun, because the server has too little memory left."""


class _ReaderKey(NamedTuple):
    lsn: int
    is_long: bool  # the reader is for queries that may take long


@dataclass(eq=False, slots=True)
class _Snapshot:
    reader: Reader
    asking: threading.Lock = field(default_factory=threading.Lock)  # held for each query
    users: int = 0
    is_dropped: bool = False
    used_at: float = field(default_factory=time.monotonic)


class Snapshots:
    """The snapshots of one run. Threads may share it."""

    def __init__(
        self, run: Path, *, refresh_s: float = REFRESH_S, as_of: int | None = None
    ) -> None:
        """Open the newest snapshot. Raises StoreError.

        The snapshot `as_of` stays open, once it is open.
        """
        self.run = run
        self._as_of = as_of
        self.left_out = ""  # files that cannot be read and are missing in answers
        self.stuck = ""  # why newer snapshots cannot be shown just now
        self._refresh_s = refresh_s
        self._lock = threading.Lock()
        self._open_lock = threading.Lock()  # one child is started at a time
        self._long = threading.BoundedSemaphore(MAX_LONG)
        self._opening: Counter[_ReaderKey] = Counter()  # who waits for each older snapshot
        self._snapshots: dict[_ReaderKey, _Snapshot] = {}
        self._answers = KeptAnswers(KEPT_BYTES)
        self._looked_at = time.monotonic()
        self._is_closed = threading.Event()
        self._run_id = RunLayout.open(run).info.run_id
        self._is_remote = False
        self.newest_lsn = -1
        self.newest_lsn = self._open(None)
        self._used_s = _cpu_s()  # when the newest snapshot was opened
        self._thread = threading.Thread(target=self._refresh, name="snapshots", daemon=True)
        self._thread.start()

    def look(self) -> int:
        """Return the newest lsn, and keep looking for newer ones for a while.

        The first call after a pause looks for itself: the run went on while nobody looked.
        """
        now = time.monotonic()
        paused = now - self._looked_at > LOOKED_AT_S
        self._looked_at = now
        if paused:
            self._catch_up()
        return self.newest_lsn

    def checked_layout(self) -> RunLayout:
        """Return the run. Raises StoreError if another run has its path now.

        Who owns the path may have put a link to a run of this user there, and reads the pages.
        """
        try:
            layout = RunLayout.open(self.run)
        except UnsafePathError as error:  # its text says where a link leads, and they read it
            raise StoreError(
                f"{self.run} was exchanged: a link of another user is on the way to it now; open "
                "it again where it is"
            ) from error
        layout.check_is_still(self._run_id)
        return layout

    def ensure(self, lsn: int) -> None:
        """Check that the run can be read at this lsn. Raises StoreError."""
        with self._hold_snapshot(_ReaderKey(lsn, False)):
            pass

    def ask(
        self,
        lsn: int,
        query: str,
        n_rows: int | None = None,
        *,
        tables: Tables = (),
        times_as_text: bool = True,
        is_long: bool = False,
        has_left: Callable[[], bool] = lambda: False,
    ) -> pa.Table:
        """Return the answer at this lsn, from memory where it was asked before.

        `n_rows`: at most its first rows. `tables`: see Reader.sql. The query is not begun if
        `has_left` says that nobody waits for it any more. Raises StoreError. The query's own error
        is remembered like an answer; a time-out and a refusal of too many queries are not.
        """
        key = AnswerKey(lsn, with_tables(tables, query), n_rows, times_as_text)
        if (known := self._answers.get(key)) is None:
            with (
                self._limit_long_queries(is_long=is_long),
                self._hold_snapshot(_ReaderKey(lsn, is_long)) as snapshot,
                snapshot.asking,
            ):
                if has_left():
                    raise StoreError("nobody waits for the answer any more")
                if is_long and self._is_short_of_memory():
                    raise ShortMemoryError(
                        "this server has no memory for another query just now; ask again in a "
                        "moment"
                    )
                if (known := self._answers.get(key)) is None:  # it was asked twice
                    known = self._answer(
                        snapshot.reader, query, n_rows, tables=tables, times_as_text=times_as_text
                    )
                    if not snapshot.reader.left_out:  # else rows are missing, perhaps for a moment
                        self._answers.keep(key, known)
        if isinstance(known, StoreError):
            # A new one: each `raise` of the kept one would add the frames of a request to it.
            raise StoreError(str(known))
        return known

    @contextmanager
    def _limit_long_queries(self, *, is_long: bool) -> Iterator[None]:
        """Bound the queries that may take long: each that waits has a thread of the server."""
        if is_long and not self._long.acquire(blocking=False):
            raise StoreError(
                f"{MAX_LONG} queries of this run that may take long are being answered; ask again "
                "in a moment"
            )
        try:
            yield
        finally:
            if is_long:
                self._long.release()

    def _is_short_of_memory(self) -> bool:
        """Return whether little memory is left, also without the answers that are kept."""
        if not memory.is_short():
            return False
        self._answers.clear()
        return memory.is_short()

    def close(self) -> None:
        """End all readers. May be called twice."""
        self._is_closed.set()
        self._thread.join(timeout=self._refresh_s + 1.0)
        with self._lock:
            readers = [each.reader for each in self._snapshots.values()]
            self._snapshots.clear()
        for reader in readers:
            reader.close()

    def _answer(
        self,
        reader: Reader,
        query: str,
        n_rows: int | None,
        *,
        tables: Tables,
        times_as_text: bool,
    ) -> pa.Table | StoreError:
        try:
            if n_rows is not None:
                return reader.first(
                    query,
                    n_rows=n_rows,
                    timeout_s=QUERY_TIMEOUT_S,
                    max_bytes=MAX_BYTES,
                    tables=tables,
                    times_as_text=times_as_text,
                )[0]
            return reader.sql(
                query,
                tables=tables,
                timeout_s=QUERY_TIMEOUT_S,
                max_rows=MAX_ROWS,
                max_bytes=MAX_BYTES,
                times_as_text=times_as_text,
            )
        except StoreError as error:
            # A time-out, a moved run, a lack of memory: none is the query's fault, and each has a
            # class of its own.
            if type(error) is not StoreError:
                raise
            return StoreError(str(error))  # without its traceback
        finally:
            self.left_out = reader.left_out

    @contextmanager
    def _hold_snapshot(self, reader_key: _ReaderKey) -> Iterator[_Snapshot]:
        """Hand out a snapshot, whose reader stays open meanwhile."""
        snapshot = self._take(reader_key)
        while snapshot is None:  # another thread may drop it at once
            try:
                with self._limit_waiting(reader_key):
                    self._open(reader_key.lsn, is_long=reader_key.is_long)
            except PrivateCatalogError:  # another user's run went on; a page may have to wait then
                if not reader_key.is_long:
                    raise
                reader_key = reader_key._replace(is_long=False)
            snapshot = self._take(reader_key)
        try:
            yield snapshot
        finally:
            with self._lock:
                snapshot.users -= 1
                closes = snapshot.is_dropped and not snapshot.users
            if closes:
                snapshot.reader.close()

    @contextmanager
    def _limit_waiting(self, reader_key: _ReaderKey) -> Iterator[None]:
        """Bound the older snapshots that are waited for, and who waits: they open one at a time."""
        with self._lock:
            is_older = reader_key.lsn not in (self.newest_lsn, self._as_of)
            too_many = reader_key not in self._opening and len(self._opening) >= MAX_OPENING
            too_many |= self._opening.total() >= MAX_WAITING
            if is_older and too_many:
                raise StoreError(
                    f"{len(self._opening)} older snapshots of this run are being opened; ask "
                    "again in a moment"
                )
            self._opening[reader_key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._opening[reader_key] -= 1
                if not self._opening[reader_key]:
                    del self._opening[reader_key]

    def _take(self, reader_key: _ReaderKey) -> _Snapshot | None:
        with self._lock:
            snapshot = self._snapshots.get(reader_key)
            if snapshot is not None:
                snapshot.users += 1
                snapshot.used_at = time.monotonic()
            return snapshot

    def _open(self, lsn: int | None, *, is_long: bool = False) -> int:
        """Open a snapshot, the newest one if `lsn` is None, and return its lsn."""
        with self._open_lock:
            if lsn is not None and (lsn, is_long) in self._snapshots:
                return lsn
            if self._is_closed.is_set():
                raise StoreError("the viewer is being closed")
            reader = open_run(self.run, as_of=lsn, warn=False)
            try:
                reader.layout.check_is_still(self._run_id)
            except StoreError:
                reader.close()
                raise
            reader_key = _ReaderKey(reader.lsn, is_long)
            with self._lock:
                is_known = reader_key in self._snapshots
                if not is_known:
                    self._snapshots[reader_key] = _Snapshot(reader=reader)
            if is_known:
                reader.close()
        self._drop_old(newest=reader.lsn if lsn is None else self.newest_lsn, just=reader_key)
        return reader.lsn

    def _drop_old(self, *, newest: int, just: _ReaderKey) -> None:
        """Close the readers that were not used for longest."""
        with self._lock:
            old = sorted(
                (
                    reader_key
                    for reader_key in self._snapshots
                    if reader_key not in ((newest, False), (self._as_of, False), just)
                ),
                key=lambda reader_key: self._snapshots[reader_key].used_at,
            )
            dropped = [
                self._snapshots.pop(reader_key)
                for reader_key in old[: max(0, len(old) - KEPT_READERS + 1)]
            ]
            for snapshot in dropped:
                snapshot.is_dropped = True
            idle = [snapshot.reader for snapshot in dropped if not snapshot.users]
        for reader in idle:
            reader.close()

    def _refresh(self) -> None:
        """Look for a newer snapshot every few seconds while somebody looks, until `close`."""
        caught_up_at = time.monotonic()  # `__init__` opened the newest
        while not self._is_closed.wait(self._refresh_s):
            now = time.monotonic()
            since_s = now - caught_up_at
            try:
                # else what the last answers took stays until the next query
                self._is_short_of_memory()
                allowed_s = CPU_SHARE * (psutil.cpu_count() or 1) * since_s
                if (
                    now - self._looked_at <= LOOKED_AT_S
                    and since_s >= (REMOTE_REFRESH_S if self._is_remote else 0.0)
                    and (_cpu_s() - self._used_s <= allowed_s or since_s >= MAX_BEHIND_S)
                ):
                    before_s = _cpu_s()
                    if self._catch_up():
                        caught_up_at, self._used_s = now, before_s
            # Other users may hold all memory or open files of this process. The reason is shown
            # until a look succeeds.
            except (MemoryError, OSError, psutil.Error):
                self.stuck = LACKS_RESOURCES

    def _catch_up(self) -> bool:
        """Open the newest snapshot if there is a newer one, and return whether it was tried.

        The manifest says it. A run that cannot be read just now is `stuck`.
        """
        try:
            self._is_remote = self.checked_layout().info.storage_uri is not None
            is_tried = self._is_remote or self._has_newer()
            if is_tried:
                self.newest_lsn = self._open(None)
            self.stuck = ""
        except (StoreError, OSError) as error:
            self.stuck = f"newer rows cannot be read just now: {error}"
            return True
        return is_tried

    def _has_newer(self) -> bool:
        manifest = read_manifest(self.checked_layout())
        return manifest is not None and manifest.lsn != self.newest_lsn


def _cpu_s() -> float:
    """Return the CPU time of this process and its readers, in seconds."""
    me = psutil.Process()
    times = [me.cpu_times()]
    used_s = times[0].children_user + times[0].children_system  # of readers that ended
    for child in me.children():
        with suppress(psutil.Error):  # it ends just now
            times.append(child.cpu_times())
    return used_s + sum(each.user + each.system for each in times)
