"""A policy served by a vLLM engine in a process of its own; `vllm_engine.py` starts it,
`weight_transfer.py` is its other end.

    policy = await VLLMPolicy.start(model_path=..., dtype=..., actors=..., gate=RequestGate(64), stop_token_ids=..., ...)
    completion = await policy.generate(prompt, seed=seed, temperature=1.0)
    load = await policy.load_weights(version=7, path=run_dir / "weights/v000007", digest=published.digest)

Token ids in, token ids out: the engine has no tokenizer. Weights change under running requests:
they are frozen, their cached keys and values dropped, and they go on with the new weights;
`version_min` and `version_max` of a completion say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from actors.inference.concurrency import RequestGate
from actors.inference.engine_environment import engine_environment, environment
from actors.inference.fork_server import begin_loading, engines_from_server
from actors.inference.vllm_engine import (
    EngineLostError,
    Preemptions,
    engine_args,
    engine_call,
    start_failures,
    stop_engine,
)
from actors.inference.vllm_images import engine_input
from actors.inference.weight_files import (
    RECEIVED,
    WeightFileError,
    check_fit,
    check_shapes,
    tensor_shapes,
)
from actors.inference.weight_load import PhaseClock, WeightLoad
from actors.policy import Completion, Prompt
from actors.prompting.images import ImageForm, load_image_form
from configs import ActorsConfig

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


VERIFY_POLL_S = 0.005


class VLLMPolicy:
    """Made by `start`. Consumes prompts and numbered weights; produces completions. Unblocked by
    the engine process.
    """

    def __init__(
        self,
        *,
        llm: AsyncLLM,
        processes: Collection[BaseProcess],
        max_response_tokens: int,
        stop_token_ids: Sequence[int],
        stop: Sequence[str],
        shapes: Mapping[str, list[int]],
        gate: RequestGate,
        images: ImageForm | None,
        preemptions: Preemptions,
    ) -> None:
        self._llm: AsyncLLM | None = llm
        self._processes = processes
        self._max_response_tokens = max_response_tokens
        self._stop_token_ids, self._stop = list(stop_token_ids), list(stop)
        self._shapes = shapes
        self._gate, self._images, self._preemptions = gate, images, preemptions
        self._version = 0
        self._request_numbers = itertools.count()
        self._one_load = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        *,
        model_path: Path,
        dtype: str,
        actors: ActorsConfig,
        gate: RequestGate,
        stop_token_ids: Sequence[int],
        stop: Sequence[str],
        tokenizer: object,
        log_path: Path,
    ) -> VLLMPolicy:
        """Start an engine on version 0, the weights in `model_path`. Requests pass `gate`, whose
        limit now is the most there will ever be.

        A response ends with one of `stop_token_ids`, or with the token that completes one of the
        texts in `stop`; to find those, and for nothing else, the engine's output is read with
        `tokenizer`, a Hugging Face one. Raises EngineStartError.

        Blocks the event loop for the start-up: the engine dies with the thread that started it
        (`die_with_parent`), and a pool's thread may end at any time.
        """
        shapes = tensor_shapes(model_path)
        variables = load_ahead(actors, log_path)
        with environment(variables):
            # Imported here, not above: vLLM, huggingface_hub and OpenMP read their variables when
            # they are loaded.
            from vllm.v1.engine.async_llm import AsyncLLM

            others = set(multiprocessing.active_children())
            preemptions = Preemptions()
            with engines_from_server(variables), start_failures(log_path):
                llm = AsyncLLM.from_engine_args(
                    engine_args(
                        model_path=model_path, dtype=dtype, actors=actors, max_requests=gate.limit
                    ),
                    stat_loggers=[preemptions.logger],
                )
        await llm.update_weight_version("0")
        if stop:  # vLLM without a tokenizer would ignore them in silence
            llm.output_processor.tokenizer = tokenizer
        return cls(
            llm=llm,
            processes=set(multiprocessing.active_children()) - others,
            max_response_tokens=actors.max_response_tokens,
            stop_token_ids=stop_token_ids,
            stop=stop,
            shapes=shapes,
            gate=gate,
            images=load_image_form(model_path),
            preemptions=preemptions,
        )

    @property
    def version(self) -> int:
        return self._version

    @property
    def errored(self) -> bool:
        return self._llm is None or self._llm.errored

    @property
    def is_loading(self) -> bool:
        return self._one_load.locked()

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            seed=seed,  # without one, sampling depends on what else is in the batch
            temperature=temperature,
            max_tokens=self._max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            stop=self._stop,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(self._stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = engine_input(prompt, self._images)
        async with self._gate:
            submitted_at = self._version
            outputs = self._engine().generate(request, params, str(next(self._request_numbers)))
            with engine_call():
                async for output in outputs:
                    if output.finished:
                        return self._completion(output.outputs[0], submitted_at=submitted_at)
        raise EngineLostError(
            "the vLLM engine ended a request without an answer; start a new policy"
        )

    def preempted(self) -> int:
        """Requests that the engine put back since the last call, because its cache was full."""
        return self._preemptions.taken()

    async def answers(self) -> None:
        """Returns when the engine process has answered, which it does between two forward
        passes.
        """
        with engine_call():
            await self._engine().get_weight_version()

    async def load_weights(self, *, version: int, path: Path, digest: str) -> WeightLoad:
        """Replace the weights by those of `version` in `path`, a safetensors file or a directory of
        them.

        `digest` is what their publisher recorded (`store.files_digest`). Files that have another,
        lack a tensor or cannot be read raise WeightFileError with the engine untouched; a failure
        later raises EngineLostError with the engine stopped and the running requests ended as
        "abort". Shielded: a cancelled caller cannot leave the engine paused between two versions.
        """
        load = await asyncio.shield(
            asyncio.ensure_future(self._load_weights(version=version, path=path, digest=digest))
        )
        assert load is not None, "a path was given"
        return load

    async def join_broadcast(self, address: str) -> None:
        """From now on the learner at `address` sends its weights to the engine too; to be called
        again, as it may restart.
        """
        with engine_call():
            await self._engine().collective_rpc("join_broadcast", args=(address,))

    async def load_received(self, *, version: int, digest: str) -> WeightLoad | None:
        """As `load_weights`, of weights that the learner has sent; None, with nothing changed, if
        they did not come whole.
        """
        return await asyncio.shield(
            asyncio.ensure_future(self._load_weights(version=version, path=None, digest=digest))
        )

    async def close(self) -> None:
        """Stop the engine process. Running requests end as "abort". Safe to call twice.

        Raises EngineLostError if the engine fails at it; its process is stopped all the same.
        """
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            if not llm.errored:
                with engine_call():
                    # else those who wait for an answer would wait for ever
                    await llm.pause_generation(mode="abort")
        finally:
            await asyncio.to_thread(stop_engine, llm, self._processes)

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineLostError("this policy is closed; start a new one")
        return self._llm

    async def _load_weights(
        self, *, version: int, path: Path | None, digest: str
    ) -> WeightLoad | None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._one_load:
            llm = self._engine()
            clock = PhaseClock()
            if path is not None:
                check_shapes(path, expected=self._shapes)
                clock.lap("check")
                found = await self._verify(llm, path=path, digest=digest)
            elif shapes := await self._received(llm, digest=digest):
                check_fit(shapes, expected=self._shapes, source=RECEIVED)
                clock.lap("check")
                found = digest
            else:
                return None
            clock.lap("verify")
            try:
                await llm.pause_generation(mode="keep", clear_cache=True)
                clock.lap("pause")
                await llm.start_weight_update()
                clock.lap("start")
                await llm.update_weights(
                    WeightTransferUpdateRequest(update_info={"path": str(path or RECEIVED)})
                )
                clock.lap("update")
                await llm.finish_weight_update(weight_version=str(version))
                clock.lap("finish")
                await llm.resume_generation()
                clock.lap("resume")
            # process border: the engine's errors arrive as bare Exception
            except Exception as error:
                with contextlib.suppress(EngineLostError):  # why the load failed is what counts
                    await self.close()
                raise EngineLostError(
                    f"loading version {version} from {path or RECEIVED} failed; the engine, on "
                    f"version {self._version} before, "
                    "was stopped because it may hold parts of both. Start a new policy. Cause: "
                    f"{error}"
                ) from error
            self._version = version
            return WeightLoad(
                version=version, file_digest=found, received=path is None, **clock.laps_ms
            )

    async def _verify(self, llm: AsyncLLM, *, path: Path, digest: str) -> str:
        """Every process of the engine opens and reads the files it would load; returns the digest
        of what it read.

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
        """Shapes of the weights of that digest, if all processes of the engine have received them;
        else none.
        """
        with engine_call():
            while None in (answers := await llm.collective_rpc("stage_received", args=(digest,))):
                await asyncio.sleep(VERIFY_POLL_S)
        return answers[0] if all(answers) else {}

    def _completion(self, output: CompletionOutput, *, submitted_at: int) -> Completion:
        if output.finish_reason not in ("stop", "length", "abort"):
            raise EngineLostError(
                f"the vLLM engine ended a request with {output.finish_reason!r}; see its log"
            )
        # none: nothing was generated
        versions = [int(span.version) for span in output.weight_versions or ()] or [submitted_at]
        return Completion(
            token_ids=tuple(output.token_ids),
            logprobs=tuple(output.logprobs.logprobs) if output.logprobs else (),
            finish_reason=output.finish_reason,
            version_min=min(versions),
            version_max=max(versions),
        )


def load_ahead(actors: ActorsConfig, log_path: Path) -> dict[str, str]:
    """Has a CPU engine load vLLM from now on, beside whatever else is done before
    `VLLMPolicy.start`.

    Returns the environment variables that an engine is started with.
    """
    variables = engine_environment(actors, log_path)
    if not actors.gpus_per_worker:
        begin_loading(variables)
    return variables
