"""Bring a run to this machine whose files are in a storage, and whose own disk may be lost.

    uri, root = "s3://bucket/run", Path("runs/run")
    if not is_brought(uri, root):
        report = bring_run(uri, root, trusts=False)   # from now on the run goes on here
    run = run_at(uri)     # only to be read: a directory in this user's cache
    bring_catalog(uri)    # and its catalog there, for a fork

`bring_run` makes the directory the run's primary one. Its catalog is the newest backup, with the
segment files that are newer. Weights and checkpoints are fetched when they are needed. Killed at
any moment, the same call begins again.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from store import primary_directory
from store.atomic_write import READ_ONLY, READ_WRITE, make_directory, write_atomically
from store.errors import FormatError, LockedError, StoreError, UnavailableError
from store.layout import (
    BASE_POLICY,
    CONFIG_FILE,
    OUTSIDE_FILE,
    UNFINISHED_BRING,
    RunLayout,
    is_unused,
)
from store.maintenance.rebuild import Report, rebuild
from store.reading import open_sql
from store.reading.mirror import cache_of
from store.remote_directory import has_directory, local_directory
from store.run_json import RunInfo, parse_run_json
from store.storage import Storage, open_storage
from store.untrusted.file_access import (
    MAX_OPEN_SQL_BYTES,
    MAX_TEXT_BYTES,
)
from store.untrusted.memory_limit import limited_memory
from store.untrusted.signatures import MAX_SIGNED_BYTES, SIGNED, add_signatures
from store.untrusted.trust import check_trusted, trust

RUN_JSON = "run.json"
LOCK_ENDING = ".bring.lock"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
OF_A_FILE_SYSTEM = "lost+found"  # may be in a directory that is the root of one


def is_uri(location: str) -> bool:
    """Return whether a location is the URI of a storage, and no path."""
    return "://" in location


def bring_run(uri: str, root: Path, *, trusts: bool) -> Report:
    """Make the directory `root`, in which the run at `uri` goes on. Say what was recovered.

    `root` must be empty, or not there. `trusts` counts the run as this user's. Raises StoreError,
    for a stranger's run too; nothing is left at `root` then, and the run stays where it was, if the
    storage still answers. Raises LockedError while another process brings a run to `root`.
    """
    storage = open_storage(uri)
    info, run_json = _read_run_json(storage)
    root = root.absolute()
    with _alone(root):
        return _bring(storage, RunLayout(root=root, info=info), run_json, trusts=trusts)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the lock of whoever brings a run to `root`: a file beside it. Raises LockedError."""
    make_directory(root.parent, beneath=root.parent)
    path = root.parent / f".{root.name}{LOCK_ENDING}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise StoreError(f"{path} cannot be locked: {error.strerror}; remove it") from error
        yield  # `root` is a mounted volume, beside which nothing can be written
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder removes the file: a lock on a removed one excludes nobody.
        is_held = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    except BlockingIOError:
        is_held = False
    if not is_held:
        os.close(descriptor)
        raise LockedError(
            f"another process brings a run to {root} at this moment; wait until it has ended, "
            "or give run_dir=NEW"
        )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _bring(storage: Storage, layout: RunLayout, run_json: bytes, *, trusts: bool) -> Report:
    """Make the directory of `layout`, which is locked, and remove it if that fails."""
    root = layout.root
    is_new = not root.exists()
    _empty(root)
    make_directory(root, beneath=root)
    (root / UNFINISHED_BRING).touch()
    try:
        _bring_small_files(storage, layout, run_json)
        if trusts:
            trust(root)
        with limited_memory([root]):  # an error quotes the settings of a stranger's run
            check_trusted(root)
        for directory in (layout.segments, layout.exports, layout.weights, layout.checkpoints):
            make_directory(directory, beneath=root)
        make_directory(layout.logs, beneath=root)
        if has_directory(layout, BASE_POLICY):
            local_directory(layout, BASE_POLICY)
        with primary_directory.taken(root, storage):
            report = rebuild(layout, only_new=True)
    except BaseException:
        with suppress(OSError, StoreError):
            _empty(root)
            if is_new:
                root.rmdir()
        raise
    (root / UNFINISHED_BRING).unlink()
    return report


def has_begun(uri: str) -> bool:
    """Return whether there is a run at `uri` to go on with. Raises StoreError."""
    return not is_unused(open_storage(uri))


