"""The one place that imports DeepSpeed: its settings, its process group, its standard output turned to the log.

Nothing here touches the network: a process group of one rank keeps its store in memory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from configs import LearnerConfig

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_RANK", "0")  # deepspeed asks for it in a single process too

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _standard_output_to_log() -> Any:
    """DeepSpeed prints memory figures and build messages that no setting turns off."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            _log.debug("%s", line)


with _standard_output_to_log():
    import deepspeed
# Its own handler writes to standard output, which is the reader's; the run's log files get the records instead.
logging.getLogger("DeepSpeed").handlers.clear()
logging.getLogger("DeepSpeed").propagate = True

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8  # Kingma and Ba 2015
# DeepSpeed's own default of 5e8 elements is allocated at once, 2 GB in float32; a model needs no more than it has.
MAX_BUCKET_ELEMENTS = 500_000_000
LEAST_BF16_ZERO_STAGE = 1  # below it DeepSpeed keeps no fp32 masters and accumulates gradients in bf16


def initialize(module: torch.nn.Module, *, dtype: str, learner: LearnerConfig) -> Any:
    """A DeepSpeed engine with AdamW whose gradient accumulation boundary the caller sets."""
    if dtype == "bfloat16" and learner.zero_stage < LEAST_BF16_ZERO_STAGE:
        raise ValueError(
            f"learner.zero_stage={learner.zero_stage} with model.dtype=bfloat16 would train without fp32 masters; "
            f"set learner.zero_stage={LEAST_BF16_ZERO_STAGE}, which on one rank costs the same memory"
        )
    _join_process_group()
    with _standard_output_to_log():
        engine, _, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
            config=_settings(module, dtype=dtype, learner=learner),
        )
    return engine


def _settings(module: torch.nn.Module, *, dtype: str, learner: LearnerConfig) -> dict[str, Any]:
    bucket_elements = min(MAX_BUCKET_ELEMENTS, sum(parameter.numel() for parameter in module.parameters()))
    return {
        # Micro-batches are cut by tokens and the loss is already the mean over all: DeepSpeed divides by nothing.
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.grad_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learner.learning_rate,
                "weight_decay": learner.weight_decay,
                "betas": list(ADAM_BETAS),
                "eps": ADAM_EPSILON,
                "torch_adam": True,  # DeepSpeed's own Adam is compiled at the first start, for two minutes
            },
        },
        "zero_optimization": {
            "stage": learner.zero_stage,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
        },
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def _join_process_group() -> None:
    if dist.is_initialized():
        return
    # A kernel for several ranks on one CPU, compiled at the first start (a minute, and it needs a C++ compiler); one
    # rank has nobody to talk to.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would resolve the host name otherwise, which may hang
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
