"""A run over three nodes of which none sees another's disk: there is an S3 server between them. Nodes
are lost one after the other, at last that of the driver.

Each loss is another one. A worker's node is cut off: its packets are dropped, and it goes on until
it finds out. The learner's node is killed. The driver's node is cut off and killed, so that the
other nodes are not told, and its disk is empty. A lost node is replaced, as a cluster's manager
does: by `ray start` on the same node with its old disk, or on a new one.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_nodes import SERVER, Network, Node, network, why_impossible
from tests.support.fault_runs import ROOT, untrained_model
from tests.support.killed_runs import write_world
from tests.support.s3_server import Server, s3_server

IMPOSSIBLE = why_impossible()
pytestmark = [
    pytest.mark.run,
    pytest.mark.faults,
    pytest.mark.skipif(bool(IMPOSSIBLE), reason=IMPOSSIBLE),
]

RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379
# Ray takes 200 s to find out that its head is silent. All else takes seconds on a quiet machine.
PATIENCE_S = 500.0
SETTINGS = (
    "max_staleness=4",
    "algorithm.group_filter=advantages",
    "actors.workers=2",
    "actors.engine_timeout_s=20",  # as usual: engines start on a busy machine
    "supervision.silent_s=15",
    "learner.checkpoint_every=2",
)
# By default Ray takes a minute or more to find out that a node is cut off, or its head.
NOTICED_SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "8",  # later than supervision.silent_s, as by default
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}
LEARNER, WORKER = "ray::LearnerProcess", "ray::Worker"
BACKED_UP = """
import sqlite3, sys
from store import storage
data = storage.open_storage(sys.argv[1]).read("backup/catalog.sqlite").to_pybytes()
catalog = sqlite3.connect(":memory:")
catalog.deserialize(data)
print(*[uid for (uid,) in catalog.execute("SELECT hex(traj_uid) FROM trajectory")])
"""
# Each must answer 0.
LEDGER = {
    "trajectories twice": "SELECT count(*) - count(DISTINCT traj_uid) FROM trajectories",
    "groups trained twice": """SELECT count(*) - count(DISTINCT group_uid) FROM lineage
        WHERE live AND batch_state = 'trained'""",
    "learner steps missing or twice": """SELECT abs(count(DISTINCT batch_id) - max(learner_step))
        FROM lineage WHERE live AND batch_state = 'trained'""",
    "stale groups trained": "SELECT count(*) FROM staleness_violations",
    "groups trained without all members": """SELECT count(*) FROM (SELECT group_uid FROM lineage
        JOIN trajectories USING (group_uid) WHERE live AND batch_state = 'trained'
        GROUP BY group_uid HAVING count(DISTINCT traj_uid) <> 4)""",
}


@dataclass(kw_only=True)
class Run:
    """A run of `gigpo train` on the nodes of a network."""

    net: Network
    home: Path  # of what all nodes see: the code of the world, the model
    server: Server
    environ: dict[str, str]
    head: Node
    rays: dict[str, subprocess.Popen[str]] = field(default_factory=dict)  # by the node's name
    driver: subprocess.Popen[str] | None = None
    began_s: float = field(default_factory=time.monotonic)

    @property
    def directory(self) -> Path:
        return self.net.disk / "run"

    @property
    def uri(self) -> str:
        return self.server.uri("nodes")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:5.0f} s  {text}", flush=True)

    def start_ray(self, node: Node) -> None:
        """Make the node the head of a new cluster, or have it join the head's."""
        start = [RAY, "start", "--block", "--disable-usage-stats", "--num-gpus=0"]
        start += [f"--node-ip-address={node.address}", "--object-store-memory=100000000"]
        if node is self.head:
            start += ["--head", f"--port={PORT}", f"--temp-dir={node.disk}/ray"]
            start += ["--include-dashboard=false", "--num-cpus=0"]
        else:
            start += [f"--address={self.head.address}:{PORT}", "--num-cpus=2"]
        log = self.home / f"{node.name}.ray"
        n_before = log.read_text().count("Ray runtime started") if log.exists() else 0
        ray = node.start(start, environ=self.environ, log=log)
        self.rays[node.name] = ray

        def has_started() -> bool:
            assert ray.poll() is None, log.read_text()
            return log.read_text().count("Ray runtime started") > n_before

        self.wait(has_started, what=f"Ray on {node.name}")

    def restart_ray(self, node: Node) -> None:
        """Start Ray again on a node of which it has found out that it is lost to the head."""

        def has_ended() -> bool:
            left = self.is_on(node, WORKER) or self.is_on(node, LEARNER)
            return self.rays[node.name].poll() is not None and not left

        self.wait(has_ended, what=f"the end of Ray on {node.name}")
        self.start_ray(node)

    def train(self, *words: str) -> None:
        """Start `gigpo train` on the head."""
        self.driver = self.head.start(
            [sys.executable, "-m", "cli", "train", *words],
            environ={**self.environ, "RAY_ADDRESS": f"{self.head.address}:{PORT}"},
            log=self.home / f"{self.head.name}.out",
        )

    def said(self) -> str:
        return (self.home / f"{self.head.name}.out").read_text()

    def wait(self, condition: Callable[[], bool], *, what: str) -> None:
        began_s = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - began_s
            driver_ended = self.driver is not None and self.driver.poll() is not None
            if waited_s > PATIENCE_S or driver_ended:
                raise AssertionError(
                    f"{what} did not happen within {waited_s:.0f} s: {self.said()}"
                )
            time.sleep(0.5)

    def catalog(self, query: str) -> list[list[Any]]:
        return self.head.rows(self.directory / "catalog.sqlite", query)

    def committed(self) -> set[str]:
        return {uid for (uid,) in self.catalog("SELECT hex(traj_uid) FROM trajectory")}

    def settled_step(self) -> int:
        rows = self.catalog("SELECT max(learner_step) FROM batch WHERE state = 'trained'")
        return int(rows[0][0] or 0) if rows else 0

    def backed_up(self) -> set[str]:
        """Return the trajectories of the newest backup of the catalog, in the bucket."""
        words = [*self.net.enter, sys.executable, "-c", BACKED_UP, self.uri]
        return set(subprocess.check_output(words, cwd=ROOT, text=True).split())

    def goes_on(self, *, since: str) -> None:
        """Wait until groups that are played from now on are trained on."""
        n_before, step = len(self.committed()), self.settled_step()
        self.wait(lambda: len(self.committed()) >= n_before + 16, what=f"trajectories {since}")
        self.wait(lambda: self.settled_step() >= step + 4, what=f"learner steps {since}")
        self.say(f"it went on {since}: learner step {self.settled_step()}")

    def events(self, what: str) -> list[str]:
        query = f"SELECT component || ': ' || detail FROM event WHERE what = '{what}' ORDER BY lsn"
        return [detail for (detail,) in self.catalog(query)]

    def node_of(self, title: str, nodes: Sequence[Node]) -> Node | None:
        return next((node for node in nodes if self.is_on(node, title)), None)

    def is_on(self, node: Node, title: str) -> bool:
        return any(line.startswith(title) for line in node.titles())

    def check_ledger(self) -> None:
        """Ask the run by SQL, on the head: nothing is there twice, nothing stale was trained."""
        for what, query in LEDGER.items():
            words = [
                sys.executable,
                "-m",
                "cli",
                "sql",
                str(self.directory),
                f"SELECT ({query}) AS n",
            ]
            asked = self.head.run([*words, "--format", "json"], environ=self.environ)
            assert asked.returncode == 0, asked.stderr
            assert json.loads(asked.stdout) == {"n": 0}, f"{what}: {asked.stdout}"


