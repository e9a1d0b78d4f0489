"""Check and set up the device of one rank, as the config chooses it.

    prepare_device(learner)      # once per engine, before a model is loaded
    device_type(learner)         # "cuda" or "cpu"

Ray hides GPUs from a process that asked for none.
"""

from __future__ import annotations

import os

import torch

from configs import LearnerConfig, ModelConfig
from learner.distributed.deepspeed_setup import accelerator

CUDA, CPU = "cuda", "cpu"
# cuBLAS reads it when it makes its first handle. Without it torch's deterministic mode refuses
# matrix products.
DETERMINISTIC_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def device_type(learner: LearnerConfig) -> str:
    """Return the torch device type that `learner.gpus_per_rank` asks for."""
    return CUDA if learner.gpus_per_rank else CPU


def prepare_device(learner: LearnerConfig) -> None:
    """Set torch's process-wide settings for one rank. Raises ValueError for a wrong device."""
    check_device(learner, found=accelerator())
    if device_type(learner) == CPU:
        torch.set_num_threads(learner.threads)
        return
    if learner.offload:
        torch.set_num_threads(offload_threads(learner))
    if learner.gpus_per_rank < 1:
        # So that this process runs out of memory, and not the engine on the same GPU.
        torch.cuda.set_per_process_memory_fraction(learner.gpus_per_rank)
    if learner.deterministic:
        os.environ.update(DETERMINISTIC_CUBLAS)
    torch.use_deterministic_algorithms(learner.deterministic)


def offload_threads(learner: LearnerConfig) -> int:
    """Return the CPU threads for an offloaded optimizer: a rank's share of cores, or the setting.

    Ray sets OMP_NUM_THREADS=1, with which one thread would update all weights.
    """
    return max(learner.threads, len(os.sched_getaffinity(0)) // learner.ranks)


def adapters_in_tf32(learner: LearnerConfig, model: ModelConfig) -> bool:
    """Return whether adapters multiply in TF32, with 11 bits beside the 8 of a bfloat16 base.

    In float32 they take 30 to 40% of a step [estimate]. A float32 base keeps all its bits, and a
    CPU has no TF32.
    """
    return model.dtype == "bfloat16" and device_type(learner) == CUDA


def check_device(learner: LearnerConfig, *, found: str) -> None:
    """Raise ValueError unless DeepSpeed `found` the device that the config asks for."""
    if found == device_type(learner):
        return
    asked = f"learner.gpus_per_rank={learner.gpus_per_rank:g}"
    if found == CUDA:
        raise ValueError(
            f"{asked} asks for a CPU learner, but this process sees a GPU and DeepSpeed took it; "
            "set learner.gpus_per_rank=1, or hide the GPUs: CUDA_VISIBLE_DEVICES= gigpo ..."
        )
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    raise ValueError(
        f"{asked} asks for a GPU, and torch {torch.__version__} ({build}) finds none; check "
        "`nvidia-smi`, or set learner.gpus_per_rank=0"
    )


def device_text(learner: LearnerConfig) -> str:
    """Return the device in words, with the settings that change bits on it."""
    return "a GPU" if device_type(learner) == CUDA else f"a CPU, learner.threads={learner.threads}"


def nondeterminism_note(learner: LearnerConfig) -> str:
    """Return a note that two passes may differ in their last bits; "" if they cannot."""
    if device_type(learner) == CPU or learner.deterministic:
        return ""
    return (
        " (a GPU without learner.deterministic=true may add in another order each time: the same "
        "bits are not promised)"
    )
