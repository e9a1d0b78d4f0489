"""Run users' SQL in a child process that first gives up the right to do harm.

The text of a statement is never trusted: a COPY may hide in a CTE. There are two protections:

landlock    The kernel refuses this process every write, every read outside the run directory (but
            a few facts about the machine that DuckDB needs, see MACHINE) and TCP. It holds whatever
            DuckDB does, so also against its defects. In the run DuckDB keeps to ROWS by itself.
filesystem  DuckDB's file system is switched off. It reads through a Python one that cannot write
            and does not leave the run. For other systems and old kernels. It holds as long as
            DuckDB keeps to it. Scans are slower.

With both, the process has no environment, writes no large file and no core dump, ends with its
parent, and has a memory limit. DuckDB neither loads extensions nor spills, and its settings are
locked. All of this holds before the run's open.sql is executed, because that is a stranger's text
as much as a query is. The parent ends a child that does not open the run in time. The beginning of
a statement is looked at only for a clearer error.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow.compute  # noqa: F401  pyarrow imports it later, when no module may be read

from printable import SHOWN_CHARACTERS, one_line
from store.errors import FormatError, QueryProcessError, StoreError, is_out_of_memory
from store.layout import RunLayout
from store.reading import landlock, wire
from store.reading.arrow_answer import BATCH_ROWS, for_arrow, send_rows
from store.reading.manifest import Manifest, read_manifest
from store.reading.open_sql import sql_literal
from store.reading.query import leave_out_unreadable, left_out, show
from store.run_names import MANIFEST

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

LANDLOCK, FILESYSTEM = "landlock", "filesystem"
# They say how much memory there is. DuckDB aborts if they exist and cannot be read.
MACHINE = ("/proc/self/cgroup", "/sys/fs/cgroup")
READING_STATEMENTS = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
# DuckDB's default is 80% of the machine, and a run may be training beside it.
SHARE_OF_DEFAULT_MEMORY = 0.6
# Bytes for the interpreter, Arrow batches, and memory that DuckDB does not count.
MEMORY_BESIDE_DUCKDB = 2 << 30
# What views read beneath the run. No query reads its settings and logs, where secrets may be: every
# user of the machine may ask one of `gigpo view`.
ROWS = ("segments", "export")
CONNECT_TRIES = 5  # a manifest may change while its tables are read
# Footers that are kept in memory: 70 KB a file, more than most small files have.
MAX_CACHED_FILES = 2_000
SETTINGS = (
    "temp_directory = ''",
    "max_temp_directory_size = '0B'",
    "allow_community_extensions = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "allow_persistent_secrets = false",
    "python_enable_replacements = false",
    "python_scan_all_frames = false",
    "enable_progress_bar = false",
)
_PR_SET_PDEATHSIG = 1


def serve(descriptor: int) -> None:
    """Serve queries until the parent ends. `descriptor` is a socket.

    The first message says which run to open, and each further message is a query.
    """
    channel = socket.socket(fileno=descriptor)
    try:
        _, content = wire.receive(channel)
    except EOFError:  # the parent is already gone
        return
    try:
        run = _open(json.loads(content))
        ready = {"lsn": run.lsn, "left_out": left_out(run.connection, run.layout)}
    except Exception as error:  # noqa: BLE001  a process border: the parent gets it
        _send_error(channel, error)
        return
    wire.send(channel, wire.READY, json.dumps(ready).encode())
    asked: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, asked), daemon=True).start()
    while True:
        try:
            _answer(channel, run, asked=json.loads(asked.get()))
        except Exception as error:  # noqa: BLE001  a process border: the parent gets it
            _send_why(channel, run, error=error)


def _listen(channel: socket.socket, asked: queue.SimpleQueue[bytearray]) -> None:
    """Consume the parent's messages. Its end ends this process, and so a query that runs."""
    try:
        while True:
            asked.put(wire.receive(channel)[1])
    except (EOFError, OSError):
        os._exit(0)


@dataclass(kw_only=True, slots=True)
class _Opened:
    """A run whose views the connection has."""

    connection: duckdb.DuckDBPyConnection
    layout: RunLayout
    lsn: int
    prefix: str  # of every path; empty unless the read-only file system is used
    kept: list[list[str]] = field(default_factory=list)  # see _with_tables


