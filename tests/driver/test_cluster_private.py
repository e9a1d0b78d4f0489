"""Test how a private Ray is started, and the error of a process for which it has no room."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

import configs
from actors import ENGINE_SOCKETS
from driver.cluster import DRIVER_DIRECTORY, cpus_of_a_process, ray_cluster
from driver.errors import ComponentFailed, describe_cause
from driver.processes import why_unplaced
from driver.run_lock import RUN_MARK, has_ended, has_mark
from driver.supervisor import Supervisor
from learner import RAY_HIDES_GPUS
from tests.support.processes import PATIENCE_S, children
from tests.support.supervisor_samples import process
from usage_statistics import usage_statistics_off

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run's, with a GPU that is not there."""
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("RAY_ADDRESS", raising=False)
        environ.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 1}')
        environ.setenv("CUDA_VISIBLE_DEVICES", "0")
        environ.setenv(RUN_MARK, "not this process")  # `ray_cluster` leaves its own there
        with ray_cluster(str(tmp_path_factory.mktemp("run")), processes=1):
            yield


def test_ray_starts_without_processes_that_a_run_has_no_use_for(cluster: None) -> None:
    assert children("gcs_server", recursive=True) and children("raylet", recursive=True)
    assert not children("dashboard.py", recursive=True) + children("monitor.py", recursive=True)


def test_a_signal_to_the_drivers_process_group_is_not_for_ray(cluster: None) -> None:
    """Slurm and `timeout` signal the group. Ray would end, and with it the coordinator."""
    roots = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() in ("gcs_server", "raylet")
    ]
    assert {process.name() for process in roots} == {"gcs_server", "raylet"}
    processes = [*roots, *(child for root in roots for child in root.children(recursive=True))]
    assert os.getpgid(0) not in {os.getpgid(process.pid) for process in processes}


def test_the_raylet_and_its_workers_have_the_runs_mark(cluster: None) -> None:
    """Without it, what a killed driver left would not be removed.

    Ray's agents may overwrite their variables with their title. They end with their raylet.
    """
    (raylet,) = children("raylet", recursive=True)
    processes = [raylet, *raylet.children(recursive=True)]
    marked = [process for process in processes if not process.name().endswith("Agent")]
    mark = os.environ[RUN_MARK]
    assert [process for process in marked if not has_mark(process.pid, mark)] == []


ASKS_RAY = """
import sys
from ray._raylet import GcsClient
try:
    print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=int(sys.argv[2])))
except Exception as error:
    print(type(error).__name__)
"""


def asks_ray(*, timeout_s: int = 20, **token: str) -> str:
    """Ask the running Ray for all its keys from another process, and return the answer."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", ASKS_RAY, address, str(timeout_s)]
    return subprocess.run(
        command, env={**environ, **token}, text=True, capture_output=True, check=False
    ).stdout.strip()


def test_a_neighbour_gets_no_answer_from_ray(cluster: None) -> None:
    """Whoever gets one can have any command run by this user."""
    wrong = asks_ray(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert wrong in ("AuthenticationError", "RpcError", "GetTimeoutError"), wrong
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert path.stat().st_mode & 0o777 == 0o600
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": path.read_text()}
    assert asks_ray(**token).startswith("["), "the attack itself works"
    # Nothing answers, so all of the time passes. The next test looks at the handshake itself.
    without = asks_ray(timeout_s=3, **token, RAY_USE_TLS="0")
    assert without in ("RpcError", "GetTimeoutError"), (
        f"with a token, and no certificate: {without}"
    )


def test_a_stranger_who_connects_to_ray_writes_no_line(
    cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The attack: 56,000 connections put as many lines on the terminal, and into every log."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            connection.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "it was refused, and so looked at"
    logs = Path(os.environ[ENGINE_SOCKETS]).rglob("*.*")
    said = "".join(path.read_text(errors="replace") for path in logs if path.is_file())
    assert said and "Handshake failed" not in said + capfd.readouterr().err


def test_a_neighbour_cannot_end_ray_and_take_its_place(cluster: None) -> None:
    """The attack: one `RaySyncer.StartSync` without a header ended the GCS and freed its port.

    Whoever took the port was sent the token by every process that was left, and could have the
    raylet start programs with it.
    """
    (gcs,) = children("gcs_server", recursive=True)
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    certificate = ssl.get_server_certificate((host, int(port))).encode()
    for channel in (
        grpc.insecure_channel(address),
        grpc.secure_channel(address, grpc.ssl_channel_credentials(certificate)),
    ):
        call = channel.stream_stream("/ray.rpc.syncer.RaySyncer/StartSync")
        with channel, pytest.raises(grpc.RpcError) as refused:
            next(call(iter([b""]), timeout=PATIENCE_S))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "failed to connect" in refused.value.details(), "not one byte of it is read"
    assert not has_ended(gcs) and ray.cluster_resources()


def test_no_other_machine_reaches_a_port_of_ray(cluster: None) -> None:
    """The attack: one `RaySyncer.StartSync` without a token or a header ended raylet and GCS."""

    class Sits:
        def where(self) -> None: ...

    worker = ray.remote(Sits).options(num_cpus=0).remote()
    ray.get(worker.where.remote())
    listening = {
        connection.laddr.ip
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    ray.kill(worker)
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    assert host == "127.0.0.1", "the address that processes of the run are given"


def test_a_neighbour_cannot_enter_the_directory_of_the_sockets(cluster: None) -> None:
    directory = Path(os.environ[ENGINE_SOCKETS])
    sockets = [path for path in directory.rglob("*") if path.is_socket()]
    assert sockets, "Ray's are in it"
    assert (directory.stat().st_uid, directory.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("refused")
"""
    command = [sys.executable, "-c", code, str(sockets[0])]
    assert (
        subprocess.run(command, text=True, capture_output=True, check=False).stdout == "refused\n"
    )


