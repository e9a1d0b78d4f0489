"""Compute log-probabilities and entropies of response tokens without all logits in memory.

    output = OutputLayer(causal_lm.get_output_embeddings(), temperature=1.0)
    logprobs_N, entropy_N = output(hidden_NH, response_ids_N)

With 16,384 response tokens and a vocabulary of 150,000 the logits alone take 10 GB, and autograd
would keep several tensors of that size. Here forward and backward pass each compute CHUNK_TOKENS
tokens at a time; the backward pass computes the logits again.

Letters: N response tokens, C of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

# Logits of a chunk are 512 x 150,000 float32, 0.3 GB, where a whole batch's would be tens of GB.
# The matrix product is large enough to keep a GPU busy.
CHUNK_TOKENS = 512


class OutputLayer(nn.Module):
    """Compute log softmax(logits_NV / temperature)[response_ids_N], and entropies in nats.

    Both are float32. With `float32` the logits are too: products of a bfloat16 model are then not
    rounded to bfloat16, as in vLLM's float32 head. It shares the model's parameters, and all chunks
    are one call. So a weight partitioned by ZeRO 3 is gathered once forward and once backward, on
    every rank, however many response tokens each has.
    """

    def __init__(self, layer: nn.Module, *, temperature: float, float32: bool = False) -> None:
        super().__init__()
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"the output layer is of type {type(layer).__name__}; only Linear ones can be "
                "computed in chunks; use another model"
            )
        self.weight, self.bias = layer.weight, layer.bias
        self.temperature = temperature
        self.float32 = float32

    def forward(
        self, hidden_NH: torch.Tensor, response_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N, entropy_N = _Chunked.apply(
            hidden_NH, self.weight, self.bias, response_ids_N, self.temperature, self.float32
        )
        return logprobs_N, entropy_N


class _Chunked(torch.autograd.Function):
    """Differentiate with p = softmax(l), l = logits / temperature, and H the entropy:

    d logprob / d l_j = [j = response] - p_j,        d H / d l_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        response_ids_N: torch.Tensor,
        temperature: float,
        float32: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normaliser_N = torch.empty(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        logprobs_N, entropy_N = torch.empty_like(normaliser_N), torch.empty_like(normaliser_N)
        for chunk in _chunks(len(hidden_NH)):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, bias_V, temperature, float32)
            normaliser_C = normaliser_N[chunk] = logits_CV.logsumexp(-1)
            logprobs_N[chunk] = (
                logits_CV.gather(-1, response_ids_N[chunk, None]).squeeze(-1) - normaliser_C
            )
            probabilities_CV = (logits_CV - normaliser_C[:, None]).exp_()
            entropy_N[chunk] = normaliser_C - probabilities_CV.mul_(logits_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, response_ids_N, normaliser_N, entropy_N)
        ctx.temperature, ctx.float32 = temperature, float32
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[Any, ...]:
        hidden_NH, weight_VH, bias_V, response_ids_N, normaliser_N, entropy_N = ctx.saved_tensors
        hidden_wanted, weight_wanted, bias_wanted, *_ = ctx.needs_input_grad
        grad_hidden_NH = torch.empty_like(hidden_NH) if hidden_wanted else None
        # In float32: in bf16 late chunks would be rounded away beside the sum of early ones.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if weight_wanted else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_wanted else None
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(normaliser_N)
        for chunk in _chunks(len(hidden_NH)):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, bias_V, ctx.temperature, ctx.float32)
            probabilities_CV = (logits_CV - normaliser_N[chunk, None]).exp_()
            if grad_entropy_N is not None:  # by log p + H, in place of the logits
                logits_CV.sub_((normaliser_N - entropy_N)[chunk, None]).mul_(probabilities_CV)
                logits_CV.mul_(grad_entropy_N[chunk, None])
            grad_CV = probabilities_CV.mul_(-grad_logprobs_N[chunk, None])
            grad_CV.scatter_add_(-1, response_ids_N[chunk, None], grad_logprobs_N[chunk, None])
            if grad_entropy_N is not None:
                grad_CV.sub_(logits_CV)
            grad_logits_CV = grad_CV.div_(ctx.temperature).to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_logits_CV, weight_VH, out=grad_hidden_NH[chunk])
            if grad_weight_VH is not None:
                grad_weight_VH += grad_logits_CV.T @ hidden_NH[chunk]
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0, dtype=torch.float32)
        grad_weight_VH = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias_V = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None


def _chunks(n_tokens: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK_TOKENS) for start in range(0, n_tokens, CHUNK_TOKENS))


def _logits(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature: float,
    float32: bool,
) -> torch.Tensor:
    if not float32 or hidden_CH.dtype == torch.float32:
        return nn.functional.linear(hidden_CH, weight_VH, bias_V).float().div_(temperature)
    if hidden_CH.is_cuda:  # no copy of the weight in float32; other devices have no such product
        logits_CV = torch.mm(hidden_CH, weight_VH.T, out_dtype=torch.float32)
    else:
        logits_CV = hidden_CH.float() @ weight_VH.float().T
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV.div_(temperature)
