"""A policy served by a vLLM engine in a process of its own; with `weight_transfer.py` the only code that knows vLLM.

    policy = await VLLMPolicy.start(model_path=..., dtype=..., actors=..., max_requests=..., stop_token_ids=..., log_path=...)
    completion = await policy.generate(prompt, seed=seed, temperature=1.0)
    load = await policy.load_weights(version=7, path=run_dir / "weights/v000007")

Token ids in, token ids out: the engine has no tokenizer. Weights change under running requests: they are frozen, their
cached keys and values dropped, and they go on with the new weights; `version_min` and `version_max` of a completion say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from actors.policy import Completion, Prompt
from configs import ActorsConfig

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class WeightFileError(ValueError):
    """These weights were refused before the engine was touched; it goes on with the version it has."""


class EngineLostError(RuntimeError):
    """The engine is gone, or was stopped because it may hold a mixture of weights. Start a new policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLoad:
    """What one change of weights cost; generation stands still from pause to resume."""

    version: int
    file_digest: str  # SHA-256, in hex, of what the engine read: that of the file, as its publisher recorded it
    checksum: str  # SHA-256 over the engine's own tensors. CPU engines hide their packed matrices from it
    check_ms: float  # header of the new file against the model, while generation goes on
    pause_ms: float
    start_ms: float
    update_ms: float
    finish_ms: float
    checksum_ms: float
    resume_ms: float


