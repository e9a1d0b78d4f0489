"""vLLM's pluggable weight transfer, by file; runs inside the engine process.

    start_weight_update()      layers go back to the layout of a checkpoint
    receive_weights(path)      tensors are loaded, layer by layer
    finish_weight_update()     layers take the layout of the kernels again, in the memory they had before

vLLM's own engines need GPUs on both sides; a file needs nothing but a disk that both can see, and is the durable version too.
The engine process imports this module because `worker_extension_cls` names `WorkerExtension`, before it looks the engine up.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actors.engine_environment import ENGINE_CORES, engine_cores
from actors.weight_files import weight_files

BACKEND = "safetensors_file"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """A file needs no set-up."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    path: str  # a .safetensors file, or a directory of them


class WorkerExtension:
    """vLLM makes this a base of its worker: its methods can be called by name from the other process."""

    weight_transfer_engine: FileWeightTransferEngine  # the worker's

    def received_digest(self) -> str:
        return self.weight_transfer_engine.received_digest


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """One per worker process of an engine; each reads the whole file and keeps its part."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.received_digest = ""  # SHA-256, in hex, of the file last received, or of the files of a directory in order
        die_with_parent()
        if ENGINE_CORES in os.environ:
            bind_to(engine_cores(os.environ[ENGINE_CORES]))

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        files = weight_files(Path(update_info.path))
        self.received_digest = _digest(files)
        self.model.load_weights(_tensors(files))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer tied to the embedding receives nothing of its own, so vLLM leaves it as it is; but on CPU it
        # computes with a packed copy made at the first load. Without this it would go on with the old weights.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is gone, however that happened.

    An orphaned engine would keep its cores and memory, and nobody could reach it. The kernel watches the parent's *thread*
    that started us: start engines from a thread that lives as long as they should.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # not started by another Python process: nobody to follow
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def bind_to(cores: Sequence[int]) -> None:
    """Keep all threads of this process, and those they start later, on these cores."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, tensors.get_tensor(name)


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


if BACKEND not in WeightTransferEngineFactory._registry:  # a second import would be an error
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
