"""Compute the critic's loss: PPO's clipped squared error (arXiv 1707.06347, as in verl)."""

from __future__ import annotations

import math

from gigpo.lazy_torch import torch
from gigpo.tokens import check_same_tokens


def value_loss(
    values_K: torch.Tensor,
    old_values_K: torch.Tensor,
    targets_K: torch.Tensor,
    *,
    clip: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each value, float32/64 [K], and whether it is clipped, bool [K].

        L = max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2

    V is the critic's value now, with gradient; V_old the one that the advantages were computed
    with, G the target. A value that has moved by more than `clip` towards its target has no
    gradient; one that has moved away has. `clip` is in units of the return; math.inf clips nothing.
    V_old = 2, G = 5 and clip = 0.5: V = 3 is clipped with loss (2.5 - 5)^2 / 2 = 3.125, and V = 1
    has the loss (1 - 5)^2 / 2 = 8 and the gradient -4.
    """
    check_same_tokens(values_K=values_K, old_values_K=old_values_K, targets_K=targets_K)
    if not clip > 0.0:
        raise ValueError(f"clip={clip} must be above 0: no value could move (math.inf for no clip)")
    bounded_K = torch.clamp(values_K, old_values_K - clip, old_values_K + clip)
    squared_K, bounded_squared_K = (values_K - targets_K) ** 2, (bounded_K - targets_K) ** 2
    return torch.maximum(squared_K, bounded_squared_K) / 2, bounded_squared_K > squared_K


def explained_variance(values_K: torch.Tensor, targets_K: torch.Tensor) -> float:
    """Return 1 - var(G - V) / var(G), at most 1: 0 for a critic that knows the mean only.

    Values (1, 2, 3) for targets (1, 2, 6): 1 - 3 / 7. NaN without two different targets.
    """
    check_same_tokens(values_K=values_K, targets_K=targets_K)
    variance = float(targets_K.var(correction=0)) if len(targets_K) else 0.0
    if variance == 0.0:
        return math.nan
    return 1.0 - float((targets_K - values_K).var(correction=0)) / variance