class VLLMPolicy:
    """Made by `start`. Consumes prompts and numbered weights; produces completions. Unblocked by the engine process."""

    def __init__(
        self, *, llm: AsyncLLM, max_response_tokens: int, stop_token_ids: Sequence[int], shapes: Mapping[str, list[int]]
    ) -> None:
        self._llm: AsyncLLM | None = llm
        self._max_response_tokens = max_response_tokens
        self._stop_token_ids = list(stop_token_ids)
        self._shapes = shapes
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
        max_requests: int,
        stop_token_ids: Sequence[int],
        log_path: Path,
    ) -> VLLMPolicy:
        """Start an engine on version 0, the weights in `model_path`. `max_requests` is how many it works on at once.

        Blocks the event loop for the start-up: the engine dies with the thread that started it (`die_with_parent`), and
        a pool's thread may end at any time.
        """
        shapes = _tensor_shapes(model_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with _environment(_engine_environment(actors, log_path)):
            # Imported here, not above: vLLM, huggingface_hub and OpenMP read their variables when they are loaded.
            from vllm.v1.engine.async_llm import AsyncLLM

            llm = AsyncLLM.from_engine_args(
                _engine_args(model_path=model_path, dtype=dtype, actors=actors, max_requests=max_requests)
            )
        await llm.update_weight_version("0")
        return cls(llm=llm, max_response_tokens=actors.max_response_tokens, stop_token_ids=stop_token_ids, shapes=shapes)

    @property
    def version(self) -> int:
        return self._version

    @property
    def errored(self) -> bool:
        return self._llm is None or self._llm.errored

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params = SamplingParams(
            seed=seed,  # without one, sampling depends on what else is in the batch
            temperature=temperature,
            max_tokens=self._max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = tokens_input(list(prompt.token_ids))
        outputs = self._engine().generate(request, params, str(next(self._request_numbers)))
        try:
            async for output in outputs:
                if output.finished:
                    return self._completion(output.outputs[0])
        except EngineDeadError as error:
            raise EngineLostError("the vLLM engine process died; start a new policy. Its log has the reason") from error
        raise EngineLostError("the vLLM engine ended a request without an answer; start a new policy")

    async def load_weights(self, *, version: int, path: Path) -> WeightLoad:
        """Replace the weights by those of `version` in `path`, a safetensors file or a directory of them.

        Raises WeightFileError with the engine untouched, or EngineLostError with the engine stopped and the running
        requests ended as "abort". Shielded: a cancelled caller cannot leave the engine paused between two versions.
        """
        return await asyncio.shield(asyncio.ensure_future(self._load_weights(version=version, path=path)))

    async def close(self) -> None:
        """Stop the engine process. Running requests end as "abort". Safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if not llm.errored:
            await llm.pause_generation(mode="abort")  # else those who wait for an answer would wait for ever
        await asyncio.to_thread(llm.shutdown)
        llm.shutdown = lambda timeout=None: None  # again at exit, it fails with a traceback

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineLostError("this policy is closed; start a new one")
        return self._llm

    async def _load_weights(self, *, version: int, path: Path) -> WeightLoad:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._one_load:
            llm = self._engine()
            clock = _PhaseClock()
            self._check_shapes(path)
            clock.lap("check")
            try:
                await llm.pause_generation(mode="keep", clear_cache=True)
                clock.lap("pause")
                await llm.start_weight_update()
                clock.lap("start")
                await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path)}))
                clock.lap("update")
                await llm.finish_weight_update(weight_version=str(version))
                clock.lap("finish")
                digests = await llm.collective_rpc("received_digest")
                checksum = _digest(await llm.compute_weight_checksums())
                clock.lap("checksum")
                await llm.resume_generation()
                clock.lap("resume")
            except Exception as error:  # process border: the engine's errors arrive as bare Exception
                await self.close()
                raise EngineLostError(
                    f"loading version {version} from {path} failed; the engine, on version {self._version} before, "
                    f"was stopped because it may hold parts of both. Start a new policy. Cause: {error}"
                ) from error
            self._version = version
            return WeightLoad(version=version, file_digest=digests[0], checksum=checksum, **clock.laps_ms)

    def _check_shapes(self, path: Path) -> None:
        """vLLM keeps the old values of tensors that are missing, without an error: so every name and shape must agree."""
        shapes = _tensor_shapes(path)
        if shapes.keys() - self._shapes.keys() == {"lm_head.weight"}:
            del shapes["lm_head.weight"]  # some writers store the tied output layer a second time
        wrong = sorted(n for n in shapes.keys() | self._shapes.keys() if shapes.get(n) != self._shapes.get(n))
        if wrong:
            name = wrong[0]
            raise WeightFileError(
                f"{path} does not fit the model being served: {len(wrong)} tensors differ, the first is {name}, of shape "
                f"{shapes.get(name, 'missing')} here and {self._shapes.get(name, 'missing')} there. "
                f"Publish all tensors of the base model under their names"
            )

    def _completion(self, output: CompletionOutput) -> Completion:
        if output.finish_reason not in ("stop", "length", "abort"):
            raise EngineLostError(f"the vLLM engine ended a request with {output.finish_reason!r}; see its log")
        versions = [int(span.version) for span in output.weight_versions or ()] or [self._version]
        return Completion(
            token_ids=tuple(output.token_ids),
            logprobs=tuple(output.logprobs.logprobs) if output.logprobs else (),
            finish_reason=output.finish_reason,
            version_min=min(versions),
            version_max=max(versions),
        )


class _PhaseClock:
    def __init__(self) -> None:
        self.laps_ms: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.laps_ms[f"{phase}_ms"] = (now_s - self._last_s) * 1e3
        self._last_s = now_s


def _engine_args(*, model_path: Path, dtype: str, actors: ActorsConfig, max_requests: int) -> AsyncEngineArgs:
    from vllm import AsyncEngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig

    placement: dict[str, Any]
    if actors.gpus_per_worker:
        placement = {
            "tensor_parallel_size": actors.gpus_per_worker,
            "gpu_memory_utilization": actors.gpu_memory_utilization,
        }
    else:
        placement = {
            "kv_cache_memory_bytes": int(actors.kv_cache_gib * 2**30),
            # A seeded request whose prompt is prefilled in two pieces kills a CPU engine: "CPU Generator does not use
            # offset". A batch must then hold at least one whole prompt.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(actors.max_model_tokens, CPU_BATCH_TOKENS),
            "enforce_eager": True,  # compiling takes longer than a small model gains
        }
    if actors.gpus_per_worker <= 1:
        placement["distributed_executor_backend"] = "uni"  # scheduler and model in one process: one fewer to die
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=actors.max_model_tokens,
        max_num_seqs=max_requests,
        logprobs_mode="processed_logprobs",  # after temperature, as sampled; raw ones would bias every ratio
        worker_extension_cls="actors.weight_transfer.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend="safetensors_file"),
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **placement,
    )


CPU_BATCH_TOKENS = 8192  # prompt tokens of one forward pass; more only adds to the time until the first token


def _engine_environment(actors: ActorsConfig, log_path: Path) -> dict[str, str]:
    log_config_path = log_path.with_suffix(".logging.json")
    log_config_path.write_text(json.dumps(_log_config(log_path)))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_CONFIG_PATH": str(log_config_path),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if actors.gpus_per_worker:
        return environment
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else a CPU engine adds a third process for the model
    # vLLM compiles the rank of a sampled token with a C++ compiler at the first request, 17 s; nobody asks for the rank.
    environment["TORCHDYNAMO_DISABLE"] = "1"
    cores = _cores(actors.cpu_cores)
    environment["OMP_NUM_THREADS"] = str(len(cores))
    environment["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))  # VLLM_CPU_OMP_THREADS_BIND needs that third process
    return environment


def _cores(cpu_cores: str) -> list[int]:
    """ "0,2-3" -> [0, 2, 3]; "auto" -> all this process may use but the last, which stays free for others."""
    if cpu_cores == "auto":
        allowed = sorted(os.sched_getaffinity(0))
        return allowed[:-1] or allowed
    cores: list[int] = []
    for part in cpu_cores.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the engine process, and take back these and those that vLLM sets (LD_PRELOAD, ...) afterwards.

    Environment processes started later from this one must not inherit them.
    """
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _log_config(log_path: Path) -> dict[str, Any]:
    handler = {"class": "logging.FileHandler", "filename": str(log_path), "formatter": "line"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }


def weight_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise WeightFileError(f"no weights at {path}: give a .safetensors file, or a directory that holds some")
    return files


def _tensor_shapes(path: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise WeightFileError(f"{file} is not a whole safetensors file ({error}); publish it again") from error
    return shapes


def _digest(checksums: Sequence[Mapping[str, str]]) -> str:
    """One digest over (rank, tensor name, SHA-256), whatever the order in which they came."""
    return hashlib.sha256(json.dumps(list(checksums), sort_keys=True).encode()).hexdigest()
