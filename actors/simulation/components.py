"""A run without a model: workers and a learner that only take time, around the real coordinator,
catalog and files.

    handle = LocalHandle(Coordinator(config, learns=True), delay=None, seed=0)    # or a real Ray handle
    worker = SimulatedWorker(setup, handle)                                       # what `Worker` does, by the same `RolloutRunner`
    learner = SimulatedLearner(config, handle, step_time=Delay(median_s=0.5, sigma=0.1), seed=0)
    await learner.start(); await learner.run()

Thousands of workers fit into one process: each is a few tasks of its event loop. Under
`virtual_time.py` nothing sleeps, and the same seeds give the same run, call for call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.inference.concurrency import Concurrency
from actors.prompting.prompt import PromptForm
from actors.rollout.attempts import Attempts
from actors.rollout.episode import AsyncEnvironment, EpisodeIds, EpisodeRules, play_episode
from actors.rollout.runner import CALLS_PER_S, RolloutRunner
from actors.simulation.fakes import ByteTokenizer, Delay, SimulatedPolicy
from configs import Config
from coordinator import CoordinatorClient, Lease
from store import Batch, SegmentMeta, Trajectory, VersionRecord

HEARTBEAT_S = 1.0
CLAIM_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSetup:
    """`environment` is called for every episode, with a source of random numbers of its own."""

    name: str
    config: Config
    seed: int
    environment: Callable[[random.Random], AsyncEnvironment]
    generation: Delay  # of every answer of the policy
    loading: Delay  # of new weights


class KillableRunner(RolloutRunner):
    """What it has not written when it dies is never written."""

    is_dead = False

    async def write(self, lease: Lease, trajectories: Sequence[Trajectory]) -> SegmentMeta:
        if self.is_dead:
            raise asyncio.CancelledError
        return await super().write(lease, trajectories)

    async def record_unfinished(self, lease: Lease, attempts: Attempts, *, why: str) -> None:
        if not self.is_dead:
            await super().record_unfinished(lease, attempts, why=why)


class SimulatedWorker:
    """`await run()` until `stop()`. The real `RolloutRunner`, with environments, a policy and weights that
    only take time.

    `kill` is a death without warning: what was not committed is lost, and nobody is told.
    """

    def __init__(self, setup: SimulatedSetup, coordinator: Any) -> None:
        self.name, self.config, self.setup = setup.name, setup.config, setup
        self.form = PromptForm(ByteTokenizer(), setup.config.prompt)
        self._random = random.Random(f"{setup.seed}/{setup.name}")
        self.policy = SimulatedPolicy(self.form, delay=setup.generation, source=self._random)
        self.coordinator = CoordinatorClient(coordinator, component=setup.name)
        self.player = KillableRunner(
            self.coordinator,
            setup.config,
            play=self._play_episode,
            weights=SimulatedWeights(self.policy, loading=setup.loading, source=self._random),
            concurrency=Concurrency.of(setup.config),
        )
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._running = asyncio.ensure_future(self._run())
        try:
            await self._running
        except asyncio.CancelledError:
            if not self.player.is_dead:
                raise

    async def stop(self) -> None:
        """As `Worker.stop`."""
        self.player.stop()

    def kill(self) -> None:
        self.player.is_dead = True
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            beating = loops.create_task(self._beat())
            await self.player.run()
            beating.cancel()

    async def _play_episode(self, lease: Lease, member: int, attempts: Attempts) -> Trajectory:
        return await play_episode(
            self.setup.environment(random.Random(self._random.getrandbits(64))),
            self.policy,
            self.form,
            task=lease.task,
            episode=EpisodeIds.of(lease.group.group_uid, member, progress=attempts.begin(member)),
            rules=EpisodeRules.of(self.config, temperature=lease.temperature),
        )

    async def _beat(self) -> None:
        """Send heartbeats as `Heartbeat` does, but seldom enough for thousands of workers."""
        every_s = max(HEARTBEAT_S, self.config.actors.workers / CALLS_PER_S)
        while True:
            waiting_on, waits_s = self.player.waiting() or (None, 0.0)
            await self.coordinator.heartbeat(waiting_on, waits_s)
            await asyncio.sleep(every_s * self._random.uniform(0.5, 1.5))


class SimulatedWeights:
    """Weights that take `loading` to be there."""

    def __init__(self, policy: SimulatedPolicy, *, loading: Delay, source: random.Random) -> None:
        self._policy, self._loading, self._random = policy, loading, source
        self._one_load = asyncio.Lock()

    async def serve(self, version: VersionRecord) -> None:
        async with self._one_load:
            if version.version > self._policy.version:
                await asyncio.sleep(self._loading.draw(self._random))
                self._policy.version = version.version


class SimulatedLearner:
    """Claims, sleeps its step time, publishes, settles, in the order of `Learner`; with
    max_staleness > 0 it claims ahead.

    `idle_s` and `step_ends_s` are by the event loop's clock: what it waited for groups, and the end
    of every learner step.
    """

    def __init__(self, config: Config, coordinator: Any, *, step_time: Delay, seed: int) -> None:
        self.config = config
        self.coordinator = CoordinatorClient(coordinator, component="learner")
        self.step = self.version = 0
        self.idle_s: list[float] = []
        self.step_ends_s: list[float] = []
        self._step_time, self._random = step_time, random.Random(seed)

    async def start(self) -> None:
        """From the newest checkpoint, whose weights get a number nobody has seen."""
        checkpoints = await self.coordinator.checkpoints()
        self.step = checkpoints[0].learner_step if checkpoints else 0
        point = await self.coordinator.resume(self.step)
        await self._publish(0 if point.latest_version is None else point.latest_version + 1)

    async def run(self) -> int:
        """Until `config.learner.steps`; returns the learner step it ended at."""
        clock, coming = asyncio.get_running_loop().time, None
        while self.step < self.config.learner.steps:
            began_s = clock()
            batch = await (coming or self._claim(self.version))
            self.idle_s.append(clock() - began_s)
            ahead = self.config.max_staleness > 0 and self.step + 1 < self.config.learner.steps
            coming = asyncio.ensure_future(self._claim(self.version + 1)) if ahead else None
            try:
                await asyncio.sleep(self._step_time.draw(self._random))
                await self._finish_step(batch)
            except BaseException:
                if coming is not None:
                    coming.cancel()
                raise
            self.step_ends_s.append(clock())
        return self.step

    async def _claim(self, version: int) -> Batch:
        while (batch := await self.coordinator.claim(version)) is None:
            await asyncio.sleep(CLAIM_POLL_S)
        return batch

    async def _finish_step(self, batch: Batch) -> None:
        self.step += 1
        trained_at = self.version
        await self._publish(trained_at + 1)
        await self.coordinator.settle(
            batch.batch_id, learner_step=self.step, no_signal={}, version_in=trained_at, metrics={}
        )
        if self.step % self.config.learner.checkpoint_every == 0:
            await self.coordinator.checkpoint(
                self.step, f"checkpoints/step{self.step}", self.version
            )

    async def _publish(self, version: int) -> None:
        record = VersionRecord(
            version=version, path=f"weights/v{version}", digest="simulated", learner_step=self.step
        )
        await self.coordinator.publish(record)
        self.version = version
