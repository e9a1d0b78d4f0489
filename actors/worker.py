"""The actor: plays leased groups with its own vLLM engine and commits them. It never waits for the learner.

_play_groups     consumes leases, starts one task per group
                 waits for "admission" when it has nothing to play (the learner unblocks it by training)
_play_group      plays the group's episodes at once and commits them (`group.py`)
                 waits for its engine and its environments; each episode has deadlines
_follow_weights  consumes published versions, looking for news many times a second; gives up what they make too old, and
                 loads them under the running requests, when it is this worker's turn
_watch_engine    asks the engine for a sign of life; one that does not answer ends the worker, and another is started
_promise         says that the event loop is alive, and what the worker waits for
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from transformers import AutoTokenizer, GenerationConfig

from actors.endpoint import Endpoint, EndpointSettings
from actors.group import EpisodeFailed, play_group, with_attempts
from actors.plays import Lease
from actors.policy import Policy, ScriptedPolicy
from actors.program import play_program
from actors.prompt import PromptForm
from actors.rollout import EpisodeIds, EpisodeRules, play_episode
from actors.served_weights import ServedWeights
from actors.vllm_policy import EngineLostError, VLLMPolicy
from configs import Config
from envs import EnvironmentPool, ProgramPool, is_program
from store import Heartbeat, RunLayout, Trajectory, VersionRecord, capture_output, write_segment

POLL_S = 0.1  # between two requests for a lease while none is free
PROMISE_EVERY_S = 0.5
LOOP_PATIENCE_S = 10.0  # an event loop that stands still for longer is not heard of any more
START_TIMEOUT_S = 1800.0  # of an engine, with a large model
ENGINE_QUESTION_S = 2.0  # between two questions whether it lives
VERSION_POLL_S = 0.05  # how soon newer weights are noticed, with few workers
VERSION_POLLS_PER_S = 200.0  # of all workers together: the coordinator has more to do than to answer them
COORDINATOR_TIMEOUT_S = 60.0
TURN_POLL_S = 0.05
TURN_PATIENCE_S = 60.0  # then weights are changed out of turn


class CoordinatorSilent(RuntimeError):
    """The coordinator did not answer; without it nothing can be leased or committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    name: str
    config: Config
    model_path: str  # Hugging Face directory the engine starts from: version 0


