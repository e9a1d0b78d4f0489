"""Record a repair and the publishing of weights, and check what a power cut leaves of them.

The run that is repaired has one file with a changed byte. A damaged file is set aside and never
deleted; a repair that was cut short is done again.
"""

from __future__ import annotations

import importlib.util
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType

import store
from store import Catalog, RunLayout, StoreError
from store.atomic_write import make_directory
from store.hashing import file_digest
from store.maintenance.finding import Finding
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.maintenance.repair import repair
from tests.crash.checks import Line
from tests.crash.guards import change_a_byte
from tests.crash.workload import Diary

Done = dict[str | None, Line]  # by what is done
PUBLISHED = ("weights/0", "weights/1", "checkpoints/0", "weights/2", "weights/3", "checkpoints/1")
WEIGHTS = {"model.safetensors": b"\1" * 10_000, "config.json": b"{}"}


def damage(root: str) -> None:
    """Change a byte of the youngest file."""
    with closing(sqlite3.connect(Path(root) / "catalog.sqlite")) as connection:
        (path,) = connection.execute(
            "SELECT path FROM segment WHERE retired_lsn IS NULL ORDER BY lsn DESC LIMIT 1"
        ).fetchone()
    change_a_byte(Path(root) / path)


def mend(root: str, diary_path: str) -> None:
    """fsck --repair, then a rebuild of the catalog from the files."""
    diary = Diary(Path(diary_path))
    layout = RunLayout.open(Path(root))
    damaged = [layout.root / finding.subject for finding in _errors(layout)]
    diary.done("found", digests=[file_digest(path.read_bytes()) for path in damaged])
    diary.phase("repair")
    _repair(layout)
    diary.done("repair", trajectories=sorted(_trajectories(layout)))
    diary.phase("rebuild")
    rebuild(layout)
    diary.done("rebuild")


def mended(base: Path, diary: Sequence[Line], thorough: bool) -> list[str]:
    """Check that a crash of `mend` leaves only work to be done again, however thorough."""
    layout = RunLayout.open(base / "run")
    done = {line.get("done"): line for line in diary}
    try:
        broken = []
        if "repair" not in done:
            _repair(layout)
        elif "rebuild" not in done and diary[-1].get("phase") == "rebuild":
            broken += _lost(layout, done) if _opens(layout) else []  # refused, or whole
            rebuild(layout)
        return (
            broken
            + _lost(layout, done)
            + _deleted(layout, done)
            + [f"{finding}" for finding in _errors(layout)]
        )
    except (StoreError, sqlite3.Error) as error:
        return [f"{type(error).__name__}: {error}"]


def publish(root: str, diary_path: str) -> None:
    """Publish as a learner does: versions, and checkpoints that make them durable.

    The second version and the first checkpoint are written twice.
    """
    diary = Diary(Path(diary_path))
    directories = _directories()
    for parent in ("", "weights", "checkpoints"):
        make_directory(Path(root) / parent, beneath=Path(root))
    versions: list[str] = []
    for name in (*PUBLISHED[:2], PUBLISHED[1], PUBLISHED[2], *PUBLISHED[2:]):
        diary.phase(name)
        is_version = name.startswith("weights")
        dest = Path(root) / name
        shown = directories.visible_whole if is_version else directories.atomic_directory
        with shown(dest) as directory:
            for file, data in WEIGHTS.items():
                (directory / file).write_bytes(data)
        if is_version:
            directories.sync_whole(dest)
            versions.append(name)
        else:
            diary.done("checkpoint", names=[name, *versions])


def published(base: Path, diary: Sequence[Line], thorough: bool) -> list[str]:
    """Check that a checkpoint is whole, and so are the versions that it made durable.

    A directory that is being replaced at that moment may be torn: nobody reads it. So may versions
    after the last checkpoint.
    """
    durable = {name for line in diary for name in line.get("names", ())} - {
        line.get("phase") for line in diary[-1:]
    }
    broken = []
    for name in PUBLISHED:
        path = base / "run" / name
        found = {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else None
        if found is None and name in durable:
            broken.append(f"{name} is gone")
        elif found not in (None, WEIGHTS) and (name in durable or name.startswith("checkpoints")):
            broken.append(f"{name} is torn")
    return broken


def _repair(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=check(layout, level=CONTENTS))


def _opens(layout: RunLayout) -> bool:
    try:
        Catalog.open(layout).close()
    except StoreError:
        return False
    return True


def _lost(layout: RunLayout, done: Done) -> list[str]:
    kept = set(done["repair"]["trajectories"]) if "repair" in done else set()
    return [f"trajectory {uid} is lost" for uid in sorted(kept - _trajectories(layout))]


def _deleted(layout: RunLayout, done: Done) -> list[str]:
    """Check that damaged and replaced files are in quarantine, where nothing sweeps them."""
    there = {file_digest(path.read_bytes()) for path in layout.quarantine.glob("*.parquet")}
    wanted = done["found"]["digests"] if "found" in done else []
    replaced = "rebuild" in done and not (layout.quarantine / layout.catalog.name).is_file()
    return [
        f"the damaged file {digest} is not in quarantine"
        for digest in wanted
        if digest not in there
    ] + (["the old catalog is not in quarantine"] if replaced else [])


def _errors(layout: RunLayout) -> list[Finding]:
    return [finding for finding in check(layout, level=CONTENTS) if finding.severity == "error"]


def _trajectories(layout: RunLayout) -> set[str]:
    with closing(sqlite3.connect(layout.catalog)) as connection:
        return {row[0] for row in connection.execute("SELECT lower(hex(traj_uid)) FROM trajectory")}


def _directories() -> ModuleType:
    """learner/files/atomic_directory.py beside this store; from its package it would come with
    torch, which takes seconds.
    """
    path = Path(store.__file__).parent.parent / "learner" / "files" / "atomic_directory.py"
    spec = importlib.util.spec_from_file_location("atomic_directory", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
