"""Runs as a stranger could send them: links, FIFOs, sizes and names that lead out of the run, and a
tree that must not change.

attacks = ATTACKS                                # by name: what is done to a copy of a sound run
run = hostile_run(sound, tmp_path / "run", "link: segments", outside=outside)
before = snapshot(outside); command(run); assert snapshot(outside) == before
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from store import RunLayout

Attack = Callable[[RunLayout, Path], None]  # the run, and the tree outside of it that it is after
# Every name of a run's directory that the store, a learner or gigpo train reads or writes.
TOP_NAMES = (
    *(
        "run.json",
        "signed.json",
        "manifest.json",
        "open.sql",
        "config.yaml",
        "driver.json",
        "outside.json",
        "catalog.sqlite",
    ),
    *(
        "catalog.lock",
        "segments",
        "export",
        "weights",
        "checkpoints",
        "readers",
        "quarantine",
        "logs",
        "tensorboard",
        "base",
    ),
    "untrained",
)
FILES = (
    "run.json",
    "manifest.json",
    "open.sql",
    "config.yaml",
    "driver.json",
    "catalog.sqlite",
    "catalog.lock",
)
HUGE_BYTES = 1 << 42  # sparse: four tebibytes
DEEP_LEVELS = 1_100
FOREIGN_ID = "f" * 32
LONG = "x" * 300
BAD_PATHS = (
    "../outside/precious.parquet",
    "segments/../../outside/precious.parquet",
    "segments/w0/../../../outside/precious.parquet",
    "/proc/self/cwd/precious.parquet",
    "segments/w0/a\0b.parquet",
    f"segments/{LONG}/{FOREIGN_ID}.parquet",
    "run.json",
    "export",
    "",
)


def make_outside(directory: Path) -> Path:
    """Make a tree of somebody's own files, some of which look like those of a run."""
    for name in (
        "segments/w0",
        "export",
        "weights/v000001",
        "checkpoints/step000001",
        "readers",
        "home",
    ):
        (directory / name).mkdir(parents=True)
    for name in (
        *(
            f"segments/w0/{FOREIGN_ID}.parquet",
            "export/groups-0-1.parquet",
            "export/.x.parquet.1-1.tmp",
        ),
        *(
            "precious.parquet",
            "home/profile",
            "weights/v000001/model.safetensors",
            "checkpoints/step000001/checkpoint.json",
        ),
        *("readers/3-99-0123abcd", "text", "catalog.sqlite", ".catalog.sqlite.tmp"),
    ):
        path = directory / name
        path.write_text(f"precious {name}\n")
        os.utime(path, (1_000_000, 1_000_000))  # old enough to be swept
    for path in [directory, *directory.rglob("*")]:
        os.utime(path, (1_000_000, 1_000_000))
    return directory


