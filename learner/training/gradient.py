"""Share micro-batches between ranks, add up their gradients, and apply them with DeepSpeed.

    for index, batch in enumerate(mine := share_of_rank(batches, rank=rank, ranks=ranks)):
        loss = ...                                 # its share of the update's loss
        add_gradient(engine, loss, scale=scale, is_last=index == len(mine) - 1)
    grad_norm = apply_gradient(engine)             # not finite: nothing was applied

All ranks call these together. The ranks of a sequence group have one share, and there count as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from learner.data.micro_batch import MicroBatch
from learner.distributed.deepspeed_setup import forget_gradient


def share_of_rank(
    micro_batches: Sequence[MicroBatch], *, rank: int, ranks: int
) -> Sequence[MicroBatch]:
    """Return this rank's share. All ranks need equally many: a ZeRO 3 pass needs every rank.

    A sequence group counts as one rank.
    """
    if not any(batch.n_response_tokens for batch in micro_batches):
        raise ValueError("an update needs at least one response token; leave empty batches out")
    if len(micro_batches) % ranks:
        raise ValueError(
            f"{len(micro_batches)} micro-batches cannot be shared by {ranks} ranks; cut "
            f"them with ranks={ranks}"
        )
    return micro_batches[rank::ranks]


def add_gradient(engine: Any, loss: torch.Tensor, *, scale: float, is_last: bool) -> None:
    """Add the gradient of `scale` times the loss of a micro-batch, the update's last if `is_last`.

    DeepSpeed takes the mean over ranks, so a loss that is their sum needs `scale` to have their
    number as a factor. All ranks count here: those of a sequence group have one loss, and parts of
    its gradient.
    """
    # Only the last micro-batch reduces gradients. DeepSpeed cannot know which one is last, because
    # their number differs from update to update.
    engine.set_gradient_accumulation_boundary(is_last)
    # A non-finite loss may have a finite gradient. As NaN it is seen by every rank.
    checked = torch.where(torch.isfinite(loss.detach()), scale, math.nan)
    engine.backward(loss * checked, scale_wrt_gas=False)


def apply_gradient(engine: Any) -> float:
    """Clip and apply the gradient unless it is not finite. Return its norm, equal on all ranks.

    DeepSpeed's ZeRO optimizers refuse such a gradient themselves; at stage 0 nothing checks it.
    """
    if engine.zero_optimization():
        engine.step()
        grad_norm = float(engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            forget_gradient(engine)
        return grad_norm
    gradients = [
        parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None
    ]
    grad_norm = float(torch.nn.utils.get_total_norm(gradients))
    if math.isfinite(grad_norm):
        engine.step()
    else:
        engine.zero_grad()
    return grad_norm
