"""The first to import DeepSpeed: its settings, the group of ranks, its standard output turned to
the log.

    store = host_ranks(LOOPBACK)                                    # in one process; several ranks only
    address = str(protocol.Address.new(LOOPBACK, store.port))
    join_ranks(0, ranks=2, address=address)                         # in each rank's process, before `initialize`
    engine = initialize(module, dtype="float32", learner=learner)
    with whole(parameter):                                          # ZeRO 3: all ranks together
        parameter.shape

One rank touches no network: its group keeps its store in memory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from configs import BUCKET_ELEMENTS, LearnerConfig
from store import broadcast as protocol

# Read when deepspeed is imported. A process of a run sees a GPU only if its config asks for one
# (`device.py` checks it).
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# deepspeed's device index; Ray shows each rank its own device only, as number 0
os.environ.setdefault("LOCAL_RANK", "0")

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
    # for `full_state.py` too, which has it from here and so never before this is set up
    import deepspeed as deepspeed
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
# Its own handler writes to standard output, which is the reader's; the run's log files get the
# records instead.
logging.getLogger("DeepSpeed").handlers.clear()
logging.getLogger("DeepSpeed").propagate = True
# ZeRO 3 calls torch by names that it is to lose one day, and says so for every parameter of every
# pass.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8  # Kingma and Ba 2015
# below it DeepSpeed keeps no fp32 masters and accumulates gradients in bf16
LEAST_BF16_ZERO_STAGE = 1
PARTITIONED = 3  # the ZeRO stage from which a rank holds only its part of a parameter
# parameters smaller than this stay whole on each rank: a norm's are not worth a message
WHOLE_ELEMENTS = 100_000
# Longer than ranks ever wait for each other: for a pass, or, while they gather weights, for each to
# write a file of `shards.SHARD_BYTES` (eight of them at 100 MB/s together take six minutes). No
# rank waits for an fsync, which has no bound. It ends the wait for a rank that hangs: of one that
# died or failed `ranks.py` knows within seconds. DeepSpeed's own groups have torch's time-outs, 30
# minutes with gloo and 10 with NCCL.
GROUP_TIMEOUT = timedelta(minutes=30)
LOOPBACK = "127.0.0.1"


def accelerator() -> str:
    """Return the torch device type that DeepSpeed computes on in this process, "cuda" or "cpu"."""
    return str(deepspeed.accelerator.get_accelerator().device_name())


def initialize(module: torch.nn.Module, *, dtype: str, learner: LearnerConfig) -> Any:
    """A DeepSpeed engine with AdamW whose gradient accumulation boundary the caller sets. All ranks
    call it together.

    At ZeRO 3 the module's parameters are empty outside of its forward pass and of `whole`.
    """
    if dtype == "bfloat16" and learner.zero_stage < LEAST_BF16_ZERO_STAGE:
        raise ValueError(
            f"learner.zero_stage={learner.zero_stage} with model.dtype=bfloat16 would train "
            "without fp32 masters; "
            f"set learner.zero_stage={LEAST_BF16_ZERO_STAGE}, which on one rank costs the same "
            "memory"
        )
    if learner.offload and not learner.zero_stage:
        raise ValueError(
            "learner.offload=true with learner.zero_stage=0: only ZeRO's optimizers offload; set "
            "zero_stage=1"
        )
    with _standard_output_to_log():
        engine, _, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=[
                parameter for parameter in module.parameters() if parameter.requires_grad
            ],
            config=_settings(module, dtype=dtype, learner=learner),
        )
    return engine


def whole(parameter: torch.nn.Parameter) -> contextlib.AbstractContextManager[None]:
    """Inside it the parameter has all its elements on every rank, to read. All ranks enter it
    together.
    """
    return deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id"))


def own_elements(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Those that this rank keeps, detached: at ZeRO 3 a part of them, flat, without what pads it;
    else all.
    """
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    part: torch.Tensor = parameter.ds_tensor.detach()
    begins_at = dist.get_rank(parameter.ds_process_group) * part.numel()
    return part[: max(0, parameter.ds_numel - begins_at)]


def forget_gradient(engine: Any) -> None:
    """After an update that DeepSpeed refused: offloaded bf16 gradients of ZeRO 1 and 2 would be
    added to the next ones.

    Its optimizers of ZeRO 3, and of ZeRO 1 in bf16 without offload, forget them by themselves.
    """
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        engine.optimizer.averaged_gradients = dict.fromkeys(engine.optimizer.averaged_gradients)


def _settings(module: torch.nn.Module, *, dtype: str, learner: LearnerConfig) -> dict[str, Any]:
    # DeepSpeed's own default of 5e8 elements is allocated at once, 2 GB in float32; a model needs
    # no more than it has.
    bucket_elements = min(
        BUCKET_ELEMENTS, sum(parameter.numel() for parameter in module.parameters())
    )
    zero: dict[str, Any] = {
        "stage": learner.zero_stage,
        "reduce_bucket_size": bucket_elements,
        "allgather_bucket_size": bucket_elements,
        "stage3_param_persistence_threshold": WHOLE_ELEMENTS,
    }
    if learner.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": learner.gpus_per_rank > 0}
    return {
        # Micro-batches are cut by tokens and the loss is already the mean over all: DeepSpeed
        # divides by nothing but ranks.
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
                # DeepSpeed's own Adam is compiled at the first start, for two minutes
                "torch_adam": True,
                "fused": True,  # one pass over memory; on a CPU it takes an eighth of the time
            },
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's Adam runs on offloaded state too
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        # of gradients: a sum over ranks and micro-batches in bf16 would depend on the cut
        "communication_data_type": "fp32",
    }


def host_ranks(host: str) -> dist.TCPStore:
    """Where the ranks of a group meet, on a free port (`.port`); its process keeps it as long as
    the group lives.

    It takes connections to the address `host` of this machine and no other: whoever reaches the
    port can end the run.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # left to itself a TCPStore listens on all addresses
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=GROUP_TIMEOUT,
        master_listen_fd=listening.detach(),
    )


def join_ranks(rank: int, *, ranks: int, address: str | None) -> None:
    """Makes this process one rank of a group, for good; returns when all have come. Raises
    RuntimeError if they do not.

    `address` is the `Address` of a `host_ranks`, as text; one rank alone needs none. A process
    stays what it has become: DeepSpeed keeps groups of its own.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, ranks):
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and "
                f"cannot become rank {rank} of "
                f"{ranks}; a process has one group of ranks for its life, so start the learner in "
                "another"
            )
        return
    # A kernel for several ranks on one CPU, compiled at the first start (a minute, and it needs a
    # C++ compiler).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if ranks > 1 and not address:
        raise ValueError(f"{ranks} ranks need an address to meet at; see host_ranks")
    place = (
        protocol.Address.of(address)
        if address
        else protocol.Address(secret="", host=LOOPBACK, port=0)
    )
    if place.host == LOOPBACK:  # gloo would resolve the host name otherwise, which may hang
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if ranks == 1:
        store: dist.Store = dist.HashStore()
    else:  # a stray connection to the port does not know the names of the keys
        store = dist.PrefixStore(
            place.secret,
            dist.TCPStore(place.host, place.port, is_master=False, timeout=GROUP_TIMEOUT),
        )
    backend = "nccl" if accelerator() == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT
    )
