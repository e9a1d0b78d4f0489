"""Estimates of KL(pi || ref) per token, from tokens that pi sampled: Schulman 2020, "Approximating
KL Divergence".

With u = log pi - log ref (clamped to +-20), each float32/64 [N], differentiable in `logprobs_N` (a
penalty in the loss, not in the reward). Worked, pi twice as likely as the reference, u = log 2: k1
= 0.693, k2 = 0.240, k3 = 0.193.

"Unbiased" below is over samples of pi. In training the tokens are mu's: on stale data every one of
these estimates, and its gradient, is biased by how far pi has moved from mu (nothing here weighs
them by pi / mu); k3 is also, beyond its bound of 10.

|    | value         | gradient in log pi | as an estimate of the KL          | its gradient, over
pi's samples         |
|----|---------------|--------------------|-----------------------------------|-----------------------------------------|
| k1 | u             | 1                  | unbiased, may be negative         | mean 0: no pull at
all, refused as loss | | k2 | u^2 / 2       | u                  | biased (second order), >= 0
| that of KL(pi || ref), unbiased         | | k3 | e^-u - 1 + u  | 1 - e^-u           | unbiased, >=
0, the least varying | that of KL(ref || pi)                   |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from gigpo.lazy_torch import torch
from gigpo.tokens import log_ratio

# Bound on the k3 estimate itself, as in verl: one token far off the reference must not own the
# batch.
KL_BOUND: Final = 10.0


def kl_k1(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """log pi - log ref. For a look at the KL; differentiated it only pushes every sampled token
    down.
    """
    return log_ratio(logprobs_N, reference_logprobs_N)


def kl_k2(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """(log pi - log ref)^2 / 2. Its gradient is the KL's own: the choice where the penalty is
    strong.
    """
    return 0.5 * log_ratio(logprobs_N, reference_logprobs_N).square()


def kl_k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = log ref - log pi, clamped to +-10 as verl does. The default of GRPO,
    verl and GiGPO's authors.
    """
    d_N = -log_ratio(logprobs_N, reference_logprobs_N)
    return torch.clamp(torch.exp(d_N) - d_N - 1.0, min=-KL_BOUND, max=KL_BOUND)


KL_PENALTIES: Final[Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = (
    MappingProxyType({"k1": kl_k1, "k2": kl_k2, "k3": kl_k3})
)