def snapshot(tree: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return mode, links, time of change and content of everything in the tree, by name."""
    found = {}
    for path in [tree, *sorted(tree.rglob("*"))]:
        seen = path.lstat()
        content = ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = blake2b(path.read_bytes()).hexdigest()
        found[str(path.relative_to(tree))] = (
            seen.st_mode,
            seen.st_nlink,
            seen.st_mtime_ns,
            content,
        )
    return found


def hostile_run(sound: RunLayout, root: Path, attack: str, *, outside: Path) -> Path:
    """Copy a sound run to `root`, and do to the copy what the attack of that name does. Return its
    directory.
    """
    shutil.copytree(sound.root, root)
    ATTACKS[attack](RunLayout.open(root), outside)
    return root


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place, also one that is read-only."""
    content = json.loads(path.read_text())
    change(content)
    path.chmod(0o644)
    path.write_text(json.dumps(content, indent=1))


def _gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _linked(name: str) -> Attack:
    """The name is a link to what has its name outside, or to a text that is there."""

    def attack(layout: RunLayout, outside: Path) -> None:
        _gone(layout.root / name)
        target = outside / name if (outside / name).exists() else outside / "text"
        (layout.root / name).symlink_to(target)

    return attack


def _linked_to_nothing(name: str) -> Attack:
    """The name is a link to a file that would be made outside."""

    def attack(layout: RunLayout, outside: Path) -> None:
        _gone(layout.root / name)
        (layout.root / name).symlink_to(outside / "home" / "planted")

    return attack


def _fifo(name: str) -> Attack:
    def attack(layout: RunLayout, _: Path) -> None:
        _gone(layout.root / name)
        os.mkfifo(layout.root / name)

    return attack


def _huge(name: str) -> Attack:
    def attack(layout: RunLayout, _: Path) -> None:
        path = layout.root / name
        path.touch()
        path.chmod(0o644)
        os.truncate(path, HUGE_BYTES)

    return attack


def _stored(uri: str) -> Attack:
    """run.json says that the files are elsewhere. `{outside}` is the tree."""

    def attack(layout: RunLayout, outside: Path) -> None:
        edit_json(
            layout.run_json, lambda info: info.update(storage_uri=uri.format(outside=outside))
        )
        manifest = (layout.root / "manifest.json").read_text()
        (layout.root / "published.json").write_text(manifest)

    return attack


def _stored_with_its_manifest(layout: RunLayout, outside: Path) -> None:
    """The storage is a foreign directory, the mirror of which is the run, whose `export` is that
    directory by a link.
    """
    _stored("file:///proc/self/cwd")(layout, outside)
    _gone(layout.exports)
    layout.exports.symlink_to(outside / "export")


def _manifest(change: Callable[[dict[str, Any], Path], object]) -> Attack:
    def attack(layout: RunLayout, outside: Path) -> None:
        edit_json(layout.root / "manifest.json", lambda content: change(content, outside))

    return attack


def _named_segment(path: str) -> Attack:
    return _manifest(lambda content, _: content["segments"].append(path))


def _named_part(path: str) -> Attack:
    return _manifest(
        lambda content, _: content["tables"]["groups"].append(
            {**content["tables"]["groups"][0], "path": path}
        )
    )


def _superseded(layout: RunLayout, outside: Path) -> None:
    """`export` is a link, and its files are superseded since long ago: the next owner's export
    removes them.
    """
    names = [path.name for path in (outside / "export").iterdir()]

    def change(content: dict[str, Any]) -> None:
        content["superseded"] = {f"export/{name}": {"lsn": 0, "at_us": 0} for name in names}

    edit_json(layout.root / "manifest.json", change)
    _gone(layout.exports)
    layout.exports.symlink_to(outside / "export")


def _catalog(statement: str) -> Attack:
    """`{outside}` is the tree; `:path` in the statement is a parameter of the attack's own."""

    def attack(layout: RunLayout, outside: Path) -> None:
        with closing(sqlite3.connect(layout.catalog)) as connection, connection:
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
            ).fetchall():
                connection.execute(f"DROP TRIGGER {name}")
            connection.execute(statement.format(outside=outside))

    return attack


def _retired(path: str) -> Attack:
    """A segment that was retired long ago: compaction unlinks what it names."""
    quoted = path.replace("'", "''").replace("\0", "' || char(0) || '")
    return _catalog(
        f"UPDATE segment SET path = '{quoted}', removed_us = NULL, retired_us = 1, retired_lsn = "
        "1, retired_why = 'compacted' "
        "WHERE segment_id = (SELECT segment_id FROM segment WHERE retired_lsn IS NOT NULL LIMIT 1)"
    )


def _worker_linked(layout: RunLayout, outside: Path) -> None:
    worker = next(path for path in sorted(layout.segments.iterdir()) if path.is_dir())
    _gone(worker)
    worker.symlink_to(outside / "segments/w0")


def _deep(name: str) -> Attack:
    """Directories in directories, more than Python's stack or a process's descriptors would
    take.
    """

    def attack(layout: RunLayout, _: Path) -> None:
        descriptor = os.open(layout.root / name, os.O_RDONLY)
        for _ in range(DEEP_LEVELS):
            os.mkdir("d", dir_fd=descriptor)
            below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        os.close(descriptor)

    return attack


