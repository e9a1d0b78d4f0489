"""A stop that comes while Ray starts, or while anything else is under way that must not be left
half done.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import services
from ray.exceptions import AuthenticationError

from configs import ConfigError
from driver import cluster
from driver.cluster import AUTHENTICATION_HINT, ray_cluster
from driver.interrupt import REPEAT_S, STOP_SIGNALS, hold_interrupts
from learner.distributed.private_ray import RAY_DIRECTORY

ROOT = Path(__file__).resolve().parents[2]
STARTS_RAY = """
import sys
from driver import cluster, interrupt
interrupt.Interrupt().listen()
try:
    with cluster.ray_cluster(sys.argv[1], processes=1):
        print("Ray is up")
except KeyboardInterrupt:
    print("stopped")
"""

# Three nodes on this machine, until standard input is closed.
HOSTS_NODES = """
import sys
from ray.cluster_utils import Cluster
head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": sys.argv[1] + "/ray"}
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(2):
    cluster.add_node(num_cpus=0)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
# Places a coordinator several times, without what makes it slow to start.
PLACES_COORDINATORS = """
import json, os, sys
import ray
import configs
from driver import cluster, processes

class Coordinator:
    def __init__(self, config, *, learns):
        pass
    def place(self):
        return ray.get_runtime_context().get_node_id(), os.getcwd()

processes.CoordinatorActor = ray.remote(Coordinator)
config = configs.from_yaml("{run_dir: " + sys.argv[1] + "}")
with cluster.ray_cluster(sys.argv[1], processes=1):
    calls = [processes.CoordinatorProcess(config, learns=True) for _ in range(4)]
    places = ray.get([call.handle.place.remote() for call in calls])
    print(json.dumps([ray.get_runtime_context().get_node_id(), len(ray.nodes()), places]))
"""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """A cluster of several nodes that asks for a token."""

    address: str
    environ: dict[str, str]  # of a process that has the token

    def without_token(self) -> dict[str, str]:
        return {
            name: value for name, value in self.environ.items() if not name.startswith("RAY_AUTH")
        }


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    home = tmp_path_factory.mktemp("elsewhere")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    directory = tempfile.mkdtemp(prefix="gigpo-test-", dir="/tmp")  # names of sockets must be short
    environ = {
        **os.environ,
        **token,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": directory,
    }
    environ.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-c", HOSTS_NODES, directory],
        cwd=home,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        assert host.stdin is not None and host.stdout is not None
        address = host.stdout.readline().strip()
        assert address, "the cluster did not start"
        yield Nodes(address=address, environ={**environ, "RAY_ADDRESS": address})
        host.stdin.close()
    shutil.rmtree(directory, ignore_errors=True)


def test_the_coordinator_runs_on_the_drivers_node_and_in_its_directory(
    nodes: Nodes, tmp_path: Path
) -> None:
    placing = subprocess.run(
        [sys.executable, "-c", PLACES_COORDINATORS, str(tmp_path / "run")],
        cwd=tmp_path,
        env=nodes.environ,
        capture_output=True,
        text=True,
        timeout=600.0,
        check=False,
    )
    assert placing.returncode == 0, placing.stderr
    here, n_nodes, places = json.loads(placing.stdout)
    assert n_nodes == 3
    assert places == [[here, str(tmp_path)]] * 4


def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(nodes: Nodes, tmp_path: Path) -> None:
    joining = subprocess.run(
        [sys.executable, "-c", STARTS_RAY, str(tmp_path / "run")],
        env=nodes.without_token(),
        capture_output=True,
        text=True,
        timeout=600.0,
        check=False,
    )
    last = joining.stderr.splitlines()[-1]
    assert f"ConfigError: the Ray cluster at RAY_ADDRESS={nodes.address} cannot be joined: " in last
    assert last.endswith(AUTHENTICATION_HINT)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AuthenticationError("no authentication token was found"), AUTHENTICATION_HINT),
        (
            ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"),
            "10.0.0.1:6379; check the address",
        ),
        (RuntimeError("No node info found\nmore"), "No node info found; check the address"),
    ],
    ids=["no token here", "nobody answers", "no node here"],
)
def test_a_cluster_that_cannot_be_joined_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str
) -> None:
    def init(**options: object) -> None:
        assert os.environ[cluster.JOIN_ATTEMPTS] == cluster.FEW_ATTEMPTS
        raise error

    monkeypatch.setattr("driver.cluster.ray.init", init)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv(cluster.JOIN_ATTEMPTS, raising=False)
    joined = cluster.ray_cluster(str(tmp_path / "run"), processes=1)
    with (
        pytest.raises(ConfigError, match="RAY_ADDRESS=10.0.0.1:6379 cannot be joined: ") as refused,
        joined,
    ):
        pass
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert cluster.JOIN_ATTEMPTS not in os.environ


def test_a_driver_outside_the_cluster_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    joined = cluster.ray_cluster(str(tmp_path / "run"), processes=1)
    with (
        pytest.raises(ConfigError, match="RAY_ADDRESS=ray://head:10001 joins through Ray Client"),
        joined,
    ):
        pass


def ray_directories_of(process: subprocess.Popen[str]) -> list[str]:
    return [
        name for name in os.listdir("/tmp") if name.startswith(f"{RAY_DIRECTORY}{process.pid}-")
    ]


def test_a_stop_while_ray_starts_is_heard_and_prints_nothing_of_ray(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_RAY, str(tmp_path / "run")]
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as starting:
        while starting.poll() is None and not ray_directories_of(starting):
            time.sleep(0.01)
        starting.send_signal(signal.SIGTERM)
        printed, _ = starting.communicate(timeout=600.0)
    assert printed == "stopped\n"
    assert ray_directories_of(starting) == []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_that_is_held_back_is_heard_at_the_end(number: signal.Signals) -> None:
    handler, done = signal.getsignal(number), []

    @hold_interrupts()
    def work() -> None:
        os.kill(os.getpid(), number)
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(number) is handler


def test_one_more_stop_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, done = [100.0], []
    monkeypatch.setattr("driver.interrupt.time.monotonic", lambda: now_s[0])

    @hold_interrupts()
    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        now_s[0] += REPEAT_S / 2
        os.kill(os.getpid(), signal.SIGINT)  # the group's: the same wish
        done.append("this")
        now_s[0] += REPEAT_S
        os.kill(os.getpid(), signal.SIGINT)
        done.append("not that")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["this"]


def test_an_error_of_what_is_not_to_be_left_half_done_comes_first() -> None:
    @hold_interrupts()
    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        work()


def test_a_command_line_of_another_user_keeps_no_run_from_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attack: Ray read it as that of a cluster, and failed on its form."""
    found: list[object] = []

    def start(*, address: str | None = None, **_: object) -> None:
        found.append(services.canonicalize_bootstrap_address(address))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", start)
    program = ["raylet", "-c", "import time; time.sleep(60)", "--gcs-address"]
    with subprocess.Popen(program, executable=sys.executable) as theirs:
        try:
            while "raylet" not in psutil.Process(theirs.pid).cmdline():
                time.sleep(0.01)
            with ray_cluster(str(tmp_path / "run"), processes=1):
                pass
        finally:
            theirs.kill()
    assert found == [None]
