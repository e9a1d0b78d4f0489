"""Claim a storage for a new run, so that of two runs that are made at once one has it.

claim(root, info, content)     # content: the bytes of run.json
keep_run_json(root, info)      # again and again, while the run goes on
release(root)                  # of a fork that is not whole
"""

from __future__ import annotations

from pathlib import Path

from printable import shell_word
from store import primary_directory
from store.errors import FormatError, StoreError, UnavailableError
from store.primary_directory import Primary
from store.run_json import RunInfo, parse_run_json
from store.run_names import (
    PRIMARY,
    REVOKED,
    RUN_JSON,
    SIGNED,
    STORED_FORK_MARKERS,
    stored_fork_marker,
    without_other_runs,
)
from store.storage import make_place, open_storage, read_or_none
from store.untrusted.file_access import MAX_TEXT_BYTES, read_bytes, status
from store.untrusted.limited_process import SMALL_BYTES, in_limited_process
from store.untrusted.signatures import signed_texts


def claim(root: Path, info: RunInfo, run_json: bytes) -> None:
    """Make `root` the primary directory of the storage, and write run.json into the storage.

    Raises StoreError if the storage has another run, also one that was made at the same time.
    """
    assert info.storage_uri is not None
    uri, storage = info.storage_uri, open_storage(info.storage_uri)
    used = StoreError(
        f"{storage.locate('')} has files of another run; give each run a store.uri of its own, or "
        f"go on with that one: gigpo train --resume {shell_word(uri)}"
    )
    if not is_unused(uri):
        raise used
    make_place(storage)
    primary_directory.take(root, storage)
    if not is_unused(uri):
        # A run was made there while PRIMARY was on its way. It keeps the storage.
        token = in_limited_process(_shown_by, uri, at_most_bytes=SMALL_BYTES)
        instead = Primary.of_token(token) if token else None
        primary_directory.revoke(root, storage, instead=instead)
        raise used
    if info.forked_from is not None:  # nobody brings it before it is whole
        storage.write(stored_fork_marker(info.run_id), info.run_id.encode())
    storage.write(RUN_JSON, run_json)
    # another start may have claimed it meanwhile
    primary_directory.repair(root, uri, primary_directory.check(root, uri))


def release(unfinished: Path) -> None:
    """Remove what an unfinished fork has in its storage, if that is not another run's by now.

    Raises StoreError.
    """
    texts = signed_texts(unfinished)
    if texts is None:
        return
    data = texts.run_json
    try:
        info = parse_run_json(data, name=str(unfinished / RUN_JSON))
    except FormatError:  # of another version
        return
    if info.storage_uri is None:
        return
    storage = open_storage(info.storage_uri)
    if not storage.exists(PRIMARY):  # it was claimed before run.json was signed
        raise UnavailableError(
            f"{storage.locate(PRIMARY)} is not there; mount the volume, or, if what the fork had "
            f"there was removed, remove {unfinished}"
        )
    # It may have been brought to another directory, where it goes on.
    if not primary_directory.is_primary(unfinished, storage):
        return
    if storage.exists(RUN_JSON) and storage.read(RUN_JSON).to_pybytes() == data:
        # With the marker nobody brings it. If the fork was whole it is gone, and somebody may be
        # bringing it.
        marker = stored_fork_marker(info.run_id)
        storage.write(marker, info.run_id.encode())
        if not primary_directory.is_primary(unfinished, storage):
            storage.remove(marker)
            return
        paths = without_other_runs(file.path for file in storage.files(""))
        last = (RUN_JSON, marker)
        # PRIMARY may be another directory's at any moment, so it is never removed. The others are
        # of other starts, which may be late.
        kept = (PRIMARY, REVOKED, STORED_FORK_MARKERS)
        ours = [path for path in paths if path.partition("/")[0] not in kept and path not in last]
        for path in (*ours, *last):
            # Without files it counts as unused, and another run may be made there.
            if not primary_directory.is_primary(unfinished, storage):
                raise StoreError(
                    f"the storage {storage.locate('')} of the fork was taken by another directory; "
                    "give the command again"
                )
            storage.remove(path)
        primary_directory.revoke(unfinished, storage)


def is_unused(uri: str) -> bool:
    """Return whether no run has begun in the storage at `uri`, which may be anybody's.

    run.json, PRIMARY and STORED_FORK_MARKERS are also left by a start that did not get further, and
    REVOKED by one that found another run there.
    """
    return in_limited_process(_has_no_files, uri, at_most_bytes=SMALL_BYTES)


def _has_no_files(uri: str) -> bool:
    left = (RUN_JSON, PRIMARY, REVOKED, STORED_FORK_MARKERS)
    paths = (file.path for file in open_storage(uri).files(""))
    return all(path.partition("/")[0] in left for path in paths)


def _shown_by(uri: str) -> str | None:
    return primary_directory.shown_by(open_storage(uri))


def keep_run_json(root: Path, info: RunInfo) -> None:
    """Write run.json into the storage unless this run's is there. Raises StoreError.

    The refused one of two runs that were made at once may have written its run.json after this
    run's. Does nothing while the run is made.
    """
    assert info.storage_uri is not None
    if status(root / RUN_JSON, root=root) is None:
        return
    storage = open_storage(info.storage_uri)
    there = read_or_none(storage, RUN_JSON, at_most=MAX_TEXT_BYTES)
    try:
        is_ours = parse_run_json(there or b"", name=RUN_JSON).run_id == info.run_id
    except FormatError:  # it is gone, or damaged
        is_ours = False
    if not is_ours:
        ours = read_bytes(root / RUN_JSON, root=root, at_most=MAX_TEXT_BYTES)
        storage.write(RUN_JSON, ours)
        if signed_texts(root) is not None:
            storage.write(SIGNED, (root / SIGNED).read_bytes(), is_private=True)
