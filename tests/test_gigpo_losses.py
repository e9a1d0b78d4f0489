"""Losses, corrections and diagnostics against numbers worked by hand, and gradients against finite differences."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch

from gigpo import (
    POLICY_LOSSES,
    anchor_size_histogram,
    behaviour_cloning,
    clip_fraction,
    ess,
    kl_k3,
    log_ratio,
    mismatch_kl,
    ppo_clip,
    ratio_range,
    singleton_fraction,
    step_variance_share,
    token_mean,
    token_tis_weight,
)

TRUST_REGION = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "tis_cap": 2.0}


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at_ratio(rho: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log pi with gradient, log mu) of one token with this ratio."""
    behaviour = f64(-1.5)
    return (behaviour + math.log(rho)).requires_grad_(), behaviour


# low 0.2, high 0.3, dual clip 3, cap 2. Columns: A, rho, loss, d loss / d log pi, clipped.
CASES = [
    (1.0, 1.0, -1.0, -1.0, False),  # on policy: minus the policy gradient
    (-1.0, 1.0, 1.0, 1.0, False),
    (2.0, 1.2, -2.4, -2.4, False),  # inside the region: -A rho
    (2.0, 1.5, -2.6, 0.0, True),  # -2 * 1.3; C / rho does not act below C
    (2.0, 2.5, -2.08, 0.0, True),  # -2 * 1.3 * (2 / 2.5)
    (1.0, 0.5, -0.5, -0.5, False),  # A > 0 and rho low: the pessimistic side is the unclipped one
    (-1.0, 0.9, 0.9, 0.9, False),
    (-1.0, 0.5, 0.8, 0.0, True),  # -(-1) * 0.8
    (-1.0, 1.8, 1.8, 1.8, False),  # A < 0 and rho high: not clipped ...
    (-1.0, 2.5, 2.0, 2.0, False),  # ... but its gradient weight is capped at C = 2
    (-1.0, 4.0, 1.5, 0.0, True),  # dual clip: 3 * (2 / 4)
    (0.0, 4.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("advantage", "rho", "loss", "gradient", "clipped"), CASES)
def test_ppo_clip_by_hand(advantage, rho, loss, gradient, clipped):
    logprobs, behaviour = at_ratio(rho)
    got = ppo_clip(logprobs, behaviour, f64(advantage), **TRUST_REGION)
    got.loss_N.sum().backward()
    assert got.loss_N.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert got.clipped_N.item() is clipped
    assert got.ratio_N.item() == pytest.approx(rho)
    assert not got.ratio_N.requires_grad


@pytest.mark.parametrize("rho", [0.1, 0.85, 1.0, 1.25, 1.9])
@pytest.mark.parametrize("advantage", [-1.7, 0.4])
def test_ppo_clip_gradient_is_that_of_its_value_below_the_cap(rho, advantage):
    """Above the cap the stop-gradient makes the two differ on purpose (see the cases by hand)."""
    logprobs, behaviour = at_ratio(rho)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ppo_clip(x, behaviour, f64(advantage), **TRUST_REGION).loss_N

    loss(logprobs).sum().backward()
    with torch.no_grad():
        h = 1e-6
        numeric = (loss(logprobs + h) - loss(logprobs - h)) / (2 * h)
    assert logprobs.grad.item() == pytest.approx(numeric.item(), abs=1e-7)


def test_cap_is_the_gradient_weight():
    """The weight on -A d(log pi) is min(rho, C): rho where nothing is capped, C beyond."""
    for cap, rho, weight in [(2.0, 1.5, 1.5), (2.0, 2.9, 2.0), (1.0, 2.9, 1.0), (math.inf, 2.9, 2.9)]:
        logprobs, behaviour = at_ratio(rho)
        ppo_clip(logprobs, behaviour, f64(-1.0), **(TRUST_REGION | {"tis_cap": cap})).loss_N.sum().backward()
        assert logprobs.grad.item() == pytest.approx(weight)


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    logprobs = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantages = torch.linspace(-2, 2, 64, dtype=torch.float64)
    ppo_clip(logprobs, logprobs.detach().clone(), advantages, **TRUST_REGION).loss_N.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


def test_far_off_tokens_stay_finite_in_float32():
    logprobs = torch.tensor([-0.01, -200.0, -0.01], requires_grad=True)
    got = ppo_clip(logprobs, torch.tensor([-200.0, -0.01, -200.0]), torch.tensor([1.0, 1.0, -1.0]), **TRUST_REGION)
    got.loss_N.sum().backward()
    assert torch.isfinite(got.loss_N).all()
    assert torch.isfinite(logprobs.grad).all()
    assert got.ratio_N.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(20)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tis_cap": 0.5}, "tis_cap=0.5"),
        ({"tis_cap": math.nan}, "tis_cap=nan"),
        ({"clip_low": 0.0}, "clip_low=0.0"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ppo_clip(f64(0.0), f64(0.0), f64(1.0), **(TRUST_REGION | change))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_policy_loss_refuses_tensors_that_would_broadcast(name):
    with pytest.raises(ValueError, match="advantages_N"):
        POLICY_LOSSES[name](f64(-1.0, -2.0), f64(-1.0, -2.0), f64(1.0), **TRUST_REGION)
    with pytest.raises(ValueError, match="flat"):
        POLICY_LOSSES[name](*(torch.zeros(2, 2) for _ in range(3)), **TRUST_REGION)


def test_behaviour_cloning():
    logprobs = f64(-0.5, -2.0).requires_grad_()
    got = POLICY_LOSSES["behaviour_cloning"](logprobs, f64(-1.0, -1.0), f64(7.0, -7.0), **TRUST_REGION)
    got.loss_N.sum().backward()
    assert got.loss_N.tolist() == behaviour_cloning(logprobs).tolist() == [0.5, 2.0]
    assert logprobs.grad.tolist() == [-1.0, -1.0]
    assert not got.clipped_N.any()


def test_kl_k3():
    """d = log ref - log pi; exp(d) - d - 1: 0 at 0, e - 2 at 1, 1/e at -1; bounded by 10; gradient 1 - exp(d)."""
    logprobs = f64(-1.0, -2.0, -1.0, -9.0).requires_grad_()
    kl = kl_k3(logprobs, f64(-1.0, -1.0, -2.0, -1.0))
    assert kl.tolist() == pytest.approx([0.0, math.e - 2, 1 / math.e, 10.0])
    kl.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1 - math.e, 1 - 1 / math.e, 0.0])


