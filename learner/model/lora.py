"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): a frozen base model, and for each linear
layer two small matrices.

    add_adapters(causal_lm, rank=16, alpha=32.0)      # from now on y = W x + (alpha / rank) B A x; only A and B learn
    for name, tensor in merged(causal_lm): ...        # the same policy as plain weights, to publish
    with adapters_off(causal_lm): ...                 # the base model, which is the reference policy
    write_adapter(causal_lm, Path("adapter"))         # for peft, and for vLLM beside the base model

Letters: I inputs and O outputs of a layer, r the rank. A is [r, I], B is [O, r] and starts at 0, so
that at first nothing changes. In a model's own names a layer `q_proj` becomes

    q_proj.base_layer.weight      W, frozen
    q_proj.lora_A.default.weight  A, float32
    q_proj.lora_B.default.weight  B, float32
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from learner.distributed.deepspeed_setup import whole
from learner.files.atomic_directory import atomic_directory

if TYPE_CHECKING:
    from peft.tuners import lora

ADAPTER = "default"  # peft's own name; adapter files leave it out
ADAPTER_FILE = "adapter_model.safetensors"
# of every name in an adapter file: peft's wrapper around the model
FILE_PREFIX = "base_model.model."
BASE, ADAPTER_WEIGHTS = ".base_layer.", (".lora_A.", ".lora_B.")


def add_adapters(
    causal_lm: PreTrainedModel, *, rank: int, alpha: float, tf32: bool = False
) -> None:
    """Adapts all linear layers but the output layer, in place, and freezes everything else.

    A is drawn from torch's random state, so a seed set before gives the same adapters. They are
    float32 whatever the base is: steps of 1e-5 are lost in bfloat16. With `tf32` a GPU multiplies
    by them on its tensor cores; a CPU ignores it. Raises ValueError for a rank or alpha that cannot
    be, and without a linear layer.
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
    # here and below: most learners have no adapters
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # only ever divided by r; peft and vLLM take fractions too
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
    # A set until here, whose order, and so the file's, would differ from process to process.
    causal_lm.peft_config[ADAPTER].target_modules = sorted(config.target_modules or ())


def _forward_in_tf32(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _Tf32Product.apply(inputs, layer.weight)
    return product


class _Tf32Product(torch.autograd.Function):
    """inputs @ weight.T in TF32, forward and backward, whatever the process's precision is.

    Not for the process: rotary angles and the merge of `merged` need all bits of float32.
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
            grad_weight_OI = (
                grad_TO.flatten(0, -2).T @ inputs_TI.flatten(0, -2) if weight_wanted else None
            )
        return grad_inputs_TI, grad_weight_OI


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Within it float32 matrices are multiplied in TF32 on a GPU."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def merged(causal_lm: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapted model as a plain one: (name in the base model, tensor), each storage once, in the
    base's dtype.

    W + (alpha / rank) B A, summed in float32 and rounded once. The model itself is not changed. One
    parameter exists at a time beside it; one that is not adapted is the model's own, not a copy:
    read it before the next one and the next update. A tied output layer has no entry. Weights that
    ZeRO 3 shares out are gathered one by one, which all ranks do together.

    Worked, rank 1, alpha 2: W = [[1, 0], [0, 1]], A = [[1, 2]], B = [[3], [0]] give W + 2 B A =
    [[7, 12], [0, 1]].
    """
    seen: set[int] = set()
    for name, tensor in causal_lm.state_dict(keep_vars=True).items():
        if id(tensor) in seen or any(part in name for part in ADAPTER_WEIGHTS):
            continue
        seen.add(id(tensor))
        layer_name, is_adapted, leaf = name.partition(BASE)
        if is_adapted and leaf == "weight":
            layer = causal_lm.get_submodule(layer_name)
            with (
                whole(tensor),
                whole(layer.lora_A[ADAPTER].weight),
                whole(layer.lora_B[ADAPTER].weight),
            ):
                merged_OI = _merged(layer, tensor)
            yield f"{layer_name}.{leaf}", merged_OI
        else:
            with whole(tensor):
                yield f"{layer_name}.{leaf}" if is_adapted else name, tensor.detach()


@contextmanager
def adapters_off(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Within it the model is the base model, bit for bit, and there is nothing to take a gradient
    of.

    A backward pass of a forward pass made before must wait until it is left.
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
    """Writes a peft adapter directory, adapter_config.json and adapter_model.safetensors; it
    appears whole or not at all.
    """
    parameters = {
        name: tensor
        for name, tensor in causal_lm.named_parameters()
        if any(p in name for p in ADAPTER_WEIGHTS)
    }
    tensors = {}
    for name, parameter in parameters.items():
        with whole(parameter):
            file_name = FILE_PREFIX + name.replace(f".{ADAPTER}.", ".")
            tensors[file_name] = parameter.detach().cpu().clone()
    with atomic_directory(dest) as unfinished:
        causal_lm.peft_config[ADAPTER].save_pretrained(str(unfinished))
        save_file(tensors, unfinished / ADAPTER_FILE, metadata={"format": "pt"})


def _merged(layer: lora.Linear, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        A_rI, B_Or = layer.lora_A[ADAPTER].weight.float(), layer.lora_B[ADAPTER].weight.float()
        change_OI = layer.scaling[ADAPTER] * (B_Or @ A_rI)
        # GPT-2's Conv1D keeps its weight as [I, O].
        change = change_OI.T if layer.fan_in_fan_out else change_OI
        return (weight.float() + change).to(weight.dtype)
