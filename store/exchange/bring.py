"""Copy a run from object storage to this machine, for example after its own disk was lost.

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

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from store import primary_directory
from store.atomic_write import (
    PRIVATE,
    READ_ONLY,
    READ_WRITE,
    make_directory,
    write_atomically,
)
from store.catalog.catalog import Catalog
from store.errors import FormatError, StoreError, UnavailableError
from store.exchange.run_making import making_alone, removable
from store.file_rights import keep_private
from store.layout import RunLayout
from store.maintenance.rebuild import Report, rebuild
from store.reading import open_sql
from store.reading.manifest import export
from store.reading.mirror import cache_of
from store.remote_directory import has_directory, local_directory
from store.run_json import RunInfo, parse_run_json
from store.run_names import (
    BASE_POLICY,
    BRING_MARKER,
    CONFIG_FILE,
    DRIVER_LOCK,
    OUTSIDE_FILE,
    RUN_JSON,
    SIGNED,
    stored_fork_marker,
)
from store.storage import Storage, open_storage
from store.storage_claim import is_unused
from store.untrusted.file_access import MAX_OPEN_SQL_BYTES, MAX_TEXT_BYTES, remove, remove_tree
from store.untrusted.limited_process import SMALL_BYTES, in_limited_process
from store.untrusted.memory_limit import limited_memory
from store.untrusted.own_directory import check_own_directory
from store.untrusted.signatures import MAX_SIGNED_BYTES, add_signatures
from store.untrusted.trust import trust

VIEWS = "open.sql"
# Read of a run that may be a stranger's, each once: the storage may answer something else later.
SMALL_FILES = {
    RUN_JSON: MAX_TEXT_BYTES,
    SIGNED: MAX_SIGNED_BYTES,
    CONFIG_FILE: MAX_TEXT_BYTES,
    OUTSIDE_FILE: MAX_TEXT_BYTES,
    VIEWS: MAX_OPEN_SQL_BYTES,
}
# In a directory that is the root of a file system, and in one where a start has failed.
ALLOWED_IN_EMPTY = ("lost+found", DRIVER_LOCK)


def is_uri(location: str) -> bool:
    """Return whether a location is the URI of a storage, and no path."""
    return "://" in location


def bring_run(
    uri: str, root: Path, *, trusts: bool, is_secret: Callable[[str], bool] = lambda _: True
) -> Report:
    """Make the directory `root`, in which the run at `uri` goes on. Say what was recovered.

    `root` must be empty, or not there. `trusts` counts the run as this user's. Nobody else may
    enter the directory if `is_secret` says so of the run's settings. Raises StoreError,
    for a stranger's run too; nothing is left at `root` then, and the run stays where it was, if the
    storage still answers. Raises LockedError while another process makes a run at `root`.
    """
    files = _small_files(uri)
    if files is None:
        raise FormatError(
            f"{open_storage(uri).locate(RUN_JSON)} is not there; is it the store.uri of a run?"
        )
    layout = RunLayout(root=root.absolute(), info=_info(uri, files[RUN_JSON]))
    with making_alone(layout.root):
        return _bring(open_storage(uri), layout, files, trusts=trusts, is_secret=is_secret)


def _bring(
    storage: Storage,
    layout: RunLayout,
    files: Mapping[str, bytes],
    *,
    trusts: bool,
    is_secret: Callable[[str], bool],
) -> Report:
    """Make the directory of `layout`, which is locked, and remove it if that fails."""
    root = layout.root
    is_new = not root.exists()
    check_own_directory(root, is_made=False)
    make_directory(root, beneath=root)
    check_own_directory(root)
    with limited_memory([root]):  # a stranger's settings
        newest = files.get(CONFIG_FILE, b"").decode(errors="replace")
        is_private = any(is_secret(text) for text in (newest, layout.info.config_yaml) if text)
    if is_private:
        keep_private(root)
    _empty(root)
    (root / BRING_MARKER).touch()
    try:
        _write_small_files(layout, files)
        if trusts:
            trust(root)
        with limited_memory([root]):  # an error quotes the settings of a stranger's run
            layout.check_trusted()
        for directory in (layout.segments, layout.exports, layout.weights, layout.checkpoints):
            make_directory(directory, beneath=root)
        make_directory(layout.logs, beneath=root)
        if has_directory(layout, BASE_POLICY):
            local_directory(layout, BASE_POLICY)
        with primary_directory.taken(root, storage):
            # Again: a removal of the fork writes its marker before it reads PRIMARY, so one of both
            # sees the other.
            _check_no_unfinished_fork(storage, run_id=layout.info.run_id)
            report = rebuild(layout, is_brought=True)
            # PRIMARY keeps the previous directory until `taken` ends. A failure before that
            # restores it.
            (root / BRING_MARKER).unlink()
    except BaseException:
        with suppress(OSError, StoreError):
            (root / BRING_MARKER).touch()
            _empty(root)
            if is_new:
                root.rmdir()
        raise
    # Only now: a bring that fails shows no rows that the previous directory does not have.
    with Catalog.open(layout) as catalog:
        export(catalog, layout)
    return report


def has_begun(uri: str) -> bool:
    """Return whether there is a run at `uri` to go on with. Raises StoreError."""
    return not is_unused(uri)


def is_brought(uri: str, root: Path) -> bool:
    """Return whether the run at `uri` is in the directory `root` already, whole.

    Raises StoreError if another run is there.
    """
    root = root.absolute()
    if not RunLayout.exists(root) or (root / BRING_MARKER).exists():
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
    files = _small_files(location)
    if files is None:
        return Path(location)
    info = _info(location, files[RUN_JSON])
    root = cache_of(info.run_id, location, kind="settings")
    _write_small_files(RunLayout(root=root, info=info), files)
    return root


@functools.cache
def bring_catalog(location: str) -> None:
    """Make a remote run's newest backup the catalog of `run_at(location)`, once in a process.

    Raises StoreError, for a stranger's run too: its backup may have any size.
    """
    root = run_at(location)
    if not is_uri(location) or not RunLayout.exists(root):
        return
    layout = RunLayout.open(root)
    layout.check_trusted()
    backup = layout.relative(layout.backup)
    if layout.storage.exists(backup):
        data = layout.storage.read(backup)
        write_atomically(layout.catalog, memoryview(data), mode=PRIVATE, beneath=root)


def _small_files(uri: str) -> dict[str, bytes] | None:
    """Return the settings and signatures of the run at `uri`, by name. None if no run is there."""
    return in_limited_process(_read_small_files, uri, at_most_bytes=SMALL_BYTES)


def _read_small_files(uri: str) -> dict[str, bytes] | None:
    storage = open_storage(uri)
    found: dict[str, bytes] = {}
    for name, at_most in SMALL_FILES.items():
        if storage.exists(name):
            try:
                found[name] = storage.read(name, at_most=at_most).to_pybytes()
            except UnavailableError as error:
                # The run is another user's, and only they can read its signatures.
                if name != SIGNED or not isinstance(error.__cause__, PermissionError):
                    raise
        elif name == RUN_JSON:
            return None
    run_id = parse_run_json(found[RUN_JSON], name=storage.locate(RUN_JSON)).run_id
    _check_no_unfinished_fork(storage, run_id=run_id)
    return found


def _check_no_unfinished_fork(storage: Storage, *, run_id: str) -> None:
    """Raise FormatError if the run is a fork that is not whole, or is being removed."""
    if storage.exists(stored_fork_marker(run_id)):
        raise FormatError(
            f"{storage.locate('')} has a fork that was cut short, or is being made; give the "
            "command that made it again, or, if its directory is gone, empty this storage"
        )


def _info(uri: str, run_json: bytes) -> RunInfo:
    """Return the content of run.json. Raises FormatError if it names another storage than `uri`."""
    storage = open_storage(uri)
    name = storage.locate(RUN_JSON)
    info = parse_run_json(run_json, name=name)
    own = info.storage_uri
    if not own or open_storage(own).locate("") != storage.locate(""):
        raise FormatError(
            f"{name} is of a run whose files are in {own or 'its directory'}; give that, or read "
            "this copy: gigpo fetch URI DIR"
        )
    return info


def _write_small_files(layout: RunLayout, files: Mapping[str, bytes]) -> None:
    """Write the run's settings and signatures into its directory."""
    root = layout.root
    if SIGNED in files:
        add_signatures(root, files[SIGNED])
    for name in (CONFIG_FILE, OUTSIDE_FILE):
        if name in files:
            write_atomically(root / name, files[name], mode=READ_WRITE, beneath=root)
    if VIEWS in files:
        placed = open_sql.placed(layout, files[VIEWS].decode(errors="replace"))
        write_atomically(layout.open_sql, placed.encode(), mode=READ_WRITE, beneath=root)
    make_directory(layout.run_json_backup.parent, beneath=root)
    for path in (layout.run_json_backup, layout.run_json):
        write_atomically(path, files[RUN_JSON], mode=READ_ONLY, beneath=root)


def _empty(root: Path) -> None:
    """Remove what a killed call left. Raises StoreError if anything else is there."""
    try:
        there = [path for path in root.iterdir() if path.name not in ALLOWED_IN_EMPTY]
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror}; give run_dir=NEW") from error
    marker = root / BRING_MARKER
    if there and marker not in there:
        raise _has_other_things(root, [path.name for path in there])
    ours = removable(root)
    for path in there:
        if path != marker and path.name in ours:
            remove_tree(path, root=root)
    remove(marker, root=root)
    if others := [path.name for path in there if path.name not in ours]:
        raise _has_other_things(root, others)


def _has_other_things(root: Path, names: Sequence[str]) -> StoreError:
    some = ", ".join(sorted(names)[:3])
    return StoreError(
        f"{root} has other things in it ({some}); give an empty directory: run_dir=NEW"
    )
