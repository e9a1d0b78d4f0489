"""The output layer in chunks gives what it gives whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.model import chunked_logprobs as output_layer
from learner.model.chunked_logprobs import OutputLayer

V = 97
TEMPERATURE = 0.7


@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
@pytest.mark.parametrize("learnt", ["logprobs", "entropy", "both"])
def test_the_output_layer_in_chunks_is_the_whole_one(
    chunk_tokens: int, learnt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_TOKENS", chunk_tokens)
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, V)
    hidden_NH, ids_N, factor_N = (
        torch.randn(20, 16, requires_grad=True),
        torch.randint(0, V, (20,)),
        torch.randn(20),
    )

    def results(logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> list[torch.Tensor]:
        loss = {"logprobs": logprobs_N, "entropy": entropy_N, "both": logprobs_N - 2.0 * entropy_N}[
            learnt
        ] * factor_N
        return [
            logprobs_N,
            entropy_N,
            *torch.autograd.grad(loss.sum(), [hidden_NH, layer.weight, layer.bias]),
        ]

    all_logprobs_NV = torch.log_softmax(layer(hidden_NH) / TEMPERATURE, -1)
    whole = results(
        all_logprobs_NV[torch.arange(20), ids_N], -(all_logprobs_NV.exp() * all_logprobs_NV).sum(-1)
    )
    chunked = results(*OutputLayer(layer, temperature=TEMPERATURE)(hidden_NH, ids_N))
    for one, other in zip(chunked, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_in_bf16_the_gradient_of_the_weights_does_not_depend_on_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every token's share is of one sign and size: summed in bf16, those after the 256th would be
    rounded away.
    """
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, V).bfloat16()
    hidden_NH = torch.rand(1, 16, dtype=torch.bfloat16).expand(1024, 16)
    ids_N = torch.zeros(1024, dtype=torch.int64)

    def gradients(chunk_tokens: int, *, dtype: torch.dtype) -> list[torch.Tensor]:
        monkeypatch.setattr(output_layer, "CHUNK_TOKENS", chunk_tokens)
        same = torch.nn.Linear(16, V, dtype=dtype)
        same.load_state_dict(layer.state_dict())
        logprobs_N, _ = OutputLayer(same, temperature=TEMPERATURE)(hidden_NH.to(dtype), ids_N)
        found = torch.autograd.grad(logprobs_N.sum(), [same.weight, same.bias])
        assert [gradient.dtype for gradient in found] == [dtype, dtype]
        return [gradient.float() for gradient in found]

    exact = gradients(1024, dtype=torch.float32)
    for chunk_tokens in (1, 2, 64, 1024):
        for gradient, expected in zip(
            gradients(chunk_tokens, dtype=torch.bfloat16), exact, strict=True
        ):
            assert (gradient - expected).norm() < 0.01 * expected.norm(), chunk_tokens


def test_a_float32_head_rounds_no_logit_to_bf16() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, V).bfloat16()
    hidden_NH = (4.0 * torch.randn(700, 64)).bfloat16().requires_grad_()
    ids_N = torch.randint(0, V, (700,))
    exact_NV = layer.weight.double() @ hidden_NH.detach().double().T
    exact_NV = (exact_NV.T + layer.bias.double()) / TEMPERATURE
    exact_N = exact_NV.log_softmax(-1).gather(-1, ids_N[:, None]).squeeze(-1)
    errors = {}
    for float32 in (False, True):
        output = OutputLayer(layer, temperature=TEMPERATURE, float32=float32)
        logprobs_N, _ = output(hidden_NH, ids_N)
        errors[float32] = float((logprobs_N - exact_N).abs().max())
        gradients = torch.autograd.grad(logprobs_N.sum(), [hidden_NH, layer.weight, layer.bias])
        assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3
    assert errors[True] < 1e-5 < 1e-3 < errors[False]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_exist_for_a_chunk_only_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # more than the 16 of the weight, which is as wide
    monkeypatch.setattr(output_layer, "CHUNK_TOKENS", 20)
    layer = torch.nn.Linear(16, V)
    hidden_NH = torch.randn(50, 16, requires_grad=True)
    with Largest() as largest:
        logprobs_N, entropy_N = OutputLayer(layer, temperature=TEMPERATURE)(
            hidden_NH, torch.randint(0, V, (50,))
        )
        (logprobs_N.sum() + entropy_N.sum()).backward()
    assert largest.elements == 20 * V


def test_another_layer_than_a_linear_one_is_refused() -> None:
    with pytest.raises(ValueError, match="the output layer is of type Embedding"):
        OutputLayer(torch.nn.Embedding(V, 16), temperature=1.0)
