"""vLLM alone, in a process of its own, answering requests that our actors made before; for
`rollout.py`.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from transformers import GenerationConfig

from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from configs import Config, max_model_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    prompt_ids: list[int]
    seed: int


class RawVLLM:
    """`tokens_per_s(requests)`: all of them in their order, `in_flight` at a time."""

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


def _serve(
    pipe: Connection, config: Config, model_path: Path, in_flight: int, log_path: Path
) -> None:
    asyncio.run(_answer(pipe, config, model_path, in_flight, log_path))


async def _answer(
    pipe: Connection, config: Config, model_path: Path, in_flight: int, log_path: Path
) -> None:
    stops = GenerationConfig.from_pretrained(model_path).eos_token_id
    stop_token_ids = stops if isinstance(stops, list) else [stops]
    # only for the engine: the same arguments, cores and environment as a worker's
    policy = VLLMPolicy(
        model_path=model_path,
        dtype=config.model.dtype,
        actors=config.actors,
        max_model_tokens=max_model_tokens(config),
        gate=RequestGate(in_flight),
        stop_token_ids=stop_token_ids,
        stop=(),
        tokenizer=None,
        log_path=log_path,
    )
    await policy.start()
    pipe.send("ready")
    while (requests := await asyncio.to_thread(pipe.recv)) is not None:
        pipe.send(await _generate(policy, config, requests, in_flight=in_flight))
    await policy.close()


async def _generate(
    policy: VLLMPolicy, config: Config, requests: list[Request], *, in_flight: int
) -> float:
    """Tokens per second, until the last request is begun: after that there are fewer than
    `in_flight`.
    """
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    waiting, n_tokens, began_s, ended_s = (
        list(enumerate(requests))[::-1],
        0,
        time.perf_counter(),
        0.0,
    )
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
