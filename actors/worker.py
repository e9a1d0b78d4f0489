"""Run the actor: a Ray process that plays leased groups with its own policy and commits them.

The loop is `RolloutRunner.run`; it never waits for the learner while it has something to play.
Beside it run small loops:

_send_heartbeats   says that the event loop is alive, and what the worker waits for
_watch_engine      calls the engine; an engine that does not answer ends the worker
_watch_episodes    looks for an environment that cannot be cancelled, which ends the worker too
_adapt             adapts requests and groups to the engine's load
_count_answers     reports how many answers of environments were remembered
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.concurrency import ADAPT_EVERY_S, Concurrency, RequestGate
from actors.inference.codepoint_tokenizer import codepoint_form
from actors.inference.engine_process import preload_vllm
from actors.inference.openai_policy import ChatPolicy
from actors.inference.vllm_engine import prometheus_figures
from actors.inference.vllm_policy import VLLMPolicy, load_stop_token_ids
from actors.inference.weight_sync import WeightSync
from actors.policy import EngineLostError, Policy, ScriptedPolicy
from actors.prompting.chat_template import load_tokenizer
from actors.prompting.images import load_image_form
from actors.prompting.prompt import PromptForm
from actors.rollout.by_environment import EpisodesByEnvironment
from actors.rollout.committer import Committer
from actors.rollout.episode import EnvironmentEpisodes, EpisodeRunner
from actors.rollout.runner import REPORT_AFTER_S, RolloutRunner
from configs import Config, environments, holds_secrets, max_model_tokens, serves_adapters
from coordinator import CoordinatorClient, Heartbeat, capture_output, heartbeat_every_s
from envs import (
    EnvironmentPool,
    EnvironmentStuckError,
    PendingOperations,
    ProgramPool,
    is_program,
    write_log,
)
from store import RunLayout, keep_compiled_code, keep_private, local_model

HEARTBEAT_EVERY_S = 0.5  # between two reports to the thread that sends them
LOOP_TIMEOUT_S = 10.0  # an event loop that stands still for longer counts as silent
START_TIMEOUT_S = 1800.0  # for an engine with a large model, and for its weights
ENGINE_CALL_EVERY_S = 2.0  # between two checks that the engine answers
COUNT_EVERY_S = 5.0  # how often the answers of environments are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    name: str
    run_id: str  # another run in `config.run_dir` is refused: the worker's node may have one
    config: Config
    model_path: str  # Hugging Face directory the engine starts from: version 0


class Worker:
    """Call `await start()`, then `await run()` until `stop()`, then `await close()`."""

    def __init__(self, setup: WorkerSetup, coordinator: ActorHandle) -> None:
        # Until the worker has started: collections take a fifth of the time of its imports.
        gc.disable()
        keep_compiled_code()
        config = setup.config
        if holds_secrets(config):
            keep_private(Path(config.run_dir))
        layout = RunLayout.join(
            Path(config.run_dir), storage_uri=config.store.uri, run_id=setup.run_id
        )
        setup = replace(setup, model_path=local_model(layout, setup.model_path))
        log = layout.logs / f"{setup.name}.log"
        capture_output(log)
        self.name, self.config = setup.name, config
        self.coordinator = CoordinatorClient(coordinator, component=setup.name)
        self.pending = PendingOperations()
        self.heartbeat = Heartbeat(self.coordinator.heartbeat, every_s=heartbeat_every_s(config))
        concurrency = Concurrency.of(config)
        self.engine: VLLMPolicy | None = None  # set below if this worker has one
        self.server: ChatPolicy | None = None  # set below if the model is behind a URL
        forms: dict[str, PromptForm]  # by environment, as the policies
        policies: Mapping[str, Policy]
        if config.endpoint.url:  # the worker then needs no tokenizer and no torch
            forms = {name: codepoint_form(own.prompt) for name, own in environments(config).items()}
            self.server = ChatPolicy(config)
            policies = dict.fromkeys(forms, self.server)
        elif config.actors.scripted:
            forms = _load_forms(setup, with_torch=False)
            max_tokens = config.actors.max_response_tokens
            policies = {
                name: ScriptedPolicy(form.encode_answer, max_tokens=max_tokens)
                for name, form in forms.items()
            }
        else:
            engine_log = layout.logs / f"{setup.name}-engine.log"
            # while this process loads the tokenizer
            preload_vllm(config.actors, Path(setup.model_path), engine_log)
            forms = _load_forms(setup, with_torch=True)
            tokenizer = next(iter(forms.values())).tokenizer
            self.engine = _engine(
                setup, tokenizer=tokenizer, gate=concurrency.gate, log_path=engine_log
            )
            policies = dict.fromkeys(forms, self.engine)
        self.episodes = _episodes(config, policies=policies, forms=forms, log=log)
        self.runner = RolloutRunner(
            self.coordinator,
            config,
            committer=Committer(self.coordinator, layout, pending=self.pending),
            episodes=self.episodes,
            weights=self._weight_sync(layout),
            concurrency=concurrency,
            pending=self.pending,
        )

    async def where(self) -> tuple[str, int]:
        """Return host and pid of this process."""
        return socket.gethostname(), os.getpid()

    async def start(self) -> float:
        """Start the engine; return the seconds it took."""
        started = time.monotonic()
        self.heartbeat.report("the engine's start", waits_s=0.0, within_s=START_TIMEOUT_S)
        if self.engine is not None:
            await self.engine.start()
        await self.episodes.start()
        gc.freeze()  # imported objects stay for good, so later collections skip them
        gc.enable()
        return time.monotonic() - started

    async def run(self) -> None:
        """Lease, play and commit groups until `stop`. Raises the first error of any loop."""
        async with asyncio.TaskGroup() as loops:
            beside = [loops.create_task(self._send_heartbeats())]
            beside.append(loops.create_task(self._watch_episodes()))
            beside.append(loops.create_task(self._count_answers()))
            if self.engine is not None:
                beside.append(loops.create_task(self._watch_engine(self.engine)))
                beside.append(loops.create_task(self._adapt(self.engine)))
            await self.runner.run()
            for task in beside:
                task.cancel()

    async def engine_metrics(self) -> list[Any]:
        """Return vLLM's own figures, as Prometheus names them. An empty list without an engine."""
        return prometheus_figures() if self.engine is not None else []

    async def stop(self) -> None:
        """Make `run` end; see `RolloutRunner.stop`."""
        self.runner.stop()

    async def leave(self, *, within_s: float) -> None:
        """Make `run` end after `within_s` at the latest; see `RolloutRunner.leave`."""
        self.runner.leave(within_s=within_s)

    async def close(self) -> None:
        self.heartbeat.close()
        await self.episodes.close()
        if self.engine is not None:
            await self.engine.close()
        if self.server is not None:
            await self.server.close()

    async def _send_heartbeats(self) -> None:
        while True:
            reason, seconds = self._waiting() or (None, 0.0)
            self.heartbeat.report(reason, waits_s=seconds, within_s=LOOP_TIMEOUT_S)
            await asyncio.sleep(HEARTBEAT_EVERY_S)

    def _waiting(self) -> tuple[str, float] | None:
        """Return the wait to report, and its seconds; None while working."""
        if waiting := self.runner.waiting():
            return waiting
        operation, seconds = self.episodes.waiting() or ("", 0.0)
        if seconds > REPORT_AFTER_S:
            return f"environment: {operation}", seconds
        operation, seconds = (self.server.waits.oldest() if self.server else None) or ("", 0.0)
        return (operation, seconds) if seconds > REPORT_AFTER_S else None

    async def _watch_engine(self, engine: VLLMPolicy) -> None:
        timeout_s = self.config.actors.engine_timeout_s
        while True:
            was_loading = engine.is_loading
            try:
                with self.pending.on("its engine"):
                    async with asyncio.timeout(START_TIMEOUT_S if was_loading else timeout_s):
                        await engine.answers()
            except TimeoutError:
                # An engine answers nobody while it loads weights.
                if engine.is_loading and not was_loading:
                    continue
                raise EngineLostError(
                    f"the engine of {self.name} has not answered for {timeout_s:g} s"
                ) from None
            await asyncio.sleep(ENGINE_CALL_EVERY_S)

    async def _watch_episodes(self) -> None:
        """Raise EnvironmentStuckError for a call that goes on though it was cancelled.

        This process then goes silent, as its other loops end and that call does not. So it is
        killed and started again, and the task is found as one that keeps killing workers.
        """
        while (call := self.episodes.stuck()) is None:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
        error = EnvironmentStuckError(
            f"{call} goes on though it was cancelled after env.answer_timeout_s; let "
            "asyncio.CancelledError through"
        )
        write_log(None, f"{self.name}: {error}")
        raise error

    async def _adapt(self, engine: VLLMPolicy) -> None:
        while True:
            await asyncio.sleep(ADAPT_EVERY_S)
            self.runner.adapt(preempted=await engine.preempted())

    async def _count_answers(self) -> None:
        n_before = remembered_before = 0
        while True:
            await asyncio.sleep(COUNT_EVERY_S)
            n_answers, n_remembered = self.episodes.answers()
            if n_answers > n_before:
                await self.coordinator.count_answers(
                    n_answers - n_before, n_remembered - remembered_before
                )
            n_before, remembered_before = n_answers, n_remembered

    def _weight_sync(self, layout: RunLayout) -> WeightSync | None:
        if self.engine is None:
            return None
        return WeightSync(
            self.engine,
            layout,
            self.coordinator,
            # Synchronous training pauses all engines anyway.
            limits_loads=self.config.max_staleness > 0,
            is_broadcast=self.config.learner.transfer == "broadcast",
            max_staleness=self.config.max_staleness,
        )


