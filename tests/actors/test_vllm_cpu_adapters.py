"""Multiply by adapters as by hand: one or several in a batch, tokens without one, fused layers."""

from __future__ import annotations

import pytest
import torch

from actors.inference.vllm_cpu_adapters import add_adapters, parts


def test_tokens_are_grouped_by_adapter() -> None:
    def listed(indices: list[int]) -> list[tuple[int, list[int] | None]]:
        found = parts(torch.tensor(indices))
        return [(index, None if tokens is None else tokens.tolist()) for index, tokens in found]

    assert listed([2, 2]) == [(2, None)]
    assert listed([2, 2, -1, 0]) == [(0, [3]), (2, [0, 1])]
    assert listed([-1, -1]) == []
    assert listed([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_is_multiplied_by_its_own_adapter(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    outputs = (5, 3)  # of a fused layer
    stacked = [
        (torch.randn(4, 1, 2, 6, dtype=dtype), torch.randn(4, 1, n, 2, dtype=dtype), n)
        for n in outputs
    ]
    x_TI, before_TO = torch.randn(7, 6, dtype=dtype), torch.randn(7, 8, dtype=dtype)
    for indices in ([1] * 7, [1, 1, 3, -1, -1, 0, 3]):
        y_TO = before_TO.clone()
        of_tokens = parts(torch.tensor(indices))
        add_adapters(y_TO, x_TI, stacked, of_tokens=of_tokens)
        for token, index in enumerate(indices):
            expected_O = before_TO[token].float()
            if index >= 0:
                expected_O = expected_O + torch.cat(
                    [
                        B[index, 0].float() @ (A[index, 0].float() @ x_TI[token].float())
                        for A, B, _ in stacked
                    ]
                )
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(
                y_TO[token].float(), expected_O, atol=tolerance, rtol=tolerance
            )
