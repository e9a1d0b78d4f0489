"""Copy a run from a remote storage to this machine, so that DuckDB reads it like any run.

A reader's copy is in the reader's cache and never in the run: CACHE/async-gigpo/runs/<run
id>-<digest of the URI>, where CACHE is $XDG_CACHE_HOME or ~/.cache. It may be removed. Files never
change, so each is fetched once. The manifest of a copy is replaced after all files it names are
here. A file is removed when the storage no longer has it and no reader here is pinned to an older
manifest. A lock keeps two readers from changing one copy at a time. Nothing is ever written to the
storage.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path, PurePosixPath

import pyarrow as pa

from store.atomic_write import (
    PRIVATE,
    READ_ONLY,
    READ_WRITE,
    make_directory,
    write_atomically,
)
from store.catalog.ownership import check_consent
from store.catalog.snapshot import read_as_of
from store.errors import DigestError, FormatError, StoreError
from store.file_rights import keep_private
from store.hashing import file_digest
from store.layout import RunLayout
from store.reading.manifest import Manifest, parse_manifest, read_manifest
from store.reading.open_sql import placed, read_open_sql
from store.reading.pins import oldest_pinned_lsn
from store.run_json import parse_run_json
from store.run_names import EXPORT_PATH, MANIFEST, RUN_JSON, SEGMENT_PATH
from store.storage import Storage, open_storage
from store.untrusted.bounded_parquet import open_parquet
from store.untrusted.file_access import (
    MAX_MANIFEST_BYTES,
    MAX_OPEN_SQL_BYTES,
    MAX_TEXT_BYTES,
    is_file,
    open_file,
    status,
)
from store.untrusted.limited_process import in_limited_process
from store.untrusted.memory_limit import allowed_bytes
from store.untrusted.own_directory import check_own_directory
from store.user_cache import own_cache

PARALLEL = 8  # requests, which mostly wait for the network
COPIED = (SEGMENT_PATH, EXPORT_PATH)  # what is removed of a copy when no manifest names it
TRIES = 3  # a manifest may be replaced, and its files be removed, while they are fetched
URI_DIGEST_BYTES = 8  # in the name of a directory of this user; short names suffice


def mirror(layout: RunLayout, *, as_of: int | None = None) -> RunLayout:
    """Return the run as files on this machine: as it is now, or with those of the lsn `as_of`.

    A run with local storage is returned as it is. Raises StoreError if the storage does not answer,
    or if reading a stranger's run would ask the network. Raises DigestError for changed files.
    """
    uri = layout.info.storage_uri
    if uri is None:
        return layout
    check_consent(layout)
    info = dataclasses.replace(layout.info, storage_uri=None)
    root = cache_of(info.run_id, uri, kind="runs")
    copy = RunLayout(root=root, info=info, copy_of=layout.root)
    _make_copy(copy)
    with _locked(copy):
        if is_file(layout.open_sql, root=layout.root):
            views = placed(copy, read_open_sql(layout))
            write_atomically(copy.open_sql, views.encode(), mode=READ_WRITE, beneath=copy.root)
        _update(layout.storage, copy)
    if as_of is not None:
        _fetch_missing(
            layout.storage, copy, paths=dict.fromkeys(read_as_of(layout, as_of).segments)
        )
    return copy


def fetch_run(uri: str, dest: Path) -> RunLayout:
    """Make or update a readable copy of the run whose storage is at `uri`. It has no catalog.

    Nobody else may enter a new copy, as the run's settings may hold a secret.
    Raises StoreError if `dest` holds something else, or the run itself.
    """
    in_limited_process(_fetch_run, uri, dest, at_most_bytes=allowed_bytes())
    return RunLayout.open(dest)


def _fetch_run(uri: str, dest: Path) -> None:
    storage = open_storage(uri)
    if not storage.exists(RUN_JSON):
        raise FormatError(
            f"{storage.locate('run.json')} is not there; is it the store.uri of a run?"
        )
    try:
        data = storage.read(RUN_JSON, at_most=MAX_TEXT_BYTES).to_pybytes()
        content = parse_run_json(data, name=storage.locate(RUN_JSON))
    except FormatError as error:
        raise FormatError(f"{error}; is it the store.uri of a run?") from error
    info = dataclasses.replace(content, storage_uri=None)
    layout = RunLayout(root=dest.absolute(), info=info)
    check_own_directory(layout.root, is_made=False)
    make_directory(layout.root, beneath=layout.root)
    check_own_directory(layout.root)
    # The lock's file says that a directory is a copy, or was to become one. Files of a run itself,
    # also of one that lost its catalog or its run.json, would be removed.
    if not is_file(layout.mirror_lock, root=layout.root) and any(dest.iterdir()):
        raise _no_copy(dest, uri)
    if not RunLayout.exists(dest):
        keep_private(layout.root)  # its settings may hold a secret
    text = storage.read("open.sql", at_most=MAX_OPEN_SQL_BYTES).to_pybytes()
    views = placed(layout, text.decode(errors="replace"))
    with _locked(layout):
        is_new = not RunLayout.exists(dest)
        if _has_gone_on(layout) or not (is_new or RunLayout.open(dest).info == info):
            raise _no_copy(dest, uri)
        if is_new:
            _make_copy(layout)
        write_atomically(layout.open_sql, views.encode(), mode=READ_WRITE, beneath=layout.root)
        _update(storage, layout)


def _no_copy(dest: Path, uri: str) -> StoreError:
    return StoreError(
        f"{dest} is not a copy of {uri}; choose a new directory, and read a run itself where it is"
    )


def _has_gone_on(copy: RunLayout) -> bool:
    """Return whether a rebuild made a copy a run: it has a catalog then, and a backup of one."""
    # In the directory itself: `copy.catalog` of a reader's copy in the cache is the run's own.
    paths = (copy.root / copy.catalog.name, copy.backup)
    return any(status(path, root=copy.root) is not None for path in paths)


def cache_of(run_id: str, uri: str, *, kind: str) -> Path:
    """Return this user's directory for a run at `uri`, made if it is not there.

    `kind` is "runs" for its rows, and "settings" for its settings and its catalog. Raises
    StoreError.
    """
    digest = blake2b(uri.encode(errors="surrogatepass"), digest_size=URI_DIGEST_BYTES).hexdigest()
    return own_cache(kind, f"{run_id}-{digest}")


def _make_copy(copy: RunLayout) -> None:
    """Make the directories and run.json of a copy."""
    for directory in (copy.exports, copy.segments):
        make_directory(directory, beneath=copy.root)
    content = json.dumps(dataclasses.asdict(copy.info), indent=1).encode()
    if not is_file(copy.run_json, root=copy.root) or copy.copy_of is not None:
        write_atomically(copy.run_json, content, mode=READ_ONLY, beneath=copy.root)


@contextmanager
def _locked(copy: RunLayout) -> Iterator[None]:
    """Lock a copy: no older manifest replaces a newer one, and no file of it is removed."""
    try:
        # Private: a reader of a copy who could open it could keep its owner from it.
        flags = os.O_RDWR | os.O_CREAT
        lock = open_file(copy.mirror_lock, root=copy.root, flags=flags, mode=PRIVATE)
    except OSError as error:
        raise StoreError(
            f"cannot open {copy.mirror_lock}: {error.strerror}; it must be writable"
        ) from error
    try:
        os.fchmod(lock, PRIVATE)  # that of an earlier version was for all to read
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _update(storage: Storage, copy: RunLayout) -> None:
    for tries_left in reversed(range(TRIES)):
        data = _manifest_bytes(storage)
        manifest = parse_manifest(data, name=storage.locate(MANIFEST))
        if manifest.run_id != copy.info.run_id:
            raise FormatError(
                f"{storage.locate(MANIFEST)} is not of run {copy.info.run_id}; check the URI"
            )
        if manifest.lsn < _lsn_here(copy):
            return
        try:
            _fetch_missing(storage, copy, paths=_named(manifest))
        except StoreError:
            if tries_left == 0 or _manifest_bytes(storage) == data:
                raise
            continue
        write_atomically(copy.manifest, data, mode=READ_WRITE, beneath=copy.root)
        _remove_unneeded(storage, copy, manifest=manifest)
        return


def _manifest_bytes(storage: Storage) -> bytes:
    data: bytes = storage.read(MANIFEST, at_most=MAX_MANIFEST_BYTES).to_pybytes()
    return data


def _lsn_here(copy: RunLayout) -> int:
    try:
        manifest = read_manifest(copy)
    except FormatError:  # a damaged manifest is replaced
        return 0
    return 0 if manifest is None else manifest.lsn


def _named(manifest: Manifest) -> dict[str, int | None]:
    """Return every file of a manifest, with its number of rows where the manifest says it."""
    parts = {part.path: part.n_rows for parts in manifest.tables.values() for part in parts}
    return {**dict.fromkeys(manifest.segments), **parts}


def _fetch_missing(storage: Storage, copy: RunLayout, *, paths: Mapping[str, int | None]) -> None:
    missing = {path: n_rows for path, n_rows in paths.items() if not copy.storage.exists(path)}
    with ThreadPoolExecutor(PARALLEL) as pool:
        fetch = functools.partial(_fetch, storage, copy)
        list(pool.map(fetch, missing.keys(), missing.values()))


def _fetch(storage: Storage, copy: RunLayout, path: str, n_rows: int | None) -> None:
    data = storage.read(path)
    is_segment = path.startswith(f"{copy.relative(copy.segments)}/")
    if is_segment and file_digest(data) != PurePosixPath(path).stem:
        raise DigestError(
            f"{storage.locate(path)} does not have the digest it is named by; restore it from a "
            "backup"
        )
    try:
        found = open_parquet(
            pa.BufferReader(data), n_bytes=data.size, name=storage.locate(path), verify=False
        ).metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise FormatError(
            f"{storage.locate(path)} is no Parquet file ({error}); restore it from a backup"
        ) from error
    if n_rows not in (None, found):
        raise FormatError(
            f"{storage.locate(path)} has {found} rows, the manifest says {n_rows}; restore it from "
            "a backup"
        )
    copy.storage.write(path, data)


def _remove_unneeded(storage: Storage, copy: RunLayout, *, manifest: Manifest) -> None:
    pinned = oldest_pinned_lsn(copy)
    is_needed = pinned is not None and pinned < manifest.lsn
    if is_needed or _has_gone_on(copy):  # it may have gone on since the fetch began
        return
    directories = [copy.relative(directory) for directory in (copy.segments, copy.exports)]
    unnamed = _paths(copy.storage, directories) - _named(manifest).keys()
    unnamed = {path for path in unnamed if any(each.fullmatch(path) for each in COPIED)}
    if unnamed:
        for path in unnamed - _paths(storage, directories):
            with suppress(StoreError):  # the next look removes it
                copy.storage.remove(path)


def _paths(storage: Storage, directories: Iterable[str]) -> set[str]:
    return {file.path for directory in directories for file in storage.files(directory)}
