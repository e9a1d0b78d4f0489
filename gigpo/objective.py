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
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

from gigpo.corrections import (
    CORRECTIONS,
    Correction,
    SequenceMask,
    SequenceTis,
    TokenIcepop,
    TokenTis,
)
from gigpo.lazy_torch import torch
from gigpo.losses import KL_PENALTIES, POLICY_LOSSES, Loss, PpoClip
from gigpo.tokens import Tokens, check_same_tokens, sequence_sum

PROXIMAL_POLICIES: Final = ("none", "recomputed", "interpolated")

# Loss -> its usual corrections and aggregation, which "auto" in a config stands for. They are
# published with the loss, except token_tis on ppo_clip, reinforce and distillation: our choice,
# because data is always a little stale. verl has it on reinforce (`bypass_pg_is`) and on decoupled
# ppo_clip (`decoupled_token_is`) only.
DEFAULT_PAIRING: Final[Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType(
    {
        "behaviour_cloning": ((), "token_mean"),
        "cispo": ((), "token_mean"),
        "distillation": (("token_tis",), "token_mean"),
        "dppo_tv": ((), "token_mean"),
        "gspo": ((), "sequence_mean_token_mean"),
        "ppo_clip": (("token_tis",), "token_mean"),
        "reinforce": (("token_tis",), "token_mean"),
        "sapo": ((), "sequence_mean_token_mean"),
        "topr": ((), "token_mean"),
    }
)

_BATCH_WIDE: Final = ("m2po",)  # they rank the tokens of the whole update
_WEIGHTS: Final = ("token_tis", "sequence_tis")
_TOKEN_LEVEL: Final = (*_WEIGHTS, "token_icepop", "m2po")
# Loss -> why it takes no factors of single tokens. Masks of whole sequences go with every loss.
_BOUNDED_ALREADY: Final = {
    "cispo": "it clips the weight rho itself, so that no token loses its gradient",
    "dppo_tv": "it weighs by rho and masks single tokens itself (ratio_cap caps the weight)",
    "gspo": "its ratio is the sequence's, which factors of single tokens would take apart",
    "sapo": "its gate bounds the weight rho itself",
    "topr": "it bounds the weight rho by 1 itself",
}


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
        n_tokens_N = sequence_sum(torch.ones_like(loss_N), sequence_N)
        return (loss_N / n_tokens_N).sum() / totals.n_sequences


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


def check_combination(policy: Loss, corrections: tuple[Correction, ...], *, proximal: str) -> None:
    """Raise ValueError, in one line that begins with the setting to change.

    A combination is refused if it means nothing, or if a part of it could never change a gradient.
    `proximal` is one of PROXIMAL_POLICIES.
    """
    _check_with_loss(policy, corrections)
    _check_with_each_other(corrections)
    if proximal != "none" and policy.name != "ppo_clip":
        raise ValueError(
            f"proximal={proximal!r} with {policy.name}: only ppo_clip has a trust region that can "
            "be moved off the policy that sampled (decoupled PPO); use proximal=none, or ppo_clip"
        )
    if isinstance(policy, PpoClip) and proximal == "none":
        _check_beyond_clip(policy, corrections)


def _check_with_loss(policy: Loss, corrections: tuple[Correction, ...]) -> None:
    names = [correction.name for correction in corrections]
    if names and policy.name == "behaviour_cloning":
        raise ValueError(
            f"corrections={names} with behaviour_cloning: it wants every recorded token whatever "
            "pi thinks of it, so there is nothing to correct; use corrections=[]"
        )
    if "opsm" in names and policy.name == "distillation":
        raise ValueError(
            f"corrections={names}: opsm with distillation: it drops sequences by the sign of their "
            "advantage, which this loss does not read; leave opsm out"
        )
    for name in names:
        if name in _TOKEN_LEVEL and policy.name in _BOUNDED_ALREADY:
            raise ValueError(
                f"corrections={names}: {name} on top of {policy.name}: "
                f"{_BOUNDED_ALREADY[policy.name]}; leave {name} out, or use ppo_clip or reinforce"
            )


def _check_with_each_other(corrections: tuple[Correction, ...]) -> None:
    names = [correction.name for correction in corrections]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"corrections={names}: {name} twice; the narrower one alone does the same"
            )
    if all(name in names for name in _WEIGHTS):
        raise ValueError(
            f"corrections={names}: token_tis and sequence_tis each set the whole weight of a "
            "token; keep one (token_tis)"
        )
    if "sequence_mask" in names and "geometric_mask" in names:
        raise ValueError(
            f"corrections={names}: both masks bound the same sum of log ratios, one whole and one "
            "per token, so which of them acts would depend on the response's length; keep one "
            "(geometric_mask)"
        )
    found = {correction.name: correction for correction in corrections}
    tis, icepop = found.get("token_tis"), found.get("token_icepop")
    if isinstance(tis, TokenTis) and isinstance(icepop, TokenIcepop) and icepop.high <= tis.cap:
        raise ValueError(
            f"corrections={names}: token_icepop drops what is above "
            f"token_icepop.high={icepop.high:g}, so token_tis.cap={tis.cap:g} would never act; "
            "leave token_tis out, or set token_tis.cap below token_icepop.high"
        )
    sequence_tis, mask = found.get("sequence_tis"), found.get("sequence_mask")
    # Equal bounds are allowed: verl's decoupled_seq_is_rs, where the weight is X itself.
    if (
        isinstance(sequence_tis, SequenceTis)
        and isinstance(mask, SequenceMask)
        and mask.high < sequence_tis.cap
    ):
        raise ValueError(
            f"corrections={names}: sequence_mask drops what is above "
            f"sequence_mask.high={mask.high:g}, so sequence_tis.cap={sequence_tis.cap:g} would "
            "never act; set sequence_tis.cap to at most sequence_mask.high"
        )


def _check_beyond_clip(policy: PpoClip, corrections: tuple[Correction, ...]) -> None:
    """Refuse a bound above the clip of ppo_clip, which changes the loss but no gradient.

    Around mu, ppo_clip gives no gradient to rho > 1 + clip_high where A > 0, nor to rho > dual_clip
    where A < 0. cap = math.inf means "no cap" and is accepted.
    """
    beyond = max(policy.dual_clip, 1.0 + policy.clip_high)
    for correction in corrections:
        if isinstance(correction, TokenTis):
            name, bound = "token_tis.cap", correction.cap
        elif isinstance(correction, TokenIcepop) and correction.low == 0.0:
            name, bound = "token_icepop.high", correction.high
        else:
            continue
        if beyond <= bound < math.inf:
            names = [each.name for each in corrections]
            raise ValueError(
                f"corrections={names}: ppo_clip leaves no gradient above dual_clip="
                f"{policy.dual_clip:g} where A < 0, nor above 1 + clip_high="
                f"{1.0 + policy.clip_high:g} where A > 0, so {name}={bound:g} would never act; set "
                f"it below {beyond:g}, or leave {correction.name} out"
            )
