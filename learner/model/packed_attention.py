"""Compute causal attention within each of several sequences that lie end to end.

    use_packed_attention(causal_lm)
    hidden_TH = packed_hidden(causal_lm, input_ids_T=..., position_ids_T=..., bounds_Sp1=...)
    is_trimmed = trim_last_layer(causal_lm)    # False: another kind of layer, left unchanged

It works for every transformers model with replaceable attention. transformers passes the keyword
`sequences` to each layer's attention, also when a checkpointed layer is computed again, so no state
is kept. On a GPU in bf16 or fp16 one kernel computes all sequences. Otherwise each is one call of
ordinary attention, without padding and without pairs of tokens of different sequences. (On a CPU
one padded call for sequences of similar length took a tenth to a third longer. One call for
neighbours of equal length gained 3 to 15 %, and only if all are equal.)

Letters: S sequences, T tokens together, L of one, A attention heads, D size of one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from learner.distributed.sequence_group import SequenceGroup

PACKED = "packed"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)  # of the variable-length kernel
KERNEL_HEAD_SIZE = 256  # at most, a multiple of 8, and one for queries, keys and values
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings whose angles depend on the longest sequence of the forward pass, so that packed
# sequences would change each other.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Relative distance of two results of one function, in bf16, which rounds by up to 2^-8 = 0.004.
# Another function is off by a multiple of this: leaked tokens change whole vectors.
SAME = 0.01
LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SAME_TRIMMED = 1e-4  # the same operations in the same order, so only rounding differs
# Errors of a layer of another kind when `_trimmed_forward` calls its parts: wrong arguments, wrong
# number of results, a missing result, wrong shapes. Any other error is the model's own.
MISFITS = (TypeError, ValueError, IndexError, RuntimeError)
MIXED = "computes two equal sequences unequally when packed into one, so tokens pass between them"
# Arguments that some models pass to attention. Ignoring them silently would compute another
# function.
NOT_COMPUTED = ("softcap", "s_aux", "position_bias", "indices", "block_indices")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSequences:
    """Bounds of one forward pass's sequences: on the device for a kernel, as numbers for a loop."""

    bounds_Sp1: torch.Tensor  # int32, cumulative, from 0 to T
    lengths: list[int]  # of the S sequences
    compared: bool = False  # whether each layer compares its kernel with one sequence after another
    group: SequenceGroup | None = None  # the ranks that share the tokens; None: this one has all


def use_packed_attention(causal_lm: PreTrainedModel) -> None:
    """Make the model compute packed sequences from now on. Its weights must be loaded.

    Raises ValueError if tokens reach others by more than attention, or if packed attention cannot
    compute the model's attention.
    """
    name = f"model.path: {type(causal_lm).__name__}"
    # A vision model's tower keeps its own attention, which keeps images apart.
    decoder = causal_lm.get_decoder()
    others = set(getattr(decoder.config, "layer_types", None) or ()) - LAYER_TYPES
    if causal_lm.is_backend_compatible() and not causal_lm._is_stateful and not others:
        decoder.set_attn_implementation(PACKED)
    if decoder.config._attn_implementation != PACKED:
        layers = f" (its layers: {', '.join(sorted(others))})" if others else ""
        raise ValueError(
            f"{name}{layers} passes tokens on by more than attention that can be replaced, so "
            "sequences packed into one would mix; use a decoder with softmax attention, such as a "
            "Llama, Mistral, Qwen2 or Qwen3"
        )
    for module in causal_lm.modules():
        rope = getattr(module, "rope_type", None)
        for kind in rope.values() if isinstance(rope, dict) else (rope,):
            if kind in LENGTH_DEPENDENT_ROPE:
                raise ValueError(
                    f"{name} with rope_type {kind!r} turns by the longest sequence of a pass, so "
                    "sequences packed into one would change each other; set a fixed rope_type such "
                    "as 'yarn' in its config.json"
                )
    hidden_TH = _probe(causal_lm, (2, 2))
    if not are_same(*hidden_TH.chunk(2)):
        raise ValueError(f"{name} {MIXED}")


def are_same(one: torch.Tensor, other: torch.Tensor, *, relative: float = SAME) -> bool:
    """Return whether two results of one function, of any shape, are equal up to rounding in bf16.

    `relative` is the distance allowed, as a fraction of the norm.
    """
    one, other = one.float(), other.float()
    return one.shape == other.shape and bool((one - other).norm() <= relative * other.norm())