def is_brought(uri: str, root: Path) -> bool:
    """Return whether the run at `uri` is in the directory `root` already, whole.

    Raises StoreError if another run is there.
    """
    root = root.absolute()
    if not RunLayout.exists(root) or (root / UNFINISHED_BRING).exists():
        return False
    there = RunLayout.open(root).info.storage_uri
    if there is None or open_storage(there).locate("") != open_storage(uri).locate(""):
        raise StoreError(f"{root} holds another run than {uri}; give run_dir=NEW")
    return True


@functools.cache
def run_at(location: str) -> Path:
    """Return the directory of a run: `location` itself, or of a URI one in this user's cache.

    That one has the run's settings and signatures. The other files are read from the storage. A URI
    without a run is returned as it is. Each is asked once in a process. Raises StoreError.
    """
    if not is_uri(location):
        return Path(location)
    storage = open_storage(location)
    if not storage.exists(RUN_JSON):
        return Path(location)
    info, run_json = _read_run_json(storage)
    root = cache_of(info.run_id, location, kind="settings")
    _bring_small_files(storage, RunLayout(root=root, info=info), run_json)
    return root


@functools.cache
def bring_catalog(location: str) -> None:
    """Make a remote run's newest backup the catalog of `run_at(location)`, once in a process.

    Raises StoreError, for a stranger's run too: its backup may have any size.
    """
    root = run_at(location)
    if not is_uri(location) or not RunLayout.exists(root):
        return
    check_trusted(root)
    layout = RunLayout.open(root)
    backup = layout.relative(layout.backup)
    if layout.storage.exists(backup):
        data = layout.storage.read(backup)
        write_atomically(layout.catalog, memoryview(data), mode=READ_WRITE, beneath=root)


def _read_run_json(storage: Storage) -> tuple[RunInfo, bytes]:
    """Return the run's run.json. Raises StoreError if it names another storage than this one."""
    name = storage.locate(RUN_JSON)
    try:
        data: bytes = storage.read(RUN_JSON, at_most=MAX_TEXT_BYTES).to_pybytes()
    except UnavailableError:
        raise
    except StoreError as error:
        raise FormatError(f"{error}; is it the store.uri of a run?") from error
    info = parse_run_json(data, name=name)
    uri = info.storage_uri
    if not uri or open_storage(uri).locate("") != storage.locate(""):
        raise FormatError(
            f"{name} is of a run whose files are in {uri or 'its directory'}; give that, or read "
            "this copy: gigpo fetch URI DIR"
        )
    return info, data


def _bring_small_files(storage: Storage, layout: RunLayout, run_json: bytes) -> None:
    """Write the run's settings and signatures into `layout`, which was made from `run_json`.

    That file is not read again: the storage may answer something else the second time.
    """
    root = layout.root
    signed = _small(storage, SIGNED, at_most=MAX_SIGNED_BYTES)
    if signed is not None:
        add_signatures(root, signed)
    for name in (CONFIG_FILE, OUTSIDE_FILE):
        text = _small(storage, name)
        if text is not None:
            write_atomically(root / name, text, mode=READ_WRITE, beneath=root)
    views = _small(storage, layout.open_sql.name, at_most=MAX_OPEN_SQL_BYTES)
    if views is not None:
        placed = open_sql.placed(layout, views.decode(errors="replace"))
        write_atomically(layout.open_sql, placed.encode(), mode=READ_WRITE, beneath=root)
    make_directory(layout.run_json_backup.parent, beneath=root)
    for path in (layout.run_json_backup, layout.run_json):
        write_atomically(path, run_json, mode=READ_ONLY, beneath=root)


def _small(storage: Storage, name: str, *, at_most: int = MAX_TEXT_BYTES) -> bytes | None:
    """Return a small file of the storage, None if it is not there."""
    if not storage.exists(name):
        return None
    data: bytes = storage.read(name, at_most=at_most).to_pybytes()
    return data


def _empty(root: Path) -> None:
    """Remove what a killed call left. Raises StoreError if anything else is there."""
    try:
        there = [path for path in root.iterdir() if path.name != OF_A_FILE_SYSTEM]
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror}; give run_dir=NEW") from error
    marker = root / UNFINISHED_BRING
    if there and marker not in there:
        names = ", ".join(sorted(path.name for path in there)[:3])
        raise StoreError(
            f"{root} has other things in it ({names}); give an empty directory: run_dir=NEW"
        )
    for path in there:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != marker:
            path.unlink()
    marker.unlink(missing_ok=True)