class Worker:
    """`await start()`, then `await run()` until `stop()`; a failure of any part is raised by `run` with its cause."""

    def __init__(self, setup: WorkerSetup, coordinator: ActorHandle) -> None:
        config = setup.config
        self.name, self.config, self.coordinator = setup.name, config, coordinator
        self.model_path = setup.model_path
        self.layout = RunLayout.open(Path(config.run_dir))
        self.heart = Heartbeat(lambda waiting_on: coordinator.heartbeat.remote(setup.name, waiting_on))
        self.form = PromptForm(AutoTokenizer.from_pretrained(setup.model_path), config.prompt)
        env = config.env
        self.environments = (
            ProgramPool(env.name, env.options, processes=env.processes)
            if is_program(env.name)
            else EnvironmentPool(env.name, env.options, processes=env.processes, answer_timeout_s=env.answer_timeout_s)
        )
        self.endpoint: Endpoint | None = None  # of a ProgramPool
        self.engine: VLLMPolicy | None = None
        self.policy: Policy = ScriptedPolicy(self.form.encode_answer)
        self.weights: ServedWeights | None = None  # of the engine
        self.playing: dict[asyncio.Task[None], Lease] = {}
        self.too_old: dict[bytes, str] = {}  # groups that are being given up, and why
        self.waiting_on: str | None = None
        self.stopping = False

    async def capture_output(self, name: str) -> tuple[str, int]:
        """From now on prints go to the log `name`. Where this process is: host and pid."""
        capture_output(self.layout.logs / f"{name}.log")
        return socket.gethostname(), os.getpid()

    async def start(self) -> float:
        """Starts the engine; returns the seconds it took."""
        started = time.monotonic()
        self.heart.promise("the engine's start", within_s=START_TIMEOUT_S)
        if not self.config.actors.scripted:
            stops = GenerationConfig.from_pretrained(self.model_path).eos_token_id
            self.engine = await VLLMPolicy.start(
                model_path=Path(self.model_path),
                dtype=self.config.model.dtype,
                actors=self.config.actors,
                max_requests=self.config.actors.groups_in_flight * self.config.algorithm.group_size,
                stop_token_ids=stops if isinstance(stops, list) else [stops],
                stop=self.config.prompt.stop,
                tokenizer=self.form.tokenizer,
                log_path=self.layout.logs / f"{self.name}-engine.log",
            )
            self.policy = self.engine
            self.weights = ServedWeights(
                self.engine,
                self.layout,
                newest=self._newest_version,
                record=self._record,
                turn=self._turn,
                max_staleness=self.config.max_staleness,
            )
        if isinstance(self.environments, ProgramPool):
            self.endpoint = Endpoint(self.policy, self.form.tokenizer, EndpointSettings.of(self.config))
            await self.endpoint.start()
        return time.monotonic() - started

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._promise())
            loops.create_task(self._play_groups(loops))
            loops.create_task(self._follow_weights())
            loops.create_task(self._watch_engine())

    async def stop(self) -> None:
        """Asks `run` to end. Finished episodes are committed, the others given up: their groups stay open for others."""
        self.stopping = True

    async def close(self) -> None:
        self.heart.close()
        self.environments.close()
        if self.endpoint is not None:
            await self.endpoint.close()
        if self.engine is not None:
            await self.engine.close()

    async def _play_groups(self, loops: asyncio.TaskGroup) -> None:
        room = self.config.actors.groups_in_flight * self.config.algorithm.group_size
        while not self.stopping:
            if sum(len(lease.group.missing) for lease in self.playing.values()) >= room:
                # busy, not waiting: the engine has all it was meant to have
                await asyncio.wait(self.playing, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            elif (lease := await self._ask(self.coordinator.lease.remote(self.name))) is None:
                self.waiting_on = None if self.playing else "admission"
                await asyncio.sleep(POLL_S)
            else:
                self.waiting_on = None
                if self.weights is not None:
                    await self.weights.serve(lease.version)
                self.playing[loops.create_task(self._play_group(lease))] = lease
            self.playing = {task: lease for task, lease in self.playing.items() if not task.done()}
        for task in self.playing:
            task.cancel()

    async def _play_group(self, lease: Lease) -> None:
        group_uid = lease.group.group_uid
        try:
            await play_group(
                lease.group.missing, play=partial(self._play_member, lease), commit=partial(self._commit, lease.epoch)
            )
        except EpisodeFailed as error:
            why = f"task {lease.task.id!r}: {error}"
            await self._ask(self.coordinator.abandon.remote(self.name, group_uid, why))
        except asyncio.CancelledError:
            if group_uid not in self.too_old:
                raise
            await self._ask(self.coordinator.give_up.remote(self.name, group_uid, self.too_old.pop(group_uid)))

    async def _play_member(self, lease: Lease, member: int) -> Trajectory:
        episode = f"{lease.task.env_name} task {lease.task.id!r}, member {member}"
        return await with_attempts(
            partial(self._play_episode, lease, member),
            attempts=self.config.env.attempts,
            failed=lambda why: self._record("episode failed", f"{episode}: {why}"),
        )

    async def _play_episode(self, lease: Lease, member: int) -> Trajectory:
        rules = EpisodeRules.of(self.config, temperature=lease.temperature)
        ids = EpisodeIds(group_uid=lease.group.group_uid, traj_uid=lease.group.traj_uids[member], member=member)
        if isinstance(self.environments, ProgramPool):
            assert self.endpoint is not None
            return await play_program(self.environments, self.endpoint, task=lease.task, episode=ids, rules=rules)
        async with self.environments.environment() as environment:
            return await play_episode(environment, self.policy, self.form, task=lease.task, episode=ids, rules=rules)

    async def _commit(self, epoch: int, trajectories: Sequence[Trajectory]) -> None:
        segment = await asyncio.to_thread(write_segment, self.layout, trajectories, worker=self.name, epoch=epoch)
        await self._ask(self.coordinator.commit.remote(segment, epoch))

    async def _follow_weights(self) -> None:
        pause_s = max(VERSION_POLL_S, self.config.actors.workers / VERSION_POLLS_PER_S)
        while not self.stopping and self.weights is not None:
            newest = await self._newest_version()
            if newest is not None:
                self._give_up_too_old(newest.version)
                await self.weights.serve(newest)
            await asyncio.sleep(pause_s)

    def _give_up_too_old(self, newest: int) -> None:
        """Groups that no learner step can train on any more make room, before their requests are taken along."""
        for task, lease in self.playing.items():
            age = newest - lease.version.version
            if lease.group.split == "train" and age > self.config.max_staleness and lease.group.group_uid not in self.too_old:
                self.too_old[lease.group.group_uid] = (
                    f"still played at version {newest}, begun at {lease.version.version}: "
                    f"more than max_staleness={self.config.max_staleness} apart"
                )
                task.cancel()

    async def _watch_engine(self) -> None:
        patience_s = self.config.actors.engine_timeout_s
        while not self.stopping and self.engine is not None:
            try:
                await asyncio.wait_for(self.engine.answers(), timeout=patience_s)
            except TimeoutError:
                raise EngineLostError(f"the engine of {self.name} has not answered for {patience_s:g} s") from None
            await asyncio.sleep(ENGINE_QUESTION_S)

    async def _promise(self) -> None:
        while not self.stopping:
            self.heart.promise(self.waiting_on, within_s=LOOP_PATIENCE_S)
            await asyncio.sleep(PROMISE_EVERY_S)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Engines change their weights one after the other. In synchronous training none has anything else to do."""
        in_turn = self.config.max_staleness > 0
        deadline = time.monotonic() + TURN_PATIENCE_S
        while in_turn and not await self._ask(self.coordinator.take_turn.remote(self.name)) and time.monotonic() < deadline:
            await asyncio.sleep(TURN_POLL_S)
        try:
            yield
        finally:
            if in_turn:
                await self._ask(self.coordinator.end_turn.remote(self.name))

    async def _newest_version(self) -> VersionRecord | None:
        newest: VersionRecord | None = await self._ask(self.coordinator.newest_version.remote())
        return newest

    async def _record(self, what: str, detail: str) -> None:
        await self._ask(self.coordinator.record_event.remote(self.name, what, detail))

    async def _ask(self, call: Any) -> Any:
        """The coordinator's answer. Raises CoordinatorSilent: it answers in milliseconds, or it is gone."""
        try:
            return await asyncio.wait_for(call, timeout=COORDINATOR_TIMEOUT_S)
        except TimeoutError:
            raise CoordinatorSilent(f"the coordinator has not answered {self.name} for {COORDINATOR_TIMEOUT_S:g} s") from None


WorkerActor = ray.remote(Worker)
