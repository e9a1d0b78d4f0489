"""Ways to damage the run of store_runs.py, one for each code of fsck, and disks that take no
more.
"""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from store import Catalog, RunLayout
from store.hashing import file_digest
from store.maintenance.fsck import NAMES, check
from store.maintenance.fsck_segments import GRACE_S
from store.maintenance.repair import repair
from store.segment_encoding import encode
from tests.support.store_runs import flip, rewrite


def ask(layout: RunLayout, query: str, *values: object) -> list[tuple]:
    with closing(sqlite3.connect(layout.catalog)) as connection:
        return connection.execute(query, values).fetchall()


def edit(*statements: str) -> Callable[[RunLayout], None]:
    """Changes the catalog behind its back: without its triggers."""

    def damage(layout: RunLayout) -> None:
        with closing(sqlite3.connect(layout.catalog)) as connection, connection:
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
            ).fetchall():
                connection.execute(f"DROP TRIGGER {name}")
            for statement in statements:
                connection.execute(statement)

    return damage


def a_file(layout: RunLayout, *, of: str = "state = 'complete' AND split = 'train'") -> str:
    """The live file of one group."""
    return ask(
        layout,
        "SELECT path FROM segment JOIN trajectory USING (segment_id) JOIN grp USING (group_uid) "
        f"WHERE {of}",
    )[0][0]


def a_retired_file(layout: RunLayout) -> str:
    return ask(layout, "SELECT path FROM segment WHERE retired_lsn IS NOT NULL")[0][0]


def replace(layout: RunLayout, path: str, data: bytes) -> None:
    """Replace a segment and its digest in the catalog, as if a worker had committed it."""
    rewrite(layout.root / path, data)
    digest, n_bytes = file_digest(data), len(data)
    edit(f"UPDATE segment SET digest = '{digest}', n_bytes = {n_bytes} WHERE path = '{path}'")(
        layout
    )


def tampered(
    change: Callable[[pa.Table], pa.Table], *, run_id: str | None = None
) -> Callable[[RunLayout], None]:
    """A worker that wrote wrong rows, and told the catalog of right ones."""

    def damage(layout: RunLayout) -> None:
        path = a_file(layout)
        table = change(pq.read_table(layout.root / path))
        metadata = {"run_id": run_id or layout.info.run_id, "worker": "w0", "epoch": "1"}
        replace(layout, path, encode(table, metadata=metadata).to_pybytes())

    return damage


