"""Files of a run whose storage is elsewhere, brought here for DuckDB: views, sandbox and bare shell then work as on any run.

The files never change, so each is fetched once. manifest.json here is replaced only after all it names is here, and a file
goes when the storage no longer has it and no reader here is pinned to an older manifest. Readers here take turns.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from store.catalog.as_of import read_as_of
from store.durable import READ_ONLY, READ_WRITE, write_atomically, write_once
from store.errors import DigestError, FormatError, StoreError
from store.hashing import file_digest
from store.layout import RunInfo, RunLayout
from store.reading.manifest import MANIFEST_NAME, Manifest, parse_manifest, read_manifest
from store.reading.open_sql import placed
from store.reading.pins import oldest_pinned_lsn
from store.storage import Storage, open_storage

PARALLEL = 8  # requests; each waits mostly for the network
TRIES = 3  # a manifest may be replaced, and what it named be removed, while its files are fetched


def mirror(layout: RunLayout, *, as_of: int | None = None) -> RunLayout:
    """The run as files here, up to date now or with what the lsn `as_of` needs. A run with local storage is that already.

    Raises StoreError if the storage does not answer, DigestError if a file is not what was committed.
    """
    if layout.info.storage_uri is None:
        return layout
    with _turn(layout.local):
        _bring(layout.storage, layout.local)
    if as_of is not None:
        _fetch_missing(layout.storage, layout.local, dict.fromkeys(read_as_of(layout, as_of).segments))
    return layout.local


def fetch(uri: str, dest: Path) -> RunLayout:
    """A readable copy of the run whose storage is at `uri`; called again, it catches up. It has no catalog: it is not the run.

    Raises StoreError if `dest` is something else, or the run itself.
    """
    storage = open_storage(uri)
    try:
        content = json.loads(storage.read("run.json").to_pybytes())
        info = RunInfo(**{**content, "storage_uri": None})
    except (ValueError, TypeError) as error:
        raise FormatError(f"{storage.locate('run.json')} cannot be read ({error}); is it the store.uri of a run?") from error
    layout = RunLayout(root=dest.absolute(), info=info)
    if not RunLayout.exists(dest):
        if dest.exists() and any(dest.iterdir()):
            raise StoreError(f"{dest} is not empty and no copy of a run; choose a new directory")
        layout.exports.mkdir(parents=True, exist_ok=True)
        layout.segments.mkdir(exist_ok=True)
        write_once(
            layout.run_json, json.dumps(dataclasses.asdict(info), indent=1).encode(), mode=READ_ONLY, beneath=layout.root
        )
    elif RunLayout.open(dest).info != info or layout.catalog.exists():
        raise StoreError(f"{dest} is not a copy of {uri}; choose a new directory, and read a run itself where it is")
    views = placed(layout, storage.read("open.sql").to_pybytes().decode())
    write_atomically(layout.open_sql, views.encode(), mode=READ_WRITE, beneath=layout.root)
    with _turn(layout):
        _bring(storage, layout)
    return layout


@contextmanager
def _turn(local: RunLayout) -> Iterator[None]:
    """One at a time: nobody puts back an older manifest, or forgets a file that another has just fetched for a newer one."""
    try:
        lock = os.open(local.mirror_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(f"cannot open {local.mirror_lock}: {error.strerror}; it must be writable") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _bring(storage: Storage, local: RunLayout) -> None:
    for tries_left in reversed(range(TRIES)):
        data = storage.read(MANIFEST_NAME).to_pybytes()
        manifest = parse_manifest(data, name=storage.locate(MANIFEST_NAME))
        if manifest is None or manifest.run_id != local.info.run_id:
            raise FormatError(f"{storage.locate(MANIFEST_NAME)} is not of run {local.info.run_id}; check the URI")
        if manifest.lsn < _lsn_here(local):
            return
        try:
            _fetch_missing(storage, local, _named(manifest))
        except StoreError:
            if tries_left == 0 or storage.read(MANIFEST_NAME).to_pybytes() == data:
                raise
            continue
        write_atomically(local.manifest, data, mode=READ_WRITE, beneath=local.root)
        _forget(storage, local, manifest)
        return


def _lsn_here(local: RunLayout) -> int:
    try:
        manifest = read_manifest(local)
    except FormatError:  # damaged: replaced by whatever is there
        return 0
    return 0 if manifest is None else manifest.lsn


def _named(manifest: Manifest) -> dict[str, int | None]:
    """Every file of a manifest, with its rows where it says how many."""
    parts = {part.path: part.n_rows for parts in manifest.tables.values() for part in parts}
    return {**dict.fromkeys(manifest.segments), **parts}


def _fetch_missing(storage: Storage, local: RunLayout, paths: Mapping[str, int | None]) -> None:
    missing = {path: n_rows for path, n_rows in paths.items() if not local.storage.exists(path)}
    with ThreadPoolExecutor(PARALLEL) as pool:
        for _ in pool.map(lambda item: _fetch(storage, local, path=item[0], n_rows=item[1]), missing.items()):
            pass


def _fetch(storage: Storage, local: RunLayout, *, path: str, n_rows: int | None) -> None:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise StoreError(f"{storage.locate(MANIFEST_NAME)} names {path!r}, outside the run; do not read this run")
    data = storage.read(path)
    if path.startswith(f"{local.relative(local.segments)}/") and file_digest(data) != PurePosixPath(path).stem:
        raise DigestError(f"{storage.locate(path)} does not have the digest it is named by; restore it from a backup")
    try:
        found = pq.ParquetFile(pa.BufferReader(data)).metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{storage.locate(path)} is no Parquet file ({error}); restore it from a backup") from error
    if n_rows not in (None, found):
        raise FormatError(f"{storage.locate(path)} has {found} rows, the manifest says {n_rows}; restore it from a backup")
    local.storage.write(path, data)


def _forget(storage: Storage, local: RunLayout, manifest: Manifest) -> None:
    pinned = oldest_pinned_lsn(local)
    if pinned is not None and pinned < manifest.lsn:
        return
    directories = [local.relative(directory) for directory in (local.segments, local.exports)]
    unnamed = _paths(local.storage, directories) - _named(manifest).keys()
    if unnamed:
        for path in unnamed - _paths(storage, directories):
            local.storage.remove(path)


def _paths(storage: Storage, directories: Iterable[str]) -> set[str]:
    return {file.path for directory in directories for file in storage.files(directory)}
