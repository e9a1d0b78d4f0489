"""The device of a rank: the config's, or the process refuses to compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs import LearnerConfig
from learner import device
from learner.deepspeed_setup import accelerator
from learner.device import check_device, device_type, prepare_device

ROOT = Path(__file__).resolve().parent.parent


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
def test_a_device_that_is_not_the_configs_is_refused_in_a_line(gpus: int, found: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="gpus_per_rank") as caught:
        check_device(LearnerConfig(gpus_per_rank=gpus), found=found)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_an_engine_does_not_start_on_a_device_that_is_not_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    with pytest.raises(ValueError, match="learner.gpus_per_rank=0 asks for a CPU learner"):
        prepare_device(LearnerConfig())


def test_a_process_that_is_shown_no_gpu_computes_on_the_cpu() -> None:
    """The environment in which Ray starts an actor with num_gpus=0."""
    ask = "from learner.deepspeed_setup import accelerator; print(accelerator())"
    environ = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=ROOT,
        env=environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1] == "cpu" == accelerator()


def test_a_cpu_learner_has_the_threads_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    prepare_device(LearnerConfig(threads=3))
    assert given == [3]
