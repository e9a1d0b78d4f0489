"""A run without a model: workers and a learner that only take time, around the real coordinator, catalog and files.

    handle = LocalHandle(Coordinator(config, learns=True), delay=None, seed=0)    # or a real Ray handle
    worker = SimulatedWorker(setup, handle)                                       # leases, plays and commits as `Worker` does
    learner = SimulatedLearner(config, handle, step_time=Delay(median_s=0.5, sigma=0.1), seed=0)
    await learner.start(); await learner.run()

Thousands of workers fit into one process: each is a few tasks of its event loop. Under `virtual_time.py` nothing sleeps, and
the same seeds give the same run, call for call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.doubles import ByteTokenizer, Delay, SimulatedPolicy
from actors.group import play_group
from actors.plays import Lease
from actors.prompt import PromptForm
from actors.rollout import AsyncEnvironment, EpisodeIds, EpisodeRules, play_episode
from configs import Config
from store import Batch, FencedError, RunLayout, Trajectory, VersionRecord, write_segment

POLL_S = 0.1  # of a worker without a group
HEARTBEAT_S = 1.0
VERSION_POLL_S = 0.05
CALLS_PER_S = 200.0  # of each of these three, all workers together: many of them ask more seldom
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


class SimulatedWorker:
    """`await start()`, then `await run()` until `stop()`: `config.actors.groups_in_flight` groups at once, as `Worker`.

    Consumes leases and published versions; produces committed segments. Waits for "admission", and for its delays.
    `kill` is a death without warning: what was not committed is lost, and nobody is told.
    """

    def __init__(self, setup: SimulatedSetup, coordinator: Any) -> None:
        self.name, self.config, self.setup, self.coordinator = setup.name, setup.config, setup, coordinator
        self.layout = RunLayout.open(Path(setup.config.run_dir))
        self.form = PromptForm(ByteTokenizer(), setup.config.prompt)
        self._random = random.Random(f"{setup.seed}/{setup.name}")
        self.policy = SimulatedPolicy(self.form, delay=setup.generation, source=self._random)
        self.waiting_on: str | None = None
        self._playing: dict[asyncio.Task[None], Lease] = {}
        self._too_old: dict[asyncio.Task[None], str] = {}  # groups that are being given up, and why
        self._one_load = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._killed = False

    async def start(self) -> float:
        return 0.0

    async def run(self) -> None:
        slots = [self._play_groups() for _ in range(self.config.actors.groups_in_flight)]
        async with asyncio.TaskGroup() as loops:
            tasks = [loops.create_task(loop) for loop in (*slots, self._follow_weights(), self._beat())]
            await self._stopped.wait()
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Asks `run` to end. Finished episodes are committed, the others given up."""
        self._stopped.set()

    def kill(self) -> None:
        self._killed = True
        self._stopped.set()

    async def close(self) -> None:
        pass

    async def _play_groups(self) -> None:
        """One slot: a group after the other."""
        while not self._stopped.is_set():
            lease: Lease | None = await self.coordinator.lease.remote(self.name)
            if lease is None:
                self.waiting_on = "admission"
                await self._pause(POLL_S)
                continue
            self.waiting_on = None
            await self._serve(lease.version)
            group = asyncio.create_task(
                play_group(lease.group.missing, play=partial(self._play_episode, lease), commit=partial(self._commit, lease))
            )
            self._playing[group] = lease
            try:
                await group
            except asyncio.CancelledError:
                if group not in self._too_old or self._stopped.is_set():
                    raise
                await self.coordinator.give_up.remote(self.name, lease.group.group_uid, self._too_old[group])
            except FencedError:  # the coordinator was restarted: the group is leased anew, this attempt is dropped
                continue
            finally:
                del self._playing[group]
                self._too_old.pop(group, None)

    async def _play_episode(self, lease: Lease, member: int) -> Trajectory:
        group = lease.group
        return await play_episode(
            self.setup.environment(random.Random(self._random.getrandbits(64))),
            self.policy,
            self.form,
            task=lease.task,
            episode=EpisodeIds(group_uid=group.group_uid, traj_uid=group.traj_uids[member], member=member),
            rules=EpisodeRules.of(self.config, temperature=lease.temperature),
        )

    async def _commit(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        if self._killed:  # the dead write nothing
            raise asyncio.CancelledError
        segment = await asyncio.to_thread(write_segment, self.layout, trajectories, worker=self.name, epoch=lease.epoch)
        await self.coordinator.commit.remote(segment, lease.epoch)

    async def _serve(self, version: VersionRecord) -> None:
        async with self._one_load:
            if version.version > self.policy.version:
                await asyncio.sleep(self.setup.loading.draw(self._random))
                self.policy.version = version.version

    async def _follow_weights(self) -> None:
        while True:
            newest: VersionRecord | None = await self.coordinator.newest_version.remote()
            if newest is not None:
                self._give_up_too_old(newest.version)
                await self._serve(newest)
            await self._pause(VERSION_POLL_S)

    def _give_up_too_old(self, newest: int) -> None:
        for group, lease in self._playing.items():
            begun_at = lease.version.version
            if lease.group.split == "train" and newest - begun_at > self.config.max_staleness and group not in self._too_old:
                self._too_old[group] = f"still played at version {newest}, begun at {begun_at}"
                group.cancel()

    async def _beat(self) -> None:
        while True:
            await self.coordinator.heartbeat.remote(self.name, self.waiting_on)
            await self._pause(HEARTBEAT_S)

    async def _pause(self, seconds: float) -> None:
        """At least about `seconds`, so much longer that all workers together call CALLS_PER_S times; not all at one moment."""
        longer = max(seconds, self.config.actors.workers / CALLS_PER_S)
        await asyncio.sleep(longer * self._random.uniform(0.5, 1.5))


class SimulatedLearner:
    """Claims, sleeps its step time, publishes, settles, in the order of `Learner`; with max_staleness > 0 it claims ahead.

    `idle_s` and `step_ends_s` are by the event loop's clock: what it waited for groups, and the end of every learner step.
    """

    def __init__(self, config: Config, coordinator: Any, *, step_time: Delay, seed: int) -> None:
        self.config, self.coordinator = config, coordinator
        self.step = self.version = 0
        self.idle_s: list[float] = []
        self.step_ends_s: list[float] = []
        self._step_time, self._random = step_time, random.Random(seed)

    async def start(self) -> None:
        """From the newest checkpoint, whose weights get a number nobody has seen."""
        checkpoints = await self.coordinator.checkpoints.remote()
        self.step = checkpoints[0].learner_step if checkpoints else 0
        point = await self.coordinator.resume.remote(self.step)
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
        while (batch := await self.coordinator.claim.remote(version)) is None:
            await asyncio.sleep(CLAIM_POLL_S)
        return batch

    async def _finish_step(self, batch: Batch) -> None:
        self.step += 1
        trained_at = self.version
        await self._publish(trained_at + 1)
        await self.coordinator.settle.remote(batch.batch_id, self.step, {}, trained_at, {})
        if self.step % self.config.learner.checkpoint_every == 0:
            await self.coordinator.checkpoint.remote(self.step, f"checkpoints/{self.step}", self.version)

    async def _publish(self, version: int) -> None:
        record = VersionRecord(version=version, path=f"weights/{version}", digest="simulated", learner_step=self.step)
        await self.coordinator.publish.remote(record)
        self.version = version
