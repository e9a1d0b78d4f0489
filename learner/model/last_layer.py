"""Compute the last layer's feed-forward half only where a response token is predicted.

    is_trimmed = trim_last_layer(causal_lm)    # False: another kind of layer, left unchanged

Attention is the last operation in which tokens meet. Everything after it is per token, so it is
computed for the N positions that the output layer reads, not for all T. The result is the same up
to rounding. It saves 17 % of a step of a model with 2 layers, 2.7 % with 24, 1.2 % with 30.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers import PreTrainedModel

from learner.model.packed_attention import packed_hidden

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SAME = 1e-4  # relative distance: the same operations in the same order, so only rounding differs
# Errors of a layer of another kind when `_trimmed_forward` calls its parts: wrong arguments, wrong
# number of results, a missing result, wrong shapes. Any other error is the model's own.
MISFITS = (TypeError, ValueError, IndexError, RuntimeError)


def trim_last_layer(causal_lm: PreTrainedModel) -> bool:
    """Make `packed_hidden(..., positions_N)` give [N, H], and return whether that was possible.

    A layer is trimmed if it computes x + attention(norm(x)), then x + mlp(norm(x)), like those of
    Llama, Mistral, Qwen2 and Qwen3. Its parts must have the usual names. Passes before and after
    the change must give the same: at all positions, at some, and at none. Any other layer is left
    unchanged: one that adds or scales something, or whose mlp lets tokens meet.
    """
    layers = getattr(causal_lm.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not len(layers):
        return False
    layer, own = layers[-1], layers[-1].forward
    if not all(hasattr(layer, part) for part in PARTS):
        return False
    before_TH = _probe(causal_lm, None)
    layer.forward = types.MethodType(_trimmed_forward, layer)
    try:
        is_trimmed = _computes(causal_lm, before_TH)
    except MISFITS:
        is_trimmed = False
    if not is_trimmed:
        layer.forward = own
    return is_trimmed


def _computes(causal_lm: PreTrainedModel, before_TH: torch.Tensor) -> bool:
    """Return whether the changed model gives its earlier result, and any rows of it alone."""
    # Matrices of fewer rows add up in another order.
    rounding = max(SAME, torch.finfo(causal_lm.dtype).eps)
    return (
        _is_close(_probe(causal_lm, None), before_TH, relative=SAME)
        and _is_close(_probe(causal_lm, [1, 4]), before_TH[[1, 4]], relative=rounding)
        and _is_close(_probe(causal_lm, []), before_TH[[]], relative=rounding)
    )


def _is_close(one: torch.Tensor, other: torch.Tensor, *, relative: float) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= relative * other.norm())


def _trimmed_forward(
    layer: Any,
    hidden_1TH: torch.Tensor,
    *,
    positions_N: torch.Tensor | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """Compute the layer, at `positions_N` only if they are given: [1, N, H], else [1, T, H]."""
    attended_1TH, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_1TH), **keywords)
    hidden_1TH = hidden_1TH + attended_1TH
    hidden_1NH = hidden_1TH if positions_N is None else hidden_1TH.index_select(1, positions_N)
    return hidden_1NH + layer.mlp(layer.post_attention_layernorm(hidden_1NH))


def _probe(causal_lm: PreTrainedModel, positions: list[int] | None) -> torch.Tensor:
    """Compute two sequences of three and two tokens: [T, H], or [N, H] at the given positions."""
    device, was_training = causal_lm.device, causal_lm.training
    ids_T = torch.tensor([0, 1, 2, 0, 1], device=device)
    bounds_S1 = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    positions_N = None
    if positions is not None:
        positions_N = torch.tensor(positions, dtype=torch.int64, device=device)
    causal_lm.eval()
    try:
        with torch.no_grad():
            return packed_hidden(
                causal_lm, ids_T, ids_T, bounds_S1, positions_N=positions_N
            ).float()
    finally:
        causal_lm.train(was_training)
