"""Simulate one run: its workers and its learner sleep; for `async_vs_sync.py`.

Three ways to run the same work with the same code: asynchronous; `max_staleness=0`; and lock-step,
which is that with one more thing: no episode takes its next turn before every episode of the batch
has had its answer, as in a loop over a vector of environments.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import configs
from actors.rollout.episode import AsyncEnvironment
from configs import Config
from coordinator import Coordinator
from envs import Observation, Task, Transition, environment_class
from store import RunLayout, write_open_sql
from tests.support.simulation import (
    Delay,
    DelayedEnvironment,
    LocalHandle,
    SimulatedLearner,
    SimulatedSetup,
    SimulatedWorker,
)

# Time to load new weights: tens of milliseconds for a small model (benchmarks/generation.py).
LOADING = Delay(median_s=0.02, sigma=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """`environment` is every answer's latency; a worker plays one group at a time."""

    environment: Delay
    generation: Delay
    step_time: Delay
    workers: int
    groups_per_step: int
    group_size: int
    max_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    step_s: float  # mean time from the end of a learner step to that of the next
    idle: float  # fraction of it in which the learner waited for groups
    staleness: float  # mean, of the groups trained on


class Barrier:
    """Turns of `n` episodes at once: `wait` returns when all that are still playing wait too."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._playing = n
        self._arrived = 0
        self._turn = asyncio.Event()

    async def wait(self) -> None:
        self._arrived += 1
        turn = self._turn
        self._release_if_all()
        await turn.wait()

    def leave(self) -> None:
        self._playing -= 1
        self._release_if_all()

    def _release_if_all(self) -> None:
        if self._arrived < self._playing:
            return
        self._turn.set()
        self._turn, self._arrived = asyncio.Event(), 0
        if not self._playing:  # the batch is over; the next one has as many
            self._playing = self._n


class LockStep:
    """An environment whose answers are given when those of all others are there."""

    def __init__(self, environment: AsyncEnvironment, barrier: Barrier, *, max_steps: int) -> None:
        self._environment = environment
        self._barrier = barrier
        self._left = max_steps

    async def reset(self, task: Task) -> Observation:
        observation = await self._environment.reset(task)
        await self._barrier.wait()
        return observation

    async def step(self, action: str) -> Transition:
        transition = await self._environment.step(action)
        self._left -= 1
        if transition.terminated or transition.truncated or not self._left:
            self._barrier.leave()
        else:
            await self._barrier.wait()
        return transition


def simulate(
    directory: Path, pace: Pace, *, max_staleness: int, lock_step: bool, steps: int, warm_up: int
) -> Timed:
    """Play and train `warm_up + steps` learner steps in a new run. The last `steps` count."""
    config = make_config(directory, pace, max_staleness=max_staleness, steps=warm_up + steps)
    layout = RunLayout.create(directory, config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=(), max_staleness=max_staleness)
    coordinator = Coordinator(config, learns=True)
    handle = LocalHandle(coordinator, delay=None, seed=0)
    try:
        learner = asyncio.run(_play(config, pace, handle, lock_step=lock_step))
        lineage = coordinator.catalog.snapshot({}).new_parts["lineage"].table
    finally:
        coordinator.close()
    ends_s = learner.step_ends_s
    return Timed(
        step_s=(ends_s[-1] - ends_s[warm_up - 1]) / steps,
        idle=sum(learner.idle_s[warm_up:]) / (ends_s[-1] - ends_s[warm_up - 1]),
        staleness=statistics.fmean(lineage["staleness"].to_pylist()),
    )


def make_config(directory: Path, pace: Pace, *, max_staleness: int, steps: int) -> Config:
    config = Config(run_dir=str(directory), max_staleness=max_staleness)
    return replace(
        config,
        env=replace(config.env, name="key_room", max_steps=pace.max_steps),
        prompt=replace(config.prompt, template="compact"),
        actors=replace(config.actors, workers=pace.workers, groups_in_flight=1),
        algorithm=replace(config.algorithm, group_size=pace.group_size),
        learner=replace(
            config.learner,
            groups_per_step=pace.groups_per_step,
            steps=steps,
            checkpoint_every=10**6,
        ),
        evaluation=replace(config.evaluation, every=0),
    )


async def _play(
    config: Config, pace: Pace, handle: LocalHandle, *, lock_step: bool
) -> SimulatedLearner:
    environment = _environments(pace, lock_step=lock_step)  # one barrier for all
    workers = []
    for number in range(pace.workers):
        setup = SimulatedSetup(
            name=f"worker-{number}",
            config=config,
            seed=0,
            environment=environment,
            generation=pace.generation,
            loading=LOADING,
        )
        workers.append(SimulatedWorker(setup, handle))
    running = [asyncio.create_task(worker.run()) for worker in workers]
    learner = SimulatedLearner(config, handle, step_time=pace.step_time, seed=0)
    await learner.start()
    learning = asyncio.create_task(learner.run())
    # a worker ends by failing only
    await asyncio.wait([learning, *running], return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        await worker.stop()
    await asyncio.gather(learning, *running)
    return learner


def _environments(pace: Pace, *, lock_step: bool) -> Callable[[random.Random], AsyncEnvironment]:
    barrier = Barrier(pace.groups_per_step * pace.group_size)

    def make(source: random.Random) -> AsyncEnvironment:
        environment = DelayedEnvironment(
            environment_class("key_room")({}), delay=pace.environment, source=source
        )
        if not lock_step:
            return environment
        return LockStep(environment, barrier, max_steps=pace.max_steps)

    return make
