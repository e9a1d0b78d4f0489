"""What an optimizer update minimises: a policy loss, its corrections, KL and entropy, and how tokens are averaged.

    objective = Objective(policy=PpoClip(), corrections=(TokenTis(),))       # refuses combinations that make no sense
    terms = objective(tokens, reference_logprobs_N=None, entropy_N=None)     # of one micro-batch
    loss = objective.aggregation(terms.loss_N, tokens.sequence_N, totals)    # its share of the update's loss

    loss_N = factor policy_N + penalty_N + kl_coef KL_N - entropy_coef entropy_N

Micro-batches of one update add up to the same loss however they were cut, as long as each sequence is in one of them: the
denominators are those of the whole update (`BatchTotals`), and they count the tokens that corrections drop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

import torch

from gigpo.corrections import Correction, SequenceMask, SequenceTis, TokenIcepop, TokenTis
from gigpo.kl import KL_PENALTIES
from gigpo.losses import Loss
from gigpo.tokens import Tokens, check_same_tokens, sequence_sum

PROXIMAL_POLICIES: Final = ("none", "recomputed", "interpolated")

# What a loss is usually used with: corrections and aggregation. Configs that name neither get these. The aggregations, and that
# the other losses need no correction, are published with them. token_tis on ppo_clip and reinforce is our choice for data that
# is always a little stale: verl has it on reinforce (`bypass_pg_is`) and on decoupled ppo_clip (`decoupled_token_is`) alone.
USUAL_WITH: Final[Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType(
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

_WEIGHTS: Final = ("token_tis", "sequence_tis")
_TOKEN_LEVEL: Final = (*_WEIGHTS, "token_icepop", "m2po")
_BATCH_WIDE: Final = ("m2po",)
# Why a loss takes no factors of single tokens; masks of whole sequences go with all of them.
_BOUNDED_ALREADY: Final = {
    "cispo": "it clips the weight rho itself, so that no token loses its gradient",
    "dppo_tv": "it weighs by rho and masks single tokens itself (ratio_cap caps the weight)",
    "gspo": "its ratio is the sequence's, which factors of single tokens would take apart",
    "sapo": "its gate bounds the weight rho itself",
    "topr": "it bounds the weight rho by 1 itself",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTotals:
    """Of a whole optimizer update, over all micro-batches and ranks: response tokens and sequences."""

    n_tokens: int
    n_sequences: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_sequences <= self.n_tokens:
            raise ValueError(
                f"n_tokens={self.n_tokens}, n_sequences={self.n_sequences}: count the response tokens of the whole "
                "update, and its sequences with at least one of them"
            )


class Aggregation(Protocol):
    """What AGGREGATIONS lists: from losses per token to a scalar that adds up over micro-batches."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __call__(self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMean:
    """sum(loss) / n_tokens: every token weighs the same. DAPO, verl's default, GiGPO's authors.

    Worked: losses (1, 2) and (6) of two sequences: 9 / 3 = 3.
    """

    name: ClassVar[str] = "token_mean"

    def __call__(self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals) -> torch.Tensor:
        return loss_N.sum() / totals.n_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenMean:
    """Mean over sequences of the mean over their tokens: every response weighs the same, long ones' tokens less. GRPO, GSPO.

    Worked: losses (1, 2) and (6) of two sequences: (1.5 + 6) / 2 = 3.75.
    """

    name: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals) -> torch.Tensor:
        return (loss_N / sequence_sum(torch.ones_like(loss_N), sequence_N)).sum() / totals.n_sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenSumNorm:
    """Mean over sequences of their sum / norm_tokens, one constant length for the whole run. Dr.GRPO, arXiv 2503.20783.

    No token's weight depends on the length of its response, so wrong answers do not get cheaper by being long. There is no
    published number: norm_tokens is the longest response that can be generated.

    Worked, norm_tokens 10: losses (1, 2) and (6) of two sequences: (0.3 + 0.6) / 2 = 0.45.
    """

    name: ClassVar[str] = "sequence_mean_token_sum_norm"
    norm_tokens: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.norm_tokens) and self.norm_tokens >= 1):
            raise ValueError(f"norm_tokens={self.norm_tokens} must be at least 1: the longest response that can be generated")

    def __call__(self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals) -> torch.Tensor:
        return loss_N.sum() / (totals.n_sequences * self.norm_tokens)