def test_token_mean_does_not_depend_on_the_packing():
    loss = f64(1.0, 2.0, 3.0, 10.0)
    whole = token_mean(loss, 4)
    packed = token_mean(loss[:3], 4) + token_mean(loss[3:], 4)
    assert whole.item() == packed.item() == 4.0
    with pytest.raises(ValueError, match="total_tokens=0"):
        token_mean(loss, 0)


def test_log_ratio_and_weights():
    logprobs = f64(-1.0, 0.0, -50.0).requires_grad_()
    assert log_ratio(logprobs, f64(-1.5, -30.0, 0.0)).tolist() == [0.5, 20.0, -20.0]
    weight = token_tis_weight(torch.exp(log_ratio(logprobs, f64(-1.5, -30.0, 0.0))), 2.0)
    assert weight.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-20)])
    assert not weight.requires_grad


def test_ess():
    assert ess(f64(2.0, 2.0, 2.0)) == 1.0
    assert ess(f64(1.0, 0.0, 0.0, 0.0)) == 0.25
    assert ess(f64(1.0, 3.0)) == pytest.approx(16 / 20)
    with pytest.raises(ValueError, match="no weights"):
        ess(f64())


def test_token_diagnostics():
    # rho = e and 1: (e - 1 - 1 + 0) / 2
    assert mismatch_kl(f64(-1.0, -2.0), f64(-2.0, -2.0)) == pytest.approx((math.e - 2) / 2)
    assert mismatch_kl(f64(-1.0), f64(-1.0)) == 0.0
    assert clip_fraction(torch.tensor([True, False, False, False])) == 0.25
    assert ratio_range(f64(1.5, 0.25, 1.0)) == (0.25, 1.5)


def test_anchor_diagnostics():
    table = pa.table(
        {
            "anchor_size": [1, 1, 2, 2, 4, 4, 4, 4],
            "episode_advantage": [1.0, -1.0] * 4,  # variance 1
            "step_advantage": [0.0] * 4 + [2.0, -2.0] * 2,  # variance 2
        }
    )
    assert anchor_size_histogram(table) == {1: 2, 2: 1, 4: 1}
    assert singleton_fraction(table) == 0.25
    assert step_variance_share(table, 1.0) == pytest.approx(2 / 3)
    assert step_variance_share(table, 0.5) == pytest.approx(0.5 / 1.5)
    zeros = pa.array([0.0] * 8)
    flat = table.set_column(1, "episode_advantage", zeros).set_column(2, "step_advantage", zeros)
    assert step_variance_share(flat, 1.0) == 0.0
    assert step_variance_share(table.slice(0, 0), 1.0) == 0.0
