"""The actor: plays leased groups with its own vLLM engine and commits them. It never waits for the learner.

_play_groups     consumes leases, starts one task per group
                 waits for "admission" when it has nothing to play (the learner unblocks it by training)
_play_group      plays the group's episodes at once, writes one segment, commits it
                 waits for its engine and its environments
_follow_weights  consumes published versions, looking for news many times a second; loads them under the running requests
_beat            says that the worker is alive, and what it waits for
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from transformers import AutoTokenizer, GenerationConfig

from actors.coordinator import Lease
from actors.policy import Policy, ScriptedPolicy
from actors.prompt import PromptForm
from actors.rollout import EpisodeIds, EpisodeRules, play_episode
from actors.served_weights import ServedWeights
from actors.vllm_policy import VLLMPolicy
from configs import Config
from envs import EnvironmentPool
from store import RunLayout, Trajectory, VersionRecord, capture_output, write_segment

POLL_S = 0.1  # between two requests for a lease while none is free
HEARTBEAT_S = 0.5
VERSION_POLL_S = 0.05  # how soon newer weights are noticed, with few workers
VERSION_POLLS_PER_S = 200.0  # of all workers together: the coordinator has more to do than to answer them
COORDINATOR_TIMEOUT_S = 60.0


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
        self.form = PromptForm(
            AutoTokenizer.from_pretrained(setup.model_path),
            template=config.prompt.template,
            history_length=config.prompt.history_length,
            max_prompt_tokens=config.prompt.max_prompt_tokens,
        )
        self.environments = EnvironmentPool(config.env.name, config.env.options, processes=config.env.processes)
        self.engine: VLLMPolicy | None = None
        self.policy: Policy = ScriptedPolicy(self.form.encode_answer)
        self.weights: ServedWeights | None = None  # of the engine
        self.waiting_on: str | None = None
        self.stopping = False

    async def capture_output(self, name: str) -> None:
        capture_output(self.layout.logs / f"{name}.log")

    async def start(self) -> float:
        """Starts the engine; returns the seconds it took."""
        started = time.monotonic()
        if not self.config.actors.scripted:
            stops = GenerationConfig.from_pretrained(self.model_path).eos_token_id
            self.engine = await VLLMPolicy.start(
                model_path=Path(self.model_path),
                dtype=self.config.model.dtype,
                actors=self.config.actors,
                max_requests=self.config.actors.groups_in_flight * self.config.algorithm.group_size,
                stop_token_ids=stops if isinstance(stops, list) else [stops],
                log_path=self.layout.logs / f"{self.name}-engine.log",
            )
            self.policy = self.engine
            self.weights = ServedWeights(
                self.engine,
                self.layout,
                newest=self._newest_version,
                record=self._record,
                max_staleness=self.config.max_staleness,
            )
        return time.monotonic() - started

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._play_groups(loops))
            loops.create_task(self._follow_weights())
            loops.create_task(self._beat())

    async def stop(self) -> None:
        """Asks `run` to end; episodes that are still being played are given up, their groups stay open for a resume."""
        self.stopping = True

    async def close(self) -> None:
        self.environments.close()
        if self.engine is not None:
            await self.engine.close()

    async def _play_groups(self, loops: asyncio.TaskGroup) -> None:
        playing: dict[asyncio.Task[None], int] = {}  # task of a group -> its episodes
        room = self.config.actors.groups_in_flight * self.config.algorithm.group_size
        while not self.stopping:
            if sum(playing.values()) >= room:  # busy, not waiting: the engine has all it was meant to have
                await asyncio.wait(playing, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            elif (lease := await self._ask(self.coordinator.lease.remote(self.name))) is None:
                self.waiting_on = None if playing else "admission"
                await asyncio.sleep(POLL_S)
            else:
                self.waiting_on = None
                if self.weights is not None:
                    await self.weights.serve(lease.version)
                playing[loops.create_task(self._play_group(lease))] = len(lease.group.missing)
            playing = {task: episodes for task, episodes in playing.items() if not task.done()}
        for task in playing:
            task.cancel()

    async def _play_group(self, lease: Lease) -> None:
        members = lease.group.missing
        trajectories = await asyncio.gather(*(self._play_episode(lease, member) for member in members))
        segment = await asyncio.to_thread(write_segment, self.layout, trajectories, worker=self.name, epoch=lease.epoch)
        await self._ask(self.coordinator.commit.remote(segment, lease.epoch))

    async def _play_episode(self, lease: Lease, member: int) -> Trajectory:
        rules = EpisodeRules(
            max_steps=self.config.env.max_steps,
            win_reward=self.config.env.win_reward,
            temperature=lease.temperature,
            admissible_only=self.config.prompt.admissible_only,
        )
        ids = EpisodeIds(group_uid=lease.group.group_uid, traj_uid=lease.group.traj_uids[member], member=member)
        async with self.environments.environment() as environment:
            return await play_episode(environment, self.policy, self.form, task=lease.task, episode=ids, rules=rules)

    async def _follow_weights(self) -> None:
        pause_s = max(VERSION_POLL_S, self.config.actors.workers / VERSION_POLLS_PER_S)
        while not self.stopping and self.weights is not None:
            newest = await self._newest_version()
            if newest is not None:
                await self.weights.serve(newest)
            await asyncio.sleep(pause_s)

    async def _beat(self) -> None:
        while not self.stopping:
            await self._ask(self.coordinator.heartbeat.remote(self.name, self.waiting_on))
            await asyncio.sleep(HEARTBEAT_S)

    async def _newest_version(self) -> VersionRecord | None:
        newest: VersionRecord | None = await self._ask(self.coordinator.newest_version.remote())
        return newest

    async def _record(self, what: str, detail: str) -> None:
        await self._ask(self.coordinator.record_event.remote(self.name, what, detail))

    async def _ask(self, call: Any) -> Any:
        """The coordinator's answer. Raises TimeoutError: it answers in milliseconds, or it is gone."""
        return await asyncio.wait_for(call, timeout=COORDINATOR_TIMEOUT_S)


WorkerActor = ray.remote(Worker)
