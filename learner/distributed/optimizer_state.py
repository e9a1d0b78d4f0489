"""What DeepSpeed spreads over ranks and flat buffers, as whole tensors by parameter name, whatever
the ZeRO stage.

    parameters = trainable(engine.policy.causal_lm)
    for name, tensor in read_state(engine.deepspeed, parameters, "exp_avg"): ...   # one at a time
    write_state(engine.deepspeed, parameters, saved, steps=7)

Kinds: "master" are the weights as the optimizer has them, "exp_avg" and "exp_avg_sq" Adam's moments
(m and v of Kingma and Ba 2015); all float32, of the parameter's own shape. Of an engine that never
stepped the moments are 0. All ranks call a function together, and iterate to its end.
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
    """The parameters that the optimizer changes, by name, in the module's order; a tied one under
    its first name.
    """
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def shape_of(parameter: torch.nn.Parameter) -> list[int]:
    """Of the whole parameter: under ZeRO 3 its own shape is 0."""
    return list(getattr(parameter, "ds_shape", parameter.shape))


def read_state(
    engine: Any, parameters: Parameters, kind: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, float32 tensor) of every parameter, gathered when its turn comes. Use it before the
    next update.
    """
    adam = _adam_states(engine, parameters)
    if not engine.zero_optimization():
        for name, parameter in parameters.items():
            yield name, parameter.detach() if kind == MASTER else adam[name][kind]
        return
    for name, parameter in parameters.items():
        if kind == MASTER:
            yield name, deepspeed.utils.safe_get_full_fp32_param(parameter)
        else:
            yield name, deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)


def read_steps(engine: Any, parameters: Parameters) -> int:
    """Steps that Adam has made; its bias correction depends on them."""
    return max(int(state["step"]) for state in _adam_states(engine, parameters).values())


def write_state(
    engine: Any, parameters: Parameters, saved: Callable[[str, str], torch.Tensor], *, steps: int
) -> None:
    """Sets masters, moments and the weights of the model; `saved(name, kind)` gives what
    `read_state` gave.
    """
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
    """ZeRO 1 and 2: each rank keeps its fragment of masters and moments, and the whole weights."""
    deepspeed.utils.safe_set_full_fp32_param(parameter, tensors[MASTER])
    for kind in MOMENTS:
        deepspeed.utils.safe_set_full_optimizer_state(parameter, tensors[kind], kind)
    with torch.no_grad():
        parameter.copy_(tensors[MASTER])  # rounded as a step rounds it


def _write_partitioned(parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    """ZeRO 3: each rank keeps its part of everything. Parts are of equal length, the last one
    padded with 0.

    deepspeed.utils.safe_set_full_* take no padding: 5 elements on 2 ranks are the parts 0 1 2 and 3
    4 0.
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
        parameter.copy_(tensors[MASTER])  # and from rank 0 to the parts of all


def _adam_states(engine: Any, parameters: Parameters) -> dict[Any, dict[str, torch.Tensor]]:
    """Adam's state of each tensor that it steps on, made here where the first step would make it.

    Those are the parameters themselves at ZeRO 0, else flat buffers with this rank's part of many
    of them.
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
        # as after a first step: else parameters do not find their fragments
        zero._lazy_init_hp_params_optimizer_state()
    return states


def _started(state: dict[str, torch.Tensor], tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fill an empty Adam state as torch's fused AdamW fills it at its first step."""
    if not state:
        # The fused kernel reads the count on the device: a step on the CPU ends a run on a GPU at
        # its first update.
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        state |= {
            kind: torch.zeros_like(tensor, memory_format=torch.preserve_format) for kind in MOMENTS
        }
    return state


def _flat_masters(zero: Any) -> Iterable[torch.Tensor]:
    """This rank's part of the float32 weights, under the names that DeepSpeed's optimizers have for
    it.
    """
    for attribute in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(zero, attribute):  # of ZeRO 3; of 1 and 2; of 1 in bfloat16
            return list(getattr(zero, attribute))
    raise TypeError(
        f"{type(zero).__name__} is none of the ZeRO optimizers known here; their names for the "
        "masters changed"
    )