def remove_deep(directory: Path) -> None:
    """Remove what `_deep` made, as no function that calls itself could: pytest would fail to."""
    if (directory / "d").is_dir():
        for n_levels in range(DEEP_LEVELS, 0, -1):
            os.rmdir(f"{directory}{'/d' * n_levels}")


def _file_linked(pattern: str) -> Attack:
    """The first file of that pattern is a link to one outside."""

    def attack(layout: RunLayout, outside: Path) -> None:
        path = sorted(layout.root.glob(pattern))[0]
        path.unlink()
        path.symlink_to(outside / "precious.parquet")

    return attack


def _wal(layout: RunLayout, outside: Path) -> None:
    for suffix in ("-wal", "-shm"):
        (layout.root / f"catalog.sqlite{suffix}").symlink_to(outside / "text")


def _hostile_views(layout: RunLayout, outside: Path) -> None:
    """SQL of its own that writes, and that names files outside as those of the run."""
    text = layout.open_sql.read_text()
    evil = f"COPY (SELECT 1) TO '{outside}/home/planted'; SET VARIABLE segments = ['{outside}/precious.parquet'];\n"
    layout.open_sql.write_text(text.replace("-- The views.", f"{evil}-- The views."))


ATTACKS: Mapping[str, Attack] = {
    **{f"link: {name}": _linked(name) for name in TOP_NAMES},
    **{f"link to nothing: {name}": _linked_to_nothing(name) for name in TOP_NAMES},
    **{f"fifo: {name}": _fifo(name) for name in FILES},
    **{f"huge: {name}": _huge(name) for name in FILES if name != "catalog.sqlite"},
    "link: a worker's directory": _worker_linked,
    "deep: segments": _deep("segments"),
    "deep: export": _deep("export"),
    "deep: weights": _deep("weights"),
    "link: a segment": _file_linked("segments/*/*.parquet"),
    "link: an export": _file_linked("export/groups-*.parquet"),
    "link: the log of the catalog": _wal,
    "storage: /proc/self/cwd": _stored("file:///proc/self/cwd"),
    "storage: /proc/self/cwd, export linked": _stored_with_its_manifest,
    "storage: a foreign directory": _stored("file://{outside}"),
    "storage: a relative path": _stored("../outside"),
    "storage: no such scheme": _stored("gopher://example.org/run"),
    "storage: the network": _stored(
        "s3://bucket/run?region=eu-central-1&endpoint_override=127.0.0.1:1"
    ),
    **{f"manifest: segment {path[:40]!r}": _named_segment(path) for path in BAD_PATHS},
    **{f"manifest: part {path[:40]!r}": _named_part(path) for path in BAD_PATHS},
    "manifest: an absolute segment": _manifest(
        lambda content, outside: content["segments"].append(f"{outside}/precious.parquet")
    ),
    "manifest: superseded files of a linked export": _superseded,
    **{f"catalog: retired {path[:40]!r}": _retired(path) for path in BAD_PATHS},
    "catalog: an absolute retired file": _retired("{outside}/precious.parquet"),
    "catalog: an absolute version": _catalog(
        "UPDATE version SET path = '{outside}/weights/v000001'"
    ),
    "catalog: an absolute checkpoint": _catalog(
        "UPDATE checkpoint SET path = '../outside/checkpoints/step000001'"
    ),
    "open.sql: writes and names foreign files": _hostile_views,
    "run.json: a run id with a path in it": lambda layout, _: edit_json(
        layout.run_json, lambda info: info.update(run_id="../../home/planted")
    ),
    "storage: no URI": _stored("s3://[x"),
    "storage: half a character": _stored("file:///\ud800"),
    "storage: a byte in a path": _stored("\udcff"),
    "storage: a null byte": _stored("a\0b"),
    "storage: a null byte of a URI": _stored("file:///a%00b"),
}
