"""Measure durable ingest, verified reads, and SQL over a million steps, side by side in one run.

    python benchmarks/store.py [--quick] [--rows 10M]

Ingest: 4 writer processes and one owner take turns at (1) encoding only, which a worker must do in
any case, (2) the store: lease, encode, write, sync, commit, and (3) sending the same rows to the
owner of one DuckDB file, an episode when it ends or (by_group) only whole groups; the owner commits
all that has arrived at once. Ratios are medians of the turns. MB are of the Arrow table, before
compression; the row model is in support/store_load.py. Times are wall clock. `--rows` goes on after
the first million. The last line is JSON.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import duckdb
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import store_growth, store_load
from support.figures import quick_parser, show_json, show_table
from support.store_load import (
    BATCH_GROUPS,
    GROUP_SIZE,
    GROUPS_PER_FILE,
    Done,
    Lease,
    NewGroups,
    Writer,
)

from store import (
    SEGMENT_SCHEMA,
    Catalog,
    Group,
    RunLayout,
    export,
    read_segments,
    to_table,
)
from tests.support.run_views import connect
from tests.support.store_samples import open_task_group

WRITERS = 4  # processes: more than the cores of the machine of docs/performance.md
ROUNDS = 3  # of each job, taken in turns so that a slow minute hits all of them
EXPORT_INTERVAL_S = 1.0  # as of a run's coordinator
SIZES = {"100k": 100_000, "1m": 1_000_000}
QUERIES = {
    "count": "SELECT count(*) FROM steps",
    "anchor_group_by": """SELECT count(*), max(n), sum(mean) FROM (
        SELECT group_uid, state_hash, count(*) AS n, avg(reward) AS mean
        FROM steps WHERE state_hash NOT NULL GROUP BY ALL)""",
    "trajectory": "SELECT * FROM steps WHERE traj_uid = '{traj_uid}' ORDER BY step_index",
}
# files, groups, exports
FULL_GROWTH = ((20_000, "20k"), (300_000, "300k"), (2_000, "2000"))
QUICK_GROWTH = ((1_000, "1k"), (20_000, "20k"), (100, "100"))
REQUIRED = {
    "reader_open_s_20k": "<= 3",
    "ingest_over_encode": ">= 0.6, aim 0.8",
    "ingest_over_shared_duckdb": ">= 5",
    "verified_read_gb_s": ">= 0.3",
    "group_by_exponent": "1 is linear",
}
LAST_LINE = (
    *("ingest_over_encode", "ingest_over_shared_duckdb", "verified_read_gb_s"),
    *("count_ms_1m", "anchor_group_by_ms_1m", "trajectory_ms_1m", "group_by_exponent"),
)

Job = Callable[[Writer, int], int]


class Store:
    """Own the catalog as the coordinator does: answer leases and commits, export once a second."""

    def __init__(self, catalog: Catalog, layout: RunLayout) -> None:
        self.catalog = catalog
        self.layout = layout
        self.exported_at = 0.0

    def answer(self, requests: list[Any]) -> list[Any]:
        replies = [self.answer_one(request) for request in requests]
        if time.perf_counter() - self.exported_at > EXPORT_INTERVAL_S:
            export(self.catalog, self.layout)
            self.exported_at = time.perf_counter()
        return replies

    def answer_one(self, request: Any) -> Any:
        if isinstance(request, Lease):
            # As the coordinator does: a lease that a power cut undoes is given again.
            with self.catalog.unsynced():
                self.open_group()
                return self.catalog.lease_open_group(worker=request.worker, lease_s=3_600.0)
        if isinstance(request, NewGroups):
            return [self.open_group() for _ in range(request.number)]
        return self.catalog.commit(request, epoch=self.catalog.epoch)

    def open_group(self) -> Group:
        return open_task_group(self.catalog, "t", size=GROUP_SIZE)


class SharedDuckDB:
    """Own one database file: insert and commit all that has arrived at once."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout, self.connection = layout, duckdb.connect(str(layout.root / "shared.duckdb"))
        self.connection.register("arrived", SEGMENT_SCHEMA.empty_table())
        self.connection.execute("CREATE TABLE steps AS FROM arrived")

    def answer(self, requests: list[bytes]) -> list[None]:
        arrived = pa.concat_tables([pa.ipc.open_stream(request).read_all() for request in requests])
        self.connection.register("arrived", arrived)
        self.connection.execute("BEGIN; INSERT INTO steps FROM arrived; COMMIT")
        return [None] * len(requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    n_steps: int
    seconds: float

    @property
    def steps_per_s(self) -> float:
        return self.n_steps / self.seconds


@contextmanager
def writers() -> Iterator[list[Connection]]:
    """Yield the pipes of WRITERS processes that have made their rows and wait for a job."""
    context = mp.get_context("spawn")
    pipes = []
    processes = []
    for number in range(WRITERS):
        ours, theirs = context.Pipe()
        process = context.Process(target=store_load.work, args=(theirs, f"w{number}"), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    yield pipes
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()


def take_turn(
    pipes: list[Connection], job: Job, amount: int, *, owner: Store | SharedDuckDB
) -> Turn:
    """Have every writer do `job`, and the owner answer, until the last writer is done."""
    started = time.perf_counter()
    for pipe in pipes:
        pipe.send((job, owner.layout, amount))
    working, n_steps = list(pipes), 0
    while working:
        messages = {pipe: pipe.recv() for pipe in wait(working)}
        for pipe, message in list(messages.items()):
            if isinstance(message, Done):
                n_steps += message.n_steps
                working.remove(pipe)
                del messages[pipe]
        if messages:
            for pipe, reply in zip(messages, owner.answer(list(messages.values())), strict=True):
                pipe.send(reply)
    return Turn(n_steps=n_steps, seconds=time.perf_counter() - started)


def ingest(pipes: list[Connection], store: Store, *, n_groups: int) -> dict[str, float]:
    """Do all jobs in turns, so that a slow moment of the machine meets all of them."""
    batch = store_load.invented(BATCH_GROUPS, store_load.make_pool(seed=0))
    table = to_table([trajectory for group in batch for trajectory in group])
    shared = SharedDuckDB(store.layout)
    jobs = {
        "encode": (store_load.encode_only, n_groups),
        "store": (store_load.to_store, n_groups),
        # slower, and need not take as long
        "duckdb": (store_load.episodes_to_duckdb, n_groups // 4),
        "duckdb_by_group": (store_load.groups_to_duckdb, n_groups // 4),
    }
    speeds: dict[str, list[float]] = {name: [] for name in jobs}  # steps per second, by round
    for _ in range(ROUNDS):
        for name, (job, amount) in jobs.items():
            owner = shared if "duckdb" in name else store
            speeds[name].append(take_turn(pipes, job, amount, owner=owner).steps_per_s)
    mb_per_step = table.nbytes / table.num_rows / 1e6

    def over(name: str) -> float:
        rounds = zip(speeds["store"], speeds[name], strict=True)
        return statistics.median(ours / theirs for ours, theirs in rounds)

    return {
        "bytes_per_step": 1e6 * mb_per_step,
        **{f"{name}_mb_s": statistics.median(speeds[name]) * mb_per_step for name in jobs},
        "ingest_over_encode": over("encode"),
        "ingest_over_shared_duckdb": over("duckdb"),
        "ingest_over_duckdb_by_group": over("duckdb_by_group"),
    }


def verified_read(store: Store, *, n_batches: int) -> dict[str, float]:
    """Claim and read whole batches as the learner does, from memory, as soon after a commit."""
    speeds, claims_s = [], []
    for _ in range(n_batches):
        started = time.perf_counter()
        batch = store.catalog.claim(n_groups=BATCH_GROUPS, current_version=0, max_staleness=0)
        assert batch is not None and len(batch.segments) == BATCH_GROUPS
        claimed = time.perf_counter()
        rows = read_segments(store.layout, batch.segments, is_own=True)
        speeds.append(rows.nbytes / (time.perf_counter() - started) / 1e9)
        claims_s.append(claimed - started)
    return {
        "verified_read_gb_s": statistics.median(speeds),
        "claim_ms": 1e3 * statistics.median(claims_s),
    }


def ask_at(pipes: list[Connection], store: Store, *, n_steps: int, label: str) -> dict[str, float]:
    """Bring the run to about `n_steps`, export, and ask each query 5 times through the views."""
    missing = n_steps - store.catalog.counts().steps
    started = time.perf_counter()
    per_file = GROUPS_PER_FILE * GROUP_SIZE * sum(store_load.EPISODE_STEPS) / 2
    n_files = max(1, round(missing / per_file / WRITERS))
    turn = take_turn(pipes, store_load.in_bulk, n_files, owner=store)
    export(store.catalog, store.layout)
    figures = {
        f"steps_{label}": float(store.catalog.counts().steps),
        f"files_{label}": float(len(store.catalog.live_segments())),
        f"build_steps_per_s_{label}": turn.n_steps / (time.perf_counter() - started),
    }
    with connect(store.layout) as connection:
        sample = "SELECT DISTINCT traj_uid FROM steps USING SAMPLE 5 ROWS"
        some = connection.execute(sample).fetchall()
        for name, query in QUERIES.items():
            times = []
            for (traj_uid,) in some:
                started = time.perf_counter()
                connection.execute(query.format(traj_uid=traj_uid)).fetchall()
                times.append(time.perf_counter() - started)
            figures[f"{name}_ms_{label}"] = 1e3 * statistics.median(times)
    return figures


def exponent(figures: dict[str, float], labels: list[str]) -> float:
    """Return the slope of the group-by's time over the steps, both logarithmic: 1 is linear."""
    steps = [math.log(figures[f"steps_{label}"]) for label in labels]
    times = [math.log(figures[f"anchor_group_by_ms_{label}"]) for label in labels]
    return statistics.linear_regression(steps, times).slope


def growth(*, quick: bool) -> dict[str, float]:
    """Return what grows with a run. The names have the runs' sizes."""
    files, groups, exports = QUICK_GROWTH if quick else FULL_GROWTH
    return (
        store_growth.many_files(*files)
        | store_growth.many_groups(*groups)
        | store_growth.reader_left_open(*exports)
    )


def main() -> None:
    parser = quick_parser(__doc__, quick="fewer groups a turn, for a run of under a minute")
    parser.add_argument(
        "--rows", choices=["1M", "10M"], default="1M", help="10M needs 16 GB of disk"
    )
    options = parser.parse_args()
    sizes = {**SIZES, "10m": 10_000_000} if options.rows == "10M" else SIZES
    print(
        f"{WRITERS} writers on {os.cpu_count()} cores; groups of {GROUP_SIZE} episodes, batches of "
        f"{BATCH_GROUPS} groups, compacted files of {GROUPS_PER_FILE} groups"
    )
    with writers() as pipes:
        with store_growth.new_run() as (catalog, layout):
            store = Store(catalog, layout)
            figures = ingest(pipes, store, n_groups=24 if options.quick else 60)
            figures |= verified_read(store, n_batches=4 if options.quick else 10)
        with store_growth.new_run() as (catalog, layout):
            store = Store(catalog, layout)
            for label, n_steps in sizes.items():
                figures |= ask_at(pipes, store, n_steps=n_steps, label=label)
            n_bytes = sum(segment.n_bytes for segment in store.catalog.live_segments())
            figures["disk_bytes_per_step"] = n_bytes / store.catalog.counts().steps
    figures["group_by_exponent"] = exponent(figures, list(sizes))
    grown = growth(quick=options.quick)
    show_table(figures | grown, REQUIRED)
    show_json(figures | grown, (*LAST_LINE, *grown))


if __name__ == "__main__":
    main()