AGGREGATIONS: Final[Mapping[str, type[Aggregation]]] = MappingProxyType(
    {aggregation.name: aggregation for aggregation in (SequenceMeanTokenMean, SequenceMeanTokenSumNorm, TokenMean)}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What an Objective says of N tokens; all but loss_N detached.

    loss_N     float [N], differentiable: everything that is minimised
    factor_N   float [N], product of the corrections; 0 where one drops the token
    clipped_N  bool [N], True where the policy loss's own trust region leaves the token no gradient
    kl_N       float [N], KL to the reference policy; 0 without one
    """

    loss_N: torch.Tensor
    factor_N: torch.Tensor
    clipped_N: torch.Tensor
    kl_N: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A policy loss with what goes with it. Raises ValueError for what does not, with the reason and the way out.

    corrections   multiplied; at most one of each
    proximal      "none": the trust region is around mu. "recomputed" or "interpolated": around the tokens'
                  proximal_logprobs_N (decoupled PPO), which the caller has from a forward pass before the first update of
                  the batch, or from `interpolated_proximal`
    kl, kl_coef   estimator and weight of the penalty that holds pi at a reference policy; kl_coef 0 needs no reference
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
        _check_corrections(self.policy, self.corrections)
        _check_proximal(self.policy, self.proximal)
        if self.kl not in KL_PENALTIES:
            raise ValueError(f"kl={self.kl!r} is none of {', '.join(KL_PENALTIES)}")
        if self.kl == "k1" and self.kl_coef:
            raise ValueError(
                "kl='k1' cannot be a penalty: its gradient is 1 whatever the reference says, 0 on average, so it would not "
                "hold the policy; use k2 (the gradient of this KL) or k3"
            )
        for name, value in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}={value} must be finite and >= 0; 0 leaves it out")

    @property
    def batch_wide(self) -> bool:
        """True if a correction ranks tokens over the update: `factor` then needs all of them at once."""
        return any(correction.name in _BATCH_WIDE for correction in self.corrections)

    def factor(self, tokens: Tokens) -> torch.Tensor:
        """Product of the corrections' factors, float [N], no gradient."""
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
        """`factor_N`: of these tokens, where `factor` was called for the whole update already; None calls it here."""
        if (tokens.proximal_logprobs_N is not None) != (self.proximal != "none"):
            given = "no proximal_logprobs_N" if tokens.proximal_logprobs_N is None else "proximal_logprobs_N"
            raise ValueError(f"proximal={self.proximal!r}, but the tokens have {given}; the trust region has one centre")
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
        return Terms(loss_N=loss_N, factor_N=factor_N, clipped_N=policy.clipped_N, kl_N=kl_N.detach())


def _check_corrections(policy: Loss, corrections: tuple[Correction, ...]) -> None:
    names = [correction.name for correction in corrections]
    if names and policy.name == "behaviour_cloning":
        raise ValueError(
            f"corrections={names} with behaviour_cloning: it wants every recorded token whatever pi thinks of it, so there "
            "is nothing to correct; use corrections=[]"
        )
    for name in names:
        if name in _TOKEN_LEVEL and policy.name in _BOUNDED_ALREADY:
            raise ValueError(
                f"corrections={names}: {name} on top of {policy.name}: {_BOUNDED_ALREADY[policy.name]}; leave {name} out, or "
                "use ppo_clip or reinforce"
            )
        if names.count(name) > 1:
            raise ValueError(f"corrections={names}: {name} twice; the narrower one alone does the same")
    if all(name in names for name in _WEIGHTS):
        raise ValueError(
            f"corrections={names}: token_tis and sequence_tis each set the whole weight of a token; keep one (token_tis)"
        )
    if "sequence_mask" in names and "geometric_mask" in names:
        raise ValueError(
            f"corrections={names}: both masks bound the same sum of log ratios, one whole and one per token, so which of them "
            "acts would depend on the response's length; keep one (geometric_mask)"
        )
    found = {correction.name: correction for correction in corrections}
    tis, icepop = found.get("token_tis"), found.get("token_icepop")
    if isinstance(tis, TokenTis) and isinstance(icepop, TokenIcepop) and icepop.icepop_high <= tis.tis_cap:
        raise ValueError(
            f"corrections={names}: token_icepop drops what is above icepop_high={icepop.icepop_high:g}, so "
            f"tis_cap={tis.tis_cap:g} would never act; leave token_tis out, or set tis_cap below icepop_high"
        )
    sequence_tis, mask = found.get("sequence_tis"), found.get("sequence_mask")
    # Equal is verl's decoupled_seq_is_rs, where the weight is X itself.
    if isinstance(sequence_tis, SequenceTis) and isinstance(mask, SequenceMask) and mask.sequence_high < sequence_tis.tis_cap:
        raise ValueError(
            f"corrections={names}: sequence_mask drops what is above sequence_high={mask.sequence_high:g}, so "
            f"tis_cap={sequence_tis.tis_cap:g} would never act; set tis_cap to at most sequence_high"
        )


def _check_proximal(policy: Loss, proximal: str) -> None:
    if proximal not in PROXIMAL_POLICIES:
        raise ValueError(f"proximal={proximal!r} is none of {', '.join(PROXIMAL_POLICIES)}")
    if proximal != "none" and policy.name != "ppo_clip":
        raise ValueError(
            f"proximal={proximal!r} with {policy.name}: only ppo_clip has a trust region that can be moved off the policy that "
            "sampled (decoupled PPO); use proximal=none, or ppo_clip"
        )
