"""Read a run beside writers and compaction: every snapshot must be whole.

One process owns the catalog: three threads write, one claims and settles as a learner does, and the
maintainer merges at four settled files. Replaced files are removed at once, so only the manifest
and pins protect a reader. A reader that lists the directory is the control, and sees torn groups.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from store import (
    Catalog,
    CompactionPolicy,
    Maintainer,
    MaintainerSettings,
    RunLayout,
    export,
    read_segments,
    write_open_sql,
    write_segment,
)
from store.reading.manifest import read_manifest
from store.reading.pins import Pin
from tests.support.run_views import connect
from tests.support.store_samples import make_trajectory, open_train_group

REPOSITORY = Path(__file__).resolve().parents[2]
# How long runs are read while they are written. `make test-crash`: 60.
READ_FOR_S = float(os.environ.get("STORE_LIVE_READER_S", "8"))
MOST_S = READ_FOR_S + 300.0  # where the machine is so busy that little happens in that time
N_WRITERS, GROUPS_PER_STEP, WAITING_GROUPS = 3, 4, 24
EAGER = MaintainerSettings(
    snapshot_window_s=0.0,
    keep_days=None,
    keep_versions=None,
    pause_s=0.02,
    policy=CompactionPolicy(fan_in=4, max_live_files=500, min_file_bytes=1 << 18),
)
KEEP = "CREATE TEMP TABLE kept AS SELECT traj_uid, group_uid, step_index, episode_steps FROM steps"
LOOK = """
WITH whole AS (
    SELECT traj_uid, any_value(group_uid) AS group_uid, count(*) AS n_steps,
           any_value(episode_steps) AS episode_steps
    FROM kept GROUP BY traj_uid
)
SELECT (SELECT count(*) FROM kept) AS steps,
       (SELECT count(DISTINCT (traj_uid, step_index)) FROM kept) AS distinct_steps,
       (SELECT count(*) FROM whole) AS trajectories,
       (SELECT count(*) FROM whole WHERE n_steps <> episode_steps) AS torn_trajectories,
       (SELECT coalesce(sum(n_steps), 0)::BIGINT FROM groups) AS steps_by_groups,
       (SELECT count(*) FROM groups
        LEFT JOIN (SELECT group_uid, count(*) AS n FROM whole GROUP BY ALL) USING (group_uid)
        WHERE n_members <> coalesce(n, 0)) AS torn_groups,
       (SELECT count(*) FROM groups WHERE state <> 'open' AND n_members <> size)
           AS incomplete_groups,
       (SELECT count(*) FROM groups) AS groups
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One row of LOOK."""

    steps: int
    distinct_steps: int
    trajectories: int
    torn_trajectories: int
    steps_by_groups: int
    torn_groups: int
    incomplete_groups: int
    groups: int

    def anomalies(self, before: Look | None) -> list[str]:
        found = {
            "doubled steps": self.steps != self.distinct_steps,
            "torn trajectories": self.torn_trajectories > 0,
            "torn groups": self.torn_groups > 0,
            "incomplete groups": self.incomplete_groups > 0,
            "tables of another moment": self.steps != self.steps_by_groups,
            "counts that go back": before is not None
            and (
                self.steps < before.steps
                or self.trajectories < before.trajectories
                or self.groups < before.groups
            ),
        }
        return [name for name, is_so in found.items() if is_so]


def look(layout: RunLayout) -> Look:
    """Read as a reader does: pin the manifest's snapshot, then read the manifest, which may be
    newer.
    """
    manifest = read_manifest(layout)
    assert manifest is not None
    pin = Pin(layout, manifest.lsn)
    try:
        with connect(layout) as connection:
            connection.execute(KEEP)
            relation = connection.sql(LOOK)
            row = relation.fetchall()[0]
            return Look(**dict(zip(relation.columns, row, strict=True)))
    finally:
        pin.close()


def glob_anomaly(layout: RunLayout) -> str | None:
    """Count what is wrong for a reader that lists the directory: the control."""
    files = f"read_parquet('{layout.segments}/**/*.parquet')"
    sql = f"SELECT count(*), count(DISTINCT (traj_uid, step_index)) FROM {files}"
    try:
        with duckdb.connect() as connection:
            steps, distinct = connection.sql(sql).fetchall()[0]
    except duckdb.Error as error:
        return type(error).__name__
    return "doubled steps" if steps != distinct else None


def test_a_reader_sees_whole_snapshots_while_writers_and_compaction_run(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.store.test_live_reader", str(tmp_path / "run")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdin is not None and owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        layout = RunLayout.open(tmp_path / "run")
        looks: list[Look] = []
        anomalies: list[tuple[int, list[str], Look]] = []
        globs: list[str | None] = []
        began_s = time.monotonic()
        while (lasted_s := time.monotonic() - began_s) < READ_FOR_S or (
            lasted_s < MOST_S and not has_seen_much(looks, globs)
        ):
            seen = look(layout)
            if found := seen.anomalies(looks[-1] if looks else None):
                anomalies.append((len(looks), found, seen))
            looks.append(seen)
            globs.append(glob_anomaly(layout))
            assert owner.poll() is None, "the owner has failed"
        answer, _ = owner.communicate("stop\n", timeout=60.0)
    finally:
        owner.kill()
        owner.wait()
    assert owner.returncode == 0
    print(
        f"{len(looks)} looks, {sum(g is not None for g in globs)} of {len(globs)} globs wrong; "
        f"last {looks[-1]}; {answer}"
    )
    assert anomalies == []
    assert has_seen_much(looks, globs), "the control saw nothing: nothing was merged under its eyes"
    merged, removed, steps = map(int, answer.split())
    assert merged > 0 and removed > 0
    assert look(layout).steps == steps


def has_seen_much(looks: list[Look], globs: list[str | None]) -> bool:
    return (
        len(looks) > 5
        and looks[-1].steps > looks[0].steps
        and any(glob is not None for glob in globs)
    )


def write_groups(layout: RunLayout, catalog: Catalog, name: str, stop: threading.Event) -> None:
    """Play groups of three, some of them in two files, some members twice."""
    chance = random.Random(name)
    while not stop.is_set():
        counts = catalog.counts()
        # admission: as far ahead as a learner lets workers run
        if counts.complete + counts.open > WAITING_GROUPS:
            stop.wait(0.005)
            continue
        open_train_group(catalog, None, size=3)
        group = catalog.lease_open_group(worker=name, lease_s=60.0)
        if group is None:
            continue
        for members in chance.choice([((0, 1, 2),), ((2, 0), (1,)), ((0, 1), (1, 2))]):
            trajectories = [
                make_trajectory(group, member, n_steps=chance.randint(1, 6)) for member in members
            ]
            catalog.commit(
                write_segment(layout, trajectories, worker=name, epoch=catalog.epoch),
                epoch=catalog.epoch,
            )


def learn(layout: RunLayout, catalog: Catalog, stop: threading.Event) -> None:
    """Claims, reads with digests, settles: what makes files settled."""
    step = 0
    while not stop.is_set():
        batch = catalog.claim(n_groups=GROUPS_PER_STEP, current_version=0, max_staleness=0)
        if batch is None:
            stop.wait(0.005)
            continue
        expected = sum(
            trajectory.n_steps for meta in batch.segments for trajectory in meta.trajectories
        )
        assert read_segments(layout, batch.segments).num_rows == expected
        step += 1
        catalog.settle(batch.batch_id, learner_step=step, filtered={}, version_in=0)


def own(root: Path) -> None:
    """Runs until a line comes in; then prints the files merged and removed, and the steps
    committed.
    """
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=0)
    stop, failures = threading.Event(), []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            raise

    with Catalog.open(layout) as catalog:
        works: list[Callable[[], None]] = [lambda: learn(layout, catalog, stop)]
        works += [
            lambda name=f"w{n}": write_groups(layout, catalog, name, stop) for n in range(N_WRITERS)
        ]  # type: ignore[misc]
        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        threads.append(threading.Thread(target=lambda: (sys.stdin.readline(), stop.set())))
        maintainer = Maintainer(catalog, layout, settings=EAGER)
        export(catalog, layout)
        maintainer.start()
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        while not stop.is_set() and not failures:
            export(catalog, layout)
            maintainer.check()
            stop.wait(0.05)
        stop.set()
        maintainer.close()
        maintainer.check()
        if failures:
            os._exit(1)  # the thread that waits for a line would hold the process
        for thread in threads:
            thread.join()
        export(catalog, layout)
        steps = catalog.counts().steps
    with connect(layout) as connection:
        counted = connection.sql(
            "SELECT count(*) FILTER (what = 'merged'), count(*) FILTER (what = 'removed') FROM "
            "events"
        ).fetchall()[0]
    print(*counted, steps, flush=True)


if __name__ == "__main__":
    own(Path(sys.argv[1]))
