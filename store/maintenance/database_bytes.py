"""Turn a database in memory into the bytes of its file, and back, whatever its size.

    data = bytes_of(connection)
    copy_bytes(data, connection)      # into an empty database

sqlite3's `serialize` and `deserialize` end at 2 GiB: two to five million trajectories.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa

from store.errors import UnavailableError
from store.user_cache import private_directory

IN_MEMORY_BYTES = 1 << 30  # larger ones take a file of their own in this user's cache
# Both bytes are 2 in a catalog with a write-ahead log. SQLite opens no such file in memory.
JOURNAL_MODE = slice(18, 20)
ROLLBACK_JOURNAL = b"\1\1"
PREFIX = "gigpo-catalog-"


def bytes_of(connection: sqlite3.Connection) -> pa.Buffer:
    """Return the bytes of a database's file, for which it needs no log.

    Raises sqlite3.Error; StoreError, UnavailableError without room for a file.
    """
    (n_pages,) = connection.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    if n_pages * page_bytes <= IN_MEMORY_BYTES:
        data = bytearray(connection.serialize())
        data[JOURNAL_MODE] = ROLLBACK_JOURNAL
        return pa.py_buffer(data)
    with _file() as path:
        with closing(sqlite3.connect(path)) as file:
            connection.backup(file)
        with path.open("r+b") as opened:
            opened.seek(JOURNAL_MODE.start)
            opened.write(ROLLBACK_JOURNAL)
        return pa.memory_map(str(path)).read_buffer()  # it stays when its name is removed


def copy_bytes(data: pa.Buffer, connection: sqlite3.Connection) -> None:
    """Copy the pages of a file into an empty database. Nothing of them is executed.

    Raises as `bytes_of`.
    """
    if data.size <= IN_MEMORY_BYTES:
        with closing(sqlite3.connect(":memory:")) as file:
            file.deserialize(data)
            file.backup(connection)
        return
    with _file() as path:
        path.write_bytes(memoryview(data))
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as file:
            file.backup(connection)


@contextmanager
def _file() -> Iterator[Path]:
    """Give a path for a while. Raises UnavailableError where nothing can be written there."""
    with private_directory(PREFIX) as directory:
        path = directory / "catalog.sqlite"
        try:
            yield path
        except OSError as error:
            raise UnavailableError(
                f"a copy of the catalog cannot be kept in {directory.parent}: {error.strerror}; "
                "free space there, or set XDG_CACHE_HOME to a directory with room, then retry"
            ) from error
