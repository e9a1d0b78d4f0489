"""Keep directories of finished files in a remote storage: weights, checkpoints, the base policy.

The marker is written last and removed first, so a directory is either whole or not there. With
local storage nothing is done: the run directory has the files.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

import pyarrow as pa

from store.atomic_write import TEMPORARY_SUFFIX, make_directory
from store.errors import StoreError, UnavailableError
from store.layout import RunLayout
from store.run_names import (
    BASE_POLICY,
    PUBLISHED_PATH,
    VERSION_PATH,
    checked_name,
    without_other_runs,
)
from store.storage import LocalStorage
from store.untrusted import json_values
from store.untrusted.file_access import MAX_TEXT_BYTES, is_directory, remove_tree
from store.weight_files import check_side_files

# Names the files and their sizes. It is written last and removed first.
MARKER = "complete.json"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# The version being loaded, and the one before, which another worker may still load.
KEEP_FETCHED = 2


def publish_directory(layout: RunLayout, directory: Path) -> None:
    """Copy a finished directory into the storage, in place of an older one of its name."""
    if layout.info.storage_uri is None:
        return
    where = layout.relative(directory)
    # A checkpoint of a step that is trained again has an older one's name.
    layout.storage.remove(f"{where}/{MARKER}")
    files = [file for file in sorted(directory.iterdir()) if file.is_file() and file.name != MARKER]
    for file in files:
        layout.storage.write(f"{where}/{file.name}", _content(file))
    sizes = {file.name: file.stat().st_size for file in files}
    layout.storage.write(f"{where}/{MARKER}", json.dumps(sizes).encode())


def prune_published(
    layout: RunLayout, parent: Path, *, kept: Callable[[list[str]], Collection[str]]
) -> None:
    """Remove directories from the storage.

    `kept` gets the names in `parent`, the smallest number first, and returns some.

    What no run publishes is left alone, and what cannot be removed goes the next time: NFS keeps a
    removed file that somebody reads under another name.
    """
    if layout.info.storage_uri is None:
        return
    stored = layout.storage.files(layout.relative(parent))
    found = [PurePosixPath(path) for path in without_other_runs(one.path for one in stored)]
    ours = [path for path in found if PUBLISHED_PATH.fullmatch(str(path.parent))]
    keeps = kept(sorted({path.parent.name for path in ours}, key=lambda name: (len(name), name)))
    for path in sorted(ours, key=lambda path: path.name != MARKER):
        if path.parent.name not in keeps:
            try:
                layout.storage.remove(str(path))
            except UnavailableError:
                raise
            except StoreError:  # the next prune tries again
                continue


def is_published(layout: RunLayout, path: str) -> bool:
    """Return whether a directory is whole in a remote storage."""
    return layout.info.storage_uri is not None and layout.storage.exists(f"{path}/{MARKER}")


def check_published(layout: RunLayout, path: str) -> None:
    """Raise UnavailableError if this machine does not see a directory that a learner published."""
    if layout.info.storage_uri is not None and not is_published(layout, path):
        raise UnavailableError(
            f"{layout.storage.locate(path)} is not there; mount the volume where the learner runs, "
            "then give the command again"
        )


def has_directory(layout: RunLayout, path: str) -> bool:
    """Return whether a directory is here, or whole in a remote storage."""
    return is_directory(layout.root / path, root=layout.root) or is_published(layout, path)


def local_directory(layout: RunLayout, path: str) -> Path:
    """Return the path of a directory on this machine, fetched first if it is only remote.

    Raises StoreError if it is not whole there, UnavailableError if the storage does not answer.
    """
    here = layout.root / checked_name(path, PUBLISHED_PATH, where=str(layout.catalog))
    if here.is_dir() or layout.info.storage_uri is None:
        return here
    sizes = _sizes(layout, path)
    unique = f"{os.getpid()}-{threading.get_ident()}"
    unfinished = here.with_name(f".{here.name}.{unique}{TEMPORARY_SUFFIX}")
    is_version = VERSION_PATH.fullmatch(path) is not None
    try:
        make_directory(here.parent, beneath=layout.root)
        unfinished.mkdir()
        for name, data in _files(layout, path, sizes=sizes):
            (unfinished / name).write_bytes(memoryview(data))
        if is_version:  # to be removed below, unlike the learner's own
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
    if is_version:
        there = (marker.parent for marker in here.parent.glob(f"*/{MARKER}"))
        fetched = sorted(one for one in there if VERSION_PATH.fullmatch(layout.relative(one)))
        for old in fetched[:-KEEP_FETCHED]:
            remove_tree(old, root=layout.root)
    return here


def copy_published(layout: RunLayout, path: str, dest: Path) -> None:
    """Copy the files of a published version into `dest`, a new directory of this user.

    Raises OSError, and StoreError if it is not whole in the storage, or has more than
    MAX_SIDE_BYTES beside its weights.
    """
    sizes = _sizes(layout, path)
    check_side_files(sizes, of=layout.storage.locate(path))
    for name, data in _files(layout, path, sizes=sizes):
        (dest / name).write_bytes(memoryview(data))


def remove_copy(layout: RunLayout, path: str) -> None:
    """Remove a directory of this machine that is whole in a remote storage.

    `local_directory` then fetches it. Raises StoreError.
    """
    here = layout.root / checked_name(path, PUBLISHED_PATH, where=str(layout.catalog))
    if is_published(layout, path):
        remove_tree(here, root=layout.root)


def local_model(layout: RunLayout, path: str) -> str:
    """Return the path of a model on this machine. The base policy of the run is fetched if need be.

    Raises as `local_directory`.
    """
    if Path(path).absolute() != layout.root / BASE_POLICY:
        return path
    return str(local_directory(layout, BASE_POLICY))


def copy_directory(source: RunLayout, layout: RunLayout, path: str) -> None:
    """Copy a directory from the storage of `source` to the run directory of `layout`, durably.

    Raises StoreError if it is not whole in the storage.
    """
    for name, data in _files(source, path, sizes=_sizes(source, path)):
        LocalStorage(layout.root).write(f"{path}/{name}", data)


def _files(
    layout: RunLayout, path: str, *, sizes: Mapping[str, int]
) -> Iterator[tuple[str, pa.Buffer]]:
    """Yield the files of a published directory. Raises StoreError if one is not whole."""
    for name, n_bytes in sizes.items():
        data = layout.storage.read(f"{path}/{name}", at_most=n_bytes)
        if data.size != n_bytes:
            raise StoreError(
                f"{layout.storage.locate(path)}/{name} has {data.size} bytes, not {n_bytes}; "
                "publish it again"
            )
        yield name, data


def _sizes(layout: RunLayout, path: str) -> dict[str, int]:
    """Return the files of a published directory with their sizes. Raises StoreError."""
    name = layout.storage.locate(f"{path}/{MARKER}")
    try:
        marker = layout.storage.read(f"{path}/{MARKER}", at_most=MAX_TEXT_BYTES)
        sizes = json_values.parse_object(marker.to_pybytes())
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
