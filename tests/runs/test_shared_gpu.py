"""GPUs of a run: engines and learner that share one, and an engine that the installed vLLM does not
have.
"""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

import configs
from actors import engine_fault
from actors.inference import engine_process
from actors.inference.vllm_engine import placement
from configs import ActorsConfig, Config, ConfigError, LearnerConfig
from driver import preflight
from learner.distributed import deepspeed_setup
from learner.distributed.deepspeed_setup import prepare_device

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def install(monkeypatch: pytest.MonkeyPatch, *, cuda: bool) -> None:
    """From now on the installed vLLM is the CUDA build, or the CPU build."""

    def version(name: str) -> str:
        if (name == "vllm") != cuda:
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(engine_process.metadata, "version", version)


def test_the_cuda_build_has_no_cpu_engine_and_the_cpu_build_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu, on_gpu = ActorsConfig(), ActorsConfig(gpus_per_worker=0.5)
    install(monkeypatch, cuda=True)
    assert engine_fault(on_gpu) == ""
    assert "CUDA build" in engine_fault(on_cpu) and "learner.gpus_per_rank=0.5" in engine_fault(
        on_cpu
    )
    install(monkeypatch, cuda=False)
    assert engine_fault(on_cpu) == ""
    assert "actors.gpus_per_worker=0.5" in engine_fault(on_gpu) and "CPU build" in engine_fault(
        on_gpu
    )


def test_a_worker_refuses_an_engine_that_would_land_on_a_gpu_nobody_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, cuda=True)
    with pytest.raises(ValueError, match="gpus_per_worker=0 asks for a CPU engine"):
        engine_process.engine_environment(ActorsConfig(), tmp_path, tmp_path / "engine.log")


@pytest.mark.parametrize(
    ("yaml", "cuda", "gpus", "refused"),
    [
        ("{}", True, 1, "asks for a CPU engine"),
        ("{}", False, 0, ""),
        ("{actors: {gpus_per_worker: 0.5}, learner: {gpus_per_rank: 0.5}}", True, 1, ""),
        (
            "{actors: {gpus_per_worker: 0.5}, learner: {gpus_per_rank: 0.5}}",
            True,
            0,
            "asks for 1 GPUs .* Ray has 0",
        ),
        (
            "{actors: {gpus_per_worker: 0.6}, learner: {gpus_per_rank: 0.5}}",
            True,
            1,
            "asks for 2 GPUs .* Ray has 1",
        ),
        ("{actors: {gpus_per_worker: 0.5}}", False, 1, "asks for an engine on a GPU"),
        ("{source: [runs/a]}", True, 0, ""),  # nothing is played
        ("{endpoint: {url: 'http://h:1/v1', model: m}}", True, 0, ""),
    ],
)
def test_what_cannot_start_is_refused_before_anything_does(
    yaml: str, cuda: bool, gpus: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, cuda=cuda)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "available_gpus", lambda: gpus)
    config = configs.from_yaml(yaml)
    if not refused:
        preflight.check_gpus(config, learns=True)
        return
    with pytest.raises(ConfigError, match=refused):
        preflight.check_gpus(config, learns=True)


@pytest.mark.parametrize(
    ("gpus", "parallel", "utilization", "cache"),
    [(1.0, 1, 0.8, None), (2.0, 2, 0.8, None), (0.5, 1, 0.4, 3 * GIB)],
)
def test_an_engine_takes_its_part_of_the_gpu(
    gpus: float, parallel: int, utilization: float, cache: int | None
) -> None:
    arguments = placement(
        ActorsConfig(gpus_per_worker=gpus, gpu_memory_utilization=0.8, kv_cache_gib=3),
        max_model_tokens=256,
    )
    # a setting of 2 is read as 2.0, which vLLM refuses
    assert isinstance(arguments["tensor_parallel_size"], int)
    assert (arguments["tensor_parallel_size"], arguments.get("kv_cache_memory_bytes")) == (
        parallel,
        cache,
    )
    assert arguments["gpu_memory_utilization"] == pytest.approx(utilization)


def test_a_learner_that_shares_a_gpu_is_kept_to_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_setup, "accelerator", lambda: "cuda")
    kept: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", kept.append)
    for gpus in (1, 0.4):
        prepare_device(LearnerConfig(gpus_per_rank=gpus))
    assert kept == [0.4]


def test_a_base_policy_is_cloned_without_a_gpu_for_the_scripted_policy() -> None:
    config = configs.from_yaml("{actors: {gpus_per_worker: 0.5}, learner: {gpus_per_rank: 0.5}}")
    cloning = configs.cloning_config(config)
    assert (cloning.actors.gpus_per_worker, cloning.learner.gpus_per_rank) == (0, 0.5)
    assert isinstance(config, Config)


@pytest.mark.parametrize(("extra", "given"), [("cuda", True), ("cpu", False)])
def test_the_quick_start_uses_the_gpu_that_there_is(extra: str, given: bool) -> None:
    shown = subprocess.run(
        ["make", "-n", "train", f"EXTRA={extra}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (line,) = [line for line in shown.splitlines() if "configs/quickstart.yaml" in line]
    assert ("actors.gpus_per_worker=0.5 learner.gpus_per_rank=0.5" in line) == given
