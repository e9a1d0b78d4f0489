"""Load weights inside the engine process, from files or as the learner sent them.

    stage(path)              opens the files and reads them once, in a thread, for their digest
    stage_received(digest)   or takes the weights that the learner sent (`broadcast_receiver.py`)
    start_weight_update()    layers return to the layout of a checkpoint
    receive_weights(path)    loads the staged tensors, layer by layer
    finish_weight_update()   layers take the layout of the kernels, in the memory they had before

Generation goes on while weights are staged. This is a plug-in for vLLM's weight transfer, whose own
engines need GPUs on both sides. `engine_worker.py` gives it to vLLM.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from actors.inference.broadcast_receiver import Receiver
from actors.inference.weight_load import RECEIVED
from store import WeightFileError, files_digest, weight_files

# Errors of the engine's process, not of the file it reads: no memory, too many open files
PROCESS_FAULTS = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
# A tiny model's files are read in this time, which saves a call that waits for the engine's step.
STAGE_AT_ONCE_S = 0.003


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """The settings that vLLM asks for before the first load: none.

    Files need no set-up, and `join_broadcast` names the sender, which may change.
    """


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    path: str  # a .safetensors file, or a directory of them, or RECEIVED


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """The checked tensors of one version: of open files, or received.

    Open files can be removed, and are still loaded as they were checked.
    """

    path: str
    digest: str
    tensors: Iterable[tuple[str, torch.Tensor]]


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Load weights in one process of an engine; each reads the whole files and keeps its part."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-weights")
        self._staging: Future[Staged] | None = None
        self._receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def stage(self, path: str) -> tuple[str, str] | None:
        """Begin to read `path`; return `staged()`, which is final already for small files."""
        self._release()
        self._staging = self._reader.submit(_stage, path)
        wait([self._staging], timeout=STAGE_AT_ONCE_S)
        return self.staged()

    def staged(self) -> tuple[str, str] | None:
        """Return (digest, "") of the files, or ("", reason) if they cannot be read.

        Returns None while they are being read. An error of this process is raised: the files may be
        whole although this engine cannot load them.
        """
        assert self._staging is not None, "stage first"
        if not self._staging.done():
            return None
        try:
            return self._staging.result().digest, ""
        except (OSError, SafetensorError, WeightFileError) as error:
            if _is_process_fault(error):
                raise
            return "", str(error)

    def join_broadcast(self, address: str) -> None:
        """Receive what the learner at `address` sends; connect again if that was lost."""
        if self._receiver is None or self._receiver.address != address or self._receiver.is_lost:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = Receiver(
                address,
                device=self.device,
                asks=self.parallel_config.tensor_parallel_size > 1,
            )

    def let_receive(self, is_allowed: bool) -> bool:
        """Return False if weights are arriving and may not be stopped. See `Receiver.allow`."""
        return self._receiver is None or self._receiver.allow(is_allowed)

    def stage_received(self, digest: str) -> dict[str, list[int]] | None:
        """Return the shapes of the received weights with this digest; {} if they are not whole.

        Returns None while weights are arriving, or wait for `let_receive`.
        """
        if self._receiver is None:
            return {}
        if self._receiver.is_busy:
            return None
        received = self._receiver.take(digest)
        if received is None:
            return {}
        staged = Staged(path=RECEIVED, digest=digest, tensors=received.tensors())
        self._staging = self._reader.submit(lambda: staged)
        return received.shapes()

    def _release(self) -> None:
        if self._receiver is not None:
            self._receiver.release()

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        assert self._staging is not None, "stage first"
        staged, self._staging = self._staging.result(), None  # None: the files close afterwards
        assert staged.path == update_info.path, f"staged {staged.path}, not {update_info.path}"
        self.model.load_weights(staged.tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer tied to the embedding receives no tensor, so vLLM leaves it as it is. On
        # CPU it computes with a packed copy, which without this would keep the old weights.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        # Not earlier: vLLM reads a padded layer's tensor only in the finalisation.
        self._release()

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


def _is_process_fault(error: Exception) -> bool:
    """Return whether `error` is one of PROCESS_FAULTS; safetensors gives its text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in PROCESS_FAULTS
    return any(os.strerror(code) in str(error) for code in PROCESS_FAULTS)


def _stage(path: str) -> Staged:
    paths = weight_files(Path(path))
    files = [safe_open(file, framework="pt") for file in paths]
    return Staged(path=path, digest=files_digest(paths), tensors=_tensors(files))


def _tensors(files: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            yield name, file.get_tensor(name)