def test_an_actor_sees_the_gpus_it_asked_for_and_no_others(cluster: None) -> None:
    class Looks:
        def gpus(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    handles = [ray.remote(Looks).options(num_cpus=0, num_gpus=n).remote() for n in (0, 0.5, 0.5)]
    try:
        assert ray.get([handle.gpus.remote() for handle in handles]) == ["", "0", "0"]
    finally:
        for handle in handles:
            ray.kill(handle)


# An actor says whether it would import a module that lies in the current directory.
LOOKS_FOR_MODULE = """
import importlib.util, sys
import ray
from driver.cluster import ray_cluster

class Looks:
    def finds(self):
        return importlib.util.find_spec("planted") is not None

with ray_cluster(sys.argv[1], processes=1):
    print(ray.get(ray.remote(Looks).options(num_cpus=0).remote().finds.remote()))
"""


@pytest.mark.parametrize("asked_for", [False, True])
def test_ray_imports_from_the_current_directory_only_if_the_driver_does(
    asked_for: bool, tmp_path: Path
) -> None:
    """The attack: `gigpo train` in a stranger's run, or in /tmp, ran the `learner.py` there."""
    (tmp_path / "planted.py").touch()
    (tmp_path / "learner.py").write_text("raise SystemExit('a stranger runs')")
    path = f"{ROOT}{os.pathsep}." if asked_for else str(ROOT)
    without = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOOKS_FOR_MODULE, "run"],
        cwd=tmp_path,
        env={**without, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{asked_for}\n", done.stderr


def test_a_cluster_that_is_joined_hides_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    with ray_cluster("runs/x", processes=1):
        variables = asked["runtime_env"]["env_vars"]
    expected = {RUN_MARK, DRIVER_DIRECTORY, *RAY_HIDES_GPUS, *usage_statistics_off({})}
    assert variables.keys() == expected


def test_ray_tells_what_an_actor_refused(cluster: None) -> None:
    class Refuses:  # here, so that its process need not import this module
        def __init__(self) -> None:
            raise ValueError("the value is 7;\nuse 8")

        def where(self) -> None: ...

    refused = ray.remote(Refuses).options(num_cpus=0).remote()
    with pytest.raises(ActorDiedError) as died:
        ray.get(refused.where.remote())
    assert died.value.actor_init_failed
    assert describe_cause(died.value) == "ValueError: the value is 7; use 8"


def test_a_process_without_a_place_is_named_with_what_it_asks_for(
    cluster: None, session: Supervisor, said: list[str]
) -> None:
    class Sits:
        def where(self) -> None: ...

    session.is_up, session.config = False, configs.from_yaml("{actors: {gpus_per_worker: 1}}")
    first, second = (ray.remote(Sits).options(num_cpus=0, num_gpus=1).remote() for _ in range(2))
    ray.get(first.where.remote())
    deadline_s = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("GPU"):  # what is free is counted a moment later
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    placed, unplaced = (process("worker-0", handle=handle) for handle in (first, second))
    session._look_for_place(placed)
    assert placed.is_placed and said == []
    with pytest.raises(
        ComponentFailed,
        match=r"worker-0 has had no place for .* of the 1 of the cluster 0 are free",
    ):
        session._look_for_place(unplaced)
    session.is_up = True
    session._look_for_place(unplaced)
    session._look_for_place(unplaced)
    ((what, detail),) = session.coordinator.told  # type: ignore[attr-defined]
    assert what == "no place" and "it asks for 1 GPUs" in detail


def test_in_a_joined_cluster_a_process_without_a_gpu_asks_for_a_cpu(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So none is put on a head that has none. In a private Ray more may be started later."""
    config = configs.from_yaml("{}")
    assert cpus_of_a_process() == 0
    assert why_unplaced("worker-0", config).startswith("Ray has not started a process")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    assert cpus_of_a_process() == 1
    assert why_unplaced("worker-0", config).startswith("it asks for 1 CPUs, and of the 1 of the")
