"""Machines of a cluster, on this one: each with an address, a disk, a host name and processes of its
own.

    with network() as net:
        a, b = net.add("a"), net.add("b")
        a.start(["ray", "start", ...], environ=..., log=...)
        net.cut(b)      # its packets are dropped, on the way in and on the way out
        net.mend(b)
        a.kill()        # its processes, and its disk with them

A node is a process in namespaces of its own (network, mounts, processes, host name). Its disk is a
tmpfs at `Network.disk`, the same path on each node, and its shared memory another. All else of this
machine's file system is the same for all: Python, the checkout, and what a test puts elsewhere.
Between them is a bridge in a network of its own, where a server for all may run.

Nothing of this is named in the machine's own network, and the kernel removes all of it with the
last process. Each dies with the process that made it, also if that is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PREFIX = "10.77.0."
SERVER = f"{PREFIX}1"  # of the bridge
BRIDGE = "bridge"
WITH_THIS_PROCESS = ("setpriv", "--pdeathsig", "KILL")
OWN_NAMESPACES = (
    "unshare",
    "--mount",
    "--net",
    "--uts",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
)
ENTERED = ("--mount", "--net", "--uts", "--ipc", "--pid")
# With an address of its own the bridge keeps it when a node is gone. Otherwise it has that of one of
# its cables, and whoever knows the old one reaches nobody for a minute.
MAKE_BRIDGE = f"""
ip link set lo up && ip link add {BRIDGE} address 02:00:0a:4d:00:01 type bridge &&
ip link set {BRIDGE} up &&
ip addr add {SERVER}/24 dev {BRIDGE} && echo made && exec sleep infinity
"""
# The first process of a node. SIGCHLD is ignored, so orphans leave no zombies.
MAKE_NODE = """
mount -t proc proc /proc && mount -t tmpfs tmpfs "$1" && mount -t tmpfs tmpfs /dev/shm &&
mkdir "$1/tmp" "$1/home" && hostname "$2" && printf '127.0.0.1 localhost\\n%s %s\\n' "$3" "$2" \
> "$1/hosts" && mount --bind "$1/hosts" /etc/hosts && ip link set lo up && trap '' CHLD &&
echo made && exec sleep infinity
"""
# Answers queries to a SQLite file, a line of JSON each, so that a test need not start Python each
# time.
ANSWERS = """
import json, sqlite3, sys
for line in sys.stdin:
    path, query = json.loads(line)
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)
        rows = connection.execute(query).fetchall()
        connection.close()
    except sqlite3.OperationalError as error:
        rows = str(error)
    print(json.dumps(rows), flush=True)
"""
NOT_YET = ("unable to open database file", "no such table")


def why_impossible() -> str:
    """Return why there can be no such nodes here; "" if they can be made."""
    missing = [name for name in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(
        [*OWN_NAMESPACES, "ip", "link", "add", "name", BRIDGE, "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"makes no namespaces with networks: {tried.stderr}"


@dataclass(kw_only=True)
class Node:
    name: str
    address: str
    disk: Path
    holder: subprocess.Popen[str]  # `unshare`, which ends with the first process
    pid: int  # of the first process, as this machine counts
    _answers: subprocess.Popen[str] | None = None

    def command(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *ENTERED, "--", *words]

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process of this node: what it writes is on the node's disk."""
        own = {"HOME": f"{self.disk}/home", "TMPDIR": f"{self.disk}/tmp"}
        kept = {name: value for name, value in environ.items() if not name.startswith("XDG_")}
        return {**kept, **own, "PYTHONDONTWRITEBYTECODE": "1"}

    def start(
        self, words: Sequence[str], *, environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[str]:
        """Start a command. Its output goes to `log`, a file of this machine."""
        with log.open("a") as output:
            return subprocess.Popen(
                self.command(words),
                env=self.environ(environ),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(
        self, words: Sequence[str], *, environ: Mapping[str, str], cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(words),
            env=self.environ(environ),
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )

    def rows(self, database: Path, query: str) -> list[list[Any]]:
        """Ask a SQLite file on the node's disk. Return no rows while there is none."""
        if self._answers is None:
            self._answers = subprocess.Popen(
                self.command([sys.executable, "-c", ANSWERS]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._answers.stdin is not None and self._answers.stdout is not None
        self._answers.stdin.write(json.dumps([str(database), query]) + "\n")
        self._answers.stdin.flush()
        answer = json.loads(self._answers.stdout.readline())
        if isinstance(answer, str):
            assert answer.startswith(NOT_YET), answer
            return []
        return list(answer)

    def sees(self, path: Path) -> bool:
        """Return whether there is such a file on this node."""
        return self.run(["test", "-e", str(path)], environ=os.environ).returncode == 0

    def titles(self) -> list[str]:
        """Return the command lines of the node's processes."""
        shown = self.run(["ps", "-eo", "args="], environ=os.environ)
        return shown.stdout.splitlines()

    def kill(self) -> None:
        """Kill all its processes at once. Its disk and its end of the cable vanish with them."""
        self.holder.kill()  # the kernel then kills the first process, and with it all others
        self.holder.wait()
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait()
        if self._answers is not None:
            self._answers.kill()
            self._answers.communicate()


@dataclass(kw_only=True)
class Network:
    disk: Path  # where each node has its own
    switch: subprocess.Popen[str]  # has the bridge
    nodes: list[Node] = field(default_factory=list)  # also those that were killed

    @property
    def enter(self) -> list[str]:
        """Return the words before a command in the network of the bridge, on this machine's disk."""
        return ["nsenter", "--target", str(self.switch.pid), "--net", "--"]

    def add(self, name: str) -> Node:
        """Make a node with an empty disk, and connect it."""
        address = f"{PREFIX}{len(self.nodes) + 2}"
        script = ["sh", "-c", MAKE_NODE, "sh", str(self.disk), name, address]
        holder = _held([*OWN_NAMESPACES, *script])
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
        node = Node(
            name=name, address=address, disk=self.disk, holder=holder, pid=int(children.split()[0])
        )
        self.nodes.append(node)
        ends = f"name {name} type veth peer name eth0 netns {node.pid}"
        self._ip("link", "add", *ends.split())
        self.mend(node)
        self._ip("link", "set", "dev", name, "up")
        for words in (
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {SERVER}",
        ):
            subprocess.run(node.command(["ip", *words.split()]), check=True)
        return node

    def cut(self, node: Node) -> None:
        """Drop all packets from and to a node. Neither side is told."""
        self._ip("link", "set", "dev", node.name, "nomaster")

    def mend(self, node: Node) -> None:
        self._ip("link", "set", "dev", node.name, "master", BRIDGE)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        self.switch.kill()
        self.switch.wait()

    def _ip(self, *words: str) -> None:
        subprocess.run([*self.enter, "ip", *words], check=True)


@contextmanager
def network() -> Iterator[Network]:
    """Give a network without nodes. At the end, all of it is gone."""
    with ExitStack() as after:
        # Names of Ray's sockets have at most 107 characters.
        directory = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
        after.callback(shutil.rmtree, directory)
        net = Network(disk=directory, switch=_held(["unshare", "--net", "sh", "-c", MAKE_BRIDGE]))
        after.callback(net.close)
        yield net


def _held(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that says "made" and then holds its namespaces."""
    process = subprocess.Popen(
        [*WITH_THIS_PROCESS, *command], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if said != "made\n":
        process.kill()
        process.wait()
        raise AssertionError(f"{command} said {said!r}")
    return process