def _load_forms(setup: WorkerSetup, *, with_torch: bool) -> dict[str, PromptForm]:
    """Return the form of each environment's prompts, by the environment's name."""
    tokenizer = load_tokenizer(setup.model_path, with_torch=with_torch)
    images = load_image_form(setup.model_path)
    return {
        name: PromptForm(tokenizer, own.prompt, images=images)
        for name, own in environments(setup.config).items()
    }


def _engine(
    setup: WorkerSetup, *, tokenizer: object, gate: RequestGate, log_path: Path
) -> VLLMPolicy:
    """Return the worker's engine, which `start` starts. One serves all its environments."""
    config = setup.config
    return VLLMPolicy(
        model_path=Path(setup.model_path),
        dtype=config.model.dtype,
        float32_head=config.model.float32_head,
        lora=config.model if serves_adapters(config.model) else None,
        actors=config.actors,
        max_model_tokens=max_model_tokens(config),
        gate=gate,
        stop_token_ids=load_stop_token_ids(setup.model_path),
        stop=config.prompt.stop,
        tokenizer=tokenizer,
        log_path=log_path,
        statistics=bool(config.metrics_port),
    )


def _episodes(
    config: Config, *, policies: Mapping[str, Policy], forms: Mapping[str, PromptForm], log: Path
) -> EpisodeRunner:
    """Return the player of episodes, with a policy and a form of prompts for each environment."""
    runners = {
        name: _episode_runner(own, policy=policies[name], form=forms[name], log=log)
        for name, own in environments(config).items()
    }
    return EpisodesByEnvironment(runners) if config.environments else runners[config.env.name]


def _episode_runner(
    config: Config, *, policy: Policy, form: PromptForm, log: Path
) -> EpisodeRunner:
    env = config.env
    if not is_program(env.name):
        pool = EnvironmentPool(
            env.name,
            env.options,
            processes=env.processes,
            answer_timeout_s=env.answer_timeout_s,
            log=log,
        )
        return EnvironmentEpisodes(pool, policy, form=form)
    # Imported here: the driver and the coordinator import this module, and need no HTTP server.
    from actors.endpoint.program_episode import ProgramEpisodes
    from actors.endpoint.server import Endpoint

    programs = ProgramPool(env.name, env.options, processes=env.processes, log=log)
    return ProgramEpisodes(programs, Endpoint(policy, form.tokenizer, config=config))


WorkerActor = ray.remote(Worker)
