"""Combine the loss of an optimizer update: policy loss, corrections, KL, entropy, and their mean.

    objective = Objective(policy=PpoClip(), corrections=(TokenTis(),))
    terms = objective(tokens, reference_logprobs_N=None, entropy_N=None)   # of one micro-batch
    loss = objective.aggregation(terms.loss_N, tokens.sequence_N, totals)  # its share of the loss

    loss_N = factor policy_N + penalty_N + kl_coef KL_N - entropy_coef entropy_N

Micro-batches of one update add up to the same loss however they were cut, as long as each sequence
is in one of them: the denominators are those of the whole update (`BatchTotals`) and count dropped
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

from gigpo.compatibility import check_combination
from gigpo.corrections import CORRECTIONS, Correction
from gigpo.kl import KL_PENALTIES
from gigpo.lazy_torch import torch
from gigpo.losses import POLICY_LOSSES, Loss
from gigpo.tokens import Tokens, check_same_tokens, sequence_sum

PROXIMAL_POLICIES: Final = ("none", "recomputed", "interpolated")

# Loss -> its usual corrections and aggregation, which "auto" in a config stands for. They are
# published with the loss, except token_tis on ppo_clip and reinforce: our choice, because data is
# always a little stale. verl has it on reinforce (`bypass_pg_is`) and on decoupled ppo_clip
# (`decoupled_token_is`) only.
DEFAULT_PAIRING: Final[Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType(
    {
        "behaviour_cloning": ((), "token_mean"),
        "cispo": ((), "token_mean"),
        "dppo_tv": ((), "token_mean"),
        "gspo": ((), "sequence_mean_token_mean"),
        "ppo_clip": (("token_tis",), "token_mean"),
        "reinforce": (("token_tis",), "token_mean"),
        "sapo": ((), "sequence_mean_token_mean"),
        "topr": ((), "token_mean"),
    }
)

_BATCH_WIDE: Final = ("m2po",)  # they rank the tokens of the whole update


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTotals:
    """Count the response tokens and sequences of an update, over all micro-batches and ranks."""

    n_tokens: int
    n_sequences: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_sequences <= self.n_tokens:
            raise ValueError(
                f"n_tokens={self.n_tokens}, n_sequences={self.n_sequences}: count the response "
                "tokens of the whole update, and its sequences with at least one of them"
            )


class Aggregation(Protocol):
    """The interface of an entry of AGGREGATIONS: losses per token [N] to a scalar.

    Scalars of micro-batches add up. Every aggregation is given the sequence of each token, int64
    [N].
    """

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __call__(
        self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMean:
    """sum(loss) / n_tokens: every token has the same weight. DAPO, verl's default, GiGPO's authors.

    Worked: losses (1, 2) and (6) of two sequences: 9 / 3 = 3.
    """

    name: ClassVar[str] = "token_mean"

    def __call__(
        self, loss_N: torch.Tensor, _sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor:
        return loss_N.sum() / totals.n_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenMean:
    """Mean over sequences of the mean over their tokens. GRPO, GSPO.

    Every response has the same weight, so tokens of long ones have less. Worked: losses (1, 2) and
    (6) of two sequences: (1.5 + 6) / 2 = 3.75.
    """

    name: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(
        self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor:
        return (
            loss_N / sequence_sum(torch.ones_like(loss_N), sequence_N)
        ).sum() / totals.n_sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenSumNorm:
    """Mean over sequences of their sum / norm_tokens. Dr.GRPO, arXiv 2503.20783.

    norm_tokens is one constant for the whole run, the longest response that can be generated; there
    is no published number. No token's weight depends on the length of its response, so wrong
    answers do not get cheaper by being long.

    Worked, norm_tokens 10: losses (1, 2) and (6) of two sequences: (0.3 + 0.6) / 2 = 0.45.
    """

    name: ClassVar[str] = "sequence_mean_token_sum_norm"
    norm_tokens: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.norm_tokens) and self.norm_tokens >= 1):
            raise ValueError(
                f"norm_tokens={self.norm_tokens} must be at least 1: the longest response that can "
                "be generated"
            )

    def __call__(
        self, loss_N: torch.Tensor, _sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor:
        return loss_N.sum() / (totals.n_sequences * self.norm_tokens)


AGGREGATIONS: Final[Mapping[str, type[Aggregation]]] = MappingProxyType(
    {
        aggregation.name: aggregation
        for aggregation in (SequenceMeanTokenMean, SequenceMeanTokenSumNorm, TokenMean)
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The terms of an Objective for N tokens; all but loss_N are detached.

    loss_N     float32/64 [N], differentiable: everything that is minimised
    factor_N   float32/64 [N], product of the corrections; 0 where one drops the token
    clipped_N  bool [N], True where the policy loss's own trust region leaves the token no gradient
    kl_N       float32/64 [N], KL to the reference policy; 0 without one
    """

    loss_N: torch.Tensor
    factor_N: torch.Tensor
    clipped_N: torch.Tensor
    kl_N: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A policy loss with its corrections, penalties and mean.

    Raises ValueError for parts that do not go together, with the reason and the fix.

    corrections   multiplied; at most one of each
    proximal      centre of the trust region. "none": mu. "recomputed" or "interpolated": the
                  tokens' proximal_logprobs_N (decoupled PPO), from a forward pass before the first
                  update of the batch, or from `interpolated_proximal`
    kl, kl_coef   estimator and weight of the penalty that holds pi at a reference policy; kl_coef 0
                  needs no reference
    entropy_coef  weight of the entropy bonus
    aggregation   how the loss per token becomes a number
    """

    policy: Loss
    corrections: tuple[Correction, ...] = ()
    proximal: str = "none"
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: Aggregation = TokenMean()

    def __post_init__(self) -> None:
        _check_part("policy", self.policy, POLICY_LOSSES)
        if not isinstance(self.corrections, tuple):
            raise ValueError(
                f"corrections={self.corrections!r} is no tuple; write corrections=(TokenTis(),), "
                "or () for none"
            )
        for correction in self.corrections:
            _check_part("corrections", correction, CORRECTIONS)
        _check_part("aggregation", self.aggregation, AGGREGATIONS)
        if self.proximal not in PROXIMAL_POLICIES:
            raise ValueError(
                f"proximal={self.proximal!r} is none of {', '.join(PROXIMAL_POLICIES)}"
            )
        check_combination(self.policy, self.corrections, proximal=self.proximal)
        if self.kl not in KL_PENALTIES:
            raise ValueError(f"kl={self.kl!r} is none of {', '.join(KL_PENALTIES)}")
        if self.kl == "k1" and self.kl_coef:
            raise ValueError(
                "kl='k1' cannot be a penalty: its gradient is 1 whatever the reference says, 0 on "
                "average, so it would not hold the policy; use k2 (the gradient of this KL) or k3"
            )
        for name, value in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}={value} must be finite and >= 0; 0 leaves it out")

    @property
    def batch_wide(self) -> bool:
        """Return whether `factor` needs all tokens of the update at once, to rank them."""
        return any(correction.name in _BATCH_WIDE for correction in self.corrections)

    def factor(self, tokens: Tokens) -> torch.Tensor:
        """Return the product of the corrections' factors, float32/64 [N], without gradient."""
        factor_N = torch.ones_like(tokens.advantages_N)
        for correction in self.corrections:
            factor_N = factor_N * correction(tokens)
        return factor_N

    def __call__(
        self,
        tokens: Tokens,
        *,
        reference_logprobs_N: torch.Tensor | None,
        entropy_N: torch.Tensor | None,
        factor_N: torch.Tensor | None = None,
    ) -> Terms:
        """Return the terms of these tokens.

        `factor_N` is the result of `factor` for the whole update; None computes it here.
        """
        if (tokens.proximal_logprobs_N is not None) != (self.proximal != "none"):
            given = (
                "no proximal_logprobs_N"
                if tokens.proximal_logprobs_N is None
                else "proximal_logprobs_N"
            )
            raise ValueError(
                f"proximal={self.proximal!r}, but the tokens have {given}; the trust region has "
                "one centre"
            )
        policy = self.policy(tokens)
        if factor_N is None:
            factor_N = self.factor(tokens)
        check_same_tokens(factor_N=factor_N, logprobs_N=tokens.logprobs_N)
        loss_N = factor_N * policy.loss_N
        if policy.penalty_N is not None:
            loss_N = loss_N + policy.penalty_N
        kl_N = torch.zeros_like(loss_N)
        if self.kl_coef:
            if reference_logprobs_N is None:
                raise ValueError(f"kl_coef={self.kl_coef} needs reference_logprobs_N")
            kl_N = KL_PENALTIES[self.kl](tokens.logprobs_N, reference_logprobs_N)
            loss_N = loss_N + self.kl_coef * kl_N
        if self.entropy_coef:
            if entropy_N is None:
                raise ValueError(f"entropy_coef={self.entropy_coef} needs entropy_N")
            loss_N = loss_N - self.entropy_coef * entropy_N
        return Terms(
            loss_N=loss_N, factor_N=factor_N, clipped_N=policy.clipped_N, kl_N=kl_N.detach()
        )


def _check_part(field: str, value: object, registry: Mapping[str, type]) -> None:
    """Refuse a class, a name, or a part of another kind, which would fail in the first update.

    A record that no registry knows is the caller's own.
    """
    if type(value) in registry.values():
        return
    kind = registry.get(value) if isinstance(value, str) else value
    if isinstance(kind, type) and kind in registry.values():
        raise ValueError(f"{field}: {value!r} names no settings; write {kind.__name__}(...)")
    known = type(value) in (*POLICY_LOSSES.values(), *CORRECTIONS.values(), *AGGREGATIONS.values())
    if known or isinstance(value, type) or not callable(value) or not hasattr(value, "name"):
        kinds = ", ".join(each.__name__ for each in registry.values())
        raise ValueError(
            f"{field}: {value!r} is not an instance of one of {kinds}, nor a callable with a name "
            "like them"
        )
