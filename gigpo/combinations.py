"""Say what a loss usually has beside it, and refuse parts that do not go together.

docs/algorithms.md, section 11, lists everything that `check_combination` refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gigpo.corrections import Correction, SequenceMask, SequenceTis, TokenIcepop, TokenTis
from gigpo.losses import Loss, PpoClip

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
