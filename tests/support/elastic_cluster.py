"""Make a Ray cluster of several nodes on this machine that grows and shrinks while a run goes.

    with elastic_cluster({}) as cluster:
        node = cluster.add(cpus=2)
        cluster.terminate(node)     # SIGTERM to its `ray start --block`, as a cluster's manager does

Each node is a `ray start --block` with its own number of CPUs. All of them see the same disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

RAY = str(Path(sys.executable).with_name("ray"))
HOST = "127.0.0.1"
START_S = 120.0  # for one node, on a busy machine
NOTICE_S = 30.0  # between the SIGTERM of a node and its end


@dataclass(kw_only=True)
class ElasticCluster:
    directory: Path  # its name is short, because the names of sockets must be
    environ: dict[str, str]
    address: str
    nodes: list[subprocess.Popen[str]] = field(default_factory=list)

    def add(self, *, cpus: int, words: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start a node, and return its `ray start` when it has joined."""
        log = self.directory / f"node-{len(self.nodes)}.log"
        command = [RAY, "start", "--block", "--disable-usage-stats", f"--num-cpus={cpus}"]
        # An address of its own, all of which lead to this machine: a driver connects to the node
        # with its own address.
        command += [f"--node-ip-address=127.0.0.{1 + len(self.nodes)}"]
        command += ["--object-store-memory=80000000"]
        command += ["--num-gpus=0", f"--dashboard-agent-listen-port={free_port()}"]
        with log.open("w") as output:
            node = subprocess.Popen(
                [*command, *(words or (f"--address={self.address}",))],
                env=self.environ,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(node)
        deadline_s = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        return node

    def terminate(self, node: subprocess.Popen[str]) -> None:
        """Send a node the notice that a cluster's manager sends before it takes the machine."""
        node.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill every process of every node."""
        left = []
        for node in self.nodes:
            with suppress(psutil.Error):
                parent = psutil.Process(node.pid)
                left += [*parent.children(recursive=True), parent]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=START_S)
        for node in self.nodes:
            node.wait()


@contextmanager
def elastic_cluster(variables: Mapping[str, str]) -> Iterator[ElasticCluster]:
    """Give a cluster with a head on which only the driver and the coordinator run.

    All processes of all nodes have the environment `variables`.
    """
    directory = Path(tempfile.mkdtemp(prefix="gigpo-test-", dir="/tmp"))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    notice = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{NOTICE_S:g}"}
    environ = {**os.environ, **token, **notice, "HOME": str(directory), **variables}
    environ.pop("RAY_ADDRESS", None)
    port = free_port()
    cluster = ElasticCluster(directory=directory, environ=environ, address=f"{HOST}:{port}")
    head = ("--head", f"--port={port}", f"--temp-dir={directory}/ray")
    try:
        cluster.add(cpus=0, words=(*head, "--include-dashboard=false"))
        yield cluster
    finally:
        cluster.kill()
        shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
