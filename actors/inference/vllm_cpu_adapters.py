"""Multiply by adapters on a CPU with two matrix products for each adapter of a batch.

vLLM's own CPU code copies the whole adapter for every token. A batch of 8,192 prompt tokens at rank
16 and hidden size 576 then copies 300 MB for each matrix. It also gives a token without an adapter
the last one in its memory, if other tokens of the batch have adapters.

    multiply_by_adapter()    # before the engine's first forward pass
"""

from __future__ import annotations

from typing import Any

import torch

NO_ADAPTER = -1  # vLLM's index of a token without one


def parts(indices_T: torch.Tensor) -> list[tuple[int, torch.Tensor | None]]:
    """Return each adapter's index with its tokens; None stands for all tokens.

    Example: [2, 2, -1, 0] gives [(0, [3]), (2, [0, 1])], and [2, 2] gives [(2, None)].
    """
    found = indices_T.unique().tolist()
    if len(found) == 1 and found != [NO_ADAPTER]:
        return [(found[0], None)]
    return [(index, (indices_T == index).nonzero()[:, 0]) for index in found if index != NO_ADAPTER]


def add_adapters(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    stacked: Any,
    *,
    of_tokens: list[tuple[int, torch.Tensor | None]],
) -> None:
    """Add B A x to `y_TO` in place, in float32 like vLLM's own code.

    `stacked` has (A, B, outputs) of each part of a fused layer, such as q, k and v. A is
    [adapters, 1, r, I], B is [adapters, 1, outputs, r]. vLLM has multiplied B by the scale.
    """
    for index, tokens in of_tokens:
        inputs = (x_TI if tokens is None else x_TI[tokens]).float()
        begin = 0
        for A, B, n_outputs in stacked:
            inner_Tr = inputs @ A[index, 0].float().T
            change = (inner_Tr @ B[index, 0, :n_outputs].float().T).to(y_TO.dtype)
            part = y_TO[:, begin : begin + n_outputs]
            if tokens is None:
                part += change
            else:
                part.index_add_(0, tokens, change)
            begin += n_outputs


def multiply_by_adapter() -> None:
    """Replace vLLM's CPU code for linear layers in this process."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    vllms_update = PunicaWrapperCPU.update_metadata

    def update_metadata(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        vllms_update(wrapper, *args, **kwargs)
        wrapper.parts = parts(wrapper.token_lora_indices)

    def add_lora_linear(
        wrapper: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        assert scale == 1.0, "vLLM 0.32 scales B when it loads an adapter"
        stacked = list(zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True))
        add_adapters(
            y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), stacked, of_tokens=wrapper.parts
        )

    PunicaWrapperCPU.parts = []  # before the first batch
    PunicaWrapperCPU.update_metadata = update_metadata
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
