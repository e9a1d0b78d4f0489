"""Hold the response tokens of a batch, flat: all that a loss, correction or diagnostic reads.

Suffix _N: N response tokens of any sequences. Suffix _S: S sequences. A sequence is one response:
the tokens of one step of an episode (one row of the store), never a whole trajectory. Floats are
float32, or float64 in tests and audits, the same for a whole batch; results have their dtype:
"float32/64 [N]".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from gigpo.lazy_torch import torch

# Bound on |log pi - log mu| before exp, as in verl (SAFETY_BOUND): e^20 is above any cap and
# finite in float32.
LOG_RATIO_BOUND: Final = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """N response tokens. All tensors are flat, have one length and are on one device.

    logprobs_N            log pi, the policy being trained; float32/64 [N], with gradient
    behaviour_logprobs_N  log mu, the policy that sampled; float32/64 [N], recorded then and never
                          recomputed
    advantages_N          A; float32/64 [N], the same for all tokens of a step, but with estimator
                          `ppo`
    sequence_N            int64 [N]; equal numbers are one sequence; any numbers, in any order
    proximal_logprobs_N   log pi_p, the centre of the trust region; float32/64 [N]. None: mu is the
                          centre
    teacher_logprobs_N    log q, the teacher of `distillation`; float32/64 [N]. None: no teacher

    Two responses of 2 and 1 tokens:
        Tokens(
            logprobs_N=x,
            behaviour_logprobs_N=tensor([-0.5, -1.0, -2.0]),
            advantages_N=tensor([2.0, 2.0, -1.0]),
            sequence_N=tensor([0, 0, 7]),
        )
    """

    logprobs_N: torch.Tensor
    behaviour_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    proximal_logprobs_N: torch.Tensor | None = None
    teacher_logprobs_N: torch.Tensor | None = None

    def __post_init__(self) -> None:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        check_same_tokens(**{name: value for name, value in tensors.items() if value is not None})


def log_ratio(logprobs_N: torch.Tensor, other_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return log rho = clamp(log pi - log mu, +-20), float32/64 [N].

    It is differentiable as if unbounded. For a token beyond the bound d rho / d log pi is rho at
    the bound, not 0. So a loss that promises a weight (min(rho, C) with token_tis) gives it there
    too.
    """
    check_same_tokens(logprobs_N=logprobs_N, other_logprobs_N=other_logprobs_N)
    log_ratio_N = logprobs_N - other_logprobs_N
    bounded_N = torch.clamp(log_ratio_N.detach(), min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    return bounded_N + (log_ratio_N - log_ratio_N.detach())


def policy_log_ratio(tokens: Tokens) -> torch.Tensor:
    """Return log rho = log pi - log mu, float32/64 [N], without gradient."""
    return log_ratio(tokens.logprobs_N.detach(), tokens.behaviour_logprobs_N)


def behaviour_log_ratio(tokens: Tokens) -> torch.Tensor:
    """Return log x, float32/64 [N], without gradient.

    x is the importance weight outside the trust region:
    x = pi_p / mu with a proximal policy, whose trust region then holds pi near pi_p; else
    x = rho = pi / mu.
    """
    if tokens.proximal_logprobs_N is None:
        return policy_log_ratio(tokens)
    return log_ratio(tokens.proximal_logprobs_N.detach(), tokens.behaviour_logprobs_N)


def interpolated_proximal(
    logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor, staleness_N: torch.Tensor
) -> torch.Tensor:
    """Return log pi_p = log mu + alpha (sg(log pi) - log mu), float32/64 [N], without gradient.

    A-3PO: a proximal policy without another forward pass (arXiv 2512.06547, AReaL `loglinear`).

        alpha = clip((v_prox - v_behave) / (v_theta - v_behave), 0, 1)

    v_behave sampled the token, v_prox is the newest published version, v_theta = v_prox + 1 is
    being made. With staleness s = v_prox - v_behave (int [N], versions, >= 0): alpha = s / (s + 1).
    A fresh token (s = 0) has pi_p = mu, s = 1 gives the geometric mean of mu and pi. For an old
    token pi_p is nearly pi: the trust region lets it move, and its weight pi_p / mu says how far it
    is.
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
    """Return per token the sum over its sequence, float32/64 [N].

    Values (1, 2, 4) of sequences (0, 0, 7): (3, 3, 4).
    """
    sums_S, index_N = _sums(values_N, sequence_N)
    return sums_S[index_N]


def sequence_mean(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """Return per token the mean over its sequence, float32/64 [N].

    Values (1, 2, 4) of sequences (0, 0, 7): (1.5, 1.5, 4).
    """
    return sequence_sum(values_N, sequence_N) / sequence_sum(torch.ones_like(values_N), sequence_N)


def sequence_ratio(
    log_ratio_N: torch.Tensor, sequence_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product of ratios per sequence, float32/64 [S], and its index per token, int64
    [N].

    The product is bounded like a single ratio. Ratios (2, 3, 4) of sequences (0, 0, 7): (6, 4) and
    (0, 0, 1).
    """
    log_products_S, index_N = _sums(log_ratio_N, sequence_N)
    bounded_S = torch.clamp(log_products_S, min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    return torch.exp(bounded_S), index_N


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
    """Refuse tensors that are not flat and of one length, which broadcasting would mix up."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_N.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
        raise ValueError(f"expected flat tensors [N] of one length, got {shapes}")
