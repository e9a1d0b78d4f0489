"""The device of a rank: the config's, or the process refuses to compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import configs
from configs import Config, ConfigError, LearnerConfig, ModelConfig
from learner import LearnerSetup, RankError
from learner.distributed import deepspeed_setup
from learner.distributed.deepspeed_setup import (
    adapters_in_tf32,
    check_device,
    device_text,
    device_type,
    nondeterminism_note,
    prepare_device,
)
from learner.ray_actor import LearnerProcess
from store import RunLayout

ROOT = Path(__file__).resolve().parents[2]


def test_the_config_chooses_the_device() -> None:
    assert [device_type(LearnerConfig(gpus_per_rank=n)) for n in (0, 1)] == ["cpu", "cuda"]
    check_device(LearnerConfig(), found="cpu")
    check_device(LearnerConfig(gpus_per_rank=1), found="cuda")


@pytest.mark.parametrize(
    ("gpus", "found", "words"),
    [
        (0, "cuda", ["learner.gpus_per_rank=0", "sees a GPU", "CUDA_VISIBLE_DEVICES="]),
        (1, "cpu", ["learner.gpus_per_rank=1", torch.__version__, "learner.gpus_per_rank=0"]),
    ],
)
def test_a_device_that_is_not_the_configs_is_refused_in_a_line(
    gpus: int, found: str, words: list[str]
) -> None:
    with pytest.raises(ValueError, match="gpus_per_rank") as caught:
        check_device(LearnerConfig(gpus_per_rank=gpus), found=found)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_an_engine_does_not_start_on_a_device_that_is_not_the_configs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed_setup, "accelerator", lambda: "cuda")
    with pytest.raises(ValueError, match="learner.gpus_per_rank=0 asks for a CPU learner"):
        prepare_device(LearnerConfig())


def test_a_cpu_learner_has_the_threads_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    prepare_device(LearnerConfig(threads=3))
    assert given == [3]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[object]]:
    """DeepSpeed has found a GPU; what torch is told is noted and not done."""
    told: dict[str, list[object]] = {"threads": [], "deterministic": []}
    monkeypatch.setattr(deepspeed_setup, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch, "set_num_threads", told["threads"].append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told["deterministic"].append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    return told


@pytest.mark.parametrize(
    ("learner", "threads"),
    [
        (LearnerConfig(gpus_per_rank=1), []),
        (LearnerConfig(gpus_per_rank=1, offload=True, zero_stage=1), [16]),
        (LearnerConfig(gpus_per_rank=1, offload=True, zero_stage=1, ranks=4), [4]),
        (LearnerConfig(gpus_per_rank=1, offload=True, zero_stage=1, ranks=4, threads=6), [6]),
    ],
)
def test_an_offloaded_optimizer_has_its_share_of_the_cores(
    on_a_gpu: dict[str, list[object]], learner: LearnerConfig, threads: list[int]
) -> None:
    prepare_device(learner)
    assert on_a_gpu["threads"] == threads


@pytest.mark.parametrize(("deterministic", "cublas"), [(True, ":4096:8"), (False, "")])
def test_torchs_deterministic_mode_is_a_setting(
    on_a_gpu: dict[str, list[object]], deterministic: bool, cublas: str
) -> None:
    learner = LearnerConfig(gpus_per_rank=1, deterministic=deterministic)
    prepare_device(learner)
    assert on_a_gpu["deterministic"] == [deterministic]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == cublas
    assert ("not promised" in nondeterminism_note(learner)) == (not deterministic)


def test_a_cpu_promises_the_same_bits() -> None:
    assert nondeterminism_note(LearnerConfig()) == ""
    assert device_text(LearnerConfig(threads=2)) == "a CPU, learner.threads=2"


def test_adapters_multiply_in_tf32_on_a_gpu_beside_a_bfloat16_base_only() -> None:
    gpu, bf16 = LearnerConfig(gpus_per_rank=1), ModelConfig(dtype="bfloat16")
    assert adapters_in_tf32(gpu, bf16)
    assert not adapters_in_tf32(LearnerConfig(), bf16)
    assert not adapters_in_tf32(gpu, ModelConfig())


def test_a_learner_whose_gpu_is_full_at_its_start_may_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be that of the learner before it, which was killed a second ago."""

    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("learner.ray_actor.capture_output", lambda path: None)
    monkeypatch.setattr("learner.learner.Learner", full)
    config = Config(run_dir=str(tmp_path / "run"))
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    setup = LearnerSetup(run_id=layout.info.run_id, config=config, model_path="unused")
    process = LearnerProcess(setup, None)  # type: ignore[arg-type]
    with pytest.raises(
        RankError, match="no room for its start: CUDA out of memory. Tried to allocate 2 GiB"
    ):
        process.start()
    process.close()


def test_flash_attention_3_is_torchs_kernel_where_it_is_chosen(
    on_a_gpu: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", chosen.append)
    for version in (2, 3):
        prepare_device(LearnerConfig(gpus_per_rank=1, flash_attention=version))
    assert chosen == ["FA3"]


def test_flash_attention_3_without_its_package_is_one_line(
    on_a_gpu: dict[str, list[object]],
) -> None:
    """torch itself looks for the package, which this environment lacks."""
    with pytest.raises(ValueError, match=r"flash_attn_interface.*learner\.flash_attention=2"):
        prepare_device(LearnerConfig(gpus_per_rank=1, flash_attention=3))


@pytest.mark.parametrize("overrides", [[], ["learner.gpus_per_rank=1"]])
def test_flash_attention_3_is_refused_where_no_kernel_would_run(overrides: list[str]) -> None:
    key_room = Path(__file__).resolve().parents[2] / "configs/key_room.yaml"
    with pytest.raises(ConfigError, match="learner.flash_attention=3 does nothing without a GPU"):
        configs.load(key_room, [*overrides, "learner.flash_attention=3"])


STARTS = """
from learner.distributed.deepspeed_setup import join_ranks
join_ranks(0, ranks=1, address=None)
"""


def test_no_kernel_is_tried_with_a_compiler_when_a_rank_starts(tmp_path: Path) -> None:
    """The attack: ld takes `libgcc_s.so.1` of the current directory, and gcc what it says."""
    for name in ("gcc", "cc", "c++", "g++", "ld", "ninja", "nvcc"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho $0 >> {tmp_path}/asked\nexit 1\n")
        program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-c", STARTS],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    assert not (tmp_path / "asked").exists()
