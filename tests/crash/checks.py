"""Check a run after a crash, and describe its end so that two runs can be compared."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from store import Catalog, RunLayout, StoreError, export
from store.hashing import file_digest
from store.maintenance.fsck import CONTENTS, NAMES, check
from store.maintenance.rebuild import rebuild
from store.reading.manifest import read_manifest
from tests.support.run_views import connect

Line = dict[str, Any]  # of a diary
EndState = dict[str, list[tuple[Any, ...]]]

# Acknowledged fact -> the values that must be found, one query for all of that kind.
KEPT = {
    ("open", "groups"): "SELECT lower(hex(group_uid)) FROM grp",
    ("commit", "trajectories"): "SELECT lower(hex(traj_uid)) FROM trajectory",
    ("claim", "groups"): "SELECT lower(hex(group_uid)) FROM batch_group",
    ("claim", "batch"): "SELECT batch_id FROM batch",
    ("settle", "batch"): "SELECT batch_id FROM batch WHERE learner_step IS NOT NULL",
    ("version", "version"): "SELECT version FROM version",
    ("metrics", "step"): "SELECT learner_step FROM metric WHERE name = 'loss'",
    ("checkpoint", "step"): "SELECT learner_step FROM checkpoint",
}
# Things that may not be there twice, whatever index guards them.
ONCE = {
    "trajectory": "SELECT lower(hex(traj_uid)) FROM trajectory",
    "member of a group": "SELECT lower(hex(group_uid)) || '/' || member FROM trajectory",
    "trained group": "SELECT lower(hex(group_uid)) FROM batch_group WHERE live = 1",
    "learner step": "SELECT learner_step FROM batch WHERE state = 'trained'",
    "version": "SELECT version FROM version",
    "file": "SELECT path FROM segment",
}
EXPIRED = """SELECT lower(hex(traj_uid)) FROM trajectory JOIN segment USING (segment_id)
             WHERE retired_why = 'expired'"""
MAX_STALENESS = 1_000
END = {
    "trajectories": "SELECT * FROM trajectories ORDER BY traj_uid",
    "rows": "SELECT * FROM steps ORDER BY traj_uid, step_index",
    "groups": """SELECT group_uid, state, size, n_members, n_steps, n_won, return_sum FROM groups
                 ORDER BY ALL""",
    "steps": "SELECT learner_step, group_uid, outcome FROM lineage WHERE live ORDER BY ALL",
    "metrics": "SELECT learner_step, name, value FROM metrics ORDER BY ALL",
    "checkpoints": "SELECT learner_step FROM checkpoints WHERE live ORDER BY ALL",
    "versions": "SELECT DISTINCT learner_step FROM versions ORDER BY ALL",
}


def read_diary(path: Path) -> list[Line]:
    """Return the lines that the workload wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def broken_promises(root: Path, diary: Sequence[Line], *, thorough: bool) -> list[str]:
    """Recover the run that a crash left. Return what is lost, doubled or torn, [] if nothing is.

    `thorough` asks the views and all levels of fsck too, which takes ten times as long.
    """
    if not RunLayout.exists(root):
        return ["the run is gone"] if any(line.get("done") == "create" for line in diary) else []
    try:
        layout = RunLayout.open(root)
        broken = _shown_to_readers(layout, diary)
        with Catalog.open(layout) as catalog:
            manifest_lsn = export(catalog, layout)
            broken += (
                []
                if catalog.epoch > _largest(diary, "recovery", "epoch")
                else [f"epoch {catalog.epoch} twice"]
            )
        broken += (
            []
            if manifest_lsn >= _largest(diary, "manifest", "lsn")
            else [f"the catalog is back at lsn {manifest_lsn}"]
        )
        broken += _in_catalog(layout, diary)
        broken += [
            f"fsck: {finding}"
            for finding in check(layout, level=CONTENTS if thorough else NAMES)
            if finding.severity == "error"
        ]
        if thorough and layout.open_sql.exists():
            broken += _in_views(layout)
            # A copy of the directory shares a remote storage with the run: it would remove files.
            if layout.info.storage_uri is None:
                broken += _after_a_rebuild(layout, diary)
        return broken
    except (StoreError, sqlite3.Error) as error:
        return [f"{type(error).__name__}: {error}"]


def end_state(root: Path) -> EndState:
    """Everything that does not depend on how often the run was interrupted."""
    with closing(connect(RunLayout.open(root))) as connection:
        return {name: connection.execute(query).fetchall() for name, query in END.items()}


def _shown_to_readers(layout: RunLayout, diary: Sequence[Line]) -> list[str]:
    """Check the manifest before a recovery: no older than promised, and its files are there."""
    manifest = read_manifest(layout)
    if manifest is None:
        return ["the manifest is gone"] if _largest(diary, "manifest", "lsn") else []
    broken = missing_for_readers(layout)
    if manifest.lsn < _largest(diary, "manifest", "lsn"):
        broken.append(f"the manifest is back at lsn {manifest.lsn}")
    return broken


def missing_for_readers(layout: RunLayout) -> list[str]:
    """Name the files of the manifest that are not there."""
    manifest = read_manifest(layout)
    if manifest is None:
        return []
    parts = [part.path for parts in manifest.tables.values() for part in parts]
    return [
        f"the manifest names {path}, which is gone"
        for path in (*manifest.segments, *parts)
        if not layout.storage.exists(path)
    ]


