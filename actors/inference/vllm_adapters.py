"""Keep the LoRA adapters that an engine serves: the newest, and older ones with requests.

    adapters = Adapters(base=model_path, shapes=tensor_shapes(model_path), model=config.model)
    AsyncEngineArgs(..., **adapters.arguments())
    await adapters.add(llm, version=7, path=directory, digest=published.digest, clock=PhaseClock())
    with adapters.in_use() as (version, request):     # the newest version answers a request
        ...

A request ends with the adapter that it began with, so all its tokens have one version. vLLM's
prefix cache is keyed by an adapter's name, and so never mixes versions.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.inference.vllm_engine import engine_call
from actors.inference.weight_load import PhaseClock
from configs import ModelConfig
from store import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    BASE_FILE,
    WeightFileError,
    check_adapter,
    files_digest,
    weight_files,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

# Adapters in one forward pass. If more versions have requests, those of the newest wait until one
# has none left. Each slot takes memory on the device.
SLOTS = 4
# Adapters in the engine's main memory. vLLM reads the file of one again if it has dropped it, so
# it must never drop one with requests.
MOST_HELD = 64
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's LoRAConfig
BASE_VERSION = 0  # before the first adapter: the base model, which version 0 equals


class Adapters:
    """The adapters of one engine. Calls of `add` must not overlap."""

    def __init__(self, *, base: Path, shapes: Mapping[str, list[int]], model: ModelConfig) -> None:
        self._base, self._shapes, self._model = base, shapes, model
        self._base_digest = ""  # until the first `add`
        self._held: set[int] = set()  # versions
        self._n_requests: Counter[int] = Counter()  # by version
        self._idle: set[int] = set()  # held versions without requests at the last `add`
        self._newest: tuple[int, LoRARequest | None] = (BASE_VERSION, None)

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments for these adapters."""
        return {
            "enable_lora": True,
            "max_lora_rank": min(rank for rank in RANKS if rank >= self._model.lora_rank),
            "max_loras": SLOTS,
            "max_cpu_loras": MOST_HELD,
            # Else vLLM also keeps, and multiplies by, adapters of the embedding and the output
            # layer.
            "lora_target_modules": names_in_blocks(self._shapes),
        }

    @contextmanager
    def in_use(self) -> Iterator[tuple[int, LoRARequest | None]]:
        """Yield the newest version and its adapter, None for the base model. It stays meanwhile."""
        version, request = self._newest
        self._n_requests[version] += 1
        try:
            yield version, request
        finally:
            self._n_requests[version] -= 1

    async def add(
        self, llm: AsyncLLM, *, version: int, path: Path, digest: str, clock: PhaseClock
    ) -> None:
        """Serve the adapter in `path` from the next request on. Laps "check", "verify", "update".

        Raises WeightFileError, with the engine as it was, for another digest, and for an adapter
        that does not fit the base model or that vLLM cannot serve. Raises EngineLostError.
        """
        from vllm.lora.request import LoRARequest

        if len(self._held) >= MOST_HELD:
            raise WeightFileError(
                f"{len(self._held)} versions have requests in this engine, which holds no more; "
                f"version {version} is loaded when one has none left"
            )
        # The engine reads the bytes that were checked: nobody else knows this copy.
        with tempfile.TemporaryDirectory(prefix="gigpo-adapter-") as name:
            copy = Path(name)
            await asyncio.to_thread(self._check, path, copy)
            clock.lap("check")
            found = await asyncio.to_thread(files_digest, [copy / ADAPTER_FILE])
            if found != digest:
                raise WeightFileError(
                    f"{path} has digest {found}, published was {digest}: it changed on disk; "
                    "publish it again"
                )
            clock.lap("verify")
            # vLLM's ids begin with 1. Its prefix cache knows an adapter by its name and path.
            request = LoRARequest(f"v{version:06d}", version + 1, name)
            await _load(llm, request, path)
        self._held.add(version)
        self._newest = version, request
        await self._remove_idle(llm)
        clock.lap("update")

    def _check(self, path: Path, copy: Path) -> None:
        """Copy the adapter, and check the copy against the run's settings and the base model."""
        for name in (ADAPTER_CONFIG_FILE, BASE_FILE, ADAPTER_FILE):
            if (path / name).is_file():  # `check_adapter` names a missing one
                shutil.copyfile(path / name, copy / name)
        if not self._base_digest:
            self._base_digest = files_digest(weight_files(self._base))
        try:
            check_adapter(
                copy,
                rank=self._model.lora_rank,
                alpha=self._model.lora_alpha,
                base_shapes=self._shapes,
                base_digest=self._base_digest,
            )
        except WeightFileError as error:
            raise WeightFileError(str(error).replace(str(copy), str(path))) from error
        # The digest is of the weights only. Another key of the published configuration could change
        # how vLLM scales them.
        settings = {
            "r": self._model.lora_rank,
            "lora_alpha": self._model.lora_alpha,
            "target_modules": names_in_blocks(self._shapes),
        }
        (copy / ADAPTER_CONFIG_FILE).write_text(json.dumps(settings))

    async def _remove_idle(self, llm: AsyncLLM) -> None:
        """Remove older adapters that had no requests now and at the last `add`.

        A request that a text has ended is still running in the engine for a moment.
        """
        newest, _ = self._newest
        idle = {version for version in self._held - {newest} if not self._n_requests[version]}
        for version in idle & self._idle:
            self._held.remove(version)
            del self._n_requests[version]
            with engine_call():
                await llm.remove_lora(version + 1)
        self._idle = idle & self._held


def names_in_blocks(shapes: Mapping[str, list[int]]) -> list[str]:
    """Return the last names of the matrices in numbered blocks, such as q_proj.

    Embeddings and the output layer are outside of the blocks.
    """
    names = set()
    for name, shape in shapes.items():
        *above, last = name.removesuffix(".weight").split(".")
        if name.endswith(".weight") and len(shape) == 2 and any(map(str.isdigit, above)):
            names.add(last)
    return sorted(names)


async def _load(llm: AsyncLLM, request: LoRARequest, path: Path) -> None:
    """Have vLLM load an adapter. Raises WeightFileError if it cannot, or leaves out a layer."""
    try:
        await llm.add_lora(request)
    except Exception as error:  # process border: the engine raises bare Exception
        if llm.errored:
            with engine_call():
                raise
        raise WeightFileError(
            f"vLLM cannot serve the adapter in {path}: {error}; use model.lora_serving=merged"
        ) from error
    with engine_call():
        left_out = await llm.collective_rpc("unserved_layers", args=(request.lora_int_id,))
        layers = sorted({layer for layers in left_out for layer in layers})
        if layers:
            await llm.remove_lora(request.lora_int_id)
    if layers:
        raise WeightFileError(
            f"vLLM serves no adapters for {len(layers)} layers of this model, the first is "
            f"{layers[0]}; use model.lora_serving=merged"
        )
