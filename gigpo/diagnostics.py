"""What to look at after a batch: small pure functions over flat tokens [N] or over compute_advantages' table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from gigpo.corrections import log_ratio


def mismatch_kl(logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor) -> float:
    """Mean of rho - 1 - log rho: estimates KL(mu || pi) in nats, as the tokens come from mu; 0 iff the two agree."""
    log_ratio_N = log_ratio(logprobs_N.detach(), behaviour_logprobs_N).double()
    return float((torch.expm1(log_ratio_N) - log_ratio_N).mean())


def clip_fraction(clipped_N: torch.Tensor) -> float:
    """Fraction of tokens that the trust region leaves without gradient, in [0, 1]."""
    return float(clipped_N.double().mean())


def ratio_range(ratio_N: torch.Tensor) -> tuple[float, float]:
    """(min, max) of rho."""
    low, high = torch.aminmax(ratio_N.detach())
    return float(low), float(high)


def anchor_size_histogram(advantages: pa.Table) -> dict[int, int]:
    """Anchor groups by size: {1: 40, 8: 3} is 40 steps alone and 3 states that were met 8 times; 64 steps in all."""
    sizes, steps = np.unique(advantages["anchor_size"].to_numpy(), return_counts=True)
    return {int(size): int(count) // int(size) for size, count in zip(sizes, steps, strict=True)}


def singleton_fraction(advantages: pa.Table) -> float:
    """Fraction of steps that are alone in their anchor group, so that the step term says nothing about them."""
    return float(np.mean(advantages["anchor_size"].to_numpy() == 1))


def step_variance_share(advantages: pa.Table, omega: float) -> float:
    """Var(omega A_S) / (Var(A_E) + Var(omega A_S)) over steps, in [0, 1]: how much of eq. 8's signal is step-level.

    The covariance is left out, so that the shares of the two terms add up to 1. No variance at all, or no steps: 0.
    """
    if len(advantages) == 0:
        return 0.0
    episode = float(np.var(advantages["episode_advantage"].to_numpy()))
    step = float(np.var(omega * advantages["step_advantage"].to_numpy()))
    return step / (episode + step) if episode + step > 0.0 else 0.0
