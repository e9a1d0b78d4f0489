"""The last layer's feed-forward half where a response token is predicted, and nowhere else: nobody reads its other outputs.

    trimmed = trim_last_layer(causal_lm)       # False: another kind of layer, which stays as it is

Attention is the last place where tokens meet. What follows is per token, so of T positions only the N are computed that the
output layer will read. The result is the same to rounding; the work saved is one layer's, a quarter of a two-layer model's
step where a tenth of the tokens are responses, next to nothing at thirty layers.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers import PreTrainedModel

from learner.attention import packed_hidden

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SAME = 1e-4  # relative distance: the same operations in the same order, so rounding alone


def trim_last_layer(causal_lm: PreTrainedModel) -> bool:
    """True if from now on `packed_hidden(..., positions_N)` gives [N, H] instead of [T, H].

    A layer is trimmed if it is x + attention(norm(x)), then x + mlp(norm(x)), as those of Llama, Mistral, Qwen2 and Qwen3
    are: its names say so, and one pass before and after the change gives the same.
    """
    layers = getattr(causal_lm.base_model, "layers", None)
    if not layers or not all(hasattr(layers[-1], part) for part in PARTS):
        return False
    layer, own = layers[-1], layers[-1].forward
    before_TH = _probe(causal_lm)
    layer.forward = types.MethodType(_trimmed_forward, layer)
    if (_probe(causal_lm) - before_TH).norm() <= SAME * before_TH.norm():
        return True
    layer.forward = own
    return False


def _trimmed_forward(
    layer: Any, hidden_1TH: torch.Tensor, *, positions_N: torch.Tensor | None = None, **keywords: Any
) -> torch.Tensor:
    attended_1TH, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_1TH), **keywords)
    hidden_1TH = hidden_1TH + attended_1TH
    hidden_1NH = hidden_1TH if positions_N is None else hidden_1TH.index_select(1, positions_N)
    return hidden_1NH + layer.mlp(layer.post_attention_layernorm(hidden_1NH))


def _probe(causal_lm: PreTrainedModel) -> torch.Tensor:
    """[T, H] of two sequences of three and two tokens."""
    was_training = causal_lm.training
    causal_lm.eval()
    ids_T, bounds_S1 = torch.tensor([0, 1, 2, 0, 1], device=causal_lm.device), torch.tensor([0, 3, 5], device=causal_lm.device)
    with torch.no_grad():
        hidden_TH = packed_hidden(causal_lm, ids_T, ids_T, bounds_S1.int()).float()
    causal_lm.train(was_training)
    return hidden_TH
