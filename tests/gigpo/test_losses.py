"""Each policy loss against numbers worked by hand, its gradient against finite differences, and its
on-policy limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gigpo
from gigpo import (
    DEFAULT_PAIRING,
    KL_PENALTIES,
    POLICY_LOSSES,
    BehaviourCloning,
    Cispo,
    Distillation,
    DppoTv,
    Gspo,
    Loss,
    PpoClip,
    Reinforce,
    Sapo,
    Tokens,
    Topr,
    interpolated_proximal,
    losses,
)

ROOT = Path(__file__).resolve().parents[2]
OF_ADVANTAGES = POLICY_LOSSES.keys() - {"behaviour_cloning", "distillation"}
POLICY_GRADIENTS = [POLICY_LOSSES[name]() for name in sorted(OF_ADVANTAGES)]
ID = {"ids": lambda loss: loss.name}


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at_ratio(rho: float, *, advantage: float, mu: float = 0.01) -> Tokens:
    """Return a token of this advantage with probability rho * mu, with gradient."""
    behaviour = f64(math.log(mu))
    return Tokens(
        logprobs_N=(behaviour + math.log(rho)).requires_grad_(),
        behaviour_logprobs_N=behaviour,
        advantages_N=f64(advantage),
        sequence_N=torch.zeros(1, dtype=torch.int64),
    )


def total(loss: Loss, tokens: Tokens) -> torch.Tensor:
    found = loss(tokens)
    return found.loss_N.sum() + (0.0 if found.penalty_N is None else found.penalty_N.sum())


# loss, A, mu, rho, value with penalty, d value / d log pi, clipped
CASES = [
    # PPO-clip, low 0.2, high 0.3, dual clip 3
    (PpoClip(clip_high=0.3), 1.0, 0.01, 1.0, -1.0, -1.0, False),
    (PpoClip(clip_high=0.3), -1.0, 0.01, 1.0, 1.0, 1.0, False),
    (PpoClip(clip_high=0.3), 2.0, 0.01, 1.2, -2.4, -2.4, False),  # inside the region: -A rho
    (PpoClip(clip_high=0.3), 2.0, 0.01, 1.5, -2.6, 0.0, True),  # -2 * 1.3
    # A > 0 and rho low: the unclipped side is the pessimistic
    (PpoClip(clip_high=0.3), 1.0, 0.01, 0.5, -0.5, -0.5, False),
    (PpoClip(clip_high=0.3), -1.0, 0.01, 0.9, 0.9, 0.9, False),
    (PpoClip(clip_high=0.3), -1.0, 0.01, 0.5, 0.8, 0.0, True),  # -(-1) * 0.8
    # A < 0 and rho high: not clipped up to the dual clip
    (PpoClip(clip_high=0.3), -1.0, 0.01, 2.5, 2.5, 2.5, False),
    (PpoClip(clip_high=0.3), -1.0, 0.01, 4.0, 3.0, 0.0, True),
    (PpoClip(dual_clip=math.inf), -1.0, 0.01, 4.0, 4.0, 4.0, False),
    (PpoClip(), 0.0, 0.01, 4.0, 0.0, 0.0, False),
    # GSPO of a sequence of one token is PPO-clip with its narrow region
    (Gspo(), 1.0, 0.01, 1.0003, -1.0003, -1.0003, False),
    (Gspo(), 1.0, 0.01, 1.01, -1.0004, 0.0, True),
    (Gspo(), -1.0, 0.01, 0.99, 0.9997, 0.0, True),
    (Gspo(), -1.0, 0.01, 4.0, 4.0, 4.0, False),  # no dual clip
    # CISPO: -weight A log pi, log pi = log 0.07, log 0.005 and log 0.03
    (Cispo(), 2.0, 0.01, 7.0, -10 * math.log(0.07), -10.0, False),  # weight 5
    # weight 0.5: low = 1 has no lower bound
    (Cispo(), 2.0, 0.01, 0.5, -math.log(0.005), -1.0, False),
    (Cispo(clip_low=0.1, clip_high=0.1), -1.0, 0.01, 3.0, 1.1 * math.log(0.03), 1.1, False),  # ROLL
    (Cispo(clip_low=0.1, clip_high=0.1), 1.0, 0.01, 0.5, -0.9 * math.log(0.005), -0.9, False),
    # DPPO-TV: what counts is pi - mu; plus 1e-3 (log rho)^2, whose gradient is 2e-3 log rho
    # pi 0.6
    (DppoTv(), 1.0, 0.5, 1.2, -1.2 + 1e-3 * math.log(1.2) ** 2, -1.2 + 2e-3 * math.log(1.2), False),
    (DppoTv(), 1.0, 0.5, 1.5, 1e-3 * math.log(1.5) ** 2, 2e-3 * math.log(1.5), True),  # pi 0.75
    # down, but A > 0
    (DppoTv(), 1.0, 0.5, 0.5, -0.5 + 1e-3 * math.log(2) ** 2, -0.5 - 2e-3 * math.log(2), False),
    (DppoTv(), -1.0, 0.5, 0.5, 1e-3 * math.log(2) ** 2, -2e-3 * math.log(2), True),  # pi 0.25
    (DppoTv(quadratic_coef=0.0), -1.0, 0.5, 1.5, 1.5, 1.5, False),  # up, but A < 0
    # a rare token may grow: pi - mu = 0.004
    (DppoTv(quadratic_coef=0.0), 1.0, 0.001, 5.0, -5.0, -5.0, False),
    # verl's cap
    (DppoTv(quadratic_coef=0.0, ratio_cap=20.0), 1.0, 0.001, 50.0, -20.0, -20.0, False),
    # SAPO: gate sigmoid(tau (rho - 1)) 4 / tau, gradient rho 4 sigmoid (1 - sigmoid)
    (Sapo(), 1.0, 0.01, 1.0, -2.0, -1.0, False),  # sigmoid 0.5
    (Sapo(), -1.0, 0.01, 1.0, 2 / 1.05, 1.0, False),
    (Sapo(), 1.0, 0.01, 2.0, -4 * 0.7310586, -8 * 0.7310586 * 0.2689414, False),  # sigmoid(1)
    # sigmoid(1.05)
    (Sapo(), -1.0, 0.01, 2.0, 4 / 1.05 * 0.7407749, 8 * 0.7407749 * 0.2592251, False),
    # TOPR: weight 1 for A >= 0, min(rho, 1) below
    (Topr(), 2.0, 0.01, 3.0, -2 * math.log(0.03), -2.0, False),
    (Topr(), 2.0, 0.01, 0.5, -2 * math.log(0.005), -2.0, False),
    (Topr(), -2.0, 0.01, 0.5, math.log(0.005), 1.0, False),
    (Topr(), -2.0, 0.01, 3.0, 2 * math.log(0.03), 2.0, False),
    # REINFORCE: -A rho
    (Reinforce(), 2.0, 0.01, 3.0, -6.0, -6.0, False),
    (Reinforce(), -1.0, 0.01, 0.25, 0.25, 0.25, False),
    # cloning: -log pi, whatever A and mu
    (BehaviourCloning(), -7.0, 0.01, 5.0, -math.log(0.05), -1.0, False),
]


@pytest.mark.parametrize(("loss", "advantage", "mu", "rho", "value", "gradient", "clipped"), CASES)
def test_by_hand(loss, advantage, mu, rho, value, gradient, clipped):
    tokens = at_ratio(rho, advantage=advantage, mu=mu)
    found = total(loss, tokens)
    found.backward()
    assert found.item() == pytest.approx(value, rel=1e-6)
    assert tokens.logprobs_N.grad.item() == pytest.approx(gradient, rel=1e-6)
    clipped_N = loss(tokens).clipped_N
    assert (clipped_N is not None and clipped_N.item()) is clipped


def drawn(n: int = 24, *, scale: float = 0.4, seed: int = 0) -> Tokens:
    """Tokens of six sequences, mixed; A of either sign and one value per sequence, as a step's
    tokens have.
    """
    generator = torch.Generator().manual_seed(seed)
    sequence_N = torch.randint(0, 6, (n,), generator=generator)
    behaviour_N = -3.0 * torch.rand(n, dtype=torch.float64, generator=generator) - 0.05
    moved_N = scale * torch.randn(n, dtype=torch.float64, generator=generator)
    return Tokens(
        logprobs_N=torch.clamp(behaviour_N + moved_N, max=-0.01).requires_grad_(),
        behaviour_logprobs_N=behaviour_N,
        advantages_N=torch.randn(6, dtype=torch.float64, generator=generator)[sequence_N],
        sequence_N=sequence_N,
        teacher_logprobs_N=-3.0 * torch.rand(n, dtype=torch.float64, generator=generator) - 0.05,
    )


def numeric_gradient(
    value: Callable[[torch.Tensor], torch.Tensor], at_N: torch.Tensor, *, h: float = 1e-6
) -> torch.Tensor:
    steps_NN = h * torch.eye(len(at_N), dtype=at_N.dtype)
    with torch.no_grad():
        return torch.stack(
            [(value(at_N + step_N) - value(at_N - step_N)) / (2 * h) for step_N in steps_NN]
        )


@pytest.mark.parametrize(
    "loss", [kind() for kind in POLICY_LOSSES.values()] + [Gspo(clip_low=0.2, clip_high=0.2)], **ID
)
def test_gradient_against_finite_differences(loss):
    """Move mu, or the teacher, with pi where a weight stands under sg(...), so that it stays
    constant.
    """
    tokens = drawn()
    total(loss, tokens).backward()
    at_N, mu_N = tokens.logprobs_N.detach(), tokens.behaviour_logprobs_N

    def value(x_N: torch.Tensor) -> torch.Tensor:
        held = mu_N + (x_N - at_N) if loss.name in ("cispo", "topr") else mu_N
        moved = Tokens(
            logprobs_N=x_N,
            behaviour_logprobs_N=held,
            advantages_N=tokens.advantages_N,
            sequence_N=tokens.sequence_N,
            teacher_logprobs_N=tokens.teacher_logprobs_N + (x_N - at_N),
        )
        return total(loss, moved)

    torch.testing.assert_close(
        tokens.logprobs_N.grad, numeric_gradient(value, at_N), atol=1e-7, rtol=1e-6
    )


@pytest.mark.parametrize("loss", POLICY_GRADIENTS, **ID)
def test_on_policy_the_gradient_is_the_plain_policy_gradient(loss):
    """d loss / d log pi = -A, for SAPO too: its 4 / tau makes up for the gate's slope of tau / 4.
    Cloning is none of these.
    """
    tokens = drawn(scale=0.0)
    assert torch.equal(tokens.logprobs_N, tokens.behaviour_logprobs_N)
    total(loss, tokens).backward()
    torch.testing.assert_close(tokens.logprobs_N.grad, -tokens.advantages_N)
    clipped_N = loss(tokens).clipped_N
    assert clipped_N is None or not clipped_N.any()


def test_gspo_takes_one_ratio_per_sequence_and_leaves_or_clips_it_whole():
    """log rho (0.0006, 0.0002): s = e^0.0004 = 1.00040008 > 1.0004. The other sequence: e^-0.0001,
    inside. Mixed order.
    """
    mu_N = f64(-1.0, -2.0, -1.0, -2.0)
    tokens = Tokens(
        logprobs_N=(mu_N + f64(0.0006, 0.0, 0.0002, -0.0002)).requires_grad_(),
        behaviour_logprobs_N=mu_N,
        advantages_N=f64(1.0, 2.0, 1.0, 2.0),
        sequence_N=torch.tensor([5, 3, 5, 3]),
    )
    found = Gspo()(tokens)
    found.loss_N.sum().backward()
    s = math.exp(-0.0001)
    assert found.loss_N.tolist() == pytest.approx([-1.0004, -2 * s, -1.0004, -2 * s], rel=1e-9)
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([0.0, -2 * s, 0.0, -2 * s], rel=1e-9)
    assert found.clipped_N.tolist() == [True, False, True, False]


def test_decoupled_ppo_keeps_the_behaviour_weight():
    """pi_p / mu = 2, pi / pi_p = 1.1: the weight is 2.2 with no correction at all (AReaL's default
    dropped the 2).

    Beyond the region around pi_p, 1.5: clipped at 1.2, times 2; around mu both tokens would have
    been clipped.
    """
    tokens = Tokens(
        logprobs_N=(
            f64(-3.0, -3.0) + math.log(2) + f64(math.log(1.1), math.log(1.5))
        ).requires_grad_(),
        behaviour_logprobs_N=f64(-3.0, -3.0),
        advantages_N=f64(1.0, 1.0),
        sequence_N=torch.tensor([0, 1]),
        proximal_logprobs_N=(f64(-3.0, -3.0) + math.log(2)).requires_grad_(),
    )
    found = PpoClip()(tokens)
    found.loss_N.sum().backward()
    assert found.loss_N.tolist() == pytest.approx([-2.2, -2.4])
    assert tokens.logprobs_N.grad.tolist() == pytest.approx([-2.2, 0.0])
    assert found.clipped_N.tolist() == [False, True]
    assert tokens.proximal_logprobs_N.grad is None, "the weight pi_p / mu carries no gradient"


def test_the_interpolated_proximal_policy():
    """alpha = s / (s + 1): 0, 1/2, 3/4 of the way from log mu = -2 to log pi = -1; no gradient."""
    proximal_N = interpolated_proximal(
        f64(-1, -1, -1).requires_grad_(), f64(-2, -2, -2), torch.tensor([0, 1, 3])
    )
    assert proximal_N.tolist() == [-2.0, -1.5, -1.25]
    assert not proximal_N.requires_grad
    with pytest.raises(ValueError, match="-1"):
        interpolated_proximal(f64(-1.0), f64(-2.0), torch.tensor([-1]))


def test_interpolated_ppo_has_the_plain_gradient_inside_its_region():
    """rho = 1.44, s = 1: pi_p is the geometric mean, w = r = 1.2 and w r = rho; r = 1.2 is the edge
    of the region.
    """
    tokens = at_ratio(1.43, advantage=1.0)
    proximal_N = interpolated_proximal(
        tokens.logprobs_N, tokens.behaviour_logprobs_N, torch.tensor([1])
    )
    decoupled = Tokens(
        logprobs_N=tokens.logprobs_N,
        behaviour_logprobs_N=tokens.behaviour_logprobs_N,
        advantages_N=tokens.advantages_N,
        sequence_N=tokens.sequence_N,
        proximal_logprobs_N=proximal_N,
    )
    PpoClip()(decoupled).loss_N.sum().backward()
    assert tokens.logprobs_N.grad.item() == pytest.approx(-1.43)
    assert PpoClip()(tokens).clipped_N.item(), "around mu it is clipped"


@pytest.mark.parametrize("loss", [kind() for kind in POLICY_LOSSES.values()], **ID)
def test_far_off_tokens_stay_finite_in_float32(loss):
    logprobs_N = torch.tensor([-0.01, -200.0, -0.01], requires_grad=True)
    tokens = Tokens(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.tensor([-200.0, -0.01, -200.0]),
        advantages_N=torch.tensor([1.0, 1.0, -1.0]),
        sequence_N=torch.tensor([0, 1, 2]),
        teacher_logprobs_N=torch.tensor([-200.0, -0.01, -0.01]),
    )
    value = total(loss, tokens)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logprobs_N.grad).all()


@pytest.mark.parametrize("log_rho", [-25.0, 25.0])
def test_beyond_the_bound_of_the_log_ratio_the_gradient_goes_on(log_rho):
    """The value stays at e^20, and the weight at rho's bound: a clamp that cut the gradient would
    leave such a token alone.
    """
    bound = math.exp(math.copysign(20.0, log_rho))
    mu_N = f64(-40.0)
    for loss, gradient in (
        (Reinforce(), -2.0 * bound),
        (PpoClip(), -2.0 * bound if log_rho < 0 else 0.0),
        (DppoTv(quadratic_coef=0.1), 0.2 * math.copysign(20.0, log_rho) - 2.0 * bound),
    ):
        tokens = Tokens(
            logprobs_N=(mu_N + log_rho).requires_grad_(),
            behaviour_logprobs_N=mu_N,
            advantages_N=f64(2.0),
            sequence_N=torch.zeros(1, dtype=torch.int64),
        )
        total(loss, tokens).backward()
        assert tokens.logprobs_N.grad.item() == pytest.approx(gradient), loss.name


@pytest.mark.parametrize("loss", [kind() for kind in POLICY_LOSSES.values()], **ID)
def test_the_order_of_the_tokens_says_nothing(loss):
    tokens = drawn()
    order_N = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    shuffled = Tokens(
        logprobs_N=tokens.logprobs_N[order_N],
        behaviour_logprobs_N=tokens.behaviour_logprobs_N[order_N],
        advantages_N=tokens.advantages_N[order_N],
        sequence_N=10 * tokens.sequence_N[order_N] - 7,
        teacher_logprobs_N=tokens.teacher_logprobs_N[order_N],
    )
    torch.testing.assert_close(loss(shuffled).loss_N, loss(tokens).loss_N[order_N])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PpoClip, {"clip_low": 0.0}, "clip_low=0.0"),
        (PpoClip, {"clip_low": 1.5}, "clip_low=1.5"),
        (PpoClip, {"clip_high": -0.1}, "clip_high=-0.1"),
        (PpoClip, {"dual_clip": 1.0}, "dual_clip=1.0"),
        (Gspo, {"clip_high": math.nan}, "clip_high=nan"),
        (Cispo, {"clip_low": 2.0}, "clip_low=2.0"),
        (DppoTv, {"delta_low": 0.0}, "delta_low=0.0"),
        (DppoTv, {"delta_high": 1.0}, "delta_high=1.0"),
        (DppoTv, {"ratio_cap": 0.5}, "ratio_cap=0.5"),
        (DppoTv, {"quadratic_coef": -1.0}, "quadratic_coef=-1.0"),
        (Sapo, {"tau_positive": 0.0}, "tau_positive=0.0"),
        (Sapo, {"tau_negative": math.inf}, "tau_negative=inf"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_tokens_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="advantages_N"):
        Tokens(
            logprobs_N=f64(-1.0, -2.0),
            behaviour_logprobs_N=f64(-1.0, -2.0),
            advantages_N=f64(1.0),
            sequence_N=torch.tensor([0, 0]),
        )
    square = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="flat"):
        Tokens(
            logprobs_N=square, behaviour_logprobs_N=square, advantages_N=square, sequence_N=square
        )


@pytest.mark.parametrize(
    ("name", "values", "gradients"),
    [  # u = log pi - log ref = 0, -1, 1, -8
        ("k1", [0.0, -1.0, 1.0, -8.0], [1.0, 1.0, 1.0, 1.0]),
        ("k2", [0.0, 0.5, 0.5, 32.0], [0.0, -1.0, 1.0, -8.0]),
        # bounded by 10
        ("k3", [0.0, math.e - 2, 1 / math.e, 10.0], [0.0, 1 - math.e, 1 - 1 / math.e, 0.0]),
    ],
)
def test_kl(name, values, gradients):
    logprobs_N = f64(-1.0, -2.0, -1.0, -9.0).requires_grad_()
    kl_N = KL_PENALTIES[name](logprobs_N, f64(-1.0, -1.0, -2.0, -1.0))
    kl_N.sum().backward()
    assert kl_N.tolist() == pytest.approx(values)
    assert logprobs_N.grad.tolist() == pytest.approx(gradients)


def test_the_means_and_gradients_of_the_kl_estimates_are_what_their_table_says():
    """Over three actions, exactly: E[k1] = E[k3] = KL; the mean gradients are 0, that of
    KL(pi||ref), and of KL(ref||pi).
    """
    theta_V = f64(0.3, -0.2, 0.5).requires_grad_()
    reference_V = torch.log_softmax(f64(-0.4, 0.1, 0.2), -1)
    logprobs_V = torch.log_softmax(theta_V, -1)
    pi_V = logprobs_V.detach().exp()

    def gradient(scalar: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(scalar, theta_V, retain_graph=True)[0]

    forward = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    backward = (reference_V.exp() * (reference_V - logprobs_V)).sum()
    expected = {
        name: (pi_V * kl(logprobs_V, reference_V)).sum() for name, kl in KL_PENALTIES.items()
    }
    assert expected["k1"].item() == pytest.approx(forward.item())
    assert expected["k3"].item() == pytest.approx(forward.item())
    torch.testing.assert_close(gradient(expected["k1"]), torch.zeros_like(theta_V))
    torch.testing.assert_close(gradient(expected["k2"]), gradient(forward))
    torch.testing.assert_close(gradient(expected["k3"]), gradient(backward))


@pytest.mark.parametrize("stale", [0.0, 0.5])
def test_the_mean_gradient_of_distillation_is_that_of_the_reverse_kl(stale):
    """Over all four actions of two positions, exactly, also where another policy sampled."""
    generator = torch.Generator().manual_seed(2)
    drawn_3NV = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator)
    theta_NV = drawn_3NV[0].clone().requires_grad_()
    teacher_NV = torch.log_softmax(drawn_3NV[1], -1)
    mu_NV = torch.log_softmax(drawn_3NV[0] + stale * drawn_3NV[2], -1)
    pi_NV = torch.log_softmax(theta_NV, -1)
    kl = (pi_NV.exp() * (pi_NV - teacher_NV)).sum()
    (wanted_NV,) = torch.autograd.grad(kl, theta_NV, retain_graph=True)
    tokens = Tokens(
        logprobs_N=pi_NV.flatten(),
        behaviour_logprobs_N=mu_NV.flatten(),
        advantages_N=torch.zeros(8, dtype=torch.float64),
        sequence_N=torch.zeros(8, dtype=torch.int64),
        teacher_logprobs_N=teacher_NV.flatten(),
    )
    expected = (mu_NV.flatten().exp() * Distillation()(tokens).loss_N).sum()
    assert expected.item() == pytest.approx(kl.item())
    (found_NV,) = torch.autograd.grad(expected, theta_NV)
    torch.testing.assert_close(found_NV, wanted_NV)


def test_distillation_by_hand_and_without_a_teacher():
    tokens = at_ratio(1.0, advantage=9.0, mu=0.5)
    with pytest.raises(ValueError, match="needs teacher_logprobs_N"):
        Distillation()(tokens)
    taught = replace(tokens, teacher_logprobs_N=f64(math.log(0.25)))
    loss_N = Distillation()(taught).loss_N
    loss_N.sum().backward()
    assert loss_N.item() == pytest.approx(math.log(2))
    assert tokens.logprobs_N.grad.item() == pytest.approx(math.log(2))


def test_a_loss_is_listed_wherever_a_user_looks_for_it() -> None:
    """The head of gigpo/losses.py says what to change for a new loss."""
    with_a_name = {
        kind for kind in vars(losses).values() if isinstance(kind, type) and hasattr(kind, "name")
    }
    assert with_a_name == set(POLICY_LOSSES.values())
    assert DEFAULT_PAIRING.keys() == POLICY_LOSSES.keys()
    assert all(getattr(gigpo, kind.__name__) is kind for kind in POLICY_LOSSES.values())
    schema = (ROOT / "configs/schema.py").read_text()
    (comment,) = re.findall(r"((?:    # .*\n)+)    policy: str = ", schema)
    assert set(re.findall(r'"(\w+)"', comment)) == POLICY_LOSSES.keys()
    text = (ROOT / "docs/algorithms.md").read_text()
    section = text.partition("## 8. Policy losses")[2].partition("## 9.")[0]
    assert set(re.findall(r"^### `(\w+)`", section, re.MULTILINE)) == POLICY_LOSSES.keys()
