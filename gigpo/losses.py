"""Policy losses and KL penalties, one number per response token. Pure functions.

Suffix _N: the N response tokens of a (micro-)batch, flat. All floating tensors are float32 [N] unless said.
Nothing is averaged here but in `token_mean`, which takes the token count of the whole batch: the mean of micro-batch
means would weigh a token by the company it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import torch

from gigpo.corrections import check_same_tokens, log_ratio, token_tis_weight

# Bound on the k3 estimate itself, as in verl: one token far off the reference must not own the batch.
KL_BOUND: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A policy loss token by token, with what the diagnostics need.

    loss_N     float [N], differentiable in the log-probabilities
    ratio_N    float [N], rho = pi / mu, detached
    clipped_N  bool [N], True where the trust region leaves the token no gradient
    """

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    clipped_N: torch.Tensor


class PolicyLossFunction(Protocol):
    """The one signature behind a name in POLICY_LOSSES."""

    def __call__(
        self,
        logprobs_N: torch.Tensor,
        behaviour_logprobs_N: torch.Tensor,
        advantages_N: torch.Tensor,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float,
        tis_cap: float,
    ) -> PolicyLoss: ...


def ppo_clip(
    logprobs_N: torch.Tensor,
    behaviour_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    tis_cap: float,
) -> PolicyLoss:
    """PPO-clip anchored at the recorded behaviour policy, with dual clip and token-level truncated importance sampling.

        rho  = exp(log pi - log mu)                             mu: recorded when sampled, no second forward pass
        L    = max(-A rho, -A clip(rho, 1 - low, 1 + high))     Schulman et al. 2017, eq. 7
        L    = min(L, -A dual_clip)             where A < 0     dual clip, Ye et al. 2020, eq. 5
        loss = sg(min(rho, C) / rho) * L                        C = tis_cap, sg: no gradient

    The last line leaves values and gradients alone where rho <= C. Above C the gradient weight, which is rho in
    -A rho d(log pi), becomes C. That matters where the clip does not act: for A < 0 and C < rho < dual_clip.
    tis_cap = math.inf and dual_clip = math.inf switch the two off.

    Worked: A = -1, rho = 2.5, low = high = 0.2, dual_clip 3, C = 2: L = 2.5, loss = 2.0, d loss / d log pi = 2.0.
    """
    check_same_tokens(logprobs_N=logprobs_N, behaviour_logprobs_N=behaviour_logprobs_N, advantages_N=advantages_N)
    _check_trust_region(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    ratio_N = torch.exp(log_ratio(logprobs_N, behaviour_logprobs_N))
    negative_N = advantages_N < 0

    surrogate_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * torch.clamp(ratio_N, min=low, max=high))
    surrogate_N = torch.where(negative_N & (ratio_N > dual_clip), -advantages_N * dual_clip, surrogate_N)
    detached_N = ratio_N.detach()
    return PolicyLoss(
        loss_N=token_tis_weight(ratio_N, tis_cap) / detached_N * surrogate_N,
        ratio_N=detached_N,
        clipped_N=torch.where(
            negative_N,
            (detached_N < low) | (detached_N > dual_clip),
            (detached_N > high) & (advantages_N > 0),
        ),
    )


def behaviour_cloning(logprobs_N: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the recorded tokens, -log pi, float [N]."""
    return -logprobs_N


def kl_k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """KL(pi || ref) per token by the k3 estimator, exp(d) - d - 1 with d = log ref - log pi; float [N], >= 0.

    Schulman 2020, "Approximating KL Divergence"; d clamped to +-20 and the estimate to +-10, as verl does.
    The gradient flows through it (the penalty is a loss term, not a reward).
    """
    d_N = -log_ratio(logprobs_N, reference_logprobs_N)
    return torch.clamp(torch.exp(d_N) - d_N - 1.0, min=-KL_BOUND, max=KL_BOUND)


def token_mean(loss_N: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """sum(loss) / total_tokens, a scalar; total_tokens counts the response tokens of the whole optimizer batch.

    Summed over micro-batches (and data-parallel ranks) it is the mean over all tokens, however they were packed.
    """
    if total_tokens < 1:
        raise ValueError(f"total_tokens={total_tokens} must be at least 1: count the response tokens of the whole batch")
    return loss_N.sum() / total_tokens


def _check_trust_region(*, clip_low: float, clip_high: float, dual_clip: float) -> None:
    if not 0.0 < clip_low <= 1.0:
        raise ValueError(f"clip_low={clip_low} must be in (0, 1]: ratios below 1 - clip_low are clipped")
    if not clip_high > 0.0:
        raise ValueError(f"clip_high={clip_high} must be above 0: ratios above 1 + clip_high are clipped")
    if not dual_clip > 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1: else on-policy tokens with A < 0 would not learn")


def _behaviour_cloning_loss(
    logprobs_N: torch.Tensor,
    behaviour_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    **trust_region: float,
) -> PolicyLoss:
    """behaviour_cloning under the common signature: every token is wanted, so advantages and trust region say nothing.

    The advantage is still checked to be there, one a token: cloning data takes the same way as any other.
    """
    check_same_tokens(logprobs_N=logprobs_N, behaviour_logprobs_N=behaviour_logprobs_N, advantages_N=advantages_N)
    del trust_region
    return PolicyLoss(
        loss_N=behaviour_cloning(logprobs_N),
        ratio_N=torch.exp(log_ratio(logprobs_N, behaviour_logprobs_N)).detach(),
        clipped_N=torch.zeros_like(logprobs_N, dtype=torch.bool),
    )


POLICY_LOSSES: Final[Mapping[str, PolicyLossFunction]] = MappingProxyType(
    {"behaviour_cloning": _behaviour_cloning_loss, "ppo_clip": ppo_clip}
)
