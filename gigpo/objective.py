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
from dataclasses import dataclass, field
from typing import Final

from gigpo.aggregations import AGGREGATIONS, Aggregation, TokenMean
from gigpo.combinations import check_combination
from gigpo.corrections import CORRECTIONS, Correction
from gigpo.lazy_torch import torch
from gigpo.losses import KL_PENALTIES, POLICY_LOSSES, Loss
from gigpo.tokens import Tokens, check_same_tokens

PROXIMAL_POLICIES: Final = ("none", "recomputed", "interpolated")
_BATCH_WIDE: Final = ("m2po",)  # they rank the tokens of the whole update


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
    aggregation: Aggregation = field(default_factory=TokenMean)

    def __post_init__(self) -> None:
        _check_part("policy", value=self.policy, registry=POLICY_LOSSES)
        if not isinstance(self.corrections, tuple):
            raise ValueError(
                f"corrections={self.corrections!r} is no tuple; write corrections=(TokenTis(),), "
                "or () for none"
            )
        for correction in self.corrections:
            _check_part("corrections", value=correction, registry=CORRECTIONS)
        _check_part("aggregation", value=self.aggregation, registry=AGGREGATIONS)
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
            no = "no " if tokens.proximal_logprobs_N is None else ""
            raise ValueError(
                f"proximal={self.proximal!r}, but the tokens have {no}proximal_logprobs_N; the "
                "trust region has one centre"
            )
        policy = self.policy(tokens)
        if factor_N is None:
            factor_N = self.factor(tokens)
        check_same_tokens(factor_N=factor_N, logprobs_N=tokens.logprobs_N)
        loss_N = factor_N * policy.loss_N
        if policy.penalty_N is not None:
            loss_N = loss_N + policy.penalty_N
        clipped_N = policy.clipped_N
        if clipped_N is None:
            clipped_N = torch.zeros_like(loss_N, dtype=torch.bool)
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
        return Terms(loss_N=loss_N, factor_N=factor_N, clipped_N=clipped_N, kl_N=kl_N.detach())


def _check_part(field: str, *, value: object, registry: Mapping[str, type]) -> None:
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
