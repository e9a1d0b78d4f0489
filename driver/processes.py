"""One process of a run as its driver knows it: how it is started, whether it has a place, how it is
killed.
"""

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
    """A worker or the learner."""

    name: str
    due_at_s: float  # when it is started (again)
    handle: Any = None  # None: waits to be started
    where: Any = None  # reference to (host, pid)
    call: Any = None  # reference to what it is at: `start`, then `run`
    asked_at_s: float = 0.0  # when Ray was asked for its process
    placed: bool = False  # known to have a process
    named_unplaced: bool = False
    started: bool = False
    leaving: bool = False


def start(part: ManagedProcess, *, config: Config, model_path: str, coordinator: Any) -> None:
    """Asks Ray for its process, and that for its start; returns at once."""
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus(part, config)}
    if part.name == LEARNER:
        setup = LearnerSetup(config=config, model_path=model_path)
        part.handle = LearnerActor.options(max_concurrency=2, **options).remote(setup, coordinator)
    else:
        worker = WorkerSetup(name=part.name, config=config, model_path=model_path)
        part.handle = WorkerActor.options(**options).remote(worker, coordinator)
    part.asked_at_s = time.monotonic()
    part.where = part.handle.where.remote()
    part.call = part.handle.start.remote()


def n_processes(config: Config, *, learns: bool) -> int:
    """That Ray is asked for at the start: the coordinator's, and those of the workers and of the
    learner's ranks.
    """
    return 1 + (n_workers(config) + config.learner.ranks if learns else config.actors.workers)


def gpus(part: ManagedProcess, config: Config) -> float:
    return config.learner.gpus_per_rank if part.name == LEARNER else config.actors.gpus_per_worker


def has_process(part: ManagedProcess) -> bool:
    """Whether Ray has found a place for it: it then has a process, even one that is still being
    made.
    """
    # the public call needs Ray's dashboard
    state = ray._private.state.actors(part.handle._actor_id.hex())
    return bool(state.get("Pid"))


def why_unplaced(part: ManagedProcess, config: Config) -> str:
    """What it asks for, against what is free now."""
    wanted = gpus(part, config)
    if not wanted:
        return "Ray has not started a process for it; is the machine out of memory or processes?"
    free, there = (
        count.get("GPU", 0) for count in (ray.available_resources(), ray.cluster_resources())
    )
    knob = "learner.gpus_per_rank" if part.name == LEARNER else "actors.gpus_per_worker"
    return (
        f"it asks for {wanted:g} GPUs on one node ({knob}), and of the {there:g} of the cluster "
        f"{free:g} are free; "
        "free some, add a node, or ask for fewer actors.workers or learner.ranks"
    )


def kill(part: ManagedProcess) -> None:
    """Also a process of this machine that is stopped, which does not hear Ray."""
    ray.kill(part.handle)
    with suppress(RayError, psutil.Error):  # it died before it could say where it was, or is gone
        host, pid = ray.get(part.where, timeout=1.0)
        if host == socket.gethostname():
            process = psutil.Process(pid)
            try:
                process.wait(timeout=RAY_KILLS_WITHIN_S)
            except psutil.TimeoutExpired:
                process.kill()
