"""Hold thousands of simulated workers around one real coordinator actor, for `rollout.py`."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray

import configs
from configs import Config
from coordinator import CoordinatorActor
from envs import environment_class
from store import RunLayout, write_open_sql
from tests.support.simulation import (
    Delay,
    DelayedEnvironment,
    SimulatedLearner,
    SimulatedSetup,
    SimulatedWorker,
)

PROCESSES = 2  # among which the workers are shared out
# threads of each process that write segments; more only wait for each other's turn of the
# interpreter
WRITERS = 2
# a simulated worker that was not is not counted; 2,000 of them beat every 10 s each
HEARD_WITHIN_S = 30.0
TIMED = ("commit", "lease", "heartbeat", "newest_version")  # calls of the coordinator
INSTANT = Delay(median_s=0.0, sigma=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    config: Config
    environment: Delay
    step_time: Delay
    warm_up_s: float
    seconds: float


class TimedHandle:
    """Remember when each call of a handle was answered, and how long that took for the caller."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        # by name: (time.monotonic(), seconds)
        self.calls: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            remote=lambda *given, **named: self._timed(
                name, getattr(self._handle, name).remote(*given, **named)
            )
        )

    async def _timed(self, name: str, call: Any) -> Any:
        began_s = time.monotonic()
        answer = await call
        now_s = time.monotonic()
        self.calls[name].append((now_s, now_s - began_s))
        return answer


class Crowd:
    """Some of the workers, as tasks of one process."""

    def __init__(self, load: Load, numbers: range, coordinator: Any) -> None:
        self.load = load
        self.numbers = numbers
        self.handle = TimedHandle(coordinator)
        self.workers: list[SimulatedWorker] = []

    async def run(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(WRITERS))
        self.workers = [
            SimulatedWorker(self._setup(number), self.handle) for number in self.numbers
        ]
        await asyncio.gather(*(worker.run() for worker in self.workers))

    async def stop(self) -> dict[str, list[tuple[float, float]]]:
        """Return the calls that the coordinator was sent until now, and end the workers."""
        for worker in self.workers:
            worker.kill()
        return dict(self.handle.calls)

    def _setup(self, number: int) -> SimulatedSetup:
        key_room = environment_class("key_room")
        return SimulatedSetup(
            name=f"worker-{number}",
            config=self.load.config,
            seed=0,
            environment=lambda source: DelayedEnvironment(
                key_room({}), delay=self.load.environment, source=source
            ),
            generation=INSTANT,
            loading=INSTANT,
        )


class Learning:
    """The learner, in a process of its own."""

    def __init__(self, load: Load, coordinator: Any) -> None:
        self.learner = SimulatedLearner(load.config, coordinator, step_time=load.step_time, seed=0)

    async def run(self) -> None:
        await self.learner.start()
        await self.learner.run()


def hold(load: Load) -> dict[str, float]:
    """Run the load on a cluster that is there, and return figures of its last `seconds`.

    Latencies are round trips as a worker sees them: its own event loop, Ray both ways, the queue
    before the coordinator.
    """
    config = load.config
    layout = RunLayout.create(Path(config.run_dir), config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=config.max_staleness)
    coordinator = CoordinatorActor.options(num_cpus=0).remote(config, learns=True)
    process = psutil.Process(ray.get(coordinator.__ray_call__.remote(lambda self: os.getpid())))
    share = config.actors.workers // PROCESSES
    crowds = [
        ray.remote(Crowd)
        .options(num_cpus=0)
        .remote(load, range(number * share, (number + 1) * share), coordinator)
        for number in range(PROCESSES)
    ]
    learning = ray.remote(Learning).options(num_cpus=0).remote(load, coordinator)
    # their imports take seconds
    ray.get([actor.__ray_ready__.remote() for actor in (coordinator, learning, *crowds)])
    running = [learning.run.remote(), *(crowd.run.remote() for crowd in crowds)]
    _stay(running, seconds=load.warm_up_s)
    began_s, began_cpu_s = time.monotonic(), cpu_s(process)
    before = ray.get(coordinator.status.remote()).counts
    _stay(running, seconds=load.seconds)
    ended_s, ended_cpu_s = time.monotonic(), cpu_s(process)
    status = ray.get(coordinator.status.remote())
    after = status.counts
    heard = [
        name
        for name, one in status.components.items()
        if name.startswith("worker-") and one.silent_s < HEARD_WITHIN_S
    ]
    latencies_s: dict[str, list[float]] = {name: [] for name in TIMED}
    for crowd in crowds:
        calls = ray.get(crowd.stop.remote())
        for name in TIMED:
            in_time = [s for at_s, s in calls.get(name, ()) if began_s <= at_s <= ended_s]
            latencies_s[name] += in_time
    for actor in (learning, *crowds):
        ray.kill(actor)
    ray.get(coordinator.close.remote())
    ray.kill(coordinator)
    episodes, seconds = after.trajectories - before.trajectories, ended_s - began_s
    figures = {
        "simulated_actors": float(len(heard)),
        "simulated_playing": float(after.leased),
        "simulated_episodes_s": episodes / seconds,
        "simulated_learner_steps_s": (after.trained - before.trained)
        / config.learner.groups_per_step
        / seconds,
        "simulated_stale_groups": float(after.stale - before.stale),
        "coordinator_ms_per_trajectory": 1e3 * (ended_cpu_s - began_cpu_s) / max(episodes, 1),
        "coordinator_cores": (ended_cpu_s - began_cpu_s) / seconds,
    }
    for name, found in latencies_s.items():
        in_order = sorted(found) or [0.0]
        figures[f"{name}_calls_s"] = len(found) / seconds
        figures[f"{name}_p50_ms"] = 1e3 * statistics.median(in_order)
        figures[f"{name}_p99_ms"] = 1e3 * in_order[int(0.99 * len(in_order))]
    return figures


def _stay(running: list[Any], *, seconds: float) -> None:
    """Wait; raise what a component raised. None of them ends by itself."""
    ended, _ = ray.wait(running, timeout=seconds)
    ray.get(ended)
    assert not ended, "a component ended"


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