def _open(order: dict) -> _Opened:
    """Open the run within all limits: they hold before any text of the run is executed."""
    _bind_to_parent(order["parent"], die_with_thread=order["die_with_thread"])
    os.environ.clear()
    layout = RunLayout.open(Path(order["run"]))
    layout.check_is_still(order["run_id"])  # the owner of its path may have exchanged it since
    if order["copy_of"] is not None:  # the parent has fetched the files of a remote storage
        layout = dataclasses.replace(layout, copy_of=Path(order["copy_of"]))
    files = None
    if order["protection"] == FILESYSTEM:
        from store.reading.read_only_files import ReadOnlyFiles  # fsspec is slow to import

        files = ReadOnlyFiles(layout.root, names=(*ROWS, MANIFEST))
    # A later import finds no module, which libraries expect, instead of a forbidden directory.
    sys.path.clear()
    if files is None:
        with ExitStack() as opened:
            runs = [
                opened.enter_context(layout.opened(path))
                for path in dict.fromkeys((layout.root, layout.run_directory))
            ]
            machine = [
                os.open(path, os.O_PATH | os.O_CLOEXEC) for path in MACHINE if Path(path).exists()
            ]
            for descriptor in machine:
                opened.callback(os.close, descriptor)
            landlock.restrict([*runs, *machine])

    prefix = "" if files is None else f"{files.protocol}://"

    def limited() -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect()
        _lock_settings(
            connection, layout, files=files, prefix=prefix, memory_limit=order["memory_limit"]
        )
        return connection

    connection, lsn = _connect(layout, lsn=order["lsn"], limited=limited, prefix=prefix)
    return _Opened(connection=connection, layout=layout, lsn=lsn, prefix=prefix)


