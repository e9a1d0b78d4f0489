"""Keep directories of finished files, such as weights, in a remote storage.

The marker is written last and removed first, so a directory is either whole or not there. With
local storage nothing is done: the run directory has the files.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path, PurePosixPath

import pyarrow as pa

from store.atomic_write import TEMPORARY_SUFFIX, make_directory
from store.errors import StoreError
from store.layout import VERSION_PATH, RunLayout, checked_name
from store.untrusted import json_values
from store.untrusted.file_access import remove_tree

# Names the files and their sizes. It is written last and removed first.
MARKER = "complete.json"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# The version being loaded, and the one before, which another worker may still load.
KEEP_FETCHED = 2


def publish_directory(layout: RunLayout, directory: Path, *, keep: int) -> None:
    """Copy a finished directory into the storage. Keep the newest `keep` beside it, by name."""
    if layout.info.storage_uri is None:
        return
    where = layout.relative(directory)
    files = [file for file in sorted(directory.iterdir()) if file.is_file()]
    for file in files:
        layout.storage.write(f"{where}/{file.name}", _content(file))
    sizes = {file.name: file.stat().st_size for file in files}
    layout.storage.write(f"{where}/{MARKER}", json.dumps(sizes).encode())
    paths = [stored.path for stored in layout.storage.files(layout.relative(directory.parent))]
    names = sorted({PurePosixPath(path).parent.as_posix() for path in paths})
    for path in sorted(paths, key=lambda path: not path.endswith(MARKER)):
        if PurePosixPath(path).parent.as_posix() in names[:-keep]:
            layout.storage.remove(path)


def local_directory(layout: RunLayout, path: str) -> Path:
    """Return the path of a directory on this machine, fetched first if it is only remote.

    Raises StoreError if it is not complete there, or if the storage does not answer.
    """
    here = layout.root / checked_name(path, VERSION_PATH, where=str(layout.catalog))
    if here.is_dir() or layout.info.storage_uri is None:
        return here
    sizes = _sizes(layout, path)
    unique = f"{os.getpid()}-{threading.get_ident()}"
    unfinished = here.with_name(f".{here.name}.{unique}{TEMPORARY_SUFFIX}")
    try:
        make_directory(here.parent, beneath=layout.root)
        unfinished.mkdir()
        for name, n_bytes in sizes.items():
            data = layout.storage.read(f"{path}/{name}", at_most=n_bytes)
            if data.size != n_bytes:
                raise StoreError(
                    f"{layout.storage.locate(path)}/{name} has {data.size} bytes, not {n_bytes}; "
                    "publish it again"
                )
            (unfinished / name).write_bytes(memoryview(data))
        (unfinished / MARKER).write_text(json.dumps(sizes))
        unfinished.rename(here)
    except OSError as error:
        if not here.is_dir():  # otherwise another worker of this machine was faster
            name = layout.storage.locate(path)
            raise StoreError(
                f"cannot fetch {name} to {here}: {error.strerror}; free space or fix permissions"
            ) from error
    finally:
        remove_tree(unfinished, root=layout.root)
    for old in sorted(marker.parent for marker in here.parent.glob(f"*/{MARKER}"))[:-KEEP_FETCHED]:
        remove_tree(old, root=layout.root)
    return here


def _sizes(layout: RunLayout, path: str) -> dict[str, int]:
    """Return the files of a published directory with their sizes. Raises StoreError."""
    name = layout.storage.locate(f"{path}/{MARKER}")
    try:
        sizes = json_values.parse_object(layout.storage.read(f"{path}/{MARKER}").to_pybytes())
        if all(map(FILE_NAME.fullmatch, sizes)):
            return {file: json_values.integer(sizes, file) for file in sizes}
    except ValueError as error:
        raise StoreError(f"{name} is damaged ({error}); publish it again") from error
    raise StoreError(f"{name} names a file that no published weights have; publish it again")


def _content(path: Path) -> pa.Buffer | bytes:
    """Return a file's bytes without a copy in memory, because weights are large."""
    if path.stat().st_size == 0:  # cannot be mapped
        return b""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()
