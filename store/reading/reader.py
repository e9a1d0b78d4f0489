"""Query one snapshot of a run with SQL, in a child process that can do no harm (see sandbox.py)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import pyarrow as pa

from printable import printable
from store import errors
from store.errors import FormatError, QueryProcessError, SqlTimeout, StoreError, UnavailableError
from store.layout import RunLayout
from store.reading import landlock, wire
from store.reading.manifest import read_manifest
from store.reading.mirror import mirror
from store.reading.pins import Pin
from store.reading.sandbox import FILESYSTEM, LANDLOCK

TIMEOUT_S = 60.0  # of a query
MAX_TIMEOUT_S = 1e9  # sockets take no more
START_S = 60.0  # for a child to import DuckDB and read the manifest, while the machine trains
MAX_ROWS = 100_000_000  # of a result
# Limits of a result that a program of ours asks for, such as versions and checkpoints.
MAX_SMALL_ROWS = 1_000_000
MAX_SMALL_BYTES = 256 << 20
MAX_BYTES = 1 << 30  # of one result; it is held in memory on both sides
# DuckDB and Arrow need no numpy here. They import it where they find it, a tenth of the start.
_BOOT = """import json, sys
sys.modules["numpy"] = None
sys.path[:] = json.loads(sys.argv[1])
from store.reading.sandbox import serve
serve(int(sys.argv[2]))"""
# A protection would not hold for threads that libraries start on import. The child clears its
# environment before it takes a query.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
Tables = Sequence[tuple[str, str]]  # names and queries
Record = TypeVar("Record")
_PASSED_ON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # some interpreters need them to start


class _FilesLeftOut(Exception):
    """DuckDB could not read some files. The query has to be asked again, without them."""


def open_run(
    run: Path | str,
    *,
    as_of: int | None = None,
    protection: str | None = None,
    memory_limit: str | None = None,
    warn: bool = True,
) -> Reader:
    """Return a reader of the run as it is now, or as it was at the lsn `as_of`.

    `protection` is "landlock" where the kernel has it, else "filesystem". `memory_limit` is
    DuckDB's, as in "2GB"; by default about half the machine. Files that cannot be read are left
    out: `Reader.left_out` says so, and with `warn` also a UserWarning. Raises FormatError if `run`
    is no run that this code can read, StoreError if `as_of` is too old.
    """
    layout = mirror(RunLayout.open(Path(run)), as_of=as_of)
    if protection is None:
        protection = LANDLOCK if landlock.abi() > 0 else FILESYSTEM
    reader = Reader(
        layout, as_of=as_of, protection=protection, memory_limit=memory_limit, warns=warn
    )
    if warn and reader.left_out:
        warnings.warn(printable(reader.left_out), stacklevel=2)
    return reader


class Reader:
    """One snapshot of a run. Its child process is kept for the next query.

        with store.open_run("runs/a") as reader:
            table = reader.sql("SELECT task_id, avg(won::INT) FROM trajectories GROUP BY ALL")

    After a time-out or a crash the next query starts a new child on the same snapshot. Threads may
    share a reader; their queries wait for one another. The files of the snapshot stay on disk until
    `close`, as long as the run directory is writable.
    """

    def __init__(
        self,
        layout: RunLayout,
        *,
        as_of: int | None,
        protection: str,
        memory_limit: str | None,
        warns: bool,
    ) -> None:
        self.protection = protection
        self.layout = layout  # of the files that it reads: this user's copy, if the run is remote
        self._memory_limit = memory_limit
        self._warns = warns
        self._lock = threading.Lock()
        self._child: _Child | None = None
        manifest = read_manifest(layout) if as_of is None else None
        newest = 0 if manifest is None else manifest.lsn
        self.lsn = newest if as_of is None else as_of  # of the snapshot
        self._pin = Pin(layout, self.lsn)
        weakref.finalize(self, self._pin.close)  # for a reader that nobody closes
        self._closed = False
        self.left_out = ""  # one line: the files that cannot be read and are missing in answers
        try:
            self._ready_child(as_of)
        except BaseException:
            self.close()
            raise
        self._pin.settle(self.lsn)

    def sql(
        self,
        query: str,
        *,
        timeout_s: float = TIMEOUT_S,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        times_as_text: bool = False,
        tables: Tables = (),
    ) -> pa.Table:
        """Return the whole result of one SELECT.

        Values of types that Arrow does not have (UHUGEINT, BIT, TIMETZ, VARIANT, ...) come as text.
        With `times_as_text` dates and times do too: Python's types have no infinity and no year
        10000. `tables`, names and queries, are a WITH before the query (which begins with a comma
        if it goes on with it). They are computed once for all next queries with the same ones.
        Raises SqlTimeout after `timeout_s`, and StoreError with DuckDB's reason or the limit
        that was exceeded.
        """
        limits = {"max_rows": max_rows, "max_bytes": max_bytes, "cut": False}
        asked = {"sql": query, "tables": tables, "times_as_text": times_as_text, **limits}
        return self._ask(asked, timeout_s=timeout_s)[0]

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return a small result as Python values, for a SELECT of our own.

        The run's views may be a stranger's, so the result is bounded. Raises the errors of `sql`,
        and FormatError for values that Python does not have.
        """
        table = self.sql(query, max_rows=MAX_SMALL_ROWS, max_bytes=MAX_SMALL_BYTES)
        try:
            return cast(list[dict[str, Any]], table.to_pylist())
        except (ValueError, OverflowError, pa.ArrowException) as error:
            raise FormatError(
                f"{self.layout.run_directory}: its views hold what no run has ({error})"
            ) from error

    def records(self, query: str, record: Callable[..., Record]) -> list[Record]:
        """Return a small result as records, whose fields are the query's columns. See `rows`.

        `reader.records("SELECT task_id, ...", TaskResult)` is a list of TaskResult.
        """
        return [record(**row) for row in self.rows(query)]

    def first(
        self,
        query: str,
        *,
        n_rows: int,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_BYTES,
        times_as_text: bool = False,
        tables: Tables = (),
    ) -> tuple[pa.Table, bool]:
        """Return at most the first `n_rows` rows, and whether there are more. See `sql`."""
        limits = {"max_rows": n_rows, "max_bytes": max_bytes, "cut": True}
        asked = {"sql": query, "tables": tables, "times_as_text": times_as_text, **limits}
        return self._ask(asked, timeout_s=timeout_s)

    def close(self) -> None:
        """End the child and unpin the snapshot. May be called twice."""
        self._discard()
        self._pin.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, asked: dict, *, timeout_s: float) -> tuple[pa.Table, bool]:
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise StoreError(
                f"timeout_s is {timeout_s}; give more than 0 and at most {MAX_TIMEOUT_S:g} seconds"
            )
        with self._lock:
            if self._closed:
                raise QueryProcessError("this reader is closed; open another")
            self._check_still_there()
            child = self._ready_child(self.lsn)
            deadline = time.monotonic() + timeout_s
            try:
                while True:
                    child.send(asked, deadline=deadline)
                    try:
                        return child.table(deadline)
                    except _FilesLeftOut as fewer:  # at least one more each time, so this ends
                        self._leave_out(str(fewer))
            except TimeoutError as error:
                self._discard()
                raise SqlTimeout(
                    f"SQL: no result within {timeout_s:g} s; ask for less, or give it more time "
                    "(timeout_s, --timeout)"
                ) from error
            except StoreError:  # the child's answer; an UnsafePathError is an OSError too
                raise
            except (EOFError, OSError) as error:
                why = child.why_it_died()
                self._discard()
                raise QueryProcessError(f"SQL: {why}") from error
            # Ctrl-C: the next question must not get the answer that is under way.
            except BaseException:
                self._discard()
                raise

    def _leave_out(self, left_out: str) -> None:
        self.left_out = left_out
        if self._warns:
            warnings.warn(printable(left_out), stacklevel=4)

    def _check_still_there(self) -> None:
        if not RunLayout.exists(self.layout.run_directory):
            raise UnavailableError(
                f"{self.layout.run_directory} was moved or deleted since it was opened; open it "
                "again where it is now"
            )

    def _ready_child(self, lsn: int | None) -> _Child:
        if self._child is None or self._child.process.poll() is not None:
            self._discard()
            order = {
                "run": str(self.layout.root),
                "run_id": self.layout.info.run_id,
                "copy_of": None if self.layout.copy_of is None else str(self.layout.copy_of),
                "lsn": lsn,
                "protection": self.protection,
                "memory_limit": self._memory_limit,
                "parent": os.getpid(),
                "die_with_thread": threading.current_thread() is threading.main_thread(),
            }
            try:
                self._child = _Child()
            except OSError as error:
                raise QueryProcessError(
                    f"SQL: no query process can be started: {error.strerror}; raise ulimit -n and "
                    "-u, then retry"
                ) from error
            self.lsn, self.left_out = self._child.start(order)
        return self._child

    def _discard(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """The process and the channel to it: a socket, because no path in /proc opens a socket."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        package_root = str(Path(__file__).resolve().parents[2])
        path = [package_root, *map(os.path.abspath, sys.path)]
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(path), str(theirs.fileno())],
                env=_ENVIRONMENT | passed_on,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
            )
        self._finalizer = weakref.finalize(self, _end, self.process, self.channel)

    def start(self, order: dict) -> tuple[int, str]:
        """Open a run in the child. Return the lsn that it shows, and which files it cannot read.

        Raises StoreError if it cannot open the run.
        """
        try:
            deadline = time.monotonic() + START_S
            self.send(order, deadline=deadline)
            kind, content = wire.receive(self.channel, deadline=deadline)
        except TimeoutError as error:
            self.end()
            raise QueryProcessError(
                f"SQL: the run is not open within {START_S:g} s: its open.sql asks too much, or "
                f"the machine is busy; look at {order['run']}/open.sql, or try again later"
            ) from error
        except (EOFError, OSError) as error:
            why = self.why_it_died()
            self.end()
            raise QueryProcessError(f"SQL: the query process did not start: {why}") from error
        if kind == wire.ERROR:
            self.end()
            raise _error(content)
        ready = json.loads(content)
        return ready["lsn"], ready["left_out"]

    def send(self, asked: dict, *, deadline: float) -> None:
        wire.send(self.channel, wire.ASK, json.dumps(asked).encode(), deadline=deadline)

    def table(self, deadline: float) -> tuple[pa.Table, bool]:
        """Return the answer to the question that was sent, and whether it was cut.

        Raises EOFError, TimeoutError, and the child's StoreError.
        """
        parts: list[pa.Table] = []
        while True:
            kind, content = wire.receive(self.channel, deadline=deadline)
            if kind == wire.ERROR:
                raise _error(content)
            if kind == wire.LEFT_OUT:
                raise _FilesLeftOut(json.loads(content))
            if kind == wire.END:
                return pa.concat_tables(parts), json.loads(content)["more"]
            parts.append(pa.ipc.open_stream(pa.py_buffer(content)).read_all())

    def end(self) -> None:
        self._finalizer()

    def why_it_died(self) -> str:
        """Say how the process ended, after the channel broke."""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "its process does not answer; ask again"
        if status in (-signal.SIGKILL, -signal.SIGABRT):
            return "its process was killed, probably out of memory; ask for less at once"
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"DuckDB's process ended with {name}; ask in another way"


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()


def _error(content: bytearray) -> StoreError:
    answer = json.loads(content)
    kind = getattr(errors, answer["type"], StoreError)
    is_ours = isinstance(kind, type) and issubclass(kind, StoreError)
    return kind(answer["message"]) if is_ours else StoreError(answer["message"])
