"""Find what saturates first with thousands of workers, and at what rate.

    python benchmarks/scale.py [--quick] [--workers N]

One real coordinator with its catalog, and around it 10,000 workers on 1,000 nodes that are only
events in virtual time (support/virtual_fleet.py). Each plays one group at a time of 8 episodes.
Times are log-normal: of an episode (median 60 s, sigma 1), of a segment's upload (median 0.08 s,
sigma 0.7), of the loading of new weights (median 1 s, sigma 0.3). 1 % of the nodes are lost in an
hour. Each call of the coordinator is really made and timed. To its CPU time is added what a Ray
actor takes for a call that does nothing, and where the answer waits for the disk what a sync takes.
Both are measured first.

load              time that the coordinator takes for the calls of one second; above 1 it falls
                  behind, and its calls wait longer and longer
limit_workers     workers with which the load would be 1, as it is nearly proportional to them

--quick measures 20 virtual seconds in place of 120. The last line is JSON.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import psutil
import ray
from support.figures import quick_parser, show_json, show_table
from support.simulated_run import Pace, make_config
from support.virtual_fleet import BYTES_PER_STEP, STEPS_PER_EPISODE, Calls, Fleet, Load

from coordinator import heartbeat_every_s
from coordinator.client import LOCK_POLL_S, LONGEST_LOCK_POLL_S
from driver.cluster import ray_cluster
from tests.support.simulation import Delay

WORKERS_PER_NODE = 10
GROUP_SIZE = 8
GROUPS_PER_STEP = 1024
# So large that admission does not bind: the coordinator is what is measured, not the algorithm.
MAX_STALENESS = 64
EPISODE = Delay(median_s=60.0, sigma=1.0)
UPLOAD = Delay(median_s=0.08, sigma=0.7)
LOADING = Delay(median_s=1.0, sigma=0.3)
LOST_NODES_PER_HOUR = 0.01
WARM_UP_S, QUICK_WARM_UP_S = 180.0, 60.0
SECONDS, QUICK_SECONDS = 120.0, 20.0
RAY_CALLS, RAY_CALLS_AT_ONCE = 10_000, 500
SYNCS, SYNC_BYTES = 200, 40_000  # about what a commit of eight trajectories adds to SQLite's log
# Amazon S3's documented rate for one prefix of a bucket: PUT, COPY, POST and DELETE.
PUTS_PER_S = 3_500.0
# Agent steps per second, of one core that reads and verifies segments (docs/performance.md).
READ_STEPS_PER_S = 100_000.0
MOST_SHOWN = 10  # verbs
REQUIRED = {"load": "< 1", "limit_workers": ">= 10000"}
LAST_LINE = ("workers", "load", "limit_workers", "episodes_s", "commit_p99_s", "backlog_s")


class Nothing:
    """Answer calls that have a heartbeat's arguments, and do nothing."""

    def heartbeat(self, component: str, waiting_on: str | None, *, waits_s: float) -> None: ...

    def pid(self) -> int:
        return os.getpid()


