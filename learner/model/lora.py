"""Train low-rank adapters (Hu et al. 2021, arXiv 2106.09685): two small matrices per linear layer.

    add_adapters(causal_lm, rank=16, alpha=32.0)   # y = W x + (alpha / rank) B A x
    for name, tensor in merged(causal_lm): ...     # the same policy as plain weights
    with adapters_off(causal_lm): ...              # the base model: the reference policy
    write_adapter(causal_lm, Path("adapter"))      # for peft, and for vLLM beside the base model

Only A and B are trained; the base model W is frozen. Letters: I inputs and O outputs of a layer, r
the rank. A is [r, I], B is [O, r] and starts at 0, so that at first nothing changes. In a model's
own names a layer `q_proj` becomes

    q_proj.base_layer.weight      W, frozen
    q_proj.lora_A.default.weight  A, float32
    q_proj.lora_B.default.weight  B, float32
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from learner.distributed.deepspeed_setup import full_parameter
from learner.files.atomic_directory import new_directory
from store import ADAPTER_FILE, ADAPTER_PREFIX

if TYPE_CHECKING:
    from peft.tuners import lora

ADAPTER = "default"  # peft's own name; adapter files leave it out
NUMBERED = re.compile(r".*?\.\d+(?=\.)")
BASE, ADAPTER_WEIGHTS = ".base_layer.", (".lora_A.", ".lora_B.")


def add_adapters(
    causal_lm: PreTrainedModel, *, rank: int, alpha: float, tf32: bool = False
) -> None:
    """Add adapters to all linear layers but the output layer, and freeze all other weights.

    The model is changed in place. A is drawn from torch's random state, so the same seed gives the
    same adapters. They are float32 whatever the base is: steps of 1e-5 are lost in bfloat16. With
    `tf32` a GPU multiplies by them on its tensor cores. Raises ValueError for an invalid rank or
    alpha, or if no layer is linear.
    """
    if rank < 1:
        raise ValueError(
            f"model.lora_rank={rank} must be at least 1 for adapters; 0 trains all weights"
        )
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(
            f"model.lora_alpha={alpha} must be above 0: an adapter's product is scaled by "
            "lora_alpha / lora_rank"
        )
    # peft is imported where it is needed, as most learners have no adapters.
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        # It is only ever divided by r; peft and vLLM accept fractions too.
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules="all-linear",
        lora_dropout=0.0,  # behaviour and learner log-probabilities must be of one function
        task_type="CAUSAL_LM",
        base_model_name_or_path=causal_lm.name_or_path,
    )
    inject_adapter_in_model(config, causal_lm, ADAPTER)
    for parameter in causal_lm.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for name, module in causal_lm.named_modules():
        if tf32 and name.endswith(tuple(f"{part}{ADAPTER}" for part in ADAPTER_WEIGHTS)):
            module.forward = types.MethodType(_forward_in_tf32, module)
    # It was a set. The order of a set, and so the adapter file, would differ between processes.
    causal_lm.peft_config[ADAPTER].target_modules = sorted(config.target_modules or ())


def _forward_in_tf32(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _Tf32Product.apply(inputs, layer.weight)
    return product


class _Tf32Product(torch.autograd.Function):
    """Compute inputs @ weight.T in TF32, forward and backward, whatever the process's precision is.

    It is not set for the whole process: rotary angles and `merged` need all bits of float32.
    """

    @staticmethod
    def forward(ctx: Any, inputs_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs_TI, weight_OI)
        with tensor_cores():
            return inputs_TI @ weight_OI.T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TO: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        inputs_TI, weight_OI = ctx.saved_tensors
        inputs_wanted, weight_wanted = ctx.needs_input_grad
        with tensor_cores():
            grad_inputs_TI = grad_TO @ weight_OI if inputs_wanted else None
            grad_weight_OI = None
            if weight_wanted:
                grad_weight_OI = grad_TO.flatten(0, -2).T @ inputs_TI.flatten(0, -2)
        return grad_inputs_TI, grad_weight_OI


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Multiply float32 matrices in TF32 on a GPU within this block."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def merged(causal_lm: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the base model, tensor) of the adapted model as a plain one.

    W + (alpha / rank) B A is summed in float32 and rounded once to the base's dtype; the model does
    not change. Each storage is yielded once, so a tied output layer has no entry. One merged
    parameter exists at a time. Others are the model's own, not copies: read them before the next
    one and the next update. Weights partitioned by ZeRO 3 are gathered layer by layer, by all ranks
    together.

    Example with rank 1 and alpha 2: W = [[1, 0], [0, 1]], A = [[1, 2]], B = [[3], [0]] give W + 2 B
    A = [[7, 12], [0, 1]].
    """
    seen: set[int] = set()
    state = causal_lm.state_dict(keep_vars=True)
    for _, names in groupby(state, key=_layer):
        layer_state = {name: state[name] for name in names}
        with full_parameter(*layer_state.values()):
            for name, tensor in layer_state.items():
                if id(tensor) in seen or any(part in name for part in ADAPTER_WEIGHTS):
                    continue
                seen.add(id(tensor))
                module_name, is_adapted, leaf = name.partition(BASE)
                if is_adapted and leaf == "weight":
                    tensor = _merged(causal_lm.get_submodule(module_name), tensor)
                yield f"{module_name}.{leaf}" if is_adapted else name, tensor.detach()


