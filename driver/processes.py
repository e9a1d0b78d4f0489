"""The Ray processes of workers and the learner: starting and killing one."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import ray._private.state
from ray.exceptions import RayError

from actors import WorkerActor, WorkerSetup
from configs import Config, n_workers
from learner import LearnerActor, LearnerSetup

LEARNER = "learner"
RAY_KILLS_WITHIN_S = 2.0


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
    has_started: bool = False
    is_leaving: bool = False  # it was told to stop, because fewer workers are wanted


def start(name: str, *, config: Config, model_path: str, coordinator: Any) -> ManagedProcess:
    """Ask Ray for a process and for its `start`; return at once."""
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus(name, config)}
    if name == LEARNER:
        setup = LearnerSetup(config=config, model_path=model_path)
        # Two calls at a time: `stop` comes beside `run`.
        handle = LearnerActor.options(max_concurrency=2, **options).remote(setup, coordinator)
    else:
        worker = WorkerSetup(name=name, config=config, model_path=model_path)
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
    return 1 + (n_workers(config) + config.learner.ranks if learns else config.actors.workers)


def gpus(name: str, config: Config) -> float:
    """Return how many GPUs a process asks for."""
    return config.learner.gpus_per_rank if name == LEARNER else config.actors.gpus_per_worker


def has_process(process: ManagedProcess) -> bool:
    """Return whether Ray has found a place for it, even if it is still being made."""
    # the public call needs Ray's dashboard
    state = ray._private.state.actors(process.handle._actor_id.hex())
    return bool(state.get("Pid"))


def why_unplaced(name: str, config: Config) -> str:
    """Return the GPUs that a process asks for and the GPUs that are free, in one line."""
    wanted = gpus(name, config)
    if not wanted:
        return "Ray has not started a process for it; is the machine out of memory or processes?"
    free = ray.available_resources().get("GPU", 0)
    total = ray.cluster_resources().get("GPU", 0)
    setting = "learner.gpus_per_rank" if name == LEARNER else "actors.gpus_per_worker"
    return (
        f"it asks for {wanted:g} GPUs on one node ({setting}), and of the {total:g} of the cluster "
        f"{free:g} are free; free some, add a node, or ask for fewer actors.workers or "
        "learner.ranks"
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
