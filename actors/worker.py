"""The actor: plays leased groups with its own vLLM engine and commits them. It never waits for the
learner.

RolloutRunner.run       plays leased groups and follows the published weights (`player.py`)
_adapt           gives the engine as many requests as it can hold, and plays as many episodes as
keep it busy _watch_engine    asks the engine for a sign of life; one that does not answer ends the
worker, and another is started
_promise         says that the event loop is alive, and what the worker waits for
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from actors.inference.codepoint_tokenizer import character_form
from actors.inference.concurrency import ADAPT_EVERY_S, Concurrency
from actors.inference.openai_policy import ChatPolicy
from actors.inference.vllm_engine import EngineLostError
from actors.inference.vllm_policy import VLLMPolicy, load_ahead
from actors.inference.weight_sync import WeightSync
from actors.policy import Policy, ScriptedPolicy
from actors.prompting.images import load_image_form
from actors.prompting.prompt import PromptForm
from actors.prompting.tokenizer import load_tokenizer
from actors.rollout.attempts import Attempts
from actors.rollout.episode import EpisodeIds, EpisodeRules, play_episode
from actors.rollout.group import with_attempts
from actors.rollout.runner import LONG_S, RolloutRunner
from configs import Config, loaded
from coordinator import CoordinatorClient, Heartbeat, Lease, capture_output
from envs import EnvironmentPool, ProgramPool, is_program
from store import RunLayout, Trajectory

if TYPE_CHECKING:
    from actors.endpoint.server import Endpoint

PROMISE_EVERY_S = 0.5
LOOP_PATIENCE_S = 10.0  # an event loop that stands still for longer is not heard of any more
START_TIMEOUT_S = 1800.0  # of an engine, with a large model
ENGINE_QUESTION_S = 2.0  # between two questions whether it lives


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    name: str
    config: Config
    model_path: str  # Hugging Face directory the engine starts from: version 0


class Worker:
    """`await start()`, then `await run()` until `stop()`; a failure of any part is raised by `run`
    with its cause.
    """

    def __init__(self, setup: WorkerSetup, coordinator: ActorHandle) -> None:
        gc.disable()  # until it has started: a fifth of what imports take
        config = setup.config
        self.name, self.config, self.model_path = setup.name, config, setup.model_path
        self.coordinator = CoordinatorClient(coordinator, component=setup.name)
        self.layout = RunLayout.open(Path(config.run_dir))
        capture_output(self.layout.logs / f"{self.name}.log")
        self.engine_log = self.layout.logs / f"{self.name}-engine.log"
        # then there is no engine, tokenizer or torch
        self.chat = ChatPolicy(config) if config.endpoint.url else None
        self.has_engine = self.chat is None and not config.actors.scripted
        if self.has_engine:
            load_ahead(config.actors, self.engine_log)
        self.heart = Heartbeat(self.coordinator.heartbeat)
        if self.chat:
            self.form = character_form(config.prompt)
        else:
            tokenizer = load_tokenizer(setup.model_path, with_torch=not config.actors.scripted)
            self.form = PromptForm(
                tokenizer, config.prompt, images=load_image_form(setup.model_path)
            )
        env, log = config.env, self.layout.logs / f"{self.name}.log"
        self.environments: ProgramPool | EnvironmentPool
        if is_program(env.name):
            self.environments = ProgramPool(env.name, env.options, processes=env.processes, log=log)
        else:
            self.environments = EnvironmentPool(
                env.name,
                env.options,
                processes=env.processes,
                answer_timeout_s=env.answer_timeout_s,
                log=log,
            )
        self.endpoint: Endpoint | None = None  # of a ProgramPool
        self.engine: VLLMPolicy | None = None
        self.policy: Policy = self.chat or ScriptedPolicy(self.form.encode_answer)
        self.player = RolloutRunner(
            self.coordinator,
            config,
            play=self._play_member,
            weights=None,
            concurrency=Concurrency.of(config),
        )

    async def where(self) -> tuple[str, int]:
        """Host and pid of this process."""
        return socket.gethostname(), os.getpid()

    async def start(self) -> float:
        """Starts the engine; returns the seconds it took."""
        started = time.monotonic()
        self.heart.promise("the engine's start", waits_s=0.0, within_s=START_TIMEOUT_S)
        if self.has_engine:
            from transformers import GenerationConfig

            stops = loaded(
                "generation configuration",
                self.model_path,
                lambda: GenerationConfig.from_pretrained(self.model_path),
            ).eos_token_id
            self.engine = await VLLMPolicy.start(
                model_path=Path(self.model_path),
                dtype=self.config.model.dtype,
                actors=self.config.actors,
                gate=self.player.concurrency.gate,
                stop_token_ids=stops if isinstance(stops, list) else [stops],
                stop=self.config.prompt.stop,
                tokenizer=self.form.tokenizer,
                log_path=self.engine_log,
            )
            self.policy = self.engine
            self.player.weights = WeightSync(
                self.engine,
                self.layout,
                newest=self.coordinator.newest_version,
                record=self.coordinator.record,
                # In synchronous training no other engine has anything else to do.
                turn=self.coordinator.weight_update
                if self.config.max_staleness > 0
                else nullcontext,
                rendezvous=self.coordinator.rendezvous
                if self.config.learner.transfer == "broadcast"
                else None,
                max_staleness=self.config.max_staleness,
            )
        if isinstance(self.environments, ProgramPool):
            # here, as the driver and the coordinator import this file
            from actors.endpoint.server import Endpoint, EndpointSettings

            self.endpoint = Endpoint(
                self.policy, self.form.tokenizer, EndpointSettings.of(self.config)
            )
            await self.endpoint.start()
        gc.freeze()  # what was imported stays for good, and need not be looked through again
        gc.enable()
        return time.monotonic() - started

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            beside = [
                loops.create_task(loop())
                for loop in (self._promise, self._watch_engine, self._adapt)
            ]
            await self.player.run()
            for task in beside:
                task.cancel()

    async def stop(self) -> None:
        """Asks `run` to end. Finished episodes are committed, the others given up: their groups
        stay open for others.
        """
        self.player.stop()

    async def close(self) -> None:
        self.heart.close()
        self.environments.close()
        if self.endpoint is not None:
            await self.endpoint.close()
        if self.engine is not None:
            await self.engine.close()
        if self.chat is not None:
            await self.chat.close()

    async def _play_member(self, lease: Lease, member: int, attempts: Attempts) -> Trajectory:
        episode = f"{lease.task.env_name} task {lease.task.id!r}, member {member}"

        async def failed(why: str) -> None:
            attempts.fail(member)
            await self.coordinator.record("episode failed", f"{episode}: {why}")

        return await with_attempts(
            partial(self._play_episode, lease, member, attempts),
            attempts=self.config.env.attempts,
            failed=failed,
        )

    async def _play_episode(self, lease: Lease, member: int, attempts: Attempts) -> Trajectory:
        rules = EpisodeRules.of(self.config, temperature=lease.temperature)
        ids = EpisodeIds.of(lease.group.group_uid, member, progress=attempts.begin(member))
        if isinstance(self.environments, ProgramPool):
            from actors.endpoint.program_episode import play_program

            assert self.endpoint is not None
            return await play_program(
                self.environments, self.endpoint, task=lease.task, episode=ids, rules=rules
            )
        async with self.environments.environment() as environment:
            return await play_episode(
                environment, self.policy, self.form, task=lease.task, episode=ids, rules=rules
            )

    async def _watch_engine(self) -> None:
        patience_s = self.config.actors.engine_timeout_s
        while self.engine is not None:
            was_loading = self.engine.is_loading
            try:
                with self.player.waits.on("its engine"):
                    async with asyncio.timeout(START_TIMEOUT_S if was_loading else patience_s):
                        await self.engine.answers()
            except TimeoutError:
                # it answers nobody while it takes in weights
                if self.engine.is_loading and not was_loading:
                    continue
                raise EngineLostError(
                    f"the engine of {self.name} has not answered for {patience_s:g} s"
                ) from None
            await asyncio.sleep(ENGINE_QUESTION_S)

    async def _adapt(self) -> None:
        while self.engine is not None:
            await asyncio.sleep(ADAPT_EVERY_S)
            self.player.adapt(preempted=self.engine.preempted())

    async def _promise(self) -> None:
        while True:
            waiting = self.player.waiting() or self._slow_environment() or self._slow_server()
            reason, seconds = waiting or (None, 0.0)
            self.heart.promise(reason, waits_s=seconds, within_s=LOOP_PATIENCE_S)
            await asyncio.sleep(PROMISE_EVERY_S)

    def _slow_environment(self) -> tuple[str, float] | None:
        what, seconds = self.environments.oldest() or ("", 0.0)
        return (f"environment: {what}", seconds) if seconds > LONG_S else None

    def _slow_server(self) -> tuple[str, float] | None:
        what, seconds = (self.chat.waits.oldest() if self.chat else None) or ("", 0.0)
        return (what, seconds) if seconds > LONG_S else None


WorkerActor = ray.remote(Worker)
