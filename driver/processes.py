"""Start and kill the Ray processes of a run: the coordinator, the workers and the learner."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import ray._private.state
from ray.exceptions import RayActorError, RayError

from actors import WorkerActor, WorkerSetup
from configs import Config, least_workers, n_workers
from coordinator import CoordinatorActor, CoordinatorClient, CoordinatorSilent, Reply
from driver.cluster import cpus_of_a_process, on_the_drivers_node
from driver.errors import DIED, ComponentFailed, cause_of, describe_cause
from envs import log_hint
from learner import LearnerActor, LearnerSetup

LEARNER = "learner"
RAY_KILLS_WITHIN_S = 2.0  # for a process to end after Ray's kill
COORDINATOR_START_TIMEOUT_S = 600.0  # it may make games
ANSWER_TIMEOUT_S = 20.0  # for a call of the coordinator
CLOSE_TIMEOUT_S = 60.0  # for a compaction that is under way

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class ManagedProcess:
    """A worker or the learner that Ray was asked to start."""

    name: str
    handle: Any  # Ray's
    where: Any  # reference to (host, pid)
    call: Any  # reference to its `start` or `run`; None while it is idle
    asked_at_s: float
    is_placed: bool = False  # Ray has found a place for it
    is_named_unplaced: bool = False  # the missing place was reported
    node: str = ""  # Ray's id of its node; "": not asked yet
    has_started: bool = False
    leaving_why: str = ""  # why it was told to leave; "": it stays
    is_wanted_again: bool = False  # once it has left it is asked for again, elsewhere
    closes_by_s: float | None = None  # time.monotonic() at which it is killed, once it has left


def start(
    name: str, *, run_id: str, config: Config, model_path: str, coordinator: Any
) -> ManagedProcess:
    """Ask Ray for a process and for its `start`; return at once."""
    options: dict[str, Any] = {"num_cpus": cpus_of_a_process(), "num_gpus": gpus(name, config)}
    if name == LEARNER:
        setup = LearnerSetup(run_id=run_id, config=config, model_path=model_path)
        # Two calls at a time: `stop` comes beside `run`.
        handle = LearnerActor.options(max_concurrency=2, **options).remote(setup, coordinator)
    else:
        worker = WorkerSetup(name=name, run_id=run_id, config=config, model_path=model_path)
        handle = WorkerActor.options(**options).remote(worker, coordinator)
    return ManagedProcess(
        name=name,
        handle=handle,
        asked_at_s=time.monotonic(),
        where=handle.where.remote(),
        call=handle.start.remote(),
    )


def n_processes(config: Config, *, learns: bool) -> int:
    """Return how many processes a run starts: coordinator, workers and the learner's ranks."""
    workers = n_workers(config) + config.learner.ranks if learns else least_workers(config.actors)
    return 1 + workers


def gpus(name: str, config: Config) -> float:
    """Return how many GPUs a process asks for."""
    return config.learner.gpus_per_rank if name == LEARNER else config.actors.gpus_per_worker


def has_process(process: ManagedProcess) -> bool:
    """Return whether Ray has found a place for it, even if it is still being made."""
    # the public call needs Ray's dashboard
    state = ray._private.state.actors(process.handle._actor_id.hex())
    return bool(state.get("Pid"))


def why_unplaced(name: str, config: Config) -> str:
    """Return what a process asks Ray for and how much of it is free, in one line."""
    setting = "learner.gpus_per_rank" if name == LEARNER else "actors.gpus_per_worker"
    kind, where, wanted = "GPU", f" on one node ({setting})", gpus(name, config)
    if not wanted:
        kind, where, wanted = "CPU", "", float(cpus_of_a_process())
    if not wanted:
        return "Ray has not started a process for it; is the machine out of memory or processes?"
    free = ray.available_resources().get(kind, 0)
    total = ray.cluster_resources().get(kind, 0)
    return (
        f"it asks for {wanted:g} {kind}s{where}, and of the {total:g} of the cluster {free:g} are "
        "free; free some, add a node, or ask for fewer actors.workers or learner.ranks"
    )


def kill(process: ManagedProcess) -> None:
    """Kill a process. A stopped process ignores Ray, so one of this machine is killed directly."""
    ray.kill(process.handle)
    # It died before it could say where it is, or it is gone already.
    with suppress(RayError, psutil.Error):
        host, pid = ray.get(process.where, timeout=1.0)
        if host == socket.gethostname():
            stuck = psutil.Process(pid)
            try:
                stuck.wait(timeout=RAY_KILLS_WITHIN_S)
            except psutil.TimeoutExpired:
                stuck.kill()


class CoordinatorProcess:
    """Start the coordinator. `answer(calls.driver_tick())` raises ComponentFailed if it is lost."""

    def __init__(self, config: Config, *, learns: bool) -> None:
        self.is_lost = False  # dead or silent
        self._log = Path(config.run_dir) / "logs" / "coordinator.log"
        # It owns the catalog, a SQLite file in WAL mode: all its users must be on one machine.
        options = {"num_cpus": 0, "scheduling_strategy": on_the_drivers_node()}
        self.handle = CoordinatorActor.options(**options).remote(config, learns=learns)
        self.calls = CoordinatorClient(self.handle, component="driver", timeout_s=ANSWER_TIMEOUT_S)

    def wait_until_up(self) -> None:
        """Wait until the coordinator has started."""
        self.answer(self.calls.capture_output(), timeout_s=COORDINATOR_START_TIMEOUT_S)

    def close(self) -> None:
        """Have the coordinator close the catalog."""
        self.answer(self.calls.close(), timeout_s=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the process."""
        ray.kill(self.handle)

    def answer(self, reply: Reply[T], *, timeout_s: float = ANSWER_TIMEOUT_S) -> T:
        """Wait for a reply. Raises ComponentFailed: it is lost, or the call failed."""
        try:
            return reply.get(timeout_s=timeout_s)
        except CoordinatorSilent as error:
            self.is_lost = True
            raise ComponentFailed(
                f"coordinator has not answered for {timeout_s:g} s: its process is stopped, or its "
                f"disk hangs{self._remedy()}"
            ) from error
        except RayError as error:
            cause = cause_of(error)
            self.is_lost = isinstance(cause, RayActorError)
            if isinstance(cause, RayActorError) and not cause.actor_init_failed:
                raise ComponentFailed(f"coordinator {DIED}{self._remedy()}") from error
            raise ComponentFailed(
                f"coordinator failed: {describe_cause(error)}{log_hint(self._log)}"
            ) from error

    def _remedy(self) -> str:
        return (
            f"{log_hint(self._log)}. Nothing that was committed is lost; the same command goes on"
        )
