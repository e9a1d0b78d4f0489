"""Make runs that have grown, for benchmarks/store.py: small segments, groups, an open reader."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from support import store_load

import store.reading.manifest as manifest
from store import (
    COMPACTION_POLICY,
    Catalog,
    RunLayout,
    Trajectory,
    VersionRecord,
    export,
    uid,
    write_open_sql,
    write_segment,
)
from store.clock import US_PER_S, now_us
from store.maintenance.compact import merges
from store.reading.reader import open_run
from tests.support.store_samples import open_task_group

TOGETHER = 500  # commits that are synced at once, only to build a run sooner
TOKENS = 20  # of a step, so that a segment is a small file
EXPORTS_TIMED = 5


@contextmanager
def new_run() -> Iterator[tuple[Catalog, RunLayout]]:
    with tempfile.TemporaryDirectory() as directory:
        layout = RunLayout.create(Path(directory) / "run", config_yaml="")
        write_open_sql(layout, macros=(), max_staleness=0)
        with Catalog.open(layout) as catalog:
            yield catalog, layout


def many_files(n_files: int, label: str) -> dict[str, float]:
    """Return what a reader, an export and compaction cost in a run of so many small segments."""
    step = store_load.make_pool(seed=0)[0][0]
    tokens = {
        name: getattr(step, name)[:TOKENS]
        for name in ("prompt_ids", "response_ids", "response_logprobs")
    }
    step = dataclasses.replace(step, terminated=True, **tokens)
    with new_run() as (catalog, layout):
        for first in range(0, n_files, TOGETHER):
            with catalog.unsynced():
                for _ in range(first, min(first + TOGETHER, n_files)):
                    commit_one(catalog, layout, step=step)
        export(catalog, layout)
        started = time.perf_counter()
        with open_run(layout.root) as reader:
            figures = {f"reader_open_s_{label}": time.perf_counter() - started}
            started = time.perf_counter()
            reader.sql("SELECT sum(reward) FROM steps")
            figures[f"first_query_s_{label}"] = time.perf_counter() - started
        figures[f"export_ms_{label}"] = export_ms(catalog, layout, n_exports=EXPORTS_TIMED)
        started = time.perf_counter()
        for _ in merges(catalog, layout, policy=COMPACTION_POLICY, skip=()):
            pass
        figures[f"compaction_s_{label}"] = time.perf_counter() - started
    return figures


def commit_one(catalog: Catalog, layout: RunLayout, *, step: store_load.Step) -> None:
    group = open_task_group(catalog, "t", size=1)
    trajectory = Trajectory(
        traj_uid=group.traj_uids[0],
        group_uid=group.group_uid,
        env_name="rooms",
        task_id="t",
        split="train",
        seed=0,
        member=0,
        won=True,
        task_score=None,
        steps=(step,),
    )
    segment = write_segment(layout, [trajectory], worker="w", epoch=catalog.epoch)
    catalog.commit(segment, epoch=catalog.epoch)


def export_ms(catalog: Catalog, layout: RunLayout, *, n_exports: int) -> float:
    """Return the mean time of the last EXPORTS_TIMED exports. Each has a new event and version."""
    newest = catalog.latest_version()
    first = 0 if newest is None else newest.version + 1
    spent_s = []
    for version in range(first, first + n_exports):
        catalog.record_version(
            VersionRecord(
                version=version, path=f"weights/v{version:06d}", digest="d", learner_step=None
            )
        )
        catalog.log(component="w", what="x", detail="")
        started = time.perf_counter()
        export(catalog, layout)
        spent_s.append(time.perf_counter() - started)
    last = spent_s[-EXPORTS_TIMED:]
    return 1e3 * sum(last) / len(last)


def reader_left_open(n_exports: int, label: str) -> dict[str, float]:
    """Return what an export costs after so many with a reader open since the first.

    They come one a second by the store's clock.
    """
    start_us, seconds = now_us(), itertools.count()
    with new_run() as (catalog, layout):
        export(catalog, layout)
        # asked once an export
        clock = patch.object(manifest, "now_us", lambda: start_us + next(seconds) * US_PER_S)
        with clock, open_run(layout.root):
            time_ms = export_ms(catalog, layout, n_exports=n_exports)
    return {f"export_ms_reader_left_open_{label}": time_ms}


def many_groups(n_groups: int, label: str) -> dict[str, float]:
    """Return what the counts of the status cost in a run of so many trained groups."""
    with new_run() as (catalog, _):
        with catalog._database.transaction() as tx:  # the public path would play them all
            columns = {
                "split": "train",
                "task_id": "t",
                "size": 8,
                "state": "trained",
                "n_members": 8,
                "n_steps": 320,
                "n_won": 4,
                "return_sum": 4.0,
                "version_min": 0,
                "version_max": 0,
                "opened_lsn": 1,
                "opened_us": 1,
            }
            rows = [
                {"group_uid": uid("growth", ordinal), "ordinal": ordinal} | columns
                for ordinal in range(n_groups)
            ]
            tx.insert_many("grp", rows)
            tx.touch("groups")
        started = time.perf_counter()
        catalog.counts()
        catalog.open_heldout()
        catalog.finished_evaluations()
        catalog.latest_metrics()
        return {f"status_ms_{label}": 1e3 * (time.perf_counter() - started)}
