"""The response tokens of a batch, flat: all that a loss, a correction or a diagnostic reads.

Suffix _N: N response tokens, whatever sequences they came from. A sequence is one response, the
tokens of one step of an episode (one row of the store), never a whole trajectory. Floats are
float32, or float64 (tests, audits), all of one batch alike; what is made of them has their dtype:
"float32/64 [N]".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gigpo.lazy_torch import torch

# Bound on |log pi - log mu| before exp, as in verl (SAFETY_BOUND): e^20 is past any cap, and finite
# in float32.
LOG_RATIO_BOUND: Final = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """N response tokens. All tensors are flat, of one length and on one device.

    logprobs_N            log pi, the policy being trained; float32/64 [N], with gradient
    behaviour_logprobs_N  log mu, the policy that sampled; float32/64 [N], recorded then, never
    recomputed
    advantages_N          A; float32/64 [N], every token has that of its step
    sequence_N            int64, the sequence of a token: equal numbers, one sequence; any numbers,
    in any order proximal_logprobs_N   log pi_p, the centre of the trust region; float32/64 [N].
    None: the trust region is around mu

    Two responses of 2 and 1 tokens:
        Tokens(logprobs_N=x, behaviour_logprobs_N=tensor([-0.5, -1.0, -2.0]), advantages_N=tensor([2.0, 2.0, -1.0]),
               sequence_N=tensor([0, 0, 7]))
    """

    logprobs_N: torch.Tensor
    behaviour_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    proximal_logprobs_N: torch.Tensor | None = None

    def __post_init__(self) -> None:
        proximal = (
            {}
            if self.proximal_logprobs_N is None
            else {"proximal_logprobs_N": self.proximal_logprobs_N}
        )
        check_same_tokens(
            logprobs_N=self.logprobs_N,
            behaviour_logprobs_N=self.behaviour_logprobs_N,
            advantages_N=self.advantages_N,
            sequence_N=self.sequence_N,
            **proximal,
        )


def log_ratio(logprobs_N: torch.Tensor, other_logprobs_N: torch.Tensor) -> torch.Tensor:
    """log rho = clamp(log pi - log mu, +-20), float32/64 [N]; differentiable in both as if there
    were no bound.

    The bound is on the value alone: where a token is beyond it, d rho / d log pi is rho at the
    bound and not 0, so a loss that promises a weight (min(rho, C) with token_tis) gives it there
    too.
    """
    check_same_tokens(logprobs_N=logprobs_N, other_logprobs_N=other_logprobs_N)
    log_ratio_N = logprobs_N - other_logprobs_N
    bounded_N = torch.clamp(log_ratio_N.detach(), min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    return bounded_N + (log_ratio_N - log_ratio_N.detach())


def policy_log_ratio(tokens: Tokens) -> torch.Tensor:
    """log rho = log pi - log mu, float32/64 [N], no gradient: how far the policy of now is from the
    one that sampled.
    """
    return log_ratio(tokens.logprobs_N.detach(), tokens.behaviour_logprobs_N)


def behaviour_log_ratio(tokens: Tokens) -> torch.Tensor:
    """log x, float32/64 [N], no gradient: the importance weight that a loss carries outside its
    trust region.

    x = pi_p / mu with a proximal policy (the trust region then holds pi near pi_p), else rho = pi /
    mu.
    """
    if tokens.proximal_logprobs_N is None:
        return policy_log_ratio(tokens)
    return log_ratio(tokens.proximal_logprobs_N.detach(), tokens.behaviour_logprobs_N)


def interpolated_proximal(
    logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor, staleness_N: torch.Tensor
) -> torch.Tensor:
    """log pi_p = log mu + alpha (sg(log pi) - log mu), float32/64 [N], no gradient: A-3PO, a
    proximal policy without another forward pass.

        alpha = clip((v_prox - v_behave) / (v_theta - v_behave), 0, 1)      arXiv 2512.06547, AReaL `loglinear`

    v_behave sampled the token, v_prox is the newest published version and v_theta = v_prox + 1 the
    one being made, so with staleness s = v_prox - v_behave (int [N], versions, >= 0): alpha = s /
    (s + 1). A fresh token (s = 0) has pi_p = mu, one of s = 1 the geometric mean of mu and pi, and
    an old one nearly pi itself: its trust region lets it move, and its weight pi_p / mu says how
    far it is.
    """
    check_same_tokens(
        logprobs_N=logprobs_N, behaviour_logprobs_N=behaviour_logprobs_N, staleness_N=staleness_N
    )
    if bool((staleness_N < 0).any()):
        raise ValueError(
            f"staleness_N has {int(staleness_N.min())}: no token can be sampled by a version of "
            "the future"
        )
    alpha_N = staleness_N / (staleness_N + 1)
    return behaviour_logprobs_N + alpha_N.to(logprobs_N.dtype) * (
        logprobs_N.detach() - behaviour_logprobs_N
    )


def sequence_sum(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """Per token, the sum over its sequence; float32/64 [N]. Values (1, 2, 4) of sequences (0, 0,
    7): (3, 3, 4).
    """
    sums_S, index_N = _sums(values_N, sequence_N)
    return sums_S[index_N]


def sequence_mean(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """Per token, the mean over its sequence; float32/64 [N]. Values (1, 2, 4) of sequences (0, 0,
    7): (1.5, 1.5, 4).
    """
    return sequence_sum(values_N, sequence_N) / sequence_sum(torch.ones_like(values_N), sequence_N)


def sequence_ratio(
    log_ratio_N: torch.Tensor, sequence_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per sequence, the product of its ratios, bounded like a single ratio, float32/64 [S]; and per
    token which of them is its own, int64 [N]. log (2, 3, 4) of sequences (0, 0, 7): (6, 4) and (0,
    0, 1).
    """
    log_products_S, index_N = _sums(log_ratio_N, sequence_N)
    return torch.exp(
        torch.clamp(log_products_S, min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    ), index_N


def _sums(values_N: torch.Tensor, sequence_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids_S, index_N = torch.unique(sequence_N, return_inverse=True)
    return values_N.new_zeros(len(ids_S)).index_add(0, index_N, values_N), index_N


def check_cap(name: str, cap: float) -> None:
    """Refuse a cap on a weight that would act on policy, where every weight is 1."""
    if not cap >= 1.0:
        raise ValueError(
            f"{name}={cap} must be >= 1 (math.inf for no cap): below 1 it would shrink on-policy "
            "gradients"
        )


def check_same_tokens(**tensors_N: torch.Tensor) -> None:
    """Refuse anything but flat tensors of one length: broadcasting would pair tokens with the wrong
    numbers.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_N.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
        raise ValueError(f"expected flat tensors [N] of one length, got {shapes}")
