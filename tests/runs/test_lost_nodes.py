"""A run over nodes of which none sees another's run directory: there is only an object store between
them. Nodes are lost, and at last that of the driver with its disk.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cli.__main__ import main
from tests.support.fault_runs import ROOT, untrained_model
from tests.support.killed_runs import (
    SIMULATED,
    KilledRun,
    staleness_violations,
    trained_twice,
    write_world,
)
from tests.support.s3_server import s3_server

RAY = Path(sys.executable).with_name("ray")
PATIENCE_S = 240.0
# An own disk in memory where the others have their runs.
ON_ITS_OWN_DISK = 'mount -t tmpfs tmpfs "$0" && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Node:
    process: subprocess.Popen[bytes]

    def disk(self) -> str:
        return os.readlink(f"/proc/{self.process.pid}/ns/mnt")

    def processes(self) -> list[psutil.Process]:
        """Return all processes that see this node's disk."""
        if self.process.poll() is not None:  # killed before
            return []
        disk = self.disk()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{process.pid}/ns/mnt") == disk:
                    found.append(process)
        return found

    def runs(self, title: str) -> bool:
        """Return whether a process with this title is on the node."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                    return True
        return False

    def kill(self) -> None:
        """Kill all its processes at once; its disk is gone with them."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


@contextmanager
def cluster(
    runs: Path, environ: Mapping[str, str], *, nodes: int
) -> Iterator[tuple[str, list[Node]]]:
    """Give the address of a Ray cluster, whose head sees `runs`, and its other nodes. Only these
    have room for a worker.
    """
    directory = tempfile.mkdtemp(prefix="gigpo-test-", dir="/tmp")  # names of sockets must be short
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start = [str(RAY), "start", "--block", "--num-cpus=0", "--node-ip-address=127.0.0.1"]
    head = [*start, "--head", f"--port={address.partition(':')[2]}", f"--temp-dir={directory}/ray"]
    with ExitStack() as started, open(f"{directory}/log", "wb") as log:

        def launch(command: list[str]) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )
            started.callback(process.wait)
            started.callback(kill_group, process.pid)
            return process

        started.callback(shutil.rmtree, directory, ignore_errors=True)

        def wait_for(n_nodes: int) -> None:
            said = Path(log.name)
            until(
                lambda: said.read_text().count("Ray runtime started") == n_nodes,
                what=f"a cluster of {n_nodes} nodes",
            )

        launch([*head, "--num-gpus=0", "--include-dashboard=false"])
        wait_for(1)
        others = []
        for number in range(nodes):
            own = ["unshare", "--mount", "sh", "-c", ON_ITS_OWN_DISK, str(runs)]
            joins = [*own, *start, f"--address={address}", "--num-gpus=1"]
            others.append(Node(process=launch(joins)))
            wait_for(2 + number)
            assert others[-1].disk() != os.readlink("/proc/self/ns/mnt")
            started.callback(others[-1].kill)
        yield address, others


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def until(condition: Callable[[], bool], *, what: str) -> None:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < PATIENCE_S, f"{what} did not happen"
        time.sleep(0.2)


@pytest.mark.run
@pytest.mark.faults
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0,
    reason="this user may make no mount namespaces",
)
def test_any_node_may_go(tmp_path: Path) -> None:
    """0 trajectories lost, 0 doubled, 0 stale trained."""
    home = tmp_path / "runs"  # on each node's own disk
    home.mkdir()
    shared = tmp_path / "shared"  # code and model
    write_world(shared)
    with s3_server(tmp_path / "server") as server:
        uri = server.uri("nodes")
        settings = (*SIMULATED, f"store.uri={uri}", "actors.gpus_per_worker=1", "actors.workers=1")
        run = KilledRun(
            home=shared,
            name="../runs/mine",
            model=untrained_model(shared / "untrained"),
            settings=(*settings, "learner.checkpoint_every=2"),
            random=random.Random(0),
        )
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environ = {**run.environ(), **token, "PYTHONPATH": f"{ROOT}:{shared}"}
        with cluster(home, environ, nodes=2) as (address, nodes):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in {**token, "RAY_ADDRESS": address}.items():
                    patch.setenv(name, value)
                run.start()
            assert run.running is not None
            run.running.wait(lambda: run.settled_step() >= 3, what="learner step 3")
            assert not (run.run / "logs" / "worker-0.log").exists()
            (lost,) = [node for node in nodes if node.runs("ray::Worker")]
            committed = run.committed()
            lost.kill()
            nodes.remove(lost)
            n_before = len(committed)
            run.running.wait(lambda: len(run.committed()) > n_before + 16, what="another worker")
            run.running.wait(
                lambda: run.settled_step() >= 6 and nodes[0].runs("ray::Worker"), what="step 6"
            )
            run.running.process.kill()  # the driver's node, and the others with it
            run.running.process.wait()
            for node in nodes:
                node.kill()
        for left in psutil.process_iter():  # the coordinator's
            with contextlib.suppress(psutil.Error):
                if left.environ().get("ASYNC_GIGPO_RUN") == str(run.run.resolve()):
                    left.kill()
        committed, settled_step = run.committed(), run.settled_step()
        shutil.rmtree(run.run)
        with cluster(home, environ, nodes=1) as (address, nodes):
            command = [sys.executable, "-m", "cli", "train", "--resume", uri]
            again = subprocess.run(
                [*command, f"run_dir={run.run}", f"learner.steps={settled_step + 3}"],
                cwd=ROOT,
                env={**environ, "RAY_ADDRESS": address},
                capture_output=True,
                text=True,
                check=False,
            )
        assert again.returncode == 0, again.stdout + again.stderr
        print(again.stdout)
        assert len(committed) > 0 and committed <= run.committed()
        assert run.settled_step() == settled_step + 3
        assert trained_twice(run.run) == staleness_violations(run.run) == 0
        assert main(["fsck", str(run.run)]) == 0
