"""Check that the workers of a run follow its cluster: it grows, nodes leave with a notice, it ends.

Everything but the policy is real: Ray with several nodes, the coordinator, the learner.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.elastic_cluster import ElasticCluster, elastic_cluster
from tests.support.fault_runs import (
    ROOT,
    SCRIPTED,
    FaultRun,
    catalog_number,
    untrained_model,
)
from tests.support.killed_runs import write_world
from tests.support.processes import PATIENCE_S

pytestmark = [pytest.mark.run, pytest.mark.slow]

SETTINGS = (
    "actors.workers={min: 1, max: 3}",
    "supervision.max_restarts=0",  # a restart that counts would end the run
    "supervision.silent_s=15",
)
# What Ray's autoscaler reads: the processes that have no place.
ASKED_FOR = """
import sys
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
state = get_cluster_resource_state(GcsClient(address=sys.argv[1]))
print(sum(asked.count for asked in state.pending_resource_requests))
"""
COMMITTED_TWICE = "SELECT count(*) - count(DISTINCT traj_uid) FROM trajectory"


@contextmanager
def training(cluster: ElasticCluster, home: Path, *overrides: str) -> Iterator[FaultRun]:
    """Run `gigpo train` on the head's node, with a scripted policy. At the end it is killed."""
    write_world(home)
    untrained_model(home / "untrained")
    run, fault, output = home / "run", home / "fault", home / "out"
    given = [str(home / "killed.yaml"), f"run_dir={run}", f"model.path={home / 'untrained'}"]
    environ = {
        **cluster.environ,
        "RAY_ADDRESS": cluster.address,
        "HF_HUB_OFFLINE": "1",
    }
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "train", *given, *SCRIPTED, *SETTINGS, *overrides],
            cwd=ROOT,
            env=environ,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield FaultRun(run=run, process=process, fault=fault, output=output)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for_workers(run: FaultRun, number: int) -> None:
    """Wait until the newest record of the number of workers is `number`."""

    def is_so() -> bool:
        return [told.partition(":")[0].split()[-1] for told in run.events("workers")[-1:]] == [
            str(number)
        ]

    run.wait(is_so, what=f"{number} workers")


def wait_until_asked_for(cluster: ElasticCluster, number: int) -> None:
    """Wait until Ray's autoscaler would see so many processes without a place."""
    command, said = [sys.executable, "-c", ASKED_FOR, cluster.address], ""
    deadline_s = time.monotonic() + PATIENCE_S
    while said != f"{number}\n":
        assert time.monotonic() < deadline_s, said
        said = subprocess.check_output(command, env=cluster.environ, text=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ElasticCluster]:
    mine = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "FAULT_FILE": str(tmp_path / "fault")}
    with elastic_cluster(mine) as made:
        yield made


def test_workers_follow_the_nodes_and_a_notice_is_an_orderly_stop(
    cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add(cpus=2)  # the learner and the least number of workers
    with training(cluster, tmp_path) as run:
        wait_for_workers(run, 1)
        wait_until_asked_for(cluster, 2)
        run.goes_on()

        spot = cluster.add(cpus=2)
        wait_for_workers(run, 3)
        run.goes_on()

        cluster.terminate(spot)
        wait_for_workers(run, 1)
        spot.wait(timeout=60.0)
        run.goes_on()
        left = run.events("gone")
        assert len(left) == 2 and all(why.startswith("left, with its node;") for why in left)
        assert len(run.events("node leaves")) == 2
        assert run.events("workers")[-1].endswith(
            " ended (left, with its node); wanted: 1 to 3 (actors.workers)"
        )
        assert run.events("started again") == [], "nothing counted as a restart"

        cluster.add(cpus=1)
        wait_for_workers(run, 2)
        run.goes_on()

        run.process.send_signal(signal.SIGTERM)
        code, last = run.ended(within_s=120.0)
        assert (code, "stopped in order" in last) == (130, True), run.said()
        assert catalog_number(run.run, COMMITTED_TWICE) == 0
    wait_until_asked_for(cluster, 0)
