"""The Ray cluster of a run: a private one, or one that RAY_ADDRESS names."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.services
import ray._private.utils
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray.exceptions import AuthenticationError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import ENGINE_SOCKETS
from configs import ConfigError
from driver.errors import ComponentFailed
from driver.interrupt import hold_interrupts
from driver.run_lock import RUN_MARK
from learner import (
    RAY_HIDES_GPUS,
    make_ray_directory,
    on_the_loopback,
    own_imports,
    ray_secrets,
)
from usage_statistics import usage_statistics_off

# Processes that Ray starts beside the two it needs: the scaler of a cloud's machines, the reader of
# logs (unused with log_to_driver=False) and the dashboard. `ray.init` cannot leave them out.
UNUSED_RAY_SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
DRIVER_DIRECTORY = "ASYNC_GIGPO_DIRECTORY"  # working directory of the driver
# Ray's driver reads this variable as a number of attempts. Each takes up to 36 s: with Ray's
# default, 20, the error that no cluster answers would come after 12 minutes.
JOIN_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"
FEW_ATTEMPTS = "2"
NOT_IN_TIME = "timed out during startup"  # in Ray's error, a bare Exception; the 30 s are fixed
AUTHENTICATION_HINT = (
    "set RAY_AUTH_MODE=token on every node and for this command, and give each the cluster's "
    "token, as RAY_AUTH_TOKEN or in ~/.ray/auth_token"
)


@contextmanager
def ray_cluster(run_dir: str, *, processes: int) -> Iterator[None]:
    """Join the cluster that RAY_ADDRESS names, or start a private one and remove it at the end.

    A private cluster starts `processes` worker processes at once, before anything asks for them.
    It has a directory that no other user can enter, with Ray's and vLLM's sockets. Its ports are on
    the loopback only, and answer to a token and a certificate of its own.

    All its processes carry RUN_MARK, by which `run_lock.py` knows them. A process that asks for no
    GPU sees none. Raises ConfigError if the cluster cannot be joined, and ComponentFailed if a
    private one does not start in Ray's time.
    """
    variables = {RUN_MARK: str(Path(run_dir).resolve())} | RAY_HIDES_GPUS
    variables |= usage_statistics_off(os.environ)  # processes on other nodes do not inherit them
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        with hold_interrupts(), _ray_without_extras():
            _join(variables)
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves a run on a busy machine
    # gRPC writes a line on the terminal and in every log for each connection that a stranger opens.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # By default Ray starts only as many processes at once as there are cores.
    os.environ.update(variables | {"RAY_worker_maximum_startup_concurrency": str(processes)})
    directory = None
    secrets = ExitStack()
    try:
        # A Ray that is left half started prints pages of errors.
        with hold_interrupts(), _ray_without_extras(), on_the_loopback() as given:
            # Made before Ray starts, because that may be interrupted.
            directory = make_ray_directory(Path(run_dir))
            os.environ[ENGINE_SOCKETS] = str(directory)  # a killed engine leaves its own
            secrets.enter_context(ray_secrets(directory))
            _start(
                # Else Ray looks for a cluster in the command lines of all users' processes.
                address="local",
                num_cpus=processes,  # so many start beforehand; no process of a run asks for CPUs
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                configure_logging=False,
                job_config=own_imports(),
                # Ray lets everybody write there (0777), so not in `directory` itself
                _temp_dir=str(directory / "ray"),
                **given,
            )
        yield
    finally:
        with hold_interrupts():
            ray.shutdown()  # half a clean-up would leave processes and files
            secrets.close()
            os.environ.pop(ENGINE_SOCKETS, None)
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)


def _start(**settings: Any) -> None:
    try:
        ray.init(**settings)
    except Exception as error:
        if NOT_IN_TIME not in str(error):
            raise
        raise ComponentFailed(
            "Ray did not start within its 30 s: other programs keep this machine busy; give the "
            "same command again"
        ) from error


def on_the_drivers_node() -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy of an actor that needs files of the driver's node.

    Ray starts an actor without resource demands on a random node. Only one that is pinned with
    `soft=False` never runs anywhere else.
    """
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def cpus_of_a_process() -> int:
    """Return how many CPUs a worker and the learner ask Ray for.

    Ray starts an actor that asks for nothing on a random node of a cluster, also on a head that is
    to have no work (`ray start --num-cpus=0`). The CPUs of a private Ray are the number of
    processes that it starts beforehand.
    """
    return 1 if is_joined() else 0