def ray_call_s(directory: Path) -> float:
    """Return the CPU seconds that an actor's process takes for a call that does nothing."""
    with ray_cluster(str(directory), processes=1):
        actor = ray.remote(Nothing).options(num_cpus=0).remote()
        process = psutil.Process(ray.get(actor.pid.remote()))
        before = process.cpu_times()
        for _ in range(RAY_CALLS // RAY_CALLS_AT_ONCE):
            ray.get(
                [
                    actor.heartbeat.remote("worker-1234", "admission", waits_s=1.0)
                    for _ in range(RAY_CALLS_AT_ONCE)
                ]
            )
        after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / RAY_CALLS


def sync_s(directory: Path) -> float:
    """Return the median seconds until a disk has what one more transaction appended to a file."""
    took_s = []
    with (directory / "log").open("wb") as log:
        for _ in range(SYNCS):
            log.write(os.urandom(SYNC_BYTES))
            log.flush()
            began_s = time.perf_counter()
            os.fsync(log.fileno())
            took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def simulate(directory: Path, *, workers: int, call_s: float, quick: bool) -> dict[str, float]:
    """Run a fleet and show its verbs. Return the figures of the whole."""
    pace = Pace(
        environment=EPISODE,
        generation=UPLOAD,
        step_time=UPLOAD,
        workers=workers,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        max_steps=STEPS_PER_EPISODE,
    )
    config = make_config(directory / "run", pace, max_staleness=MAX_STALENESS, steps=10**6)
    config = replace(config, seed=1)
    load = Load(
        config=config,
        nodes=workers // WORKERS_PER_NODE,
        episode=EPISODE,
        upload=UPLOAD,
        loading=LOADING,
        lock_poll_s=(LOCK_POLL_S, LONGEST_LOCK_POLL_S),
        lost_nodes_per_hour=LOST_NODES_PER_HOUR,
        heartbeat_s=heartbeat_every_s(config),
        call_s=call_s,
        sync_s=sync_s(directory),
    )
    fleet = Fleet(directory / "run", load)
    try:
        began_s = time.perf_counter()
        fleet.run(until_s=QUICK_WARM_UP_S if quick else WARM_UP_S)
        fleet.n_episodes = 0
        seconds = QUICK_SECONDS if quick else SECONDS
        calls = fleet.measure(seconds=seconds)
        backlog_s, n_episodes = fleet.backlog_s, fleet.n_episodes
        took_s = time.perf_counter() - began_s
    finally:
        fleet.close()
    show_verbs(calls, seconds=seconds, call_s=call_s)
    loads = {verb: sum(each.taken_s) / seconds for verb, each in calls.items()}
    total = sum(loads.values())
    commits = calls["commit"]
    leases = calls.get("lease", Calls())
    commit_s = statistics.fmean(commits.taken_s)
    commits_per_s = len(commits.taken_s) / seconds
    episodes_per_s = n_episodes / seconds
    steps_per_s = episodes_per_s * STEPS_PER_EPISODE
    return {
        "workers": float(workers),
        "ray_call_ms": 1e3 * call_s,
        "sync_ms": 1e3 * load.sync_s,
        "load": total,
        "load_of_heartbeats": loads["heartbeat"],
        "limit_workers": workers / total,
        "limit_workers_by_commits": workers / loads["commit"],
        "limit_workers_by_puts": workers * PUTS_PER_S / commits_per_s,
        "limit_workers_by_reading": workers * READ_STEPS_PER_S / steps_per_s,
        "backlog_s": backlog_s,
        "episodes_s": episodes_per_s,
        "commits_s": commits_per_s,
        "commit_ms": 1e3 * commit_s,
        "commit_p99_s": quantile(commits.answered_s, 0.99),
        "lease_p99_s": quantile(leases.answered_s, 0.99),
        "megabytes_s": steps_per_s * BYTES_PER_STEP / 1e6,
        "simulated_in_s": took_s,
    }


def show_verbs(calls: Mapping[str, Calls], *, seconds: float, call_s: float) -> None:
    """Print a line for each verb, those with the largest share of the coordinator first."""
    print(f"{'verb':20} {'calls/s':>10} {'ms each':>10} {'p99 ms':>10} {'share':>8}")
    in_order = sorted(calls.items(), key=lambda item: sum(item[1].taken_s), reverse=True)
    for verb, each in in_order[:MOST_SHOWN]:
        of_ray_s = call_s if each.answered_s else 0.0  # work for all is part of other calls
        own_ms = [1e3 * (taken_s - of_ray_s) for taken_s in each.taken_s]
        print(
            f"{verb:20} {len(own_ms) / seconds:10.1f} {statistics.fmean(own_ms):10.3f} "
            f"{quantile(own_ms, 0.99):10.3f} {sum(each.taken_s) / seconds:8.1%}",
            flush=True,
        )


def quantile(values: list[float], fraction: float) -> float:
    return sorted(values)[int(fraction * len(values))] if values else 0.0


def main() -> None:
    parser = quick_parser(__doc__, quick="fewer virtual seconds, for a run of about a minute")
    parser.add_argument("--workers", type=int, default=10_000, help="simulated workers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        call_s = ray_call_s(Path(name) / "ray")
        figures = simulate(Path(name), workers=given.workers, call_s=call_s, quick=given.quick)
    show_table(figures, REQUIRED)
    show_json(figures, LAST_LINE)


if __name__ == "__main__":
    main()
