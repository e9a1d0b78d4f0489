"""Directories of finished files, such as weights, in a storage that is elsewhere: visible last, fetched whole.

With local storage there is nothing to do: the run directory has them.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path, PurePosixPath

import pyarrow as pa

from store import json_values
from store.durable import TEMPORARY_SUFFIX
from store.errors import FormatError, StoreError
from store.layout import RunLayout

MARKER = "complete.json"  # names the files and their sizes; the last to be written, the first to be removed
KEEP_FETCHED = 2  # one being loaded, and the one before it, which another worker of the machine may still load


def publish_directory(layout: RunLayout, directory: Path, *, keep: int) -> None:
    """Put a finished directory into the storage, and remove all but the newest `keep` by name of those beside it."""
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
    """Where the directory `path` is on this machine; fetched first if it is not here and the storage is elsewhere.

    Raises StoreError if it is not complete there, or the storage does not answer.
    """
    here = layout.root / path
    if here.is_dir() or layout.info.storage_uri is None:
        return here
    marker = f"{path}/{MARKER}"
    try:
        sizes = json_values.parse_object(layout.storage.read(marker).to_pybytes())
    except ValueError as error:
        raise FormatError(f"{layout.storage.locate(marker)} is damaged ({error}); publish {path} again") from error
    unfinished = here.with_name(f".{here.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}")
    try:
        unfinished.mkdir(parents=True)
        for name, n_bytes in sizes.items():
            data = layout.storage.read(f"{path}/{PurePosixPath(name).name}")
            if data.size != n_bytes:
                raise StoreError(f"{layout.storage.locate(path)}/{name} has {data.size} bytes, not {n_bytes}; publish it again")
            (unfinished / PurePosixPath(name).name).write_bytes(memoryview(data))
        (unfinished / MARKER).write_text(json.dumps(sizes))
        unfinished.rename(here)
    except OSError as error:
        if not here.is_dir():  # else another worker of this machine was faster
            name = layout.storage.locate(path)
            raise StoreError(f"cannot fetch {name} to {here}: {error.strerror}; free space or fix permissions") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for old in sorted(marker.parent for marker in here.parent.glob(f"*/{MARKER}"))[:-KEEP_FETCHED]:
        shutil.rmtree(old, ignore_errors=True)
    return here


def _content(path: Path) -> pa.Buffer | bytes:
    """Without a copy in memory: weights are large."""
    if path.stat().st_size == 0:  # cannot be mapped
        return b""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()
