"""Estimate KL(pi || ref) per token, from tokens that pi sampled (Schulman 2020, "Approximating KL
Divergence").

Let u = log pi - log ref, clamped to +-20. Each estimate is float32/64 [N] and differentiable in
`logprobs_N`: a penalty in the loss, not in the reward. Worked: pi is twice as likely as the
reference, u = log 2: k1 = 0.693, k2 = 0.240, k3 = 0.193.

|    | value        | d / d log pi | as an estimate of the KL    | its gradient over pi's samples |
|----|--------------|--------------|-----------------------------|--------------------------------|
| k1 | u            | 1            | unbiased, may be negative   | mean 0: refused as a loss      |
| k2 | u^2 / 2      | u            | biased (second order), >= 0 | of KL(pi || ref), unbiased     |
| k3 | e^-u - 1 + u | 1 - e^-u     | unbiased, >= 0, least noise | of KL(ref || pi)               |

"Unbiased" holds for samples of pi. Training uses tokens of mu, and nothing here weighs by pi / mu.
So on stale data each estimate and its gradient is biased by how far pi has moved from mu. k3 is
also biased beyond its bound of 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from gigpo.lazy_torch import torch
from gigpo.tokens import log_ratio

# Bound on the k3 estimate, as in verl: one token far off the reference must not dominate the batch.
KL_BOUND: Final = 10.0


def kl_k1(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return log pi - log ref. As a loss it would only push every sampled token down."""
    return log_ratio(logprobs_N, reference_logprobs_N)


def kl_k2(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return (log pi - log ref)^2 / 2. Its gradient is the KL's own, for strong penalties."""
    return 0.5 * log_ratio(logprobs_N, reference_logprobs_N).square()


def kl_k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = log ref - log pi, clamped to +-10 as in verl.

    It is the default of GRPO, verl and GiGPO's authors.
    """
    d_N = -log_ratio(logprobs_N, reference_logprobs_N)
    return torch.clamp(torch.exp(d_N) - d_N - 1.0, min=-KL_BOUND, max=KL_BOUND)


KL_PENALTIES: Final[Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = (
    MappingProxyType({"k1": kl_k1, "k2": kl_k2, "k3": kl_k3})
)
