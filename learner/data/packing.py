"""Choose the sequences of each micro-batch, so that ranks have equal work.

Seven sequences, at most 10 tokens per micro-batch, two ranks. Rank 0 computes the first and the
third micro-batch, rank 1 the others:

    lengths (2, 9, 4, 6, 5, 3, 4)    ->    9 | 6 2 | 5 3 | 4 4    =    [1], [3, 0], [4, 5], [2, 6]

Letters: S sequences, M micro-batches.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

# A sequence of this many tokens spends as much time in attention scores as in matrix products: 12
# times the hidden size, here 1024. For larger models the true number is larger, and the balance is
# then by tokens almost alone.
EVEN_TOKENS = 12 * 1024
GROWTH = 1 / 16  # of the number of micro-batches, if the sequences did not fit


def costs(lengths_S: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the time to compute each sequence, in tokens of a short one: T + T^2 / EVEN_TOKENS."""
    return lengths_S + lengths_S**2 / EVEN_TOKENS


def pack(
    lengths_S: NDArray[np.int64], *, micro_batch_tokens: int, ranks: int
) -> list[NDArray[np.int64]]:
    """Return the sequence indices of each micro-batch.

    A micro-batch has at most `micro_batch_tokens`, or one longer sequence. The longest sequence
    comes first; each goes to the cheapest micro-batch with room. There are as few micro-batches as
    that allows, in a multiple of `ranks`; the last ones may be empty. The costliest come first, so
    that a lack of memory shows at once, and so that the ranks' k-th micro-batches, `result[k *
    ranks : (k + 1) * ranks]`, cost about the same. Equal lengths give equal results.
    """
    if not len(lengths_S):
        return []
    order_S = np.argsort(-lengths_S, kind="stable")
    within = np.minimum(lengths_S, micro_batch_tokens)
    n_at_least = max(
        -(-int(within.sum()) // micro_batch_tokens), int((2 * lengths_S > micro_batch_tokens).sum())
    )
    n_batches = ranks * math.ceil(n_at_least / ranks)
    fitted = partial(_fitted, lengths_S, order_S, micro_batch_tokens=micro_batch_tokens)
    while (batch_S := fitted(n_batches=n_batches)) is None:
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
    """Return the micro-batch of each sequence, or None if a sequence found no room."""
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