def _probe(
    causal_lm: PreTrainedModel, lengths: tuple[int, int], *, positions: list[int] | None = None
) -> torch.Tensor:
    """Return the hidden states of two sequences: float32 [T, H], or [N, H] at `positions`."""
    device, was_training = causal_lm.device, causal_lm.training
    ids_T = torch.tensor([*range(lengths[0]), *range(lengths[1])], device=device)
    bounds_Sp1 = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
    positions_N = None
    if positions is not None:
        positions_N = torch.tensor(positions, dtype=torch.int64, device=device)
    causal_lm.eval()
    try:
        with torch.no_grad():
            hidden = packed_hidden(
                causal_lm,
                input_ids_T=ids_T,
                position_ids_T=ids_T,
                bounds_Sp1=bounds_Sp1,
                positions_N=positions_N,
            )
            return hidden.float()
    finally:
        causal_lm.train(was_training)


def packed_hidden(
    causal_lm: PreTrainedModel,
    *,
    input_ids_T: torch.Tensor,
    position_ids_T: torch.Tensor,
    bounds_Sp1: torch.Tensor,
    embedded: Mapping[str, torch.Tensor] | None = None,
    compared: bool = False,
    positions_N: torch.Tensor | None = None,
    group: SequenceGroup | None = None,
) -> torch.Tensor:
    """Return the decoder's last hidden states: [T, H], or with `positions_N` [N, H].

    They have the model's dtype. `positions_N` is for a model whose last layer is trimmed.
    `embedded` replaces ids and positions (`vision.py`). With `compared` each layer compares its
    kernel with one sequence after another, and raises ValueError if they differ. With `group` ids
    and positions are this rank's share of the tokens, and the bounds those of all.
    """
    # Once per forward pass and not per layer: reading the lengths waits for the device.
    lengths = bounds_Sp1.diff().tolist()
    sequences = PackedSequences(
        bounds_Sp1=bounds_Sp1, lengths=lengths, compared=compared, group=group
    )
    inputs = {"input_ids": input_ids_T.unsqueeze(0), "position_ids": position_ids_T.unsqueeze(0)}
    for_last_layer = {} if positions_N is None else {"positions_N": positions_N}
    return causal_lm.get_decoder()(
        **(inputs if embedded is None else embedded),
        sequences=sequences,
        use_cache=False,
        **for_last_layer,
    ).last_hidden_state.squeeze(0)


