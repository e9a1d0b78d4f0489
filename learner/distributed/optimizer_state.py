"""Read and write DeepSpeed's state as whole tensors by parameter name, at every ZeRO stage.

    parameters = trainable(engine.policy.causal_lm)
    for name, tensor in read_state(engine.deepspeed, parameters, kind="exp_avg"): ...
    write_state(engine.deepspeed, parameters, saved=saved, steps=7)

DeepSpeed spreads it over ranks and flat buffers. Kinds: "master" are the optimizer's weights,
"exp_avg" and "exp_avg_sq" Adam's moments (m and v of Kingma and Ba 2015). All are float32, in the
parameter's shape. Before the first step the moments are 0. All ranks call a function together, and
iterate to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from learner.distributed.deepspeed_setup import PARTITIONED, deepspeed

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)

Parameters = Mapping[str, torch.nn.Parameter]


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that the optimizer changes, by name, in the module's order.

    A tied parameter has its first name.
    """
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def shape_of(parameter: torch.nn.Parameter) -> list[int]:
    """Return the shape of the whole parameter. Under ZeRO 3 its own shape is 0."""
    return list(getattr(parameter, "ds_shape", parameter.shape))


def read_state(
    engine: Any, parameters: Parameters, *, kind: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, float32 tensor) of every parameter, gathered when its turn comes.

    Use it before the next update.
    """
    adam = _adam_states(engine, parameters)
    for name, parameter in parameters.items():
        if not engine.zero_optimization():
            yield name, parameter.detach() if kind == MASTER else adam[name][kind]
        elif kind == MASTER:
            yield name, deepspeed.utils.safe_get_full_fp32_param(parameter)
        else:
            yield name, deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)


def read_steps(engine: Any, parameters: Parameters) -> int:
    """Return the number of Adam's steps, on which its bias correction depends."""
    return max(int(state["step"]) for state in _adam_states(engine, parameters).values())


def write_state(
    engine: Any, parameters: Parameters, *, saved: Callable[[str, str], torch.Tensor], steps: int
) -> None:
    """Set masters, moments and the model's weights to `saved(name, kind)`, see `read_state`."""
    adam = _adam_states(engine, parameters)
    for state in adam.values():
        state["step"].fill_(steps)
    for name, parameter in parameters.items():
        tensors = {kind: saved(name, kind) for kind in KINDS}
        if not engine.zero_optimization():
            with torch.no_grad():
                parameter.copy_(tensors[MASTER])
            for kind in MOMENTS:
                adam[name][kind].copy_(tensors[kind])
        elif engine.zero_optimization_stage() < PARTITIONED:
            _write_whole(parameter, tensors)
        else:
            _write_partitioned(parameter, tensors)


def _write_whole(parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write at ZeRO 1 and 2: each rank keeps its part of masters and moments, and all weights."""
    deepspeed.utils.safe_set_full_fp32_param(parameter, tensors[MASTER])
    for kind in MOMENTS:
        deepspeed.utils.safe_set_full_optimizer_state(parameter, tensors[kind], kind)
    with torch.no_grad():
        parameter.copy_(tensors[MASTER])  # rounded like after a step


def _write_partitioned(parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write at ZeRO 3: each rank keeps an equal part of everything, the last one padded with 0.

    deepspeed.utils.safe_set_full_* do not pad: 5 elements on 2 ranks are the parts 0 1 2 and 3 4 0.
    """
    group = parameter.ds_process_group
    length = parameter.ds_tensor.numel()
    start = torch.distributed.get_rank(group) * length
    for kind, tensor in tensors.items():
        part = torch.zeros(length, dtype=tensor.dtype)
        mine = tensor.reshape(-1)[start : start + length]
        part[: mine.numel()] = mine
        if kind == MASTER:
            deepspeed.utils.safe_set_local_fp32_param(parameter, part)
        else:
            deepspeed.utils.safe_set_local_optimizer_state(parameter, part, kind)
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(tensors[MASTER])  # rank 0 then sends all ranks their parts


def _adam_states(engine: Any, parameters: Parameters) -> dict[Any, dict[str, torch.Tensor]]:
    """Return Adam's state of each tensor that it updates, created as the first step would.

    At ZeRO 0 the tensors are the parameters, else flat buffers with this rank's part of many.
    """
    zero = engine.optimizer
    if not engine.zero_optimization():
        return {
            name: _started(zero.state[parameter], parameter)
            for name, parameter in parameters.items()
        }
    states = {
        index: _started(zero.optimizer.state[flat], flat)
        for index, flat in enumerate(_flat_masters(zero))
    }
    if engine.zero_optimization_stage() < PARTITIONED:
        # A first step would do this. Without it parameters do not find their fragments.
        zero._lazy_init_hp_params_optimizer_state()
    return states


def _started(state: dict[str, torch.Tensor], tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fill an empty Adam state like the first step of torch's fused AdamW."""
    if not state:
        # The fused kernel reads the count on the device: a count on the CPU would end a run on a
        # GPU at its first update.
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        state |= {
            kind: torch.zeros_like(tensor, memory_format=torch.preserve_format) for kind in MOMENTS
        }
    return state


def _flat_masters(zero: Any) -> Iterable[torch.Tensor]:
    """Return this rank's part of the float32 weights. Its name depends on DeepSpeed's optimizer."""
    for attribute in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(zero, attribute):  # at ZeRO 3; at 1 and 2; at 1 in bfloat16
            return list(getattr(zero, attribute))
    raise TypeError(
        f"{type(zero).__name__} is none of the known ZeRO optimizers, whose attribute for the "
        "float32 masters has another name; add it here"
    )
