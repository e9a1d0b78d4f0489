"""Test how an engine's process is prepared. test_vllm.py does it with real engines."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from actors.inference import engine_worker


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """Give the cores of this process, and restore those of each thread."""
    before = {thread: os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
    yield os.sched_getaffinity(0)
    for thread, own in before.items():
        if os.path.exists(f"/proc/self/task/{thread}"):
            os.sched_setaffinity(int(thread), own)


def test_all_threads_are_bound_and_those_that_they_start(cores: set[int]) -> None:
    one = {min(cores)}
    ended = threading.Event()
    running = threading.Thread(target=ended.wait)
    running.start()
    try:
        engine_worker.bind_to(sorted(one))
        assert running.native_id is not None
        assert os.sched_getaffinity(running.native_id) == os.sched_getaffinity(0) == one
        found: list[set[int]] = []
        later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        later.start()
        later.join()
        assert found == [one]
    finally:
        ended.set()
        running.join()


def test_an_adapters_layers_that_the_model_leaves_out_are_named() -> None:
    """vLLM serves an adapter's `up_proj` only if the model's forward pass has such a layer."""
    adapter = SimpleNamespace(loras={"layers.0.qkv_proj": 1, "layers.0.mlp.up_proj": 2})
    manager = SimpleNamespace(
        get_adapter=lambda adapter_id: {7: adapter}[adapter_id],
        modules={"layers.0.qkv_proj": object(), "layers.0.o_proj": object()},
    )
    worker = engine_worker.WorkerExtension()
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    assert worker.unserved_layers(7) == ["layers.0.mlp.up_proj"]
