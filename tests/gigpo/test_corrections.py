"""Each correction against numbers worked by hand, its on-policy limit, and the mistakes of
published implementations.
"""

from __future__ import annotations

import math

import pytest
import torch

from gigpo import (
    CORRECTIONS,
    Correction,
    GeometricMask,
    K3Mask,
    M2po,
    Objective,
    Opsm,
    PpoClip,
    Reinforce,
    SequenceMask,
    SequenceTis,
    TokenIcepop,
    Tokens,
    TokenTis,
)

ALL = [kind() for kind in CORRECTIONS.values()]
ID = {"ids": lambda correction: correction.name}


def tokens_of(
    *sequences: list[float], advantage: float = 1.0, proximal: float | None = None
) -> Tokens:
    """Return tokens with a sequence per list of rho = pi / mu, float64.

    With `proximal`, pi_p / mu is rho, and pi is that times pi_p.
    """
    ratios_N = torch.tensor(
        [rho for sequence in sequences for rho in sequence], dtype=torch.float64
    )
    mu_N = torch.full_like(ratios_N, -4.0)
    moved_N = mu_N + torch.log(ratios_N)
    return Tokens(
        logprobs_N=(moved_N + math.log(proximal or 1.0)).requires_grad_(),
        behaviour_logprobs_N=mu_N,
        advantages_N=torch.full_like(ratios_N, advantage),
        sequence_N=torch.tensor(
            [index for index, sequence in enumerate(sequences) for _ in sequence]
        ),
        proximal_logprobs_N=moved_N if proximal else None,
    )


