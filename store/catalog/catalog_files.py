"""Look at the files of a catalog before SQLite opens them. It follows links and obeys journals."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import BinaryIO

from printable import shell_word
from store.atomic_write import PRIVATE
from store.errors import FormatError, PrivateCatalogError, StoreError, UnsafePathError
from store.layout import RunLayout
from store.untrusted.file_access import open_directory, open_file, open_file_in

# The first bytes of a journal, and the last ones if it names a super-journal.
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
# A file may have holes, which read as zeros: SQLite takes them for pages, and a copy in memory has
# them all. A file system that compresses stores a catalog in a tenth of its size.
_MAX_RATIO_OF_HOLES, _SMALL_BYTES = 100, 64 << 20
_BLOCK_BYTES = 512  # of `st_blocks`, on every file system


def make_catalog_file(layout: RunLayout) -> None:
    """Make an empty catalog that only its owner may open, if there is none.

    Whoever may read its files can lock them: a lock of SQLite is one of the kernel, for which
    read permission suffices, and it would end the owner. SQLite gives the log and the shared
    memory the mode of the catalog. Raises StoreError.
    """
    try:
        os.close(
            open_file(
                layout.catalog,
                root=layout.run_directory,
                flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                mode=PRIVATE,
            )
        )
    except FileExistsError:  # its owner may have given it another mode, which stays
        return
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot make {layout.catalog}: {error.strerror}; check free space and permissions, "
            "then retry"
        ) from error


def check_catalog_files(layout: RunLayout) -> None:
    """Raise UnsafePathError or FormatError if SQLite would open or remove files outside the run.

    SQLite follows links. After a transaction of several databases it removes the file that a
    journal names. Raises FormatError too for files that stand for many more bytes than they have,
    and PrivateCatalogError for one that this user may not read.
    """
    n_bytes = 0
    directory = open_directory(layout.run_directory, root=layout.run_directory)
    try:
        for suffix in ("", "-wal", "-shm", "-journal"):
            path = layout.catalog.with_name(f"{layout.catalog.name}{suffix}")
            try:
                descriptor, n_more = open_checked(directory, path)
            except FileNotFoundError:  # its owner may just have closed the catalog
                continue
            n_bytes += n_more
            with open(descriptor, "rb") as file:
                if suffix == "-journal":
                    _check_journal(file, path, n_bytes=n_bytes, root=layout.root)
    finally:
        os.close(directory)


def open_checked(directory: int, path: Path) -> tuple[int, int]:
    """Open a file of a catalog beneath the descriptor of its directory.

    Return its descriptor, which the caller closes, and its size in bytes when it was looked at: a
    stranger may make it longer after that. Raises FileNotFoundError, PrivateCatalogError,
    UnsafePathError for what is no file, and FormatError for one that stands for many more bytes
    than it has.
    """
    catalog = path.with_name(path.name.partition("-")[0])
    try:
        descriptor = open_file_in(directory, path.name, path=path)
    except PermissionError as error:
        owner = os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_uid
        if owner == os.geteuid():
            raise StoreError(
                f"{path} may not be read: chmod u+rw {shell_word(str(catalog))}*"
            ) from error
        raise PrivateCatalogError(
            f"{path} may not be read by you: it belongs to uid {owner}, and a catalog "
            "is made for its owner alone, because who may read it can lock it. Its owner can "
            f"share it: chmod g+r {shell_word(str(catalog))}*"
        ) from error
    found = os.fstat(descriptor)
    try:
        if found.st_size > _SMALL_BYTES + _MAX_RATIO_OF_HOLES * found.st_blocks * _BLOCK_BYTES:
            _check_holes(descriptor, path, n_bytes=found.st_size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found.st_size


def _check_holes(descriptor: int, path: Path, *, n_bytes: int) -> None:
    """Raise FormatError if a file of `n_bytes` is almost nothing but holes.

    Some file systems count a new file's blocks late or never, so the holes themselves are asked
    for. Where there are none, the whole file is one extent.
    """
    stored = at = 0
    while at < n_bytes:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # this file system knows no holes
                return
            break  # the rest is a hole
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        stored += at - begin
    if n_bytes > _SMALL_BYTES + _MAX_RATIO_OF_HOLES * stored:
        raise FormatError(
            f"{path} has {n_bytes:,} bytes, of which {stored:,} are not holes; no run wrote it. "
            f"Restore it from a backup, or gigpo rebuild {path.parent}"
        )


def _check_journal(journal: BinaryIO, path: Path, *, n_bytes: int, root: Path) -> None:
    """Raise FormatError for a journal whose catalog SQLite must not play back.

    `n_bytes` is the size of the catalog and the journal together.
    """
    played_back = _bytes_when_played_back(journal)
    if _names_another_file(journal):
        fault = "names another file, which SQLite would remove"
    elif played_back > n_bytes:
        fault = f"makes a file of {played_back:,} bytes of {n_bytes:,}"
    else:
        return
    raise FormatError(
        f"{path} {fault}; no run of ours writes such a journal. Remove it, or: gigpo rebuild "
        f"--force {root}"
    )


def _bytes_when_played_back(journal: BinaryIO) -> int:
    """Return the size that a rollback journal gives the database, 0 for one that is not valid."""
    journal.seek(0)
    header = journal.read(len(_JOURNAL_MAGIC) + 20)
    if len(header) < len(_JOURNAL_MAGIC) + 20 or not header.startswith(_JOURNAL_MAGIC):
        return 0
    _, _, n_pages, _, page_bytes = struct.unpack_from(">5I", header, len(_JOURNAL_MAGIC))
    return int(n_pages * (page_bytes or 65536))  # the largest page that there is


def _names_another_file(journal: BinaryIO) -> bool:
    """Return whether a rollback journal is of several files, and so names a super-journal."""
    size = journal.seek(0, os.SEEK_END)
    journal.seek(max(0, size - len(_JOURNAL_MAGIC)))
    return journal.read() == _JOURNAL_MAGIC
