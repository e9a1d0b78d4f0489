"""Test the means of an update's losses per token by hand."""

from __future__ import annotations

import pytest
import torch

from gigpo import (
    BatchTotals,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    TokenMean,
)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
