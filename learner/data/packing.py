"""Token sequences into micro-batches of like cost, a multiple of the ranks of them.

Seven sequences, at most 10 tokens together, two ranks: four micro-batches, of which rank 0 computes
the first and the third, rank 1 the second and the fourth.

    lengths (2, 9, 4, 6, 5, 3, 4)    ->    9 | 6 2 | 5 3 | 4 4    =    [1], [3, 0], [4, 5], [2, 6]

Letters: S sequences, M micro-batches.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# A sequence of this many tokens spends as much time in attention's scores as in all matrices: 12
# times the hidden size, here of a model of 1024. Of a larger model the true number is larger; then
# the balance is by tokens all but alone.
EVEN_TOKENS = 12 * 1024
GROWTH = 1 / 16  # of the number of micro-batches, when the sequences did not fit into it


def costs(lengths_S: NDArray[np.int64]) -> NDArray[np.float64]:
    """Time to compute each sequence, in tokens of a short one: T + T^2 / EVEN_TOKENS."""
    return lengths_S + lengths_S**2 / EVEN_TOKENS


def packed(
    lengths_S: NDArray[np.int64], *, micro_batch_tokens: int, ranks: int
) -> list[NDArray[np.int64]]:
    """Indices of the sequences of each micro-batch: at most `micro_batch_tokens` together, or one
    that is longer.

    The longest first, each into the micro-batch of least cost that has room; as few micro-batches
    as that allows, but a multiple of `ranks`. They come costliest first: what the memory cannot
    hold fails at once and not after minutes, and the ranks' k-th ones, `result[k * ranks : (k + 1)
    * ranks]`, are neighbours in cost. Where there are fewer sequences than micro-batches the last
    are empty. The same lengths give the same result; without any there is none.
    """
    if not len(lengths_S):
        return []
    order_S = np.argsort(-lengths_S, kind="stable")
    within = np.minimum(lengths_S, micro_batch_tokens)
    n_at_least = max(
        -(-int(within.sum()) // micro_batch_tokens), int((2 * lengths_S > micro_batch_tokens).sum())
    )
    n_batches = ranks * math.ceil(n_at_least / ranks)
    while (
        batch_S := _fitted(
            lengths_S, order_S, micro_batch_tokens=micro_batch_tokens, n_batches=n_batches
        )
    ) is None:
        n_batches = ranks * math.ceil(n_batches * (1 + GROWTH) / ranks)
    cost_M = np.bincount(batch_S, weights=costs(lengths_S), minlength=n_batches)
    return [order_S[batch_S[order_S] == m] for m in np.argsort(-cost_M, kind="stable")]


def _fitted(
    lengths_S: NDArray[np.int64],
    order_S: NDArray[np.int64],
    *,
    micro_batch_tokens: int,
    n_batches: int,
) -> NDArray[np.int64] | None:
    """The micro-batch of each sequence, or None where one found no room."""
    batch_S = np.empty(len(lengths_S), dtype=np.int64)
    tokens_M, cost_M = np.zeros(n_batches, dtype=np.int64), np.zeros(n_batches)
    cost_S = costs(lengths_S)
    for s in order_S:
        room_M = (tokens_M + lengths_S[s] <= micro_batch_tokens) | (tokens_M == 0)
        m = int(np.where(room_M, cost_M, math.inf).argmin())
        if not room_M[m]:
            return None
        batch_S[s] = m
        tokens_M[m] += lengths_S[s]
        cost_M[m] += cost_S[s]
    return batch_S
