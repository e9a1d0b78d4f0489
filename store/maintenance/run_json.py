"""A lost or damaged run.json made anew, from what the rest of the run says. For `python -m store
rebuild`.

    lines = rebuild_run_json(root)

The run's id is in the catalog, in the manifest and in every segment. They must agree: nobody is
asked, and nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from store.atomic_write import READ_ONLY, write_atomically
from store.catalog.time_travel import connect_read_only
from store.clock import now_us
from store.errors import FormatError, NewerFormatError, StoreError
from store.hashing import CANONICALISER_VERSION
from store.layout import CONFIG_FILE, FORMAT_VERSION, RUN_ID, RunInfo, RunLayout, parse_run_json
from store.maintenance.repair import quarantine
from store.reading.exported import read_exported
from store.untrusted import json_values
from store.untrusted.file_access import (
    MAX_MANIFEST_BYTES,
    is_directory,
    is_file,
    read_bytes,
    status,
)
from store.untrusted.settings_text import parse_settings_text, setting

# of the event that a fork writes
FORKED = re.compile(rf"at learner step (\d+), run ({RUN_ID.pattern}), version \d+$")
FILES_ASKED = 100  # segments that are asked whose they are


def is_lost(root: Path) -> bool:
    """Return whether a run is at `root` whose run.json is missing or damaged. NewerFormatError if
    it is of newer code.
    """
    try:
        info = parse_run_json(_read(root, "run.json"), name=str(root / "run.json"))
    except FileNotFoundError:
        files = ("catalog.sqlite", "manifest.json")
        return is_directory(root / "segments", root=root) or any(
            is_file(root / name, root=root) for name in files
        )
    except NewerFormatError:
        raise
    except FormatError:
        return True
    except (OSError, StoreError):  # RunLayout.open says what is wrong with it
        return False
    # One that belongs to another run: the catalog and the manifest are told apart from it only if
    # both contradict it.
    others = {_of_catalog(_provisional(root, info.run_id)), _of_manifest(root)}
    return len(others) == 1 and others.isdisjoint({None, info.run_id})


def rebuild_run_json(root: Path) -> list[str]:
    """Write run.json. Return one line for each field that says where it came from. StoreError if
    nothing tells the run's id.
    """
    if status(root / "published.json", root=root) is not None:
        raise StoreError(
            f"the files of {root} are in another storage; copy run.json from there (store.uri in "
            f"{CONFIG_FILE})"
        )
    run_id, whence = _run_id(root)
    layout = _provisional(root, run_id)
    config = _config(root)
    if config is not None and (uri := _storage(root, config)):
        raise StoreError(f"the files of {root} are in {uri}; copy run.json from there")
    created_us, first = _created_us(layout)
    forked_from, ancestors = _origin(layout)
    info = dataclasses.replace(
        layout.info,
        config_yaml=config or "",
        created_us=created_us,
        forked_from=forked_from,
        ancestors=ancestors,
    )
    if status(layout.run_json, root=layout.root) is not None:
        quarantine(layout, layout.run_json.name)
    content = json.dumps(dataclasses.asdict(info), indent=1).encode()
    write_atomically(layout.run_json, content, mode=READ_ONLY, beneath=layout.root)
    older = ", ".join(info.ancestors) or "none"
    lines = [
        f"run.json: the run id {run_id} is that of {whence}",
        f"run.json: created_us is the time of {first}",
        f"run.json: ancestors ({older}) are those of the event 'forked' and of the segments",
        f"run.json: canonicaliser_version {CANONICALISER_VERSION} is this code's; fsck compares "
        "the state hashes with it",
    ]
    if config is not None:
        return [
            *lines,
            f"run.json: the configuration is that of {CONFIG_FILE}, of the newest start",
        ]
    return [
        *lines,
        f"run.json: no {CONFIG_FILE} is left, so the configuration is empty; put a backup of it "
        "there to resume",
    ]


def _read(root: Path, name: str) -> bytes:
    """Return a file at the top of the run. Raises FileNotFoundError, OSError, UnsafePathError."""
    return read_bytes(root.absolute() / name, root=root.absolute(), at_most=MAX_MANIFEST_BYTES)


def _provisional(root: Path, run_id: str) -> RunLayout:
    """Return the layout of a run of which only the id is known."""
    info = RunInfo(
        run_id=run_id,
        format_version=FORMAT_VERSION,
        canonicaliser_version=CANONICALISER_VERSION,
        config_yaml="",
        created_us=0,
    )
    return RunLayout(root=root.absolute(), info=info)


def _run_id(root: Path) -> tuple[str, str]:
    """Return the run's id and the names of the files that tell it."""
    layout = _provisional(root, "0" * 32)
    told = {"catalog.sqlite": _of_catalog(layout), "manifest.json": _of_manifest(root)}
    known = {name: run_id for name, run_id in told.items() if run_id is not None}
    if not known:
        found = set(_of_segments(layout, _files(layout)[:FILES_ASKED]))
        known = {f"its segments ({run_id})": run_id for run_id in sorted(found)}
    if not known:
        raise StoreError(f"nothing in {root} tells which run it is; restore run.json from a backup")
    if len(set(known.values())) > 1:
        said = "; ".join(f"{name} says {run_id}" for name, run_id in known.items())
        raise StoreError(
            f"{root} has files of several runs ({said}); restore run.json from a backup, or take "
            "the others away"
        )
    return next(iter(known.values())), " and ".join(known)


