"""Advantages of tokens: by hand, and against their definition in plain Python."""

from __future__ import annotations

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo import token_advantages

NUMBERS = st.floats(-20, 20).map(lambda x: round(x, 3))
ROWS = st.lists(st.tuples(NUMBERS, st.lists(NUMBERS, max_size=8)), min_size=1, max_size=6)


def test_two_responses_by_hand() -> None:
    """With lambda 0.5, of scores 4 and 1. The row between them has no token."""
    # 4 - 2 = 2;  2 - 1 = 1, and 1 + 2 / 2 = 2;  1 - 5 = -4
    advantages, targets = token_advantages([1, 2, 5], [4, 9, 1], [2, 0, 1], gae_lambda=0.5)
    assert targets.tolist() == [1 + 2, 2 + 2, 5 - 4]
    deviation = math.sqrt((2 * 2**2 + 4**2) / 2 + 1e-8)  # they have mean 0
    assert advantages == pytest.approx([2 / deviation, 2 / deviation, -4 / deviation], abs=1e-12)


@pytest.mark.parametrize(
    ("gae_lambda", "advantages"),
    [(1.0, [3.0, 2.0, 1.0]), (0.0, [1.0, 1.0, 1.0])],
)
def test_lambda_1_looks_to_the_end_and_0_one_token_ahead(
    gae_lambda: float, advantages: list[float]
) -> None:
    """Before whitening, which the targets show: a target less its value."""
    _, targets = token_advantages([1.0, 2.0, 3.0], [4.0], [3], gae_lambda=gae_lambda)
    assert (targets - [1.0, 2.0, 3.0]).tolist() == advantages


def test_equal_tokens_have_advantages_of_exactly_0() -> None:
    assert token_advantages([0.1, 0.1], [0.7, 0.7], [1, 1], gae_lambda=1.0)[0].tolist() == [0, 0]
    assert token_advantages([3.0], [1.0], [1], gae_lambda=1.0)[0].tolist() == [0]
    assert [len(x) for x in token_advantages([], [1.0], [0], gae_lambda=1.0)] == [0, 0]


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of 3 tokens together have 2 scores and 2 values"):
        token_advantages([1, 2], [1, 1], [2, 1], gae_lambda=1.0)
    with pytest.raises(ValueError, match="1 rows of 2 tokens together have 2 scores"):
        token_advantages([1, 2], [1, 1], [2], gae_lambda=1.0)
    for values, scores in (([math.nan], [1.0]), ([1.0], [math.inf])):
        with pytest.raises(ValueError, match="not finite"):
            token_advantages(values, scores, [1], gae_lambda=1.0)


@given(rows=ROWS, gae_lambda=st.floats(0, 1))
@hypothesis.settings(max_examples=200, deadline=None)
def test_they_equal_their_definition_to_1e_9(
    rows: list[tuple[float, list[float]]], gae_lambda: float
) -> None:
    """The sum of the decayed differences, token by token."""
    raw = []
    for score, values in rows:
        ahead = [*values[1:], score] if values else []  # past the end: no value, but the score
        deltas = [after - value for value, after in zip(values, ahead, strict=True)]
        raw += [
            math.fsum(gae_lambda**k * delta for k, delta in enumerate(deltas[t:]))
            for t in range(len(deltas))
        ]
    values = [value for _, of_row in rows for value in of_row]
    mean = math.fsum(raw) / max(len(raw), 1)
    variance = math.fsum((a - mean) ** 2 for a in raw) / max(len(raw) - 1, 1)
    advantages, targets = token_advantages(
        values, [score for score, _ in rows], [len(v) for _, v in rows], gae_lambda=gae_lambda
    )
    assert targets == pytest.approx(np.add(raw, values), rel=1e-9, abs=1e-9)
    whitened = [(a - mean) / math.sqrt(variance + 1e-8) for a in raw]
    assert advantages == pytest.approx(whitened, rel=1e-9, abs=1e-9)