@contextmanager
def run_over_nodes(home: Path) -> Iterator[Run]:
    """Give a run with a head, on which only the driver and the coordinator run, and no others."""
    write_world(home)
    untrained_model(home / "untrained")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with (
        network() as net,
        s3_server(home / "server", host=SERVER, enter=net.enter) as server,
    ):
        mine = {"FAULT_FILE": str(home / "fault"), "PYTHONPATH": f"{ROOT}:{home}"}
        environ = {**os.environ, **token, **mine, **NOTICED_SOON}
        environ.pop("RAY_ADDRESS", None)
        run = Run(net=net, home=home, server=server, environ=environ, head=net.add("head"))
        run.start_ray(run.head)
        yield run


def check_disks_are_apart(run: Run, nodes: Sequence[Node]) -> None:
    """Nothing of one node's run directory can be read on another, nor on this machine."""
    assert not run.directory.exists()
    for node in nodes:
        own = run.directory / f"only-on-{node.name}"
        assert node.run(["touch", str(own)], environ=run.environ).returncode == 0
    for node in nodes:
        listed = node.run(["ls", str(run.directory)], environ=run.environ).stdout.split()
        assert [name for name in listed if name.startswith("only")] == [f"only-on-{node.name}"]
        assert ("catalog.sqlite" in listed) == ("primary.json" in listed) == (node is run.head)