def _layer(name: str) -> str:
    """Return the name up to its first number; a name without one is a layer of its own.

    model.layers.3.mlp.up_proj.weight -> model.layers.3, model.embed_tokens.weight -> itself
    """
    found = NUMBERED.match(name)
    return found.group() if found else name


@contextmanager
def adapters_off(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Make the model the base model, bit for bit and without trainable parts, within this block.

    Leave the block before the backward pass of an earlier forward pass.
    """
    from peft.tuners import lora

    layers = [module for module in causal_lm.modules() if isinstance(module, lora.LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def write_adapter(causal_lm: PreTrainedModel, dest: Path) -> None:
    """Write a peft adapter directory that appears whole or not at all.

    It holds adapter_config.json and adapter_model.safetensors.
    """
    tensors = {name: tensor.cpu().clone() for name, tensor in adapter_weights(causal_lm)}
    with new_directory(dest) as unfinished:
        write_adapter_config(causal_lm, unfinished)
        save_file(tensors, unfinished / ADAPTER_FILE, metadata={"format": "pt"})


def adapter_weights(causal_lm: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in an adapter file, tensor) of A and B of every adapted layer, in float32.

    They are the model's own, not copies: read each before the next one and the next update. Weights
    partitioned by ZeRO 3 are gathered one by one, by all ranks together.
    """
    for name, parameter in causal_lm.named_parameters():
        if any(part in name for part in ADAPTER_WEIGHTS):
            with full_parameter(parameter):
                yield ADAPTER_PREFIX + name.replace(f".{ADAPTER}.", "."), parameter.detach()


def read_adapter(causal_lm: PreTrainedModel, source: Path) -> None:
    """Give the adapters of a model the values in an adapter file. Names and shapes have to agree.

    The model is not partitioned.
    """
    values = load_file(source / ADAPTER_FILE)
    for name, tensor in adapter_weights(causal_lm):
        tensor.copy_(values[name])


def write_adapter_config(causal_lm: PreTrainedModel, directory: Path) -> None:
    """Write adapter_config.json: rank, alpha and the adapted layers, as peft and vLLM read them."""
    causal_lm.peft_config[ADAPTER].save_pretrained(str(directory))


def _merged(layer: lora.Linear, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        A_rI, B_Or = layer.lora_A[ADAPTER].weight.float(), layer.lora_B[ADAPTER].weight.float()
        change_OI = layer.scaling[ADAPTER] * (B_Or @ A_rI)
        # GPT-2's Conv1D keeps its weight as [I, O].
        change = change_OI.T if layer.fan_in_fan_out else change_OI
        return (weight.float() + change).to(weight.dtype)
