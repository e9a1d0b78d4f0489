"""Test which parts of an objective go together, and which are refused with what reason."""

from __future__ import annotations

import math

import pytest

from gigpo import (
    AGGREGATIONS,
    CORRECTIONS,
    DEFAULT_PAIRING,
    POLICY_LOSSES,
    BehaviourCloning,
    Cispo,
    DppoTv,
    GeometricMask,
    Gspo,
    K3Mask,
    M2po,
    Objective,
    Opsm,
    PpoClip,
    Reinforce,
    Sapo,
    SequenceMask,
    SequenceTis,
    TokenIcepop,
    TokenMean,
    TokenTis,
    Topr,
)

REFUSED = [
    (
        {"policy": DppoTv(), "corrections": (TokenTis(),)},
        "token_tis on top of dppo_tv: it weighs by rho",
    ),
    (
        {"policy": Cispo(), "corrections": (TokenTis(),)},
        "token_tis on top of cispo: it clips the weight",
    ),
    (
        {"policy": Topr(), "corrections": (TokenTis(),)},
        "token_tis on top of topr.*use ppo_clip or reinforce",
    ),
    ({"policy": Sapo(), "corrections": (SequenceTis(),)}, "sequence_tis on top of sapo: its gate"),
    (
        {"policy": Gspo(), "corrections": (TokenTis(),)},
        "token_tis on top of gspo: its ratio is the sequence's",
    ),
    ({"policy": Gspo(), "corrections": (M2po(),)}, "m2po on top of gspo"),
    ({"policy": Cispo(), "corrections": (TokenIcepop(),)}, "no token loses its gradient"),
    (
        {"policy": BehaviourCloning(), "corrections": (Opsm(),)},
        "nothing to correct; use corrections=",
    ),
    (
        {"policy": BehaviourCloning(), "proximal": "recomputed"},
        "proximal='recomputed' with behaviour_cloning",
    ),
    ({"policy": PpoClip(), "corrections": (TokenTis(), TokenTis(cap=3.0))}, "token_tis twice"),
    ({"policy": PpoClip(), "corrections": (TokenTis(), SequenceTis())}, "keep one"),
    (
        {"policy": PpoClip(), "corrections": (SequenceMask(), GeometricMask())},
        "both masks bound the same sum",
    ),
    (
        {"policy": PpoClip(), "corrections": (TokenTis(cap=5.0), TokenIcepop())},
        "token_tis.cap=5 would never act",
    ),
    (
        {
            "policy": PpoClip(),
            "corrections": (SequenceTis(cap=5.0), SequenceMask(high=2.0)),
        },
        "sequence_tis.cap=5 would never act; set sequence_tis.cap to at most sequence_mask.high",
    ),
    (
        {"policy": PpoClip(), "corrections": (TokenTis(cap=3.0),)},
        "so token_tis.cap=3 would never act; set it below 3, or leave",
    ),
    (
        {"policy": PpoClip(clip_high=4.0), "corrections": (TokenTis(cap=5.0),)},
        r"1 \+ clip_high=5 where A > 0.*below 5",
    ),
    (
        {"policy": PpoClip(), "corrections": (TokenIcepop(low=0.0),)},
        "token_icepop.high=5 would never act",
    ),
    ({"policy": PpoClip}, r"policy: <class.*write PpoClip\(...\)"),
    ({"policy": "ppo_clip"}, r"policy: 'ppo_clip' names no settings; write PpoClip\(...\)"),
    ({"policy": "ppo"}, "policy: 'ppo' is not an instance of one of BehaviourCloning, Cispo"),
    ({"policy": None}, "policy: None is not an instance"),
    ({"policy": TokenTis()}, r"policy: TokenTis\(cap=2.0\) is not an instance"),
    (
        {"policy": PpoClip(), "corrections": TokenTis()},
        r"corrections=TokenTis\(cap=2.0\) is no tuple; write",
    ),
    ({"policy": PpoClip(), "corrections": "token_tis"}, "corrections='token_tis' is no tuple"),
    (
        {"policy": PpoClip(), "corrections": ("token_tis",)},
        r"corrections: 'token_tis' names no settings; write TokenTis\(...\)",
    ),
    ({"policy": PpoClip(), "corrections": (TokenTis,)}, r"write TokenTis\(...\)"),
    (
        {"policy": PpoClip(), "corrections": (PpoClip(),)},
        "is not an instance of one of GeometricMask",
    ),
    ({"policy": PpoClip(), "aggregation": TokenMean}, r"aggregation: .*write TokenMean\(...\)"),
    ({"policy": PpoClip(), "aggregation": "token_mean"}, r"write TokenMean\(...\)"),
    (
        {"policy": Gspo(), "proximal": "interpolated"},
        "proximal='interpolated' with gspo: only ppo_clip",
    ),
    ({"policy": Reinforce(), "proximal": "recomputed"}, "use proximal=none"),
    (
        {"policy": PpoClip(), "proximal": "recompute"},
        "proximal='recompute' is none of none, recomputed, interpolated",
    ),
    ({"policy": PpoClip(), "kl": "k4"}, "kl='k4' is none of k1, k2, k3"),
    ({"policy": PpoClip(), "kl": "k1", "kl_coef": 0.1}, "would not hold the policy; use k2"),
    ({"policy": PpoClip(), "kl_coef": -1.0}, "kl_coef=-1.0"),
    ({"policy": PpoClip(), "entropy_coef": math.nan}, "entropy_coef=nan"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_parts_that_do_not_go_together_are_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        Objective(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": PpoClip(), "corrections": (TokenTis(), GeometricMask(), Opsm())},
        # verl decoupled_seq_is_rs
        {"policy": PpoClip(), "corrections": (SequenceTis(), SequenceMask())},
        {
            "policy": PpoClip(),
            "corrections": (SequenceTis(cap=5.0), SequenceMask(high=10.0)),
        },
        {"policy": Reinforce(), "corrections": (TokenTis(), TokenIcepop())},
        {"policy": Reinforce(), "corrections": (TokenTis(cap=10.0),)},  # AIPO
        # bounds pi_p / mu
        {"policy": PpoClip(), "corrections": (TokenTis(cap=5.0),), "proximal": "recomputed"},
        {"policy": PpoClip(), "corrections": (TokenTis(cap=math.inf),)},  # no cap, as asked for
        {"policy": PpoClip(dual_clip=math.inf), "corrections": (TokenTis(cap=100.0),)},
        {"policy": Gspo(), "corrections": (K3Mask(),)},
        {"policy": DppoTv(), "corrections": (GeometricMask(),)},
        {"policy": PpoClip(), "corrections": (M2po(),), "proximal": "recomputed"},
        {"policy": PpoClip(), "kl": "k1"},  # no penalty, so nothing it could do wrong
    ],
)
def test_parts_that_are_published_together_are_not_refused(settings):
    Objective(**settings)


def test_the_usual_companions_of_every_loss_go_with_it():
    assert DEFAULT_PAIRING.keys() == POLICY_LOSSES.keys()
    for name, (corrections, aggregation) in DEFAULT_PAIRING.items():
        Objective(
            policy=POLICY_LOSSES[name](),
            corrections=tuple(CORRECTIONS[correction]() for correction in corrections),
            aggregation=AGGREGATIONS[aggregation](),
        )