def _of_catalog(layout: RunLayout) -> str | None:
    try:
        with closing(connect_read_only(layout)) as connection:
            row = connection.execute("SELECT run_id FROM meta").fetchone()
    except (sqlite3.Error, StoreError):  # rebuilt next
        return None
    return row[0] if row and isinstance(row[0], str) and RUN_ID.fullmatch(row[0]) else None


def _of_manifest(root: Path) -> str | None:
    try:
        run_id = json_values.text(json_values.parse_object(_read(root, "manifest.json")), "run_id")
    except (ValueError, OSError, StoreError):
        return None
    return run_id if RUN_ID.fullmatch(run_id) else None


def _of_segments(layout: RunLayout, paths: Iterable[str]) -> Iterator[str]:
    """Yield the id of the run that wrote each file, as far as it can be read."""
    for path in paths:
        try:
            metadata = pq.read_schema(pa.BufferReader(layout.storage.read(path))).metadata or {}
            run_id = metadata[b"run_id"].decode()
        except (pa.ArrowException, KeyError, ValueError, OSError, StoreError):  # it tells nothing
            continue
        if RUN_ID.fullmatch(run_id):
            yield run_id


def _files(layout: RunLayout) -> list[str]:
    """Return the segments' paths, oldest first: those of the catalog, or all if it cannot be
    read.
    """
    try:
        with closing(connect_read_only(layout)) as connection:
            rows = connection.execute(
                "SELECT path FROM segment WHERE removed_us IS NULL ORDER BY lsn"
            ).fetchall()
            return [str(row[0]) for row in rows]
    except (sqlite3.Error, FormatError):
        files = [
            file
            for file in layout.storage.files(layout.relative(layout.segments))
            if file.path.endswith(".parquet")
        ]
        return [file.path for file in sorted(files, key=lambda file: file.modified_us)]


def _config(root: Path) -> str | None:
    try:
        return _read(root, CONFIG_FILE).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{root / CONFIG_FILE} cannot be read ({error}); mend it, or move it away"
        ) from error


def _storage(root: Path, config: str) -> str:
    """Return what the settings say of the storage, empty if the files are in the run. StoreError if
    they cannot be read.
    """
    try:
        uri = setting(parse_settings_text(config), "store.uri")
    except ValueError as error:
        raise StoreError(
            f"{root / CONFIG_FILE} is not readable: {error}; mend it, or move it away"
        ) from error
    return uri if isinstance(uri, str) else "" if uri is None else ascii(uri)[:200]


def _created_us(layout: RunLayout) -> tuple[int, str]:
    """Return the run's first sign of life, UTC epoch, and its name."""
    written = [file.modified_us for file in layout.storage.files(layout.relative(layout.segments))]
    try:
        with closing(connect_read_only(layout)) as connection:
            opened = connection.execute("SELECT min(opened_us) FROM grp").fetchone()[0]
    except (sqlite3.Error, FormatError):
        opened = None
    if isinstance(opened, int) and 0 <= opened <= json_values.INT64_MAX:
        return opened, "the first group"
    return (max(0, min(written)), "the first segment") if written else (now_us(), "this rebuild")


def _origin(layout: RunLayout) -> tuple[str | None, tuple[str, ...]]:
    """Return `forked_from` and `ancestors`. A fork's event names its parent; older ones are told by
    the segments they wrote.
    """
    try:
        with closing(connect_read_only(layout)) as connection:
            query = "SELECT detail FROM event WHERE what = 'forked' ORDER BY event_id"
            details = [row[0] for row in connection.execute(query)]
    except (sqlite3.Error, FormatError):
        events = read_exported(layout).tables["events"]
        details = [row["detail"] for row in events if row["what"] == "forked"]
    found = [
        match for match in (FORKED.search(str(detail)) for detail in details) if match is not None
    ]
    if not found:
        return None, ()
    step, parent = found[-1].groups()
    writers = dict.fromkeys(_of_segments(layout, _files(layout)))
    older = [run_id for run_id in writers if run_id not in (layout.info.run_id, parent)]
    return f"{parent}@{step}", (*older, parent)