CASES = [
    # the weight becomes min(x, C): factor min(x, C) / x
    (TokenTis(), tokens_of([0.5, 1.5, 8.0]), [1.0, 1.0, 0.25]),
    (TokenTis(cap=math.inf), tokens_of([0.5, 1.5, 8.0]), [1.0, 1.0, 1.0]),
    # X = 1.5 and 4: weights 1.5 and 2 on each token
    (SequenceTis(), tokens_of([2.0, 0.5, 1.5], [2.0, 2.0]), [0.75, 3.0, 1.0, 1.0, 1.0]),
    (SequenceTis(cap=5.0), tokens_of([2.0, 2.0]), [2.0, 2.0]),
    (TokenIcepop(), tokens_of([0.25, 0.51, 4.9, 8.0]), [0.0, 1.0, 1.0, 0.0]),
    # X = 1.5 and 4
    (SequenceMask(), tokens_of([2.0, 0.5, 1.5], [2.0, 2.0]), [1.0, 1.0, 1.0, 0.0, 0.0]),
    # log 8 = 3 log 2 and -3 log 2: mean 0; e^0.262 = 1.3; the product of the third is 1.19, its
    # mean 1.06
    (
        GeometricMask(low=0.9, high=1.1),
        tokens_of([8.0, 0.5, 0.5, 0.5], [1.3, 1.3], [1.06, 1.06, 1.06]),
        [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
    ),
    (GeometricMask(), tokens_of([1.002], [1.0005], [0.9985]), [0.0, 1.0, 0.0]),
    # x - 1 - log x: 8 -> 4.921, 0.5 -> 0.193, 1.1 -> 0.00469, 1.2 -> 0.0177; means 1.375 and
    # 0.0112, then 0.00469
    (
        K3Mask(),
        tokens_of([8.0, 0.5, 0.5, 0.5], [1.1, 1.2], [1.1]),
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    ),
    # mean(log mu - log pi): (0.3 - 0.1) / 2 = 0.1 > 1e-4; (-0.3 + 0.1) / 2 < 0
    (Opsm(), tokens_of([math.exp(-0.3), math.exp(0.1)], advantage=-1.0), [0.0, 0.0]),
    (Opsm(), tokens_of([math.exp(0.3), math.exp(-0.1)], advantage=-1.0), [1.0, 1.0]),
    (Opsm(), tokens_of([math.exp(-0.3), math.exp(0.1)], advantage=1.0), [1.0, 1.0]),
    (Opsm(limit=0.2), tokens_of([math.exp(-0.3), math.exp(0.1)], advantage=-1.0), [1.0, 1.0]),
    # squares 0.01, 0.25, 0.09, 0.01: mean 0.09; without 0.25, 0.0367 < 0.04
    (
        M2po(),
        tokens_of([math.exp(0.1), math.exp(-0.5)], [math.exp(0.3), math.exp(-0.1)]),
        [1.0, 0.0, 1.0, 1.0],
    ),
    # 1, 1: no mean is below 0.04, and one token stays: the first
    (M2po(), tokens_of([math.exp(1.0)], [math.exp(-1.0)]), [1.0, 0.0]),
]


@pytest.mark.parametrize(("correction", "tokens", "factors"), CASES)
def test_by_hand(correction, tokens, factors):
    factor_N = correction(tokens)
    assert factor_N.tolist() == pytest.approx(factors)
    assert not factor_N.requires_grad, "a weight carries no gradient"


@pytest.mark.parametrize("correction", ALL, **ID)
def test_on_policy_every_factor_is_1(correction):
    tokens = tokens_of([1.0, 1.0, 1.0], [1.0], advantage=-1.0)
    assert correction(tokens).tolist() == [1.0] * 4


@pytest.mark.parametrize("correction", ALL, **ID)
def test_with_a_proximal_policy_the_weight_is_that_of_the_proximal_one(correction):
    """pi_p / mu = 1 throughout and pi far off: only OPSM, which looks at the policy of now, has
    anything to say.
    """
    tokens = tokens_of([1.0, 1.0], advantage=-1.0, proximal=0.1)
    assert correction(tokens).tolist() == ([0.0, 0.0] if correction.name == "opsm" else [1.0, 1.0])


@pytest.mark.parametrize("correction", ALL, **ID)
def test_the_order_of_the_tokens_and_the_numbers_of_the_sequences_say_nothing(correction):
    tokens = tokens_of([0.7, 1.1, 3.0], [1.0, 1.0005], [8.0, 0.2, 0.4], advantage=-1.0)
    order_N = torch.tensor([5, 0, 7, 3, 1, 6, 4, 2])
    shuffled = Tokens(
        logprobs_N=tokens.logprobs_N[order_N],
        behaviour_logprobs_N=tokens.behaviour_logprobs_N[order_N],
        advantages_N=tokens.advantages_N[order_N],
        sequence_N=100 - tokens.sequence_N[order_N],
    )
    torch.testing.assert_close(correction(shuffled), correction(tokens)[order_N])


@pytest.mark.parametrize("correction", ALL, **ID)
def test_far_off_tokens_stay_finite(correction):
    tokens = Tokens(
        logprobs_N=torch.tensor([-0.01, -200.0, -0.01, -0.01]),
        behaviour_logprobs_N=torch.tensor([-200.0, -0.01, -200.0, -200.0]),
        advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sequence_N=torch.tensor([0, 1, 2, 2]),
    )
    assert torch.isfinite(correction(tokens)).all()


@pytest.mark.parametrize(
    ("correction", "kept", "dropped"),
    [
        (TokenIcepop(low=0.5, high=5.0), 4.0, 0.25),
        (SequenceMask(low=0.5, high=5.0), 4.0, 0.25),
        (GeometricMask(low=0.5, high=5.0), 4.0, 0.25),
    ],
    **{"ids": ["icepop", "sequence", "geometric"]},
)
def test_a_lopsided_band_bounds_pi_over_mu_and_not_its_inverse(correction, kept, dropped):
    """verl's k1 statistic is -log(pi / mu), so its band of 0.5 to 5 keeps 0.25 and drops 4."""
    assert correction(tokens_of([kept], [dropped])).tolist() == [1.0, 0.0]


def test_verls_geometric_bounds_are_the_inverse_ones_here():
    """verl keeps 0.5 <= exp(mean log(mu / pi)) <= 5: here 1 / 5 <= exp(mean log(pi / mu)) <= 1 /
    0.5.
    """
    for ratio, inverse_is_kept in ((0.15, False), (0.25, True), (1.9, True), (2.1, False)):
        assert (0.5 <= 1 / ratio <= 5.0) is inverse_is_kept
        kept = GeometricMask(low=1 / 5.0, high=1 / 0.5)(tokens_of([ratio, ratio]))
        assert kept.tolist() == [float(inverse_is_kept)] * 2


def test_m2po_is_reinforce_with_its_mask():
    """ppo_clip would take the gradient of the ratio 1.3 away too, which the mask keeps; 3 is
    dropped by both.
    """
    for policy, expected in ((Reinforce(), [-1.0, -1.3, 0.0]), (PpoClip(), [-1.0, 0.0, 0.0])):
        tokens = tokens_of([1.0], [1.3], [3.0])
        objective = Objective(policy=policy, corrections=(M2po(),))
        objective(tokens, reference_logprobs_N=None, entropy_N=None).loss_N.sum().backward()
        assert tokens.logprobs_N.grad.tolist() == pytest.approx(expected)


def test_a_mask_of_sequences_leaves_the_cap_on_tokens():
    """OpenRLHF's seq-mask-tis keeps a sequence by its mean and then forgets the clamp: a token of
    weight 8 came through.
    """
    tokens = tokens_of([8.0, 0.5, 0.5, 0.5])
    objective = Objective(policy=Reinforce(), corrections=(GeometricMask(), TokenTis()))
    objective(tokens, reference_logprobs_N=None, entropy_N=None).loss_N.sum().backward()
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([-2.0, -0.5, -0.5, -0.5])


def test_truncation_has_no_lower_bound():
    """OpenRLHF's TIS clamps on both sides: what pi no longer does would count for 0.5 and more."""
    assert TokenTis()(tokens_of([0.01])).tolist() == [1.0]


def test_the_cap_is_the_gradient_weight():
    """The weight on -A d(log pi) is min(rho, C): rho where nothing is capped, C beyond (A < 0,
    below the dual clip).
    """
    for cap, rho, weight in [
        (2.0, 1.5, 1.5),
        (2.0, 2.9, 2.0),
        (1.0, 2.9, 1.0),
        (math.inf, 2.9, 2.9),
    ]:
        tokens = tokens_of([rho], advantage=-1.0)
        objective = Objective(policy=PpoClip(), corrections=(TokenTis(cap=cap),))
        objective(tokens, reference_logprobs_N=None, entropy_N=None).loss_N.sum().backward()
        assert tokens.logprobs_N.grad.item() == pytest.approx(weight)


def test_the_cap_is_the_gradient_weight_however_far_off_the_token_is():
    """log rho = 25 is past the bound of 20: the weight is min(rho, C) = 2 all the same, and not
    0.
    """
    tokens = Tokens(
        logprobs_N=torch.tensor([-1.0], dtype=torch.float64, requires_grad=True),
        behaviour_logprobs_N=torch.tensor([-26.0], dtype=torch.float64),
        advantages_N=torch.ones(1, dtype=torch.float64),
        sequence_N=torch.zeros(1, dtype=torch.int64),
    )
    objective = Objective(policy=Reinforce(), corrections=(TokenTis(),))
    objective(tokens, reference_logprobs_N=None, entropy_N=None).loss_N.sum().backward()
    assert tokens.logprobs_N.grad.item() == pytest.approx(-2.0)


def test_in_decoupled_ppo_the_caps_act_on_the_weight_and_the_clip_on_the_ratio():
    """pi_p / mu = 8, pi / pi_p = 1.1: token_tis gives 2 * 1.1, icepop drops it, and without either
    it is 8 * 1.1.
    """
    for corrections, gradient in [((TokenTis(),), -2.2), ((TokenIcepop(),), 0.0), ((), -8.8)]:
        tokens = tokens_of([8.0], proximal=1.1)
        objective = Objective(policy=PpoClip(), corrections=corrections, proximal="recomputed")
        objective(tokens, reference_logprobs_N=None, entropy_N=None).loss_N.sum().backward()
        assert tokens.logprobs_N.grad.item() == pytest.approx(gradient)


def test_m2po_keeps_the_most_it_may():
    """Against all subsets, by brute force: the largest set of smallest squares whose mean is below
    the bound.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logs_N = 0.4 * torch.randn(9, dtype=torch.float64, generator=generator)
        factor_N = M2po()(tokens_of([math.exp(value) for value in logs_N.tolist()]))
        ascending = sorted(value**2 for value in logs_N.tolist())
        allowed = max([k for k in range(1, 10) if sum(ascending[:k]) / k < 0.04], default=1)
        kept = sorted((logs_N[factor_N == 1.0] ** 2).tolist())
        assert kept == pytest.approx(ascending[:allowed])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TokenTis, {"cap": 0.5}, "cap=0.5"),
        (SequenceTis, {"cap": math.nan}, "cap=nan"),
        (TokenIcepop, {"low": 1.0}, "low=1.0"),
        (TokenIcepop, {"high": 0.9}, "high=0.9"),
        (SequenceMask, {"high": 1.0}, "high=1.0"),
        (GeometricMask, {"low": -0.1}, "low=-0.1"),
        (K3Mask, {"limit": 0.0}, "limit=0.0"),
        (K3Mask, {"limit": -1.0}, "limit=-1.0"),
        (Opsm, {"limit": 0.0}, "limit=0.0"),
        (M2po, {"limit": math.inf}, "limit=inf"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(
    kind: type[Correction], settings: dict[str, float], message: str
):
    with pytest.raises(ValueError, match=message):
        kind(**settings)
