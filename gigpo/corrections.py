"""Off-policy correction: importance ratios and weights, token by token.

Suffix _N: the N response tokens of a (micro-)batch, flat, whatever sequences they came from.
pi is the policy being trained, mu the behaviour policy that sampled the token; log mu is recorded, never recomputed.
"""

from __future__ import annotations

from typing import Final

import torch

# Bound on |log pi - log mu| before exp, as in verl (SAFETY_BOUND): e^20 is past any cap, and finite in float32.
LOG_RATIO_BOUND: Final = 20.0


def log_ratio(logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor) -> torch.Tensor:
    """log rho = clamp(log pi - log mu, +-20), float [N]; differentiable in logprobs_N inside the bound."""
    check_same_tokens(logprobs_N=logprobs_N, behaviour_logprobs_N=behaviour_logprobs_N)
    return torch.clamp(logprobs_N - behaviour_logprobs_N, min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)


def token_tis_weight(ratio_N: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling, min(rho, C), float [N], no gradient.

    rho itself would be unbiased; the cap bounds the variance one token can bring and biases towards mu. C = 2 is what
    verl, slime and SkyRL use. C below 1 would scale the on-policy gradient, so it is refused; math.inf is no cap.
    """
    if not cap >= 1.0:
        raise ValueError(f"tis_cap={cap} must be >= 1 (math.inf for no cap): below 1 it would shrink on-policy gradients")
    return torch.clamp(ratio_N.detach(), max=cap)


def ess(weights_N: torch.Tensor) -> float:
    """Effective sample size as a fraction: (sum w)^2 / (N sum w^2), in (0, 1]; 1 = all weights equal."""
    if weights_N.numel() == 0:
        raise ValueError("ess of no weights is undefined; leave empty batches out")
    weights = weights_N.detach().double()
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


def check_same_tokens(**tensors_N: torch.Tensor) -> None:
    """Refuse anything but flat tensors of one length: broadcasting would pair tokens with the wrong numbers."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_N.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
        raise ValueError(f"expected flat tensors [N] of one length, got {shapes}")
