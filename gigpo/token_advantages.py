"""Compute advantages of tokens, for estimator `ppo`: its critic values the state of each token."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

VARIANCE_EPSILON = 1e-8  # as in verl's `masked_whiten`


def token_advantages(
    values_N: ArrayLike, scores_R: ArrayLike, n_tokens_R: ArrayLike, *, gae_lambda: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the advantage of each response token, whitened, and the target of its value.

    Generalised advantage estimation (arXiv 1506.02438) within each row, gamma 1:
        A_t = delta_t + lambda A_{t+1},  0 past the row's last token,
        delta_t = r_t + V_{t+1} - V_t,   V = 0 past it, r_t = 0 but for the last token: the score
        target G_t = A_t + V_t
        A <- (A - mean(A)) / sqrt(var(A) + 1e-8) over all tokens, ddof 1; all equal: exactly 0
    This is verl's `compute_gae_advantage_return`, with which GiGPO's authors train their PPO
    baseline, with lambda 1. Each row is a sequence of its own, and its score is that of its whole
    episode: `value_target` of compute_advantages. No value crosses from one step to the next.

    Takes the values of all rows' tokens end to end [N], the score of each row [R], and the number
    of its tokens [R], int, possibly 0. All results are float64 [N]. Raises ValueError for a number
    that is not finite, and for rows that do not have N tokens together.

    One row with score 4, values (1, 2) and lambda 0.5: deltas (1, 2), A = (2, 2) before whitening,
    targets (3, 4).
    """
    values_N = np.asarray(values_N, np.float64)
    scores_R, n_tokens_R = np.asarray(scores_R, np.float64), np.asarray(n_tokens_R, np.int64)
    if len(scores_R) != len(n_tokens_R) or n_tokens_R.sum() != len(values_N):
        raise ValueError(
            f"{len(n_tokens_R)} rows of {n_tokens_R.sum()} tokens together have {len(scores_R)} "
            f"scores and {len(values_N)} values; give one score a row and one value a token"
        )
    if not (np.isfinite(values_N).all() and np.isfinite(scores_R).all()):
        raise ValueError("a value or a score is not finite, and advantages would not be either")
    advantages_N, ends_R = np.empty_like(values_N), np.cumsum(n_tokens_R)
    # Back from each row's last token, all rows at once: K rows have at least `back` tokens.
    for back in range(1, n_tokens_R.max(initial=0) + 1):
        is_long_R = n_tokens_R >= back
        at_K = ends_R[is_long_R] - back
        if back == 1:
            advantages_N[at_K] = scores_R[is_long_R] - values_N[at_K]
        else:
            delta_K = values_N[at_K + 1] - values_N[at_K]
            advantages_N[at_K] = delta_K + gae_lambda * advantages_N[at_K + 1]
    return _whitened(advantages_N), advantages_N + values_N


def _whitened(advantages_N: NDArray[np.float64]) -> NDArray[np.float64]:
    if not len(advantages_N) or advantages_N.min() == advantages_N.max():
        return np.zeros_like(advantages_N)
    centred_N = advantages_N - advantages_N.mean()
    return centred_N / np.sqrt(centred_N.var(ddof=1) + VARIANCE_EPSILON)
