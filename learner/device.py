"""The device of one rank: the config chooses it, this module checks it and sets torch up for it.

    prepare_device(learner)      # once per engine, before a model is loaded
    device_type(learner)         # "cuda" or "cpu"

Ray hides GPUs from a process that asked for none, so a process of a run sees what its config says.
"""

from __future__ import annotations

import torch

from configs import LearnerConfig
from learner.deepspeed_setup import accelerator

CUDA, CPU = "cuda", "cpu"


def device_type(learner: LearnerConfig) -> str:
    """Return the torch device type that `learner.gpus_per_rank` asks for."""
    return CUDA if learner.gpus_per_rank else CPU


def prepare_device(learner: LearnerConfig) -> None:
    """Set torch's process-wide settings for one rank. Raises ValueError if its device is not the config's."""
    check_device(learner, found=accelerator())
    if device_type(learner) == CPU:
        torch.set_num_threads(learner.threads)
    elif learner.gpus_per_rank < 1:
        # Out of memory here and not in the engine, which shares the GPU and cannot wait.
        torch.cuda.set_per_process_memory_fraction(learner.gpus_per_rank)


def check_device(learner: LearnerConfig, *, found: str) -> None:
    """Raise ValueError unless DeepSpeed `found` the device that the config asks for."""
    if found == device_type(learner):
        return
    asked = f"learner.gpus_per_rank={learner.gpus_per_rank:g}"
    if found == CUDA:
        raise ValueError(
            f"{asked} asks for a CPU learner, but this process sees a GPU and DeepSpeed took it; set learner.gpus_per_rank=1, "
            "or hide the GPUs: CUDA_VISIBLE_DEVICES= python ..."
        )
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    raise ValueError(
        f"{asked} asks for a GPU, and torch {torch.__version__} ({build}) finds none; check `nvidia-smi`, or set "
        "learner.gpus_per_rank=0"
    )