def is_joined() -> bool:
    """Return whether the run is on a cluster of somebody else, which may grow and shrink."""
    return bool(os.environ.get("RAY_ADDRESS"))


def _join(variables: dict[str, str]) -> None:
    """Join the cluster that RAY_ADDRESS names, or keep the connection that this process has.

    Every process of the run gets `variables`, and starts in the driver's working directory. A
    connection that is there keeps the variables that it was made with.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS={address} joins through Ray Client, whose driver is outside the cluster "
            "and cannot own a run's catalog; start the command on a node of the cluster with "
            "RAY_ADDRESS=auto, or with `ray job submit`"
        )
    # Ray starts a process where `ray start` was called: a relative path means something else there.
    environment = variables | {DRIVER_DIRECTORY: str(Path.cwd())}
    sets_attempts = JOIN_ATTEMPTS not in os.environ
    if sets_attempts:
        os.environ[JOIN_ATTEMPTS] = FEW_ATTEMPTS
    try:
        ray.init(
            ignore_reinit_error=True,
            log_to_driver=False,
            job_config=own_imports(),
            runtime_env={"env_vars": environment, "worker_process_setup_hook": _enter_directory},
        )
    except (AuthenticationError, RuntimeError, ConnectionError) as error:
        raise ConfigError(_why_not_joined(address, error)) from error
    finally:
        if sets_attempts:
            del os.environ[JOIN_ATTEMPTS]


def _enter_directory() -> None:
    """Enter the driver's working directory, in a process of a joined cluster.

    On a node without it, an actor that reads a relative path fails with an error naming the path.
    """
    directory = Path(os.environ[DRIVER_DIRECTORY])
    if directory.is_dir():
        os.chdir(directory)


def _why_not_joined(address: str, error: Exception) -> str:
    """Return one line that says why the cluster at `address` cannot be joined, and the fix."""
    texts = [str(error), str(error.__cause__)]
    start = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: "
    if isinstance(error, AuthenticationError) or any("InvalidAuthToken" in text for text in texts):
        return f"{start}its token authentication refuses this command; {AUTHENTICATION_HINT}"
    reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
    return (
        f"{start}{reason}; check the address, and that `ray status` on this machine shows the "
        "cluster"
    )


@contextmanager
def _ray_without_extras() -> Iterator[None]:
    """Patch Ray so that it starts no UNUSED_RAY_SERVICES and leaves signals to the driver."""
    node = ray._private.node.Node
    services = ray._private.services
    utils = ray._private.utils
    ours: dict[tuple[Any, str], Callable[..., Any]] = {
        (node, name): lambda self, **options: None for name in UNUSED_RAY_SERVICES
    }
    # Ray's handler raises SystemExit, which would end the run without an orderly stop.
    ours[utils, "set_sigterm_handler"] = lambda handler: None
    # A SIGTERM to the driver's process group would end Ray's agents, and seconds later the raylet
    # with the coordinator. In a group of their own they end when the driver does.
    ours[services, "ConsolePopen"] = partial(services.ConsolePopen, process_group=0)
    theirs = {(owner, name): getattr(owner, name) for owner, name in ours}
    try:
        for (owner, name), function in ours.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in theirs.items():
            setattr(owner, name, function)


def gpus_of_this_machine() -> int:
    """Return how many GPUs a Ray started on this machine would have, without starting it."""
    manager = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    there: int = manager.get_current_node_num_accelerators()
    return there if visible is None else min(there, len(visible))


def available_gpus() -> int:
    """Return the number of GPUs in the running cluster."""
    return int(ray.cluster_resources().get("GPU", 0))
