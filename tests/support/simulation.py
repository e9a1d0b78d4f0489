"""Simulate workers and a learner that take time instead of computing, for benchmarks and tests.

    handle = LocalHandle(Coordinator(config, learns=True), delay=None, seed=0)   # or a Ray handle
    worker = SimulatedWorker(setup, handle)
    learner = SimulatedLearner(config, handle, step_time=Delay(median_s=0.5, sigma=0.1), seed=0)
    await learner.start(); await learner.run()

Coordinator, catalog, files and `RolloutRunner` are real. Thousands of workers fit into one process:
each is a few tasks of its event loop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors.concurrency import Concurrency
from actors.inference.codepoint_tokenizer import codepoint_form
from actors.policy import Completion, Prompt, ScriptedPolicy
from actors.prompting.prompt import PromptForm
from actors.rollout.committer import Committer
from actors.rollout.episode import (
    AsyncEnvironment,
    AttemptProgress,
    EpisodeContext,
    EpisodeRules,
    play_episode,
)
from actors.rollout.runner import CALLS_PER_S, RolloutRunner
from actors.rollout.step_records import EpisodeIds
from configs import Config, most_workers
from coordinator import CoordinatorClient, Lease, Settlement
from envs import Environment, Observation, PendingOperations, Task, Transition
from store import Batch, CheckpointRecord, RunLayout, Trajectory, Unfinished, VersionRecord

HEARTBEAT_S = 1.0
CLAIM_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """A log-normal time: exp(sigma * z) * median_s, with z standard normal."""

    median_s: float
    sigma: float

    def draw(self, source: random.Random) -> float:
        return self.median_s * math.exp(source.gauss(0.0, self.sigma))


class LocalHandle:
    """Imitate the Ray handle of an object in this process: `await handle.lease.remote("w0")`.

    A message takes `delay` to arrive, and as much for its answer. It arrives also if its sender is
    gone by then. `target` may be replaced, as by a restart. Its methods are plain functions.
    """

    def __init__(self, target: object, *, delay: Delay | None, seed: int) -> None:
        self.target, self._delay, self._random = target, delay, random.Random(seed)

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given, **named: self._send(name, given, named))

    def _send(
        self, name: str, given: tuple[Any, ...], named: dict[str, Any]
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            try:
                result, deliver = getattr(self.target, name)(*given, **named), answer.set_result
            except Exception as error:  # noqa: BLE001  Ray would pass it on too
                result, deliver = error, answer.set_exception
            loop.call_later(self._travel_s(), lambda: None if answer.done() else deliver(result))

        loop.call_later(self._travel_s(), arrive)
        return answer

    def _travel_s(self) -> float:
        return 0.0 if self._delay is None else self._delay.draw(self._random)


class SimulatedPolicy:
    """A ScriptedPolicy with delays and a version, which may change under a running request.

    It is its own weights: `sync` takes the time `loading`.
    """

    def __init__(
        self, form: PromptForm, *, generation: Delay, loading: Delay, source: random.Random
    ) -> None:
        self.version = -1  # no weights yet
        self._scripted = ScriptedPolicy(form.encode_answer)
        self._generation, self._loading, self._random = generation, loading, source
        self._one_load = asyncio.Lock()

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        first = self.version
        await asyncio.sleep(self._generation.draw(self._random))
        completion = await self._scripted.generate(prompt, seed=seed, temperature=temperature)
        return replace(completion, version_min=first, version_max=self.version)

    async def sync(self, version: VersionRecord) -> None:
        async with self._one_load:
            if version.version > self.version:
                await asyncio.sleep(self._loading.draw(self._random))
                self.version = version.version


class DelayedEnvironment:
    """Delay each answer of an environment in this process."""

    def __init__(self, environment: Environment, *, delay: Delay, source: random.Random) -> None:
        self._environment, self._delay, self._random = environment, delay, source

    async def reset(self, task: Task) -> Observation:
        await asyncio.sleep(self._delay.draw(self._random))
        return self._environment.reset(task)

    async def step(self, action: str) -> Transition:
        await asyncio.sleep(self._delay.draw(self._random))
        return self._environment.step(action)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSetup:
    """`environment` is called for every episode, with a source of random numbers of its own."""

    name: str
    config: Config
    seed: int
    environment: Callable[[random.Random], AsyncEnvironment]
    generation: Delay  # of every answer of the policy
    loading: Delay  # of new weights


class KillableCommitter(Committer):
    """Write and report nothing after death."""

    is_dead = False

    async def commit(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        if self.is_dead:
            raise asyncio.CancelledError
        await super().commit(lease, trajectories)

    async def keep_extra(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        if self.is_dead:
            raise asyncio.CancelledError
        await super().keep_extra(lease, trajectories)

    async def record_unfinished(self, lease: Lease, episodes: Sequence[Unfinished]) -> None:
        if not self.is_dead:
            await super().record_unfinished(lease, episodes)


class SimulatedEpisodes:
    """Play every episode in an environment of its own."""

    def __init__(
        self,
        setup: SimulatedSetup,
        policy: SimulatedPolicy,
        form: PromptForm,
        *,
        source: random.Random,
    ) -> None:
        self._setup, self._policy, self._form, self._random = setup, policy, form, source

    async def start(self) -> None: ...

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        environment = self._setup.environment(random.Random(self._random.getrandbits(64)))
        return await play_episode(
            EpisodeContext(
                environment=environment,
                policy=self._policy,
                form=self._form,
                task=task,
                ids=ids,
                rules=rules,
            ),
            progress=progress,
        )

    def waiting(self) -> tuple[str, float] | None:
        return None

    async def close(self) -> None: ...


class SimulatedWorker:
    """Call `await run()` until `stop()`. `kill` is a death without warning.

    A killed worker loses what it has not committed, and reports nothing.
    """

    def __init__(self, setup: SimulatedSetup, coordinator: Any) -> None:
        config, source = setup.config, random.Random(f"{setup.seed}/{setup.name}")
        form = codepoint_form(config.prompt)
        policy = SimulatedPolicy(
            form, generation=setup.generation, loading=setup.loading, source=source
        )
        pending = PendingOperations()
        self.name, self.config, self._random = setup.name, config, source
        self.coordinator = CoordinatorClient(coordinator, component=setup.name)
        self.committer = KillableCommitter(
            self.coordinator, RunLayout.open(Path(config.run_dir)), pending=pending
        )
        self.runner = RolloutRunner(
            self.coordinator,
            config,
            committer=self.committer,
            episodes=SimulatedEpisodes(setup, policy, form, source=source),
            weights=policy,
            concurrency=Concurrency.of(config),
            pending=pending,
        )
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._running = asyncio.ensure_future(self._run())
        try:
            await self._running
        except asyncio.CancelledError:
            if not self.committer.is_dead:
                raise

    async def stop(self) -> None:
        """Make `run` end; see `RolloutRunner.stop`."""
        self.runner.stop()

    def kill(self) -> None:
        self.committer.is_dead = True
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            heartbeats = loops.create_task(self._send_heartbeats())
            await self.runner.run()
            heartbeats.cancel()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats as `Heartbeat` does, but fewer, for thousands of workers."""
        every_s = max(HEARTBEAT_S, most_workers(self.config.actors) / CALLS_PER_S)
        while True:
            waiting_on, waits_s = self.runner.waiting() or (None, 0.0)
            await self.coordinator.heartbeat(waiting_on, waits_s)
            await asyncio.sleep(every_s * self._random.uniform(0.5, 1.5))


