"""Diagnostics of nothing. test_objective.py has those of tokens, test_estimators.py those of
advantages.
"""

from __future__ import annotations

import pytest
import torch

from gigpo import Tokens, ess, token_diagnostics


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
