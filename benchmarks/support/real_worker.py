"""Play with a real worker in Ray, and answer its requests again by vLLM alone; for `rollout.py`.

A real coordinator feeds the worker. The second, equal engine has a process of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import shutil
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from transformers import GenerationConfig

import configs
from actors import WorkerActor, WorkerSetup
from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from actors.rollout.episode import request_seed
from configs import Config, max_model_tokens
from coordinator import CoordinatorActor, Settlement
from store import (
    RunLayout,
    VersionRecord,
    files_digest,
    read_segments,
    weight_files,
    write_open_sql,
)

ANSWER_TIMEOUT_S = 600.0
POLL_S = 0.2
COLUMNS = ("group_uid", "traj_uid", "step_index", "prompt_ids", "response_ids", "t_start", "gen_us")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    tokens_per_s: float
    requests: list[Request]  # in the order they were made


class RealWorker:
    """Play one batch of groups a turn, as fast as it can. Between turns admission is closed."""

    def __init__(self, config: Config, model_path: Path) -> None:
        self.config, self.model_path = config, model_path
        self.layout = RunLayout.create(Path(config.run_dir), config_yaml=configs.as_yaml(config))
        write_open_sql(self.layout, macros=(), max_staleness=0)
        self.coordinator = CoordinatorActor.options(num_cpus=0).remote(config, learns=True)
        setup = WorkerSetup(
            name="worker-0",
            run_id=self.layout.info.run_id,
            config=config,
            model_path=str(model_path),
        )
        self.worker = WorkerActor.options(num_cpus=0).remote(setup, self.coordinator)
        self.learner_step = 0
        self._settle: Any = None

    def start(self) -> None:
        ray.get(self.worker.start.remote(), timeout=ANSWER_TIMEOUT_S)
        directory = self.layout.weights_dir(0)
        shutil.copytree(self.model_path, directory)
        record = VersionRecord(
            version=0,
            path=self.layout.relative(directory),
            digest=files_digest(weight_files(directory)),
            learner_step=None,
        )
        ray.get(self.coordinator.publish.remote(record))
        self.running = self.worker.run.remote()

    def turn(self) -> Turn:
        if self._settle is not None:
            settled = self.coordinator.settle.remote(
                Settlement(
                    batch_id=self._settle,
                    learner_step=self.learner_step,
                    filtered={},
                    version_in=0,
                    metrics={},
                )
            )
            ray.get(settled)
        while (batch := ray.get(self.coordinator.claim.remote(0))) is None:
            ended, _ = ray.wait([self.running], timeout=POLL_S)
            ray.get(ended)  # raises what ended it
            assert not ended, "the worker ended"
        self.learner_step, self._settle = self.learner_step + 1, batch.batch_id
        return in_the_window(read_segments(self.layout, batch.segments).select(COLUMNS))

    def close(self) -> None:
        ray.get(self.worker.stop.remote())
        ray.wait([self.running], timeout=ANSWER_TIMEOUT_S)
        ray.get(self.worker.close.remote())
        ray.get(self.coordinator.close.remote())
        for actor in (self.worker, self.coordinator):
            ray.kill(actor)


def in_the_window(rows: pa.Table) -> Turn:
    """Return the figures of requests that were answered while the worker still began new groups.

    Until then it had as many requests in flight as it may have.
    """
    starts_us = pc.cast(rows["t_start"], pa.int64()).to_numpy()
    ends_us = starts_us + rows["gen_us"].to_numpy()
    firsts_us = (
        pa.table({"group": rows["group_uid"], "start": starts_us})
        .group_by("group")
        .aggregate([("start", "min")])
    )
    begin_us, end_us = int(starts_us.min()), pc.max(firsts_us["start_min"]).as_py()
    chosen = [number for number in starts_us.argsort() if ends_us[number] <= end_us]
    picked = rows.take(chosen)
    n_tokens = pc.sum(pc.list_value_length(picked["response_ids"])).as_py()
    requests = [
        Request(prompt_ids=row["prompt_ids"], seed=request_seed(row["traj_uid"], row["step_index"]))
        for row in picked.to_pylist()
    ]
    return Turn(tokens_per_s=n_tokens / ((end_us - begin_us) / 1e6), requests=requests)


class RawVLLM:
    """Answer all requests in their order, `in_flight` at a time."""

    def __init__(self, config: Config, model_path: Path, *, in_flight: int, log_path: Path) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, config, model_path, in_flight, log_path)
        )
        self._process.start()

    def wait_until_ready(self) -> None:
        assert self._pipe.recv() == "ready"

    def tokens_per_s(self, requests: list[Request]) -> float:
        self._pipe.send(requests)
        return float(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(*given: Any) -> None:
    asyncio.run(_answer(*given))


async def _answer(
    pipe: Connection, config: Config, model_path: Path, in_flight: int, log_path: Path
) -> None:
    stop_token_id = GenerationConfig.from_pretrained(model_path).eos_token_id
    # only for the engine: the same arguments, cores and environment as a worker's
    policy = VLLMPolicy(
        model_path=model_path,
        dtype=config.model.dtype,
        lora=None,
        actors=config.actors,
        max_model_tokens=max_model_tokens(config),
        gate=RequestGate(in_flight),
        stop_token_ids=[stop_token_id],
        stop=(),
        tokenizer=None,
        log_path=log_path,
        statistics=False,
    )
    await policy.start()
    pipe.send("ready")
    while (requests := await asyncio.to_thread(pipe.recv)) is not None:
        pipe.send(await _generate(policy, config, requests, in_flight=in_flight))
    await policy.close()


async def _generate(
    policy: VLLMPolicy, config: Config, requests: list[Request], *, in_flight: int
) -> float:
    """Return tokens per second until the last request begins: then fewer are in flight."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    waiting = list(enumerate(requests))[::-1]
    n_tokens = 0
    began_s = time.perf_counter()
    ended_s = 0.0
    run = f"{time.monotonic_ns()}"

    async def client() -> None:
        nonlocal n_tokens, ended_s
        while waiting:
            number, request = waiting.pop()
            params = SamplingParams(
                seed=request.seed,
                temperature=config.actors.temperature,
                max_tokens=config.actors.max_response_tokens,
                stop_token_ids=policy._stop_token_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async for output in policy._engine().generate(
                tokens_input(request.prompt_ids), params, f"{run}-{number}"
            ):
                if waiting:
                    n_tokens += len(output.outputs[0].token_ids)
                    ended_s = time.perf_counter()

    await policy._engine().reset_prefix_cache()
    await asyncio.gather(*(client() for _ in range(in_flight)))
    return n_tokens / (ended_s - began_s)