def column(name: str, change: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    def changed(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        return table.set_column(
            table.column_names.index(name),
            field,
            pa.array(change(table[name].to_pylist()), field.type),
        )

    return changed


def manifest(**changes: object) -> Callable[[RunLayout], None]:
    def damage(layout: RunLayout) -> None:
        content = json.loads(layout.manifest.read_text())
        layout.manifest.write_text(json.dumps({**content, **changes}))

    return damage


def an_export(layout: RunLayout, *, part: int = 0) -> Path:
    return layout.root / json.loads(layout.manifest.read_text())["tables"]["groups"][part]["path"]


def left_behind(name: str) -> Callable[[RunLayout], None]:
    def damage(layout: RunLayout) -> None:
        (layout.segments / "w0" / name).write_bytes(b"x")
        old_s = (layout.segments / "w0" / name).stat().st_mtime - GRACE_S - 1
        os.utime(layout.segments / "w0" / name, (old_s, old_s))

    return damage


def put_back(layout: RunLayout) -> None:
    """A file that was missing when fsck repaired the run, and is there again."""
    path = layout.root / a_file(layout)
    kept, times = path.read_bytes(), (path.stat().st_atime, path.stat().st_mtime)
    path.unlink()
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=check(layout, level=NAMES))
    path.write_bytes(kept)
    os.utime(path, times)


def another_batch(layout: RunLayout) -> None:
    edit(
        "DROP INDEX batch_group_once",
        "INSERT INTO batch (batch_id, epoch, state, claimed_version, version_in, learner_step, "
        "claimed_us, trained_us, "
        "claimed_lsn, trained_lsn) VALUES (99, 1, 'trained', 2, 2, 99, 1, 1, 1, 1)",
        "INSERT INTO batch_group (batch_id, group_uid, live, outcome) SELECT 99, group_uid, 1, "
        "state FROM grp "
        "WHERE state = 'trained'",
    )(layout)


DAMAGE: Mapping[str, Callable[[RunLayout], object]] = {
    "catalog_missing": lambda layout: layout.catalog.unlink(),
    "catalog_damaged": lambda layout: rewrite(
        layout.catalog, b"\0" * layout.catalog.stat().st_size
    ),
    "catalog_foreign": edit(f"UPDATE meta SET run_id = '{'0' * 32}'"),
    "foreign_key": edit(
        "INSERT INTO duplicate (segment_id, traj_uid) VALUES ('none', zeroblob(16))"
    ),
    "counter": edit(f"UPDATE sqlite_sequence SET seq = {2**63 - 1} WHERE name = 'group_state'"),
    "group_sums": edit("UPDATE grp SET n_steps = n_steps + 1 WHERE ordinal = 3"),
    "group_not_whole": edit("UPDATE grp SET size = size + 1 WHERE ordinal = 3"),
    "group_batch": edit("UPDATE batch_group SET live = 0 WHERE outcome = 'trained' AND live = 1"),
    "doubly_claimed": another_batch,
    "replayed_group": edit(
        "INSERT INTO batch_group (batch_id, group_uid, live, outcome, use) SELECT batch_id, "
        "group_uid, 1, 'trained', 2 FROM batch, grp WHERE batch.state = 'trained' "
        "AND grp.state = 'stale' LIMIT 1"
    ),
    "drawn_by": edit("UPDATE grp SET weighed_lsn = weighed_lsn + 1"),
    "success_before": edit("UPDATE grp SET success_before = NULL"),
    "critic_value": edit("UPDATE critic_value SET state_values = '[0.5, 0.25]'"),
    "batch_step": edit("UPDATE batch SET version_in = NULL WHERE state = 'trained'"),
    "ledger": edit("DELETE FROM group_state WHERE state = 'stale'"),
    "unknown_version": edit("DELETE FROM version WHERE version = 1"),
    "future_lsn": edit("UPDATE event SET lsn = 9999 WHERE event_id = 1"),
    "segment_missing": lambda layout: (layout.root / a_file(layout)).unlink(),
    "segment_damaged": lambda layout: flip(layout.root / a_file(layout), 8 * 1000),
    "retired_missing": lambda layout: (layout.root / a_retired_file(layout)).unlink(),
    "retired_damaged": lambda layout: flip(layout.root / a_retired_file(layout), 8 * 1000),
    "segment_unreadable": lambda layout: replace(
        layout, a_file(layout), b"PAR1 but not really PAR1"
    ),
    "segment_foreign": tampered(lambda table: table, run_id="0" * 32),
    "step_index": tampered(
        column("step_index", lambda values: [value + (value > 0) for value in values])
    ),
    "episode_steps": tampered(
        column("episode_steps", lambda values: [value + 1 for value in values])
    ),
    "state_hash": tampered(
        column("anchor_text", lambda values: [value and value + "?" for value in values])
    ),
    "figures": tampered(column("reward", lambda values: [value + 1 for value in values])),
    "missing_rows": tampered(lambda table: table.filter(pc.equal(table["member"], 0))),
    "uncounted_rows": edit("DELETE FROM duplicate"),
    "backup_damaged": lambda layout: rewrite(layout.backup, b"SQLite format 3\0"),
    "manifest_missing": lambda layout: layout.manifest.unlink(),
    "manifest_damaged": lambda layout: layout.manifest.write_text(layout.manifest.read_text()[:-9]),
    "manifest_foreign": manifest(run_id="0" * 32),
    "manifest_ahead": manifest(lsn=9999),
    "manifest_segment": lambda layout: manifest(
        segments=[
            *json.loads(layout.manifest.read_text())["segments"],
            f"segments/w0/{'0' * 32}.parquet",
        ]
    )(layout),
    "export_missing": lambda layout: an_export(layout).unlink(),
    "export_damaged": lambda layout: rewrite(
        an_export(layout), an_export(layout).read_bytes()[:-9]
    ),
    "open_sql_missing": lambda layout: layout.open_sql.write_text("SELECT 1;"),
    "open_sql_changed": lambda layout: layout.open_sql.write_text(
        layout.open_sql.read_text().replace("CREATE", "CRATE")
    ),
    "segment_returned": put_back,
    "orphan": left_behind(f"{'0' * 32}.parquet"),
    "unfinished": left_behind(".x.parquet.1-1.tmp"),
    "unknown_file": left_behind("notes.txt"),
}
WARNINGS = {
    "retired_missing",
    "retired_damaged",
    "orphan",
    "unfinished",
    "unknown_file",
    "open_sql_changed",
}
ONLY_IN_CONTENTS = {
    *(
        "segment_damaged",
        "segment_unreadable",
        "segment_foreign",
        "step_index",
        "episode_steps",
        "state_hash",
        "figures",
    ),
    *("missing_rows", "uncounted_rows", "export_damaged", "retired_damaged", "backup_damaged"),
}
FOR_REBUILD = {  # repair does not guess which of two records is right
    *(
        "catalog_missing",
        "catalog_damaged",
        "catalog_foreign",
        "foreign_key",
        "counter",
        "group_not_whole",
        "group_batch",
    ),
    *(
        "doubly_claimed",
        "replayed_group",
        "drawn_by",
        "success_before",
        "critic_value",
        "batch_step",
        "ledger",
        "unknown_version",
        "future_lsn",
        "figures",
        "manifest_ahead",
    ),
}


@contextmanager
def no_file_may_grow(beyond: int = 4096) -> Iterator[None]:
    """Writing beyond so many bytes of any file fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (beyond, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted(target: Path, *options: str) -> Iterator[None]:
    done = subprocess.run(
        ["mount", *options, str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


@contextmanager
def no_space_left(directory: Path) -> Iterator[None]:
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    try:
        yield
    finally:
        filler.unlink()
