"""Objectives: what goes together, what is refused, how tokens are averaged; diagnostics of the same
tokens.
"""

from __future__ import annotations

import itertools
import math

import pyarrow as pa
import pytest
import torch

from gigpo import (
    AGGREGATIONS,
    CORRECTIONS,
    DEFAULT_PAIRING,
    POLICY_LOSSES,
    BatchTotals,
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
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    SequenceTis,
    TokenIcepop,
    TokenMean,
    Tokens,
    TokenTis,
    Topr,
    anchor_size_histogram,
    anchor_size_shares,
    ess,
    step_variance_share,
    token_diagnostics,
)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(n: int = 24, *, scale: float, proximal: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(0)
    sequence_N = torch.randint(0, 6, (n,), generator=generator)
    behaviour_N = -3.0 * torch.rand(n, dtype=torch.float64, generator=generator) - 0.5
    proximal_N = behaviour_N + scale * torch.randn(n, dtype=torch.float64, generator=generator)
    return Tokens(
        logprobs_N=(
            behaviour_N + scale * torch.randn(n, dtype=torch.float64, generator=generator)
        ).requires_grad_(),
        behaviour_logprobs_N=behaviour_N,
        advantages_N=torch.randn(6, dtype=torch.float64, generator=generator)[sequence_N],
        sequence_N=sequence_N,
        proximal_logprobs_N=proximal_N if proximal else None,
        teacher_logprobs_N=-torch.rand(n, dtype=torch.float64, generator=generator),
    )


def loss_N(objective: Objective, tokens: Tokens, **given: torch.Tensor) -> torch.Tensor:
    return objective(tokens, **({"reference_logprobs_N": None, "entropy_N": None} | given)).loss_N


def combinations() -> list[Objective]:
    """Every loss with every one or two corrections, and decoupled, as far as Objective lets
    them.
    """
    found = []
    names = [(), *[(name,) for name in CORRECTIONS], *itertools.combinations(CORRECTIONS, 2)]
    for policy, chosen, proximal in itertools.product(
        POLICY_LOSSES.values(), names, ("none", "recomputed")
    ):
        try:
            found.append(
                Objective(
                    policy=policy(),
                    corrections=tuple(CORRECTIONS[name]() for name in chosen),
                    proximal=proximal,
                )
            )
        except ValueError:
            continue
    return found


def test_on_policy_every_combination_has_the_plain_policy_gradient():
    objectives = [
        objective
        for objective in combinations()
        if objective.policy.name not in ("behaviour_cloning", "distillation")
    ]
    assert len(objectives) > 100
    for objective in objectives:
        tokens = drawn(scale=0.0, proximal=objective.proximal != "none")
        loss_N(objective, tokens).sum().backward()
        torch.testing.assert_close(tokens.logprobs_N.grad, -tokens.advantages_N, msg=str(objective))


# At these thresholds a drawn batch has tokens that are kept and tokens that are not.
SOME_ARE_DROPPED = [
    TokenTis(),
    SequenceTis(),
    TokenIcepop(low=0.7, high=1.5),
    SequenceMask(low=0.6, high=1.6),
    GeometricMask(low=0.85, high=1.15),
    K3Mask(limit=0.12),
    Opsm(),
    M2po(),
]


@pytest.mark.parametrize("correction", SOME_ARE_DROPPED, ids=lambda correction: correction.name)
@pytest.mark.parametrize("proximal", ["none", "recomputed"])
def test_gradient_against_finite_differences_with_the_factors_held(correction, proximal):
    """ppo_clip, a correction, k3 and entropy: the factors are numbers, all else is
    differentiated.
    """
    objective = Objective(
        policy=PpoClip(),
        corrections=(correction,),
        proximal=proximal,
        kl_coef=0.3,
        entropy_coef=0.2,
    )
    tokens = drawn(scale=0.5, proximal=proximal != "none")
    factor_N = objective.factor(tokens)
    changed_N = (
        factor_N != 1.0 if correction.name in ("token_tis", "sequence_tis") else factor_N == 0.0
    )
    assert 0 < int(changed_N.sum()) < len(changed_N), "the case tests something"
    reference_N = tokens.behaviour_logprobs_N - 0.1

    def value(x_N: torch.Tensor) -> torch.Tensor:
        moved = Tokens(
            logprobs_N=x_N,
            behaviour_logprobs_N=tokens.behaviour_logprobs_N,
            advantages_N=tokens.advantages_N,
            sequence_N=tokens.sequence_N,
            proximal_logprobs_N=tokens.proximal_logprobs_N,
        )
        return objective(
            moved, reference_logprobs_N=reference_N, entropy_N=x_N.square(), factor_N=factor_N
        ).loss_N.sum()

    loss_N(
        objective, tokens, reference_logprobs_N=reference_N, entropy_N=tokens.logprobs_N.square()
    ).sum().backward()
    h, at_N = 1e-6, tokens.logprobs_N.detach()
    numeric_N = f64(
        *[
            float(value(at_N + step) - value(at_N - step)) / (2 * h)
            for step in h * torch.eye(24).double()
        ]
    )
    torch.testing.assert_close(tokens.logprobs_N.grad, numeric_N, atol=1e-7, rtol=1e-6)


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


def test_the_trust_region_has_the_centre_that_was_asked_for():
    with pytest.raises(
        ValueError, match="proximal='recomputed', but the tokens have no proximal_logprobs_N"
    ):
        loss_N(Objective(policy=PpoClip(), proximal="recomputed"), drawn(scale=0.1))
    with pytest.raises(
        ValueError, match="proximal='none', but the tokens have proximal_logprobs_N"
    ):
        loss_N(Objective(policy=PpoClip()), drawn(scale=0.1, proximal=True))
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 needs reference_logprobs_N"):
        loss_N(Objective(policy=PpoClip(), kl_coef=0.1), drawn(scale=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1 needs entropy_N"):
        loss_N(Objective(policy=PpoClip(), entropy_coef=0.1), drawn(scale=0.1))


# ppo_clip with high 0.3 and token_tis at 2, one token. A, rho, loss, d loss / d log pi.
PPO_WITH_TIS = [
    (2.0, 2.5, -2.08, 0.0),  # -2 * 1.3 * (2 / 2.5)
    (-1.0, 1.8, 1.8, 1.8),
    (-1.0, 2.5, 2.0, 2.0),  # 2.5 * (2 / 2.5): the weight is capped at C
    (-1.0, 4.0, 1.5, 0.0),  # dual clip: 3 * (2 / 4)
]


@pytest.mark.parametrize(("advantage", "rho", "value", "gradient"), PPO_WITH_TIS)
def test_the_quick_start_s_loss_by_hand(advantage, rho, value, gradient):
    tokens = Tokens(
        logprobs_N=f64(-1.5 + math.log(rho)).requires_grad_(),
        behaviour_logprobs_N=f64(-1.5),
        advantages_N=f64(advantage),
        sequence_N=torch.tensor([0]),
    )
    found_N = loss_N(Objective(policy=PpoClip(clip_high=0.3), corrections=(TokenTis(),)), tokens)
    found_N.sum().backward()
    assert found_N.item() == pytest.approx(value)
    assert tokens.logprobs_N.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize(("dual_clip", "clip_high"), [(3.0, 0.2), (3.0, 4.0), (1.5, 0.2)])
def test_a_cap_above_the_clip_never_acts_and_below_it_does(dual_clip, clip_high):
    """Around mu the clip leaves no gradient beyond the larger of dual_clip and 1 + clip_high, so a
    cap there has none to bound: that is what Objective refuses, and nothing less."""
    policy, n = PpoClip(dual_clip=dual_clip, clip_high=clip_high), 200
    rho_N = torch.linspace(0.05, 8.0, n, dtype=torch.float64).repeat(2)
    beyond = max(dual_clip, 1.0 + clip_high)

    def gradient(tis_cap: float) -> torch.Tensor:
        tokens = Tokens(
            logprobs_N=(torch.log(rho_N) - 5.0).requires_grad_(),
            behaviour_logprobs_N=torch.full_like(rho_N, -5.0),
            advantages_N=torch.cat([torch.ones(n), -torch.ones(n)]).double(),
            sequence_N=torch.arange(2 * n),
        )
        (policy(tokens).loss_N * TokenTis(cap=tis_cap)(tokens)).sum().backward()
        return tokens.logprobs_N.grad

    for acts, tis_cap in ((True, beyond - 0.2), (False, beyond), (False, beyond + 1.0)):
        assert acts is not torch.equal(gradient(tis_cap), gradient(math.inf))
        try:
            Objective(policy=policy, corrections=(TokenTis(cap=tis_cap),))
        except ValueError:
            assert not acts
        else:
            assert acts


def test_somebody_s_own_loss_is_let_in():
    class Mine:
        name = "mine"

        def __call__(self, tokens):
            return Reinforce()(tokens)

    tokens = drawn(scale=0.1)
    mine, plain = (
        Objective(policy=policy, corrections=(TokenTis(),)) for policy in (Mine(), Reinforce())
    )
    assert torch.equal(loss_N(mine, tokens), loss_N(plain, tokens))


def test_the_penalties_by_hand():
    """On policy, A = 2: -2; k2 of log pi - log ref = 3 is 4.5, at 0.1: + 0.45; entropy 0.7 at 0.5:
    - 0.35.
    """
    tokens = Tokens(
        logprobs_N=f64(-1.0),
        behaviour_logprobs_N=f64(-1.0),
        advantages_N=f64(2.0),
        sequence_N=torch.tensor([0]),
    )
    objective = Objective(policy=PpoClip(), kl="k2", kl_coef=0.1, entropy_coef=0.5)
    terms = objective(tokens, reference_logprobs_N=f64(-4.0), entropy_N=f64(0.7))
    assert (terms.loss_N.item(), terms.kl_N.item()) == pytest.approx((-1.9, 4.5))


def test_a_mask_leaves_the_penalties_and_the_denominator():
    """Two tokens at rho = 8 and 1, A = 1: IcePop drops the first. DPPO's square pulls it back all
    the same.

    token mean: (0 - 1) / 2 and not (0 - 1) / 1, so that the kept token pulls as it would without
    the other.
    """
    tokens = Tokens(
        logprobs_N=f64(-4.0 + math.log(8), -4.0).requires_grad_(),
        behaviour_logprobs_N=f64(-4.0, -4.0),
        advantages_N=f64(1.0, 1.0),
        sequence_N=torch.tensor([0, 1]),
    )
    totals = BatchTotals(n_tokens=2, n_sequences=2)
    reinforce = Objective(policy=Reinforce(), corrections=(TokenIcepop(),))
    terms = reinforce(tokens, reference_logprobs_N=None, entropy_N=None)
    assert reinforce.aggregation(terms.loss_N, tokens.sequence_N, totals).item() == -0.5
    assert terms.factor_N.tolist() == [0.0, 1.0]
    dppo = Objective(policy=DppoTv(), corrections=(GeometricMask(),))
    assert loss_N(dppo, tokens).tolist() == pytest.approx([1e-3 * math.log(8) ** 2, -1.0])


@pytest.mark.parametrize(
    ("aggregation", "value", "weights"),
    [  # losses (1, 2) and (6), in mixed order
        (TokenMean(), 3.0, [1 / 3, 1 / 3, 1 / 3]),
        (SequenceMeanTokenMean(), 3.75, [0.25, 0.5, 0.25]),
        (SequenceMeanTokenSumNorm(norm_tokens=10), 0.45, [0.05, 0.05, 0.05]),
    ],
)
def test_aggregations_by_hand_and_over_micro_batches(aggregation, value, weights):
    loss, sequence_N = f64(1.0, 6.0, 2.0).requires_grad_(), torch.tensor([4, 9, 4])
    totals = BatchTotals(n_tokens=3, n_sequences=2)
    whole = aggregation(loss, sequence_N, totals)
    whole.backward()
    assert whole.item() == pytest.approx(value)
    assert loss.grad.tolist() == pytest.approx(weights)
    cut = sum(
        aggregation(loss[part], sequence_N[part], totals)
        for part in (sequence_N == 4, sequence_N == 9)
    )
    assert cut.item() == pytest.approx(value)


def test_totals_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="n_tokens=0"):
        BatchTotals(n_tokens=0, n_sequences=0)
    with pytest.raises(ValueError, match="n_sequences=3"):
        BatchTotals(n_tokens=2, n_sequences=3)
    with pytest.raises(ValueError, match="norm_tokens=0"):
        SequenceMeanTokenSumNorm(norm_tokens=0)


@pytest.mark.parametrize("correction", SOME_ARE_DROPPED, ids=lambda correction: correction.name)
def test_only_m2po_needs_the_batch_at_once(correction):
    """Any other factor is the same from a part of the sequences as from all of them; m2po's is
    not.
    """
    tokens = drawn(scale=0.5)
    objective = Objective(policy=PpoClip(), corrections=(correction,))
    in_parts_N = torch.zeros_like(tokens.advantages_N)
    for part in (tokens.sequence_N < 3, tokens.sequence_N >= 3):
        alone = Tokens(
            logprobs_N=tokens.logprobs_N[part],
            behaviour_logprobs_N=tokens.behaviour_logprobs_N[part],
            advantages_N=tokens.advantages_N[part],
            sequence_N=tokens.sequence_N[part],
        )
        in_parts_N[part] = objective.factor(alone)
    same = torch.equal(in_parts_N, objective.factor(tokens))
    assert same is not objective.batch_wide
    assert objective.batch_wide is (correction.name == "m2po")


def test_token_diagnostics_by_hand():
    """rho = e and 1 in one sequence, 1 in a second, 1 / e in a third of staleness 3; A = 1, -1, 1,
    -1.

    mismatch: e - 2, 0, 0 and 1 / e. Sequence products e, 1 and 1 / e.
    """
    tokens = Tokens(
        logprobs_N=f64(-1.0, -2.0, -3.0, -5.0).requires_grad_(),
        behaviour_logprobs_N=f64(-2.0, -2.0, -3.0, -4.0),
        advantages_N=f64(1.0, -1.0, 1.0, -1.0),
        sequence_N=torch.tensor([0, 0, 1, 2]),
    )
    found = token_diagnostics(
        tokens,
        factor_N=f64(0.0, 1.0, 0.5, 1.0),
        clipped_N=torch.tensor([False, True, False, True]),
        staleness_N=torch.tensor([1, 0, 0, 3]),
    )
    e, low = math.e, 1 / math.e
    expected = {
        "ratio_min": low,
        "ratio_mean": (e + 2 + low) / 4,
        "ratio_max": e,
        "ratio_p99": e,
        "ess": (e + 2 + low) ** 2 / (4 * (e**2 + 2 + low**2)),
        "ess_sequence": (e + 1 + low) ** 2 / (3 * (e**2 + 1 + low**2)),
        "chi2": (e**2 + 2 + low**2) / 4 - 1,
        "chi2_sequence": (e**2 + 1 + low**2) / 3 - 1,
        "mismatch_kl": (e - 2 + low) / 4,
        "mismatch_kl_on_policy": 0.0,
        "mismatch_kl_stale_1": e - 2,
        "mismatch_kl_stale_3_4": low,
        "clip_fraction": 0.5,
        "masked_fraction": 0.25,
        "dropped_positive_low": 0.0,
        "dropped_positive_high": 0.25,  # the masked one
        "dropped_negative_low": 0.25,  # the last; the second is clipped at rho = 1, on neither side
        "dropped_negative_high": 0.0,
    }
    assert found == pytest.approx(expected)


def test_the_99th_percentile_and_what_is_not_finite():
    n = 200
    tokens = Tokens(
        logprobs_N=torch.log(torch.arange(1, n + 1) / n),
        behaviour_logprobs_N=torch.zeros(n),
        advantages_N=torch.ones(n),
        sequence_N=torch.arange(n),
    )
    plain = {
        "factor_N": torch.ones(n),
        "clipped_N": torch.zeros(n, dtype=torch.bool),
        "staleness_N": torch.zeros(n),
    }
    assert token_diagnostics(tokens, **plain)["ratio_p99"] == pytest.approx(0.99, rel=1e-6)
    broken = Tokens(
        logprobs_N=torch.full((n,), math.nan),
        behaviour_logprobs_N=torch.zeros(n),
        advantages_N=torch.ones(n),
        sequence_N=torch.arange(n),
    )
    assert token_diagnostics(broken, **plain)["ess"] == math.inf


def test_ess():
    assert ess(f64(2.0, 2.0, 2.0)) == 1.0
    assert ess(f64(1.0, 0.0, 0.0, 0.0)) == 0.25
    assert ess(f64(1.0, 3.0)) == pytest.approx(16 / 20)
    with pytest.raises(ValueError, match="no weights"):
        ess(f64())


def test_shares_of_anchor_sizes_by_hand():
    """Fractions of the steps, of a part of the table too; the four add up to 1."""
    table = pa.table({"anchor_size": [1, 2, 2, 3, 4, 7, 8, 1000]})
    expected = {"size_1": 1 / 8, "size_2_3": 3 / 8, "size_4_7": 2 / 8, "size_8_up": 2 / 8}
    assert anchor_size_shares(table) == expected
    assert anchor_size_shares(table.slice(0, 2)) == {
        "size_1": 0.5,
        "size_2_3": 0.5,
        "size_4_7": 0.0,
        "size_8_up": 0.0,
    }
    assert set(anchor_size_shares(table.slice(0, 0)).values()) == {0.0}


def test_anchor_diagnostics():
    table = pa.table(
        {
            "anchor_size": [1, 1, 2, 2, 4, 4, 4, 4],
            "episode_advantage": [1.0, -1.0] * 4,  # variance 1
            # the difference: 0, 0, 0, 0, 2, -2, 2, -2, variance 2
            "advantage": [1.0, -1.0] * 2 + [3.0, -3.0] * 2,
        }
    )
    assert anchor_size_histogram(table) == {1: 2, 2: 2, 4: 4}
    assert anchor_size_histogram(table.slice(1, 4)) == {1: 1, 2: 2, 4: 1}, "of a part too"
    assert step_variance_share(table) == pytest.approx(2 / 3)
    zeros = pa.array([0.0] * 8)
    flat = table.set_column(1, "episode_advantage", zeros).set_column(2, "advantage", zeros)
    assert step_variance_share(flat) == 0.0
    assert step_variance_share(table.slice(0, 0)) == 0.0