def packed_attention(
    module: torch.nn.Module,
    query_1ATD: torch.Tensor,
    key_1ATD: torch.Tensor,
    value_1ATD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequences: PackedSequences | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers' interface. Return [1, T, A, D], with D of the values.

    Keys and values may have fewer heads, a divisor of the queries'. Values may have another head
    size, as in latent attention.
    """
    if attention_mask is not None:
        raise ValueError(
            f"model.path: {type(module).__name__} masks tokens by a rule of its own, which packed "
            "attention does not apply; use another model"
        )
    if sequences is None:
        raise ValueError(
            f"{type(module).__name__} was not told its sequences; `packed_hidden` does, unless its "
            "model drops keywords"
        )
    asked = [name for name in NOT_COMPUTED if others.get(name) is not None]
    if asked:
        raise ValueError(
            f"model.path: {type(module).__name__} uses {asked[0]}, which packed attention does not "
            "compute"
        )
    heads, group = (query_1ATD, key_1ATD, value_1ATD), sequences.group
    if group is not None:
        heads = group.tokens_for_heads(*heads)
    out_1TAD = _attended(module, heads, sequences, scaling=scaling, sliding_window=sliding_window)
    return out_1TAD if group is None else group.heads_for_tokens(out_1TAD), None


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query_1ATD, key_1ATD, value_1ATD


def _attended(
    module: torch.nn.Module,
    heads: Heads,
    sequences: PackedSequences,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Compute attention of all T tokens: [1, T, A, D]."""
    query_1ATD, _, value_1ATD = heads
    if not _kernel_takes(query_1ATD, value_1ATD):
        return _by_sequence(heads, sequences, scaling=scaling, sliding_window=sliding_window)
    out_1TAD = _by_kernel(heads, sequences, scaling=scaling, sliding_window=sliding_window)
    if sequences.compared:
        looped_1TAD = _by_sequence(heads, sequences, scaling=scaling, sliding_window=sliding_window)
        if not are_same(out_1TAD, looped_1TAD):
            raise ValueError(
                f"model.path: the variable-length kernel of torch {torch.__version__} on "
                f"{query_1ATD.device} computes {type(module).__name__} unlike one sequence after "
                "another; update torch, or set model.dtype=float32, which uses no kernel"
            )
    return out_1TAD


def _by_kernel(
    heads: Heads, sequences: PackedSequences, *, scaling: float | None, sliding_window: int | None
) -> torch.Tensor:
    """Compute all sequences at once with a GPU's variable-length kernel: [1, T, A, D]."""
    longest = max(sequences.lengths)
    grouped = heads[0].shape[1] != heads[1].shape[1]
    out_TAD: torch.Tensor = varlen_attn(
        *(heads_1ATD[0].transpose(0, 1) for heads_1ATD in heads),
        sequences.bounds_Sp1,
        sequences.bounds_Sp1,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        # torch 2.11 takes grouped heads without being told.
        **({"enable_gqa": grouped} if _is_told_of_groups(varlen_attn) else {}),
    )
    return out_TAD.unsqueeze(0)


@functools.cache
def _is_told_of_groups(kernel: Callable[..., object]) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


def _by_sequence(
    heads: Heads, sequences: PackedSequences, *, scaling: float | None, sliding_window: int | None
) -> torch.Tensor:
    """Compute one sequence after another with torch's ordinary attention: [1, T, A, D]."""
    grouped = heads[0].shape[1] != heads[1].shape[1]
    outs_1LAD = []
    parts = (heads_1ATD.split(sequences.lengths, dim=2) for heads_1ATD in heads)
    for query_1ALD, key_1ALD, value_1ALD in zip(*parts, strict=True):
        seen_LL = _window(query_1ALD, sliding_window)
        out_1ALD = scaled_dot_product_attention(
            query_1ALD,
            key_1ALD,
            value_1ALD,
            seen_LL,
            is_causal=seen_LL is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outs_1LAD.append(out_1ALD.transpose(1, 2))
    return torch.cat(outs_1LAD, dim=1)


def _kernel_takes(query_1ATD: torch.Tensor, value_1ATD: torch.Tensor) -> bool:
    """Return whether the variable-length kernel computes these heads. Otherwise the loop does.

    Keys have the queries' head size.
    """
    head_size = query_1ATD.shape[-1]
    if head_size > KERNEL_HEAD_SIZE or head_size % 8 or value_1ATD.shape[-1] != head_size:
        return False
    return query_1ATD.is_cuda and query_1ATD.dtype in KERNEL_DTYPES


def _window(query_1ALD: torch.Tensor, sliding_window: int | None) -> torch.Tensor | None:
    """Return the mask of a sliding window, or None if it covers all tokens before.

    Three tokens, a window of 2: 100 110 011.
    """
    n_tokens = query_1ALD.shape[2]
    if sliding_window is None or n_tokens <= sliding_window:
        return None
    all_LL = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=query_1ALD.device)
    return all_LL.tril().triu(1 - sliding_window)


def trim_last_layer(causal_lm: PreTrainedModel) -> bool:
    """Make `packed_hidden(..., positions_N)` give [N, H], and return whether that was possible.

    A layer is trimmed if it computes x + attention(norm(x)), then x + mlp(norm(x)), like those of
    Llama, Mistral, Qwen2 and Qwen3. Its parts must have the usual names. Passes before and after
    the change must give the same: at all positions, at some, and at none. Any other layer is left
    unchanged: one that adds or scales something, or whose mlp lets tokens meet.

    Attention is the last operation in which tokens meet. Everything after it is per token, so it is
    computed for the N positions that the output layer reads, not for all T. The result is the same
    up to rounding. It saves 17 % of a step of a model with 2 layers, 2.7 % with 24, 1.2 % with 30.
    """
    layers = getattr(causal_lm.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not len(layers):
        return False
    layer, own = layers[-1], layers[-1].forward
    if not all(hasattr(layer, part) for part in LAYER_PARTS):
        return False
    before_TH = _probe(causal_lm, (3, 2))
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
    rounding = max(SAME_TRIMMED, torch.finfo(causal_lm.dtype).eps)
    return (
        are_same(_probe(causal_lm, (3, 2)), before_TH, relative=SAME_TRIMMED)
        and are_same(
            _probe(causal_lm, (3, 2), positions=[1, 4]), before_TH[[1, 4]], relative=rounding
        )
        and are_same(_probe(causal_lm, (3, 2), positions=[]), before_TH[[]], relative=rounding)
    )


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


AttentionInterface.register(PACKED, packed_attention)
