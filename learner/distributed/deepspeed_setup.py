"""Set up a rank's device, DeepSpeed, and the ranks' group. This module imports DeepSpeed first.

    prepare_device(learner)                     # once per engine, before a model is loaded
    store = host_ranks(LOOPBACK)                # with several ranks, in one process
    address = str(broadcast.Address.new(LOOPBACK, store.port))
    join_ranks(0, ranks=2, address=address)     # in each rank's process, before `initialize`
    engine = initialize(module, dtype="float32", learner=learner)
    with full_parameter(parameter):                      # ZeRO 3: all ranks together
        parameter.shape

A single rank uses no network: its group keeps its store in memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.nn import attention

from configs import BUCKET_ELEMENTS, LearnerConfig, ModelConfig
from learner.distributed.private_ray import LOOPBACK as LOOPBACK
from store import broadcast

# DeepSpeed reads these at its import. A process of a run sees a GPU only if its config asks for one
# (`check_device`): Ray hides GPUs from a process that asked for none.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# The device index. Ray shows each rank only its own device, as number 0.
os.environ.setdefault("LOCAL_RANK", "0")

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _standard_output_to_log() -> Any:
    """Redirect standard output to the log.

    No setting turns off DeepSpeed's memory figures and build messages.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            _log.debug("%s", line)


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """Let DeepSpeed find no MLflow, which may be installed for `trackers`.

    Only its autotuner wants it, which nothing here uses. With pandas, Polars and FastAPI, which
    MLflow brings, it took a quarter of the processor time of the learner's imports.
    """
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


with _standard_output_to_log(), _without_mlflow():
    # `optimizer_state.py` imports deepspeed from here, so never before this setup.
    import deepspeed as deepspeed
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
# Otherwise DeepSpeed would try each of its kernels with a compiler in the current directory, where
# ld takes libraries that may be a stranger's. It asks for one of them only, for several ranks on
# one CPU. Compiling that takes a minute at the first start.
deepspeed.ops.__compatible_ops__ = {}
# Its own handler writes to standard output. Send its records to the run's log files instead.
logging.getLogger("DeepSpeed").handlers.clear()
logging.getLogger("DeepSpeed").propagate = True
# ZeRO 3 uses deprecated names of torch, with a warning for every parameter of every pass.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8  # Kingma and Ba 2015
# At stage 0 DeepSpeed keeps no fp32 masters and accumulates gradients in bf16.
LEAST_BF16_ZERO_STAGE = 1
PARTITIONED = 3  # the ZeRO stage from which a rank holds only its part of a parameter
# Smaller parameters, such as those of norms, stay whole on each rank: not worth a message.
WHOLE_ELEMENTS = 100_000
# Ends the wait for a rank that hangs; `rank_group.py` notices a death or failure within seconds.
# It is longer than ranks ever wait for each other: for a pass or, while they gather weights, for
# each to write a file of SHARD_BYTES (eight of them at 100 MB/s together take six minutes). No
# rank waits for an fsync, which has no bound. DeepSpeed's own groups have torch's time-outs: 30
# minutes with gloo, 10 with NCCL.
GROUP_TIMEOUT = timedelta(minutes=30)
CUDA, CPU = "cuda", "cpu"
HOPPER_FLASH_ATTENTION = 3


def accelerator() -> str:
    """Return the torch device type that DeepSpeed uses in this process, "cuda" or "cpu"."""
    return str(deepspeed.accelerator.get_accelerator().device_name())


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
        # A rank's share of cores: Ray sets OMP_NUM_THREADS=1, with which one thread would update
        # all weights.
        share = len(os.sched_getaffinity(0)) // learner.ranks
        torch.set_num_threads(max(learner.threads, share))
    if learner.gpus_per_rank < 1:
        # So that this process runs out of memory, and not the engine on the same GPU.
        torch.cuda.set_per_process_memory_fraction(learner.gpus_per_rank)
    if learner.deterministic:
        # cuBLAS reads it when it makes its first handle. Without it torch's deterministic mode
        # refuses matrix products.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if learner.flash_attention == HOPPER_FLASH_ATTENTION:
        _use_flash_attention_3()
    torch.use_deterministic_algorithms(learner.deterministic)