class SimulatedLearner:
    """Claim, sleep the step time, publish and settle, in the order of `Learner`.

    With max_staleness > 0 it claims the next batch meanwhile. `idle_s` is the time it waited for
    each batch, and `step_ends_s` the end of each learner step, by the event loop's clock.
    """

    def __init__(self, config: Config, coordinator: Any, *, step_time: Delay, seed: int) -> None:
        self.config = config
        self.coordinator = CoordinatorClient(coordinator, component="learner")
        self.step = self.version = 0
        self.idle_s: list[float] = []
        self.step_ends_s: list[float] = []
        self._step_time, self._random = step_time, random.Random(seed)

    async def start(self) -> None:
        """Begin from the newest checkpoint; publish its weights under an unused number."""
        checkpoints = await self.coordinator.checkpoints()
        self.step = checkpoints[0].learner_step if checkpoints else 0
        point = await self.coordinator.resume(self.step)
        await self._publish(0 if point.latest_version is None else point.latest_version + 1)

    async def run(self) -> int:
        """Run until `config.learner.steps`; return the learner step at the end."""
        clock, next_batch = asyncio.get_running_loop().time, None
        while self.step < self.config.learner.steps:
            began_s = clock()
            batch = await (next_batch or self._claim(self.version))
            self.idle_s.append(clock() - began_s)
            ahead = self.config.max_staleness > 0 and self.step + 1 < self.config.learner.steps
            next_batch = asyncio.ensure_future(self._claim(self.version + 1)) if ahead else None
            try:
                await asyncio.sleep(self._step_time.draw(self._random))
                await self._finish_step(batch)
            except BaseException:
                if next_batch is not None:
                    next_batch.cancel()
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
            Settlement(
                batch_id=batch.batch_id,
                learner_step=self.step,
                filtered={},
                version_in=trained_at,
                metrics={},
                values={},
            )
        )
        if self.step % self.config.learner.checkpoint_every == 0:
            lsn = await self.coordinator.export_now()
            record = CheckpointRecord(
                learner_step=self.step,
                path=f"checkpoints/step{self.step}",
                version=self.version,
            )
            await self.coordinator.checkpoint(record, lsn=lsn)

    async def _publish(self, version: int) -> None:
        record = VersionRecord(
            version=version, path=f"weights/v{version}", digest="simulated", learner_step=self.step
        )
        await self.coordinator.publish(record)
        self.version = version
