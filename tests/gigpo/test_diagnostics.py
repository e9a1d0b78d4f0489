"""Test the figures of tokens and of anchor groups by hand. test_estimators.py has those of advantages."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch

from gigpo import (
    Tokens,
    anchor_size_histogram,
    anchor_size_shares,
    ess,
    step_variance_share,
    token_diagnostics,
)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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


def test_ess_without_a_weight_is_undefined():
    with pytest.raises(ValueError, match="ess of no weights is undefined"):
        ess(torch.zeros(0))
    with pytest.raises(ValueError, match="ess of 3 weights that are all 0 is undefined"):
        ess(torch.zeros(3))


def test_diagnostics_of_no_tokens_are_undefined():
    none = torch.zeros(0)
    tokens = Tokens(
        logprobs_N=none,
        behaviour_logprobs_N=none,
        advantages_N=none,
        sequence_N=torch.zeros(0, dtype=torch.int64),
    )
    nothing = {"factor_N": none, "clipped_N": none.bool(), "staleness_N": none.long()}
    with pytest.raises(ValueError, match="token_diagnostics of no tokens"):
        token_diagnostics(tokens, **nothing)
