"""Prepare the processes of an engine, and answer calls in them by name.

vLLM imports this module because `worker_extension_cls` names `WorkerExtension`. Once the model is
loaded it makes its object for weight transfer: `prepared_loader` prepares the process then.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Sequence
from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from actors.inference.engine_process import (
    ENGINE_CORES,
    PR_SET_PDEATHSIG,
    PROCESS_SEPARATOR,
    engine_cores,
)
from actors.inference.vllm_cpu_adapters import multiply_by_adapter
from actors.inference.vllm_preemptions import PreemptionCounter
from actors.inference.vllm_step_pacing import pace_engine
from actors.inference.vllm_weight_loader import FileWeightTransferEngine
from actors.inference.vllm_whole_answers import send_whole_answers

BACKEND = "safetensors_file"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
PREEMPTIONS = PreemptionCounter()  # of this process, whose scheduler it watches


class WorkerExtension:
    """Add methods to vLLM's worker, which the other process calls by name."""

    # set by vLLM's worker
    weight_transfer_engine: FileWeightTransferEngine
    model_runner: Any

    def stage_weights(self, path: str) -> tuple[str, str] | None:
        return self.weight_transfer_engine.stage(path)

    def staged_weights(self) -> tuple[str, str] | None:
        return self.weight_transfer_engine.staged()

    def join_broadcast(self, address: str) -> None:
        self.weight_transfer_engine.join_broadcast(address)

    def stage_received(self, digest: str) -> dict[str, list[int]] | None:
        return self.weight_transfer_engine.stage_received(digest)

    def let_receive(self, is_allowed: bool) -> bool:
        return self.weight_transfer_engine.let_receive(is_allowed)

    def take_preempted(self) -> int:
        return PREEMPTIONS.take()

    def unserved_layers(self, adapter_id: int) -> list[str]:
        """Return the layers of a loaded adapter that the model's forward pass leaves out."""
        manager = self.model_runner.lora_manager._adapter_manager
        # vLLM has replaced q, k and v by one fused layer, and gate and up by another.
        return sorted(set(manager.get_adapter(adapter_id).loras) - set(manager.modules))


def prepare_engine_process(config: VllmConfig, device: torch.device) -> None:
    """Bind the process to its cores and its parent's life, and patch the vLLM in it."""
    PREEMPTIONS.watch_scheduler()
    die_with_parent()
    send_whole_answers()
    if device.type == "cpu":
        keep_freed_memory()
        pace_engine(max_requests=config.scheduler_config.max_num_seqs)
        if config.lora_config is not None:
            multiply_by_adapter()
    if ENGINE_CORES in os.environ:
        lists = os.environ[ENGINE_CORES].split(PROCESS_SEPARATOR)
        bind_to(engine_cores(lists[config.parallel_config.rank]))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, for whatever reason.

    An orphaned engine would keep its cores and memory. The kernel watches the parent's *thread*
    that started this process, so start engines from a thread that lives as long as they should. The
    parent of a forked engine is the fork server, which ends with the worker.
    """
    owner = multiprocessing.parent_process()
    if owner is None:
        return  # not started by a Python process
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if not owner.is_alive():  # it died before the request above
        os.kill(os.getpid(), signal.SIGKILL)


def keep_freed_memory() -> None:
    """Ask malloc to reuse large blocks instead of giving them back to the kernel. CPU engines only.

    A load makes and frees copies of every layer, and new pages are a quarter of its cost. Measured
    with 135M parameters in float32: 330 ms instead of 450, for about 500 MB more memory.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)


def bind_to(cores: Sequence[int]) -> None:
    """Keep all threads of this process, and those that they start, on these cores."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def prepared_loader(
    config: WeightTransferConfig,
    vllm_config: VllmConfig,
    device: torch.device,
    model: torch.nn.Module,
) -> FileWeightTransferEngine:
    """Prepare this process, then return the loader of its weights. vLLM calls it once a process."""
    prepare_engine_process(vllm_config, device)
    return FileWeightTransferEngine(config, vllm_config, device, model)


if BACKEND not in WeightTransferEngineFactory._registry:  # a second import would be an error
    # vLLM only calls it: a function does as well as a class.
    WeightTransferEngineFactory.register_engine(BACKEND, cast(Any, prepared_loader))
