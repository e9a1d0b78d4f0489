"""Choose the engine's arguments, translate its errors, and stop it; used by `vllm_policy.py`."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.inference.vllm_images import image_arguments
from actors.policy import EngineLostError
from configs import (
    PIPELINE,
    TENSOR,
    ActorsConfig,
    ConfigError,
    check_model_directory,
    parallel_sizes,
)
from printable import UserError, one_line

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

STOP_TIMEOUT_S = 10.0  # for the engine process to end; then it is killed
# Arguments that `image_arguments` may override.
TEXT_ARGUMENTS = {
    "skip_tokenizer_init": True,
    "worker_extension_cls": "actors.inference.engine_worker.WorkerExtension",
}
# prompt tokens of one forward pass; more would only delay the first token
CPU_BATCH_TOKENS = 8192
# vLLM's messages, in three phases of the start, for GPU memory that another process still holds
NO_MEMORY = re.compile("Free memory on device|out of memory|Error in memory profiling")
NO_LORA = "does not support LoRA"  # vLLM's message
RAISED = re.compile(r"\b(\w*(?:Error|Exception)): (.+)")  # the last line of a traceback


class EngineStartError(EngineLostError):
    """The engine did not start. The message quotes the engine's error from its log."""


class EngineMemoryError(EngineStartError):
    """The engine found too little free memory: a killed process may still hold some."""


@contextlib.contextmanager
def start_failures(log_path: Path) -> Iterator[None]:
    """Raise EngineStartError with the error in the engine's log.

    vLLM's own exception only says that the error is further above.
    """
    before = log_path.stat().st_size if log_path.exists() else 0
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # process border: pydantic's errors cannot be sent to the driver
        text = log_path.read_bytes()[before:].decode(errors="replace") if log_path.exists() else ""
        raised = [
            found for found in RAISED.findall(text) if "initialization failed" not in found[1]
        ]
        cause = ": ".join(raised[-1]) if raised else f"{type(error).__name__}: {one_line(error)}"
        if NO_LORA in cause:
            cause += " Use model.lora_serving=merged"
        kind = EngineMemoryError if NO_MEMORY.search(f"{cause} {error}") else EngineStartError
        raise kind(f"the vLLM engine did not start: {cause}; its log is {log_path}") from error


@contextlib.contextmanager
def engine_call() -> Iterator[None]:
    """Raise EngineLostError for an error of a call to the engine, with the engine's message.

    An engine that failed once, for example without memory, may fail again or answer wrongly. A
    refused argument (ValueError, TypeError) is the caller's fault and is raised as it is.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (EngineLostError, VLLMClientError, ValueError, TypeError):
        raise
    except EngineDeadError as error:
        raise EngineLostError(
            "the vLLM engine process died; start a new policy. Its log has the reason"
        ) from error
    except Exception as error:  # process border: the engine raises bare Exception
        raise EngineLostError(
            f"a call to the vLLM engine failed; start a new policy. Cause: {error}"
        ) from error


def engine_args(
    *,
    model_path: Path,
    dtype: str,
    float32_head: bool,
    actors: ActorsConfig,
    max_model_tokens: int,
    max_requests: int,
    statistics: bool,
    adapters: Mapping[str, Any],
) -> AsyncEngineArgs:
    """Return vLLM's arguments. `adapters` are those for LoRA, none for whole weights."""
    from vllm import AsyncEngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig

    check_model_directory(model_path)
    for_images = image_arguments(model_path)
    for name in sorted(for_images.keys() & actors.engine.keys()):
        raise ConfigError(
            f"actors.engine.{name}: a vision model needs {name}={for_images[name]}; leave it out"
        )
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=dtype,
        hf_overrides={"head_dtype": "float32"} if float32_head else {},
        max_model_len=max_model_tokens,
        max_num_seqs=max_requests,
        # after temperature, as sampled; raw log-probabilities would bias every ratio
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend="safetensors_file"),
        disable_log_stats=not statistics,
        use_tqdm_on_load=False,
        **adapters,
        **(TEXT_ARGUMENTS | for_images),
        **(placement(actors, max_model_tokens=max_model_tokens) | actors.engine),
    )


def placement(actors: ActorsConfig, *, max_model_tokens: int) -> dict[str, Any]:
    """Return the engine arguments for device and memory. `actors.engine` may change some."""
    arguments: dict[str, Any]
    tensor, pipeline = parallel_sizes(actors)
    if actors.gpus_per_worker:
        arguments = {
            TENSOR: tensor,
            PIPELINE: pipeline,
            # The fraction that must be free at the start. After a kill, memory of the previous
            # engine may not be.
            "gpu_memory_utilization": actors.gpu_memory_utilization
            * min(1.0, actors.gpus_per_worker),
        }
        if actors.gpus_per_worker < 1:
            # Else vLLM measures the free memory, and counts as its own what another process
            # allocates meanwhile.
            arguments["kv_cache_memory_bytes"] = int(actors.kv_cache_gib * 2**30)
    else:
        arguments = {
            "kv_cache_memory_bytes": int(actors.kv_cache_gib * 2**30),
            # A seeded request whose prompt is prefilled in two pieces kills a CPU engine: "CPU
            # Generator does not use offset". A batch must then hold at least one whole prompt.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_tokens, CPU_BATCH_TOKENS),
            "enforce_eager": True,  # compiling takes longer than a small model gains
            # Prefixes are shared in whole blocks. With vLLM's 128 short prompts share nothing.
            "block_size": 32,
        }
    if tensor * pipeline == 1:
        # scheduler and model in one process: one fewer to die
        arguments["distributed_executor_backend"] = "uni"
    return arguments


async def stop_engine(llm: AsyncLLM, processes: Collection[BaseProcess]) -> None:
    """Shut the engine down, and kill its processes if they do not end in time.

    Call it in the event loop that started the engine. A request that is left raises
    EngineLostError.
    """
    # vLLM cancels its reader of answers from another thread, after it has closed the sockets. A
    # reader that finds them closed first logs EngineDeadError, with a traceback.
    reader = llm.output_handler
    if reader is not None:
        reader.cancel()
        await asyncio.wait([reader], timeout=STOP_TIMEOUT_S)
    llm.output_processor.propagate_error(EngineLostError("the vLLM engine was stopped"))
    await asyncio.to_thread(_stop_processes, llm, processes)


def _stop_processes(llm: AsyncLLM, processes: Collection[BaseProcess]) -> None:
    llm.shutdown()
    # vLLM would call it again at exit, which prints a traceback.
    llm.shutdown = lambda timeout=None: None
    for process in processes:
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()


def prometheus_figures() -> list[Any]:
    """Return the figures that vLLM keeps in this process for Prometheus, if it keeps any."""
    from prometheus_client import REGISTRY

    return [family for family in REGISTRY.collect() if family.name.startswith("vllm:")]
