"""The last layer's feed-forward half where a response token is predicted, and nowhere else: nobody
reads its other outputs.

    trimmed = trim_last_layer(causal_lm)       # False: another kind of layer, which stays as it is

Attention is the last place where tokens meet. What follows is per token, so of T positions only the
N are computed that the output layer will read. The result is the same to rounding; the work saved
is one layer's, a quarter of a two-layer model's step where a tenth of the tokens are responses,
next to nothing at thirty layers.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers import PreTrainedModel

from learner.model.packed_attention import packed_hidden

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SAME = 1e-4  # relative distance: the same operations in the same order, so rounding alone
# What a layer of another kind raises when it is called as `_trimmed_forward` calls it: for other
# arguments, for another number of results, for a result that is not there, for other shapes.
# Anything else is an error of the model's own.
MISFITS = (TypeError, ValueError, IndexError, RuntimeError)


def trim_last_layer(causal_lm: PreTrainedModel) -> bool:
    """True if from now on `packed_hidden(..., positions_N)` gives [N, H] instead of [T, H].

    A layer is trimmed if it is x + attention(norm(x)), then x + mlp(norm(x)), as those of Llama,
    Mistral, Qwen2 and Qwen3 are: its names say so, and passes before and after the change give the
    same, at all positions, at some and at none. One that adds or scales something, whose parts are
    called otherwise, or whose mlp lets tokens meet, stays as it is.
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
        trimmed = _gives(causal_lm, before_TH)
    except MISFITS:
        trimmed = False
    if not trimmed:
        layer.forward = own
    return trimmed


def _gives(causal_lm: PreTrainedModel, before_TH: torch.Tensor) -> bool:
    """Whether the changed model gives what it gave before, and those rows of it that are asked
    for.
    """
    # matrices of fewer rows add up in another order
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
    attended_1TH, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_1TH), **keywords)
    hidden_1TH = hidden_1TH + attended_1TH
    hidden_1NH = hidden_1TH if positions_N is None else hidden_1TH.index_select(1, positions_N)
    return hidden_1NH + layer.mlp(layer.post_attention_layernorm(hidden_1NH))


def _probe(causal_lm: PreTrainedModel, positions: list[int] | None) -> torch.Tensor:
    """[T, H] of two sequences of three and two tokens; of a trimmed model [N, H], of those
    positions only.
    """
    device, was_training = causal_lm.device, causal_lm.training
    ids_T, bounds_S1 = (
        torch.tensor([0, 1, 2, 0, 1], device=device),
        torch.tensor([0, 3, 5], device=device),
    )
    asked = (
        {}
        if positions is None
        else {"positions_N": torch.tensor(positions, dtype=torch.int64, device=device)}
    )
    causal_lm.eval()
    try:
        with torch.no_grad():
            return packed_hidden(causal_lm, ids_T, ids_T, bounds_S1.int(), **asked).float()
    finally:
        causal_lm.train(was_training)