def _bind_to_parent(parent: int, *, die_with_thread: bool) -> None:
    """Forbid large files and core dumps, be killed first without memory, and end with the parent.

    The kernel sends its signal at the end of the *thread* that started the child, so only a main
    thread asks for it. The end of the channel covers the other cases.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    with suppress(OSError):  # it only helps the kernel to choose
        Path("/proc/self/oom_score_adj").write_text("1000")
    if die_with_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(0)


def _connect(
    layout: RunLayout,
    *,
    lsn: int | None,
    limited: Callable[[], duckdb.DuckDBPyConnection],
    prefix: str,
) -> tuple[duckdb.DuckDBPyConnection, int]:
    """Return the run's views at `lsn`, by default now, and the lsn that they show.

    Read the manifest if it is the same before and after. Where it changes faster than it is read,
    read the catalog.
    """
    for _ in range(CONNECT_TRIES):
        before = _manifest_of(layout)
        if lsn not in (None, before.lsn):
            break
        connection = limited()
        show(connection, layout, as_of=None, prefix=prefix)
        after = read_manifest(layout)
        if after is not None and before.lsn == after.lsn:
            return connection, before.lsn
        connection.close()
    shown = before.lsn if lsn is None else lsn
    connection = limited()
    show(connection, layout, as_of=shown, prefix=prefix)
    return connection, shown


def _manifest_of(layout: RunLayout) -> Manifest:
    manifest = read_manifest(layout)
    if manifest is None:
        raise FormatError(
            f"{layout.run_directory} has no manifest.json; "
            f"gigpo fsck --repair {layout.run_directory} writes it"
        )
    return manifest


def _lock_settings(
    connection: duckdb.DuckDBPyConnection,
    layout: RunLayout,
    *,
    files: AbstractFileSystem | None,
    prefix: str,
    memory_limit: str | None,
) -> None:
    if memory_limit is None:
        size, unit = _memory_limit(connection).split()
        memory_limit = f"{float(size) * SHARE_OF_DEFAULT_MEMORY:.1f} {unit}"
    if files is not None:
        connection.register_filesystem(files)

    def inside(name: str) -> str:
        return sql_literal(f"{prefix}{layout.root}/{name}")

    threads = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    few = len(_manifest_of(layout).segments) <= MAX_CACHED_FILES
    settings = [
        *SETTINGS,
        # Files never change. The cache saves most of a small query over many files.
        f"parquet_metadata_cache = {str(few).lower()}",
        f"threads = {threads}",
        f"memory_limit = {sql_literal(memory_limit)}",
        f"allowed_directories = [{', '.join(map(inside, ROWS))}]",
        f"allowed_paths = [{inside(MANIFEST)}]",
        "enable_external_access = false",
        *(["disabled_filesystems = 'LocalFileSystem'"] if files is not None else []),
        "lock_configuration = true",
    ]
    for setting in settings:
        connection.execute(f"SET {setting}")
    limit_bytes = _bytes(_memory_limit(connection)) + MEMORY_BESIDE_DUCKDB
    allowed_bytes = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if allowed_bytes != resource.RLIM_INFINITY:  # a lower limit that was set with ulimit stays
        limit_bytes = min(limit_bytes, allowed_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _memory_limit(connection: duckdb.DuckDBPyConnection) -> str:
    limit: str = connection.sql("SELECT current_setting('memory_limit')").fetchall()[0][0]
    return limit


def _bytes(text: str) -> int:
    """Return the number of bytes that DuckDB writes with a unit.

    >>> _bytes("1.5 KiB")
    1536
    """
    number, unit = text.split()
    return int(float(number) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(unit))


def _answer(channel: socket.socket, run: _Opened, *, asked: dict) -> None:
    """Send the rows, then END.

    Raises StoreError for anything but one query, and for more than `max_rows` or `max_bytes`.
    """
    connection = run.connection
    sql = _with_tables(run, asked["tables"], asked["sql"])
    _check_one_query(sql)
    connection.execute("BEGIN TRANSACTION READ ONLY")
    try:
        relation = for_arrow(connection.sql(sql), times_as_text=asked["times_as_text"])
        with relation.to_arrow_reader(BATCH_ROWS) as batches:
            more = send_rows(channel, batches, asked=asked)
    finally:
        connection.execute("ROLLBACK")
    wire.send(channel, wire.END, json.dumps({"more": more}).encode())


def _with_tables(run: _Opened, tables: list[list[str]], query: str) -> str:
    """Return the query after a WITH of the tables, names and queries, which are computed once.

    A table may read those before it. They are kept until other tables are asked for.
    """
    if not tables:
        return query
    n_equal = 0
    while n_equal < min(len(tables), len(run.kept)) and tables[n_equal] == run.kept[n_equal]:
        n_equal += 1
    if n_equal < len(tables):
        del run.kept[n_equal:]
        for name, made_by in tables[n_equal:]:
            before = _with_kept([known for known, _ in run.kept])
            made = f"{before}{made_by}"
            _check_one_query(made)
            run.connection.execute(f"CREATE OR REPLACE TEMP TABLE {_kept(len(run.kept))} AS {made}")
            run.kept.append([name, made_by])
    return f"{_with_kept([name for name, _ in tables])}{query}"


def _with_kept(names: Sequence[str]) -> str:
    tables = [f"{name} AS (FROM temp.{_kept(number)})" for number, name in enumerate(names)]
    return f"WITH {', '.join(tables)} " if tables else ""


def _kept(number: int) -> str:
    return f"kept_{number}"


def _check_one_query(sql: str) -> None:
    statements = duckdb.extract_statements(sql)
    if len(statements) > 1:
        raise StoreError(f"SQL: {len(statements)} statements; ask one at a time")
    try:
        reads = bool(statements) and statements[0].type in READING_STATEMENTS
    except ValueError:  # a type that DuckDB's Python package does not know
        reads = False
    if not reads:
        raise StoreError(
            "SQL: ask one query that only reads; begin with SELECT, FROM, WITH, DESCRIBE or EXPLAIN"
        )


def _send_why(channel: socket.socket, run: _Opened, *, error: Exception) -> None:
    """Send the error, or the files that were left out because of it, so that asking again helps."""
    if isinstance(error, duckdb.Error) and leave_out_unreadable(
        run.connection, error, prefix=run.prefix
    ):
        wire.send(channel, wire.LEFT_OUT, json.dumps(left_out(run.connection, run.layout)).encode())
    else:
        _send_error(channel, error)


def _send_error(channel: socket.socket, error: Exception) -> None:
    """Send an error in one line. Of a Python traceback send only the last line."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[-1] if lines[0].startswith("Traceback") else one_line(error)
    # DuckDB would advise settings that are locked.
    if isinstance(error, duckdb.OutOfMemoryException):
        text = (
            "SQL: the query needs more memory than it may have; ask for fewer columns or groups at "
            "once, or raise memory_limit"
        )
    elif not isinstance(error, StoreError):
        name = "" if isinstance(error, duckdb.Error) else f"{type(error).__name__}: "
        text = f"SQL: {name}{text}"
    # A lack of memory may be over the next time, as the end of this process may.
    kind = QueryProcessError if is_out_of_memory(error) else type(error)
    message = {"type": kind.__name__, "message": text[:SHOWN_CHARACTERS]}
    wire.send(channel, wire.ERROR, json.dumps(message).encode())