def test_any_node_may_go(tmp_path: Path) -> None:
    """0 trajectories lost that were committed before the last backup, 0 doubled, 0 stale trained."""
    with run_over_nodes(tmp_path) as run:
        nodes = [run.net.add("left"), run.net.add("right")]
        for node in nodes:
            run.start_ray(node)
        run.say("three nodes are up")
        given = [str(tmp_path / "killed.yaml"), f"run_dir={run.directory}"]
        run.train(*given, f"model.path={tmp_path / 'untrained'}", f"store.uri={run.uri}", *SETTINGS)
        run.wait(lambda: run.settled_step() >= 4, what="learner step 4")
        check_disks_are_apart(run, [run.head, *nodes])
        learners = run.node_of(LEARNER, nodes)
        assert learners is not None and run.node_of(LEARNER, [run.head]) is None
        (other,) = [node for node in nodes if node is not learners]
        assert run.is_on(other, WORKER)
        run.say(f"it trains; the learner is on {learners.name}, a worker on {other.name}")

        seen = run.committed()
        run.net.cut(other)
        run.wait(lambda: bool(run.events("started again")), what="the end of a silent worker")
        assert "no sign of life" in run.events("started again")[0]
        run.goes_on(since="while a worker's node is cut off")
        run.wait(lambda: "has been marked dead" in run.said(), what="Ray's end of a silent node")
        run.net.mend(other)
        run.restart_ray(other)
        run.wait(lambda: run.is_on(other, WORKER), what="a worker on the node that came back")
        run.goes_on(since="with the node that came back")
        assert seen <= run.committed()
        run.check_ledger()

        seen, n_again = run.committed(), len(run.events("started again"))
        learners.kill()
        new = run.net.add("new")
        run.start_ray(new)
        run.wait(
            lambda: any("learner" in line for line in run.events("started again")[n_again:]),
            what="the end of the learner",
        )
        run.goes_on(since="after the loss of the learner's node")
        assert seen <= run.committed()
        run.check_ledger()

        step, backed_up, seen = run.settled_step(), run.backed_up(), run.committed()
        assert len(backed_up) > 0 and backed_up <= seen
        lost = run.head
        run.net.cut(lost)
        lost.kill()
        assert run.driver is not None
        run.driver.wait()
        run.say(
            f"the driver's node is gone at learner step {step}: {len(seen)} trajectories, "
            f"{len(backed_up)} in the backup"
        )
        run.driver, run.head = None, run.net.add("next")
        run.start_ray(run.head)
        run.train(
            *("--resume", run.uri, f"run_dir={run.directory}", "--trust"),
            f"learner.steps={step + 8}",
        )
        run.restart_ray(other)
        run.restart_ray(new)
        assert run.driver.wait(timeout=PATIENCE_S) == 0, run.said()
        print(run.said())
        assert run.settled_step() == step + 8
        assert backed_up <= run.committed()
        assert seen <= run.committed()  # those after the backup are found in their segments
        run.check_ledger()
        check = [sys.executable, "-m", "cli", "fsck", str(run.directory)]
        assert run.head.run(check, environ=run.environ).returncode == 0
        run.say("done")
