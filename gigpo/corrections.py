"""Define off-policy corrections: a factor per response token that bounds or drops stale tokens.

    TokenTis(cap=2.0)(tokens)        # float32/64 [N], no gradient; 0 drops the token

A correction is a frozen record of its settings, called on Tokens. `CORRECTIONS` lists them by their
names in configs. Factors of several corrections multiply. The defaults are the published values of
the system that each docstring names.

    x = pi_p / mu with a proximal policy, else rho = pi / mu: the weight that a loss carries

The ratio is always pi over mu: a band with low < 1 < high bounds it, not its inverse. A mask
changes factors only: advantages and group statistics stay. A dropped token still counts in the
denominators of the mean, so that kept tokens have the same gradient however many are dropped.

`m2po` has a paper. The sources of the others are systems and reports: each correction names those
whose form it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

from gigpo.lazy_torch import torch
from gigpo.tokens import (
    Tokens,
    behaviour_log_ratio,
    check_cap,
    policy_log_ratio,
    sequence_mean,
    sequence_ratio,
)


class Correction(Protocol):
    """The interface of an entry of CORRECTIONS: settings by keyword, called on Tokens."""

    name: ClassVar[str]

    def __call__(self, tokens: Tokens) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTis:
    """Token-level truncated importance sampling: the weight is min(x, C).

    The factor is min(x, C) / x. x itself would be unbiased. The cap bounds the variance of one
    token and biases towards mu. There is no lower bound: raising small weights would count what pi
    no longer does. C = 2: verl, slime, SkyRL. math.inf is no cap. For every stale batch; the
    cheapest correction there is. With ppo_clip around mu it acts on tokens with A < 0 and C < rho
    <= dual_clip, and on A > 0 only if C < 1 + clip_high: beyond these bounds the clip has left no
    gradient.

    Worked: C = 2, x = (0.5, 1.5, 8): weights (0.5, 1.5, 2), factors (1, 1, 0.25).
    """

    name: ClassVar[str] = "token_tis"
    cap: float = 2.0

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        x_N = torch.exp(behaviour_log_ratio(tokens))
        return torch.clamp(x_N, max=self.cap) / x_N


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTis:
    """Sequence-level truncated importance sampling: each token's weight is min(X, C).

    X is the product of its sequence's x, the unbiased weight of a whole response. It varies
    exponentially in the length, so use it for responses of tens of tokens. The factor is min(X, C)
    / x. C = 2: verl (SkyRL: 5).

    Worked: C = 2, one sequence with x = (2, 0.5, 1.5): X = 1.5, weights (1.5, 1.5, 1.5), factors
    (0.75, 3, 1).
    """

    name: ClassVar[str] = "sequence_tis"
    cap: float = 2.0

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        log_x_N = behaviour_log_ratio(tokens)
        ratio_S, index_N = sequence_ratio(log_x_N, tokens.sequence_N)
        return torch.clamp(ratio_S, max=self.cap)[index_N] / torch.exp(log_x_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIcepop:
    """IcePop: keep a token with its weight x where low <= x <= high, else drop it.

    For engine mismatch: a weight far from 1 then says that the two engines disagree, not that the
    policy moved, and is noise on either side. 0.5 and 5: NeMo-RL and verl (SkyRL: 0.5 and 2);
    Ring-1T report.

    Worked: x = (0.25, 0.5, 4, 8): factors (0, 1, 1, 0).
    """

    name: ClassVar[str] = "token_icepop"
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_band(low=self.low, high=self.high)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return _within(torch.exp(behaviour_log_ratio(tokens)), low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMask:
    """Drop a sequence unless low <= X <= high, with X the product of its x ("sequence MIS").

    The strictest mask: for 500 tokens X mostly reflects the length. 0.5 and 2: verl
    `decoupled_seq_is_rs`, there with `sequence_tis`.

    Worked: sequences with x = (2, 0.5, 1.5) and (2, 2): X = 1.5 is kept, X = 4 dropped.
    """

    name: ClassVar[str] = "sequence_mask"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        _check_band(low=self.low, high=self.high)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        ratio_S, index_N = sequence_ratio(behaviour_log_ratio(tokens), tokens.sequence_N)
        return _within(ratio_S, low=self.low, high=self.high)[index_N]


@dataclass(frozen=True, kw_only=True, slots=True)
class GeometricMask:
    """Drop a sequence unless low <= exp(mean log x) <= high: `sequence_mask` for any length.

    The band bounds pi over mu. verl's bounds the inverse: its l and u are low = 1 / u and high = 1
    / l here. It bounds no single token: x = 8 hides behind many below 1, so add `token_tis`. 0.999
    and 1.001: verl `decoupled_geo_rs` (SkyRL: 0.99 and 1.01). So tight a band is for engine
    mismatch; staleness needs a wider one.

    Worked, low 0.9, high 1.1: x = (8, 0.5, 0.5, 0.5) has mean log x = 0, kept; x = (1.3, 1.3) has
    e^0.262, dropped.
    """

    name: ClassVar[str] = "geometric_mask"
    low: float = 0.999
    high: float = 1.001

    def __post_init__(self) -> None:
        _check_band(low=self.low, high=self.high)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        mean_N = torch.exp(sequence_mean(behaviour_log_ratio(tokens), tokens.sequence_N))
        return _within(mean_N, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class K3Mask:
    """Drop a sequence whose mean of x - 1 - log x is above the limit.

    The mean estimates KL(mu || pi_p) and is never negative, so ratios above and below 1 cannot
    cancel as in the geometric mask. 0.01: verl `decoupled_k3_rs`.

    Worked: x = (8, 0.5, 0.5, 0.5): mean of (4.921, 0.193, 0.193, 0.193) = 1.375, dropped.
    """

    name: ClassVar[str] = "k3_mask"
    limit: float = 0.01

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        log_x_N = behaviour_log_ratio(tokens)
        k3_N = sequence_mean(torch.expm1(log_x_N) - log_x_N, tokens.sequence_N)
        return (k3_N <= self.limit).to(log_x_N.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opsm:
    """Off-policy sequence masking: drop tokens with A < 0 of sequences that pi has left.

    Such a sequence has mean(log mu - log pi) > limit. Pushing it further down makes stale batches
    diverge; a good sequence is always worth learning. It always compares with the current policy,
    also with a proximal one. 1e-4: slime `--opsm-delta`; DeepSeek-V3.2.

    Worked, A < 0: log rho = (-0.3, 0.1): mean(log mu - log pi) = 0.1, both dropped; with A > 0 both
    are kept.
    """

    name: ClassVar[str] = "opsm"
    limit: float = 1e-4

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        left_N = -sequence_mean(policy_log_ratio(tokens), tokens.sequence_N) > self.limit
        return (~(left_N & (tokens.advantages_N < 0))).to(tokens.advantages_N.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class M2po:
    """Second-moment trust region: drop the largest (log x)^2 until their mean is below the limit.

    M2PO is this with loss.policy=reinforce; with ppo_clip the clip acts as well. For very stale
    batches: arXiv 2510.01161 is stable at 256 versions. It bounds the batch and not the token, so
    it needs all tokens of an optimizer update at once (`Objective.batch_wide`). AReaL uses the
    tokens of a micro-batch, so there the result depends on how the batch was cut. At least one
    token is kept; of equal ones the first. 0.04: AReaL's example.

    Worked, limit 0.04: (log x)^2 = (0.01, 0.25, 0.09, 0.01): means 0.09, 0.0367 without the second;
    only that is dropped.
    """

    name: ClassVar[str] = "m2po"
    limit: float = 0.04

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        log_x_N = behaviour_log_ratio(tokens)
        ascending_N, order_N = torch.sort(log_x_N.double().square(), stable=True)
        counts_N = torch.arange(1, len(order_N) + 1, device=order_N.device)
        # Means of the smallest 1, 2, ... squares only grow, so those below the bound come first.
        n_kept = max(1, int((ascending_N.cumsum(0) / counts_N < self.limit).sum()))
        factor_N = torch.zeros_like(log_x_N)
        factor_N[order_N[:n_kept]] = 1.0
        return factor_N


def _within(ratio: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


def _check_band(*, low: float, high: float) -> None:
    if not 0.0 <= low < 1.0:
        raise ValueError(
            f"low={low} must be in [0, 1): it bounds pi / mu from below, and on policy that is 1"
        )
    if not high > 1.0:
        raise ValueError(
            f"high={high} must be above 1: it bounds pi / mu from above, and on policy that is 1"
        )
    if low == 0.0 and high == math.inf:
        raise ValueError(
            "low=0 and high=inf drop nothing; set one of them, or leave the correction out"
        )


def _check_limit(limit: float) -> None:
    if not (math.isfinite(limit) and limit > 0.0):
        raise ValueError(
            f"limit={limit} must be finite and above 0: on policy the measure is 0, so below that "
            "all is dropped"
        )


CORRECTIONS: Final[Mapping[str, type[Correction]]] = MappingProxyType(
    {
        correction.name: correction
        for correction in (
            GeometricMask,
            K3Mask,
            M2po,
            Opsm,
            SequenceMask,
            SequenceTis,
            TokenIcepop,
            TokenTis,
        )
    }
)
