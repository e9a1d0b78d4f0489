"""Test the loss of an update: the equation of all parts, and its gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gigpo import (
    CORRECTIONS,
    POLICY_LOSSES,
    BatchTotals,
    DppoTv,
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
