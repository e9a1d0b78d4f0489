"""Generate with a vLLM engine in a process of its own, and change its weights.

    policy = VLLMPolicy(model_path=..., dtype=..., actors=..., gate=RequestGate(64), ...)
    await policy.start()
    completion = await policy.generate(prompt, seed=seed, temperature=1.0)
    load = await policy.load_weights(version=7, path=directory, digest=published.digest)

Token ids go in and come out: the engine has no tokenizer. Weights change under running requests.
They are paused, their cached keys and values dropped, and resumed with the new weights; the
`version_min` and `version_max` of a completion tell. LoRA adapters are added instead, and a request
ends with the adapter that it began with (`vllm_adapters.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from actors.concurrency import RequestGate
from actors.inference.engine_process import engines_from_server, environment, preload_vllm
from actors.inference.vllm_adapters import Adapters
from actors.inference.vllm_engine import (
    engine_args,
    engine_call,
    start_failures,
    stop_engine,
)
from actors.inference.vllm_preemptions import PreemptionCounter, StatisticsOn
from actors.inference.vllm_requests import EngineRequests
from actors.inference.weight_load import (
    RECEIVED,
    PhaseClock,
    WeightLoad,
    check_shapes,
)
from actors.policy import Completion, EngineLostError, Prompt
from actors.prompting.images import load_image_form
from configs import ActorsConfig, ModelConfig, load_safely, parallel_sizes
from store import WeightFileError, tensor_shapes

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

VERIFY_POLL_S = (
    0.005  # between two questions whether all processes of the engine have their weights
)


class VLLMPolicy:
    """Serve completions of numbered weights. Unblocked by the engine process.

    Version 0 is the weights in `model_path`. With `lora` versions are adapters of that model; None:
    they are whole weights. Requests pass `gate`, whose limit at `start` is the largest it will
    have. A response ends with one of `stop_token_ids`, or with the token that
    completes a text of `stop`. Only for these texts is the output read with `tokenizer`, a Hugging
    Face one. `statistics` has vLLM keep its figures for Prometheus, at a cost for every token.
    `float32_head` computes logits in float32 whatever `dtype` is.
    """

    def __init__(
        self,
        *,
        model_path: Path,
        dtype: str,
        lora: ModelConfig | None,
        actors: ActorsConfig,
        max_model_tokens: int,
        gate: RequestGate,
        stop_token_ids: Sequence[int],
        stop: Sequence[str],
        tokenizer: object,
        log_path: Path,
        statistics: bool,
        float32_head: bool = False,
    ) -> None:
        self._model_path = model_path
        self._dtype, self._float32_head = dtype, float32_head
        self._actors = actors
        self._max_model_tokens = max_model_tokens
        self._gate = gate
        self._tokenizer = tokenizer
        self._log_path = log_path
        self._stop_token_ids, self._stop = list(stop_token_ids), list(stop)
        self._shapes = tensor_shapes(model_path)
        self._adapters: Adapters | None = None
        if lora is not None:
            self._adapters = Adapters(base=model_path, shapes=self._shapes, model=lora)
        self._images = load_image_form(model_path)
        self._statistics = statistics
        # None: the engine's process counts, where it has the scheduler too.
        self._preemptions = PreemptionCounter() if math.prod(parallel_sizes(actors)) > 1 else None
        self._forms: dict[float, EngineCoreRequest] = {}  # by temperature
        self._llm: AsyncLLM | None = None  # None while no engine runs
        self._requests: EngineRequests  # of the engine
        self._processes: Collection[BaseProcess] = ()
        self.version = 0  # that generates
        self._one_load = asyncio.Lock()

    async def start(self) -> None:
        """Start the engine. Raises EngineStartError.

        Blocks the event loop: an engine dies with the thread that started it (`die_with_parent`),
        and a thread of a pool may end at any time.
        """
        variables = preload_vllm(self._actors, self._model_path, self._log_path)
        with environment(variables):
            # Imported here: vLLM, huggingface_hub and OpenMP read their variables at import.
            from vllm.v1.engine.async_llm import AsyncLLM

            others = set(multiprocessing.active_children())
            with engines_from_server(variables), start_failures(self._log_path):
                llm = AsyncLLM.from_engine_args(
                    engine_args(
                        model_path=self._model_path,
                        dtype=self._dtype,
                        float32_head=self._float32_head,
                        actors=self._actors,
                        max_model_tokens=self._max_model_tokens,
                        max_requests=self._gate.limit,
                        statistics=self._statistics,
                        adapters=self._adapters.arguments() if self._adapters else {},
                    ),
                    stat_loggers=[lambda *engine: StatisticsOn()] if self._preemptions else None,
                )
        self._llm, self._processes = llm, set(multiprocessing.active_children()) - others
        await llm.update_weight_version("0")
        self._requests = EngineRequests(
            llm,
            tokenizer=self._tokenizer if self._stop else None,
            images=self._images,
            preemptions=self._preemptions,
        )

    @property
    def is_loading(self) -> bool:
        return self._one_load.locked()

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        async with self._gate:
            self._engine()  # raises if there is none
            with engine_call():
                if temperature not in self._forms:
                    params = self._sampling_params(temperature)
                    self._forms[temperature] = await self._requests.form(prompt, params)
                form = self._forms[temperature]
                answer = partial(self._requests.answer, form, prompt, seed=seed)
                if self._adapters is None:
                    return await answer(version=self.version, adapter=None)
                with self._adapters.in_use() as (version, adapter):
                    return await answer(version=version, adapter=adapter)

    async def preempted(self) -> int:
        """Return how many requests the engine preempted since the last call: its cache was full."""
        if self._preemptions is not None:
            return self._preemptions.take()
        with engine_call():
            (n,) = await self._engine().collective_rpc("take_preempted")
        return int(n)

    async def answers(self) -> None:
        """Return when the engine process has answered, which it does between forward passes."""
        with engine_call():
            await self._engine().get_weight_version()

    async def load_weights(self, *, version: int, path: Path, digest: str) -> WeightLoad:
        """Load `version` from `path`, a safetensors file, a directory of them, or an adapter.

        `digest` is the published one (`store.files_digest`). Files with another digest, a missing
        tensor or a read error raise WeightFileError, with the engine untouched. A later failure
        raises EngineLostError, with the engine stopped and the running requests ended as "abort".
        A cancelled caller does not interrupt the load.
        """
        if self._adapters is not None:
            load_adapter = self._load_adapter(self._adapters, version, path=path, digest=digest)
            return await asyncio.shield(load_adapter)
        load = await asyncio.shield(self._load_weights(version=version, path=path, digest=digest))
        assert load is not None, "a path was given"
        return load

    async def load_received(self, *, version: int, digest: str) -> WeightLoad | None:
        """Load weights that the learner sent; None, with nothing changed, if they are not whole.

        Raises the errors of `load_weights`.
        """
        return await asyncio.shield(self._load_weights(version=version, path=None, digest=digest))

    async def join_broadcast(self, address: str) -> None:
        """Receive the weights that the learner at `address` sends.

        Call it again after each load: a restarted learner has a new address.
        """
        with engine_call():
            await self._engine().collective_rpc("join_broadcast", args=(address,))

    async def close(self) -> None:
        """Stop the engine process. Running requests end as "abort". Safe to call twice.

        Raises EngineLostError if the engine fails meanwhile; its process is stopped all the same.
        """
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            if not llm.errored:
                with engine_call():
                    # Else the callers of running requests would wait for ever.
                    await llm.pause_generation(mode="abort")
        finally:
            await stop_engine(llm, self._processes)

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineLostError("this policy is closed; start a new one")
        return self._llm

    async def _load_adapter(
        self, adapters: Adapters, version: int, *, path: Path, digest: str
    ) -> WeightLoad:
        async with self._one_load:
            llm, clock = self._engine(), PhaseClock()
            await adapters.add(llm, version=version, path=path, digest=digest, clock=clock)
            self.version = version
            no_pause = dict.fromkeys(("pause_ms", "start_ms", "finish_ms", "resume_ms"), 0.0)
            return WeightLoad(
                version=version, file_digest=digest, received=False, **no_pause, **clock.laps_ms
            )

    async def _load_weights(
        self, *, version: int, path: Path | None, digest: str
    ) -> WeightLoad | None:
        async with self._one_load:
            llm, clock = self._engine(), PhaseClock()
            if path is not None:
                check_shapes(tensor_shapes(path), expected=self._shapes, source=str(path))
                clock.lap("check")
                found = await self._verify(llm, path=path, digest=digest)
            elif shapes := await self._received(llm, digest=digest):
                check_shapes(shapes, expected=self._shapes, source=RECEIVED)
                clock.lap("check")
                found = digest
            else:
                return None
            clock.lap("verify")
            source = str(path or RECEIVED)
            left_out = (
                self._preemptions.leave_out() if self._preemptions else contextlib.nullcontext()
            )
            try:
                with left_out:
                    await _replace_weights(llm, version=version, source=source, clock=clock)
            except Exception as error:  # process border: the engine raises bare Exception
                with contextlib.suppress(EngineLostError):  # the load's error is reported instead
                    await self.close()
                raise EngineLostError(
                    f"loading version {version} from {source} failed; the engine, on version "
                    f"{self.version} before, was stopped because it may hold parts of both. Start "
                    f"a new policy. Cause: {error}"
                ) from error
            self.version = version
            return WeightLoad(
                version=version, file_digest=found, received=path is None, **clock.laps_ms
            )

    async def _verify(self, llm: AsyncLLM, *, path: Path, digest: str) -> str:
        """Have every process of the engine read the files that it would load; return their digest.

        Raises WeightFileError, EngineLostError.
        """
        with engine_call():
            answers = await llm.collective_rpc("stage_weights", args=(str(path),))
            while None in answers:
                await asyncio.sleep(VERIFY_POLL_S)
                answers = await llm.collective_rpc("staged_weights")
        for found, fault in answers:
            if fault:
                raise WeightFileError(f"{path} cannot be read: {fault}; publish it again")
            if found != digest:
                raise WeightFileError(
                    f"{path} has digest {found}, published was {digest}: it changed on disk; "
                    "publish it again"
                )
        return str(answers[0][0])

    async def _received(self, llm: AsyncLLM, *, digest: str) -> Mapping[str, list[int]]:
        """Return the shapes of received weights; none unless all processes have that digest.

        An engine of several processes is paused while weights arrive (`broadcast_receiver.py`).
        """
        is_paused = False
        with engine_call():
            while None in (answers := await llm.collective_rpc("stage_received", args=(digest,))):
                if not is_paused and llm.vllm_config.parallel_config.tensor_parallel_size > 1:
                    await llm.pause_generation(mode="keep", clear_cache=False)
                    await llm.collective_rpc("let_receive", args=(True,))
                    is_paused = True
                await asyncio.sleep(VERIFY_POLL_S)
            if is_paused:
                while not all(await llm.collective_rpc("let_receive", args=(False,))):
                    await asyncio.sleep(VERIFY_POLL_S)
                await llm.resume_generation()
        return answers[0] if all(answers) else {}

    def _sampling_params(self, temperature: float) -> SamplingParams:
        """Return the parameters of a temperature's requests, all but the seed."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=temperature,
            max_tokens=self._actors.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            stop=self._stop,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(self._stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


async def _replace_weights(llm: AsyncLLM, *, version: int, source: str, clock: PhaseClock) -> None:
    """Pause generation, load the staged weights, resume. A failure leaves a mixture of weights."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.pause_generation(mode="keep", clear_cache=True)
    clock.lap("pause")
    await llm.start_weight_update()
    clock.lap("start")
    await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": source}))
    clock.lap("update")
    await llm.finish_weight_update(weight_version=str(version))
    clock.lap("finish")
    await llm.resume_generation()
    clock.lap("resume")


def load_stop_token_ids(model_path: str) -> list[int]:
    """Read the end tokens of a model's generation configuration."""
    from transformers import GenerationConfig

    found = load_safely(
        "generation configuration",
        model_path,
        load=lambda: GenerationConfig.from_pretrained(model_path, local_files_only=True),
    ).eos_token_id
    return found if isinstance(found, list) else [found]