def _use_flash_attention_3() -> None:
    """Replace torch's attention kernel in this process. Raises ValueError without the package."""
    try:
        attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, AttributeError) as error:  # AttributeError: an older torch
        raise ValueError(
            f"learner.flash_attention=3 finds no kernels ({error}); install flash-attn-3 for this "
            "torch, or set learner.flash_attention=2"
        ) from error


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


def initialize(module: torch.nn.Module, *, dtype: str, learner: LearnerConfig) -> Any:
    """Make a DeepSpeed engine with AdamW. All ranks call it together.

    The caller sets the gradient accumulation boundary. At ZeRO 3 the module's parameters are empty
    outside of its forward pass and of `full_parameter`.
    """
    if dtype == "bfloat16" and learner.zero_stage < LEAST_BF16_ZERO_STAGE:
        raise ValueError(
            f"learner.zero_stage={learner.zero_stage} with model.dtype=bfloat16 would train "
            f"without fp32 masters; set learner.zero_stage={LEAST_BF16_ZERO_STAGE}, which on one "
            "rank costs the same memory"
        )
    if learner.offload and not learner.zero_stage:
        raise ValueError(
            "learner.offload=true with learner.zero_stage=0: only ZeRO's optimizers offload; set "
            "zero_stage=1"
        )
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    settings = _settings(module, dtype=dtype, learner=learner)
    with _standard_output_to_log():
        return deepspeed.initialize(model=module, model_parameters=trained, config=settings)[0]


def initialize_frozen(module: torch.nn.Module, *, dtype: str, learner: LearnerConfig) -> Any:
    """Make a DeepSpeed engine for a divided model that is not trained. All ranks call it together.

    Its only work is to gather the weights of each layer for a forward pass.
    """
    settings = _settings(module, dtype=dtype, learner=learner)
    del settings["optimizer"]
    settings["zero_optimization"].pop("offload_optimizer", None)
    with _standard_output_to_log():
        return deepspeed.initialize(model=module, config=settings)[0]


def divide_parameter(
    parameter: torch.nn.Parameter,
    *,
    like: torch.nn.Parameter | None,
    module: torch.nn.Module,
    dtype: torch.dtype,
    learner: LearnerConfig,
) -> None:
    """Divide rank 0's parameter among the ranks, as ZeRO 3 does. All ranks call it together.

    `like` is another parameter of `module` that is divided already, None for the first.
    """
    with _standard_output_to_log():
        if like is not None:
            like.convert_to_zero_parameters(param_list=[parameter])
            return
        holder = torch.nn.Module()
        holder.register_parameter("first", parameter)
        bits = "bfloat16" if dtype == torch.bfloat16 else "float32"
        settings = _settings(module, dtype=bits, learner=learner)
        deepspeed.zero.Init(module=holder, config_dict_or_path=settings)


def shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """Return the shape of a parameter, also where a rank holds only its part of it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_parameter(*parameters: torch.nn.Parameter) -> contextlib.AbstractContextManager[None]:
    """Gather all elements of these parameters on every rank, to read. All ranks enter it together.

    Parameters that are whole on every rank stay as they are.
    """
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned))


def own_elements(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the elements that this rank keeps, detached: at ZeRO 3 a flat part without padding."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    part: torch.Tensor = parameter.ds_tensor.detach()
    begins_at = dist.get_rank(parameter.ds_process_group) * part.numel()
    return part[: max(0, parameter.ds_numel - begins_at)]


def forget_gradient(engine: Any) -> None:
    """Drop the gradient of an update that DeepSpeed refused.

    With ZeRO 1 and 2, offloaded bf16 gradients would be added to the next ones. The optimizers of
    ZeRO 3, and of ZeRO 1 in bf16 without offload, drop them themselves.
    """
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        engine.optimizer.averaged_gradients = dict.fromkeys(engine.optimizer.averaged_gradients)


def _settings(module: torch.nn.Module, *, dtype: str, learner: LearnerConfig) -> dict[str, Any]:
    # DeepSpeed allocates its default of 5e8 elements at once, 2 GB in float32. A model needs no
    # more elements than it has.
    n_elements = sum(shape_of(parameter).numel() for parameter in module.parameters())
    # ZeRO 1 and 2 refuse an odd number.
    bucket_elements = min(BUCKET_ELEMENTS, n_elements + n_elements % 2)
    zero: dict[str, Any] = {
        "stage": learner.zero_stage,
        "reduce_bucket_size": bucket_elements,
        "allgather_bucket_size": bucket_elements,
        "stage3_param_persistence_threshold": WHOLE_ELEMENTS,
    }
    if learner.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": learner.gpus_per_rank > 0}
    return {
        # The loss is already the mean over all micro-batches: DeepSpeed divides by ranks only.
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
                # DeepSpeed's own Adam is compiled at the first start, which takes two minutes.
                "torch_adam": True,
                "fused": True,  # one pass over memory; on a CPU it takes an eighth of the time
            },
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's Adam runs on offloaded state too
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        # A sum of gradients in bf16 would depend on the cut into micro-batches.
        "communication_data_type": "fp32",
    }


def host_ranks(host: str) -> dist.TCPStore:
    """Host the rendezvous of a group on a free port (`.port`), as long as this process lives.

    It accepts connections to the address `host` of this machine only: anyone who reaches the port
    can end the run.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without this socket a TCPStore listens on all addresses.
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
    """Make this process a rank of a group for its life. Return when all ranks have joined.

    `address` is the `Address` of a `host_ranks`, as text; a single rank needs none. Raises
    RuntimeError if ranks do not come, or if this process already has another group, because
    DeepSpeed keeps groups of its own.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, ranks):
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and "
                f"cannot become rank {rank} of {ranks}; a process has one group of ranks for its "
                "life, so start the learner in another"
            )
        return
    if ranks > 1 and not address:
        raise ValueError(f"{ranks} ranks need an address to meet at; see host_ranks")
    host = LOOPBACK
    store: dist.Store = dist.HashStore()
    if address:
        rendezvous = broadcast.Address.of(address)
        host = rendezvous.host
        tcp = dist.TCPStore(host, rendezvous.port, is_master=False, timeout=GROUP_TIMEOUT)
        # The secret hides the names of the keys from stray connections.
        store = dist.PrefixStore(rendezvous.secret, tcp)
    if host == LOOPBACK:  # otherwise gloo would resolve the host name, which may hang
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if accelerator() == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT
    )


def from_all_ranks(value: object, *, ranks: int) -> list[Any]:
    """Return each rank's value, by rank, on every rank. All ranks call it together.

    It is a value of JSON, and a tuple becomes a list. torch would pickle it, and then who reaches
    the group's ports could run programs in each rank.
    """
    return [json.loads(text) for text in _bytes_of_ranks(json.dumps(value).encode(), ranks=ranks)]


def tensors_from_all_ranks(mine: Sequence[torch.Tensor], *, ranks: int) -> list[list[torch.Tensor]]:
    """Return each rank's tensors, by rank, on every rank. All ranks call it together.

    They are on the CPU. Ranks may bring other shapes, and other numbers of tensors.
    """
    if ranks == 1:
        return [list(mine)]
    # clone: safetensors refuses tensors that share memory
    named = {str(number): tensor.contiguous().clone() for number, tensor in enumerate(mine)}
    found = [load(content) for content in _bytes_of_ranks(save(named), ranks=ranks)]
    return [[tensors[str(number)] for number in range(len(tensors))] for tensors in found]


def _bytes_of_ranks(mine: bytes, *, ranks: int) -> list[bytes]:
    """Return each rank's bytes, by rank, on every rank. None may be empty."""
    if ranks == 1:
        return [mine]
    device = accelerator() if dist.get_backend() == "nccl" else CPU
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    n_bytes = [int(each) for each in sizes]
    padded = torch.zeros(max(n_bytes), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    padded = padded.to(device)
    received = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(received, padded)
    return [each[:n].cpu().numpy().tobytes() for each, n in zip(received, n_bytes, strict=True)]