def _in_catalog(layout: RunLayout, diary: Sequence[Line]) -> list[str]:
    with closing(_connected(layout)) as connection:
        broken = []
        for (what, name), query in KEPT.items():
            promised = {
                value for line in diary if line.get("done") == what for value in _values(line[name])
            }
            lost = promised.difference(_column(connection, query)) if promised else set()
            broken += [f"{what}: {name} {value} is lost" for value in sorted(lost)]
        broken += _doubled(connection)
        broken += _not_settled_any_more(connection, diary)
        for path, digest in connection.execute(
            "SELECT path, digest FROM segment WHERE removed_us IS NULL"
        ):
            there = layout.storage.exists(path)
            if not there or file_digest(layout.storage.read(path)) != digest:
                broken.append(f"{path} is committed, but {'torn' if there else 'gone'}")
        # Every row of a live file counts, or is of a trajectory that counts elsewhere.
        broken += [
            f"{path} is live with {n} rows, of which the catalog accounts for {known}"
            for path, n, known in connection.execute(
                """SELECT path, n_steps,
                        (SELECT coalesce(sum(n_steps), 0) FROM trajectory t
                         WHERE t.segment_id = s.segment_id)
                        + (SELECT coalesce(sum(t.n_steps), 0)
                           FROM duplicate d JOIN trajectory t USING (traj_uid)
                           WHERE d.segment_id = s.segment_id) AS known
                   FROM segment s WHERE retired_lsn IS NULL AND n_steps <> known"""
            )
        ]
    return broken


def _not_settled_any_more(connection: sqlite3.Connection, diary: Sequence[Line]) -> list[str]:
    """Check that a settled step stays, unless a later recovery went back behind it."""
    trained = set(_column(connection, "SELECT learner_step FROM batch WHERE state = 'trained'"))
    settled: set[int] = set()
    checkpoint = 0
    for line in diary:
        if line.get("done") == "settle":
            settled.add(line["step"])
        elif line.get("done") == "checkpoint":
            checkpoint = line["step"]
        elif line.get("phase") == "recovery":
            settled = {step for step in settled if step <= checkpoint}
    return [f"learner step {step} is not settled any more" for step in sorted(settled - trained)]


def _in_views(layout: RunLayout) -> list[str]:
    with closing(connect(layout)) as connection:
        doubled = connection.execute(
            "SELECT traj_uid, step_index FROM steps GROUP BY ALL HAVING count(*) > 1"
        ).fetchall()
        partial = connection.execute(
            "SELECT traj_uid FROM steps GROUP BY traj_uid HAVING count(*) <> "
            "any_value(episode_steps)"
        ).fetchall()
        (steps,) = connection.execute(
            "SELECT coalesce(sum(n_steps), 0) FROM trajectories"
        ).fetchone() or (None,)
    with closing(_connected(layout)) as connection:
        (counted,) = connection.execute(
            """SELECT coalesce(sum(t.n_steps), 0)
               FROM trajectory t JOIN segment s USING (segment_id)
               WHERE s.retired_lsn IS NULL"""
        ).fetchone()
    broken = [f"row {row} is shown more than once" for row in doubled] + [
        f"trajectory {row} is shown in part" for row in partial
    ]
    return broken + (
        [] if steps == counted else [f"the views show {steps} steps, the catalog counts {counted}"]
    )


def _after_a_rebuild(layout: RunLayout, diary: Sequence[Line]) -> list[str]:
    """Lose the catalog of a copy of the run, rebuild it and train on. Return what is wrong then."""
    copy = layout.root.with_name(f"{layout.root.name}-rebuilt")
    shutil.copytree(layout.root, copy)
    try:
        rebuilt = RunLayout.open(copy)
        rebuilt.catalog.unlink()
        rebuild(rebuilt)
        with closing(_connected(layout)) as connection:
            expired = set(_column(connection, EXPIRED))
        with closing(_connected(rebuilt)) as connection:
            known = set(_column(connection, ONCE["trajectory"])) | expired
            doubled = _doubled(connection)
        committed = {
            uid for line in diary if line.get("done") == "commit" for uid in line["trajectories"]
        }
        lost = [f"trajectory {uid} is lost" for uid in sorted(committed - known)]
        return [f"rebuilt: {line}" for line in lost + doubled + train_on(rebuilt)]
    finally:
        shutil.rmtree(copy)


def train_on(layout: RunLayout) -> list[str]:
    """Train a recovered run for a learner step. Return what is wrong then."""
    with Catalog.open(layout) as catalog:
        latest = catalog.latest_version()
        version = 0 if latest is None else latest.version
        batch = catalog.claim(n_groups=1, current_version=version, max_staleness=MAX_STALENESS)
        if batch is not None:
            step = catalog.learner_step() + 1
            catalog.settle(batch.batch_id, learner_step=step, filtered={}, version_in=version)
        export(catalog, layout)
    with closing(connect(layout)) as views:
        (n_violations,) = views.execute("SELECT count(*) FROM staleness_violations").fetchall()[0]
    with closing(_connected(layout)) as connection:
        doubled = _doubled(connection)
    violations = [f"{n_violations} staleness violations"] if n_violations else []
    findings = [
        f"fsck: {finding}"
        for finding in check(layout, level=CONTENTS)
        if finding.severity == "error"
    ]
    return doubled + violations + findings


def _connected(layout: RunLayout) -> sqlite3.Connection:
    return sqlite3.connect(f"{layout.catalog.as_uri()}?mode=ro", uri=True)


def _doubled(connection: sqlite3.Connection) -> list[str]:
    return [
        f"{what} {value} is there {n} times"
        for what, query in ONCE.items()
        for value, n in Counter(_column(connection, query)).items()
        if n > 1
    ]


def _column(connection: sqlite3.Connection, query: str) -> list[Any]:
    return [row[0] for row in connection.execute(query)]


def _values(fact: Any) -> Iterable[Any]:
    return fact if isinstance(fact, list) else [fact]


def _largest(diary: Sequence[Line], what: str, name: str) -> int:
    return max((line[name] for line in diary if line.get("done") == what), default=0)
