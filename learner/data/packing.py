"""Merge rows into token sequences, and pack sequences into micro-batches of similar cost.

Merge: a step whose prompt repeats all tokens before it continues their sequence. Two steps of a
game whose prompt is its whole history become one sequence with two responses, in brackets:

    row 0: prompt (5, 6)            response (7, 8)      5 6[7 8]
    row 1: prompt (5, 6, 7, 8, 9)   response (4, 2)      5 6[7 8]9[4 2]

The sequence of a chain of rows is its last row's, which is computed anyway. So merging adds no
token, and exceeds no budget that the last row alone does not.

Pack: seven sequences, at most 10 tokens per micro-batch, two ranks. Rank 0 computes the first and
the third micro-batch, rank 1 the others:

    lengths (2, 9, 4, 6, 5, 3, 4)    ->    9 | 6 2 | 5 3 | 4 4    =    [1], [3, 0], [4, 5], [2, 6]

Letters: R rows of the table, K rows with a response, S sequences, M micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# A sequence of this many tokens spends as much time in attention scores as in matrix products: 12
# times the hidden size, here 1024. For larger models the true number is larger, and the balance is
# then by tokens almost alone.
EVEN_TOKENS = 12 * 1024
GROWTH = 1 / 16  # of the number of micro-batches, if the sequences did not fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A list column as one flat array, with the start and length of each row."""

    values: NDArray[np.generic]
    starts_R: NDArray[np.int64]
    lengths_R: NDArray[np.int64]

    def of(self, rows_K: NDArray[np.int64], *, drop_last: bool) -> NDArray[np.generic]:
        """Return the lists of these rows end to end, each whole or without its last element."""
        return self.values[ranges(self.starts_R[rows_K], self.lengths_R[rows_K] - drop_last)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Rows grouped into sequences: s has `rows_K[first_S1[s]:first_S1[s + 1]]`, by step.

    Its tokens are those of its last row.
    """

    rows_K: NDArray[np.int64]  # each row with a response once
    first_S1: NDArray[np.int64]  # begins with 0 and ends with K

    @property
    def last_row_S(self) -> NDArray[np.int64]:
        return self.rows_K[self.first_S1[1:] - 1]


def ranges(starts_K: NDArray[np.int64], lengths_K: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return consecutive integers from each start, end to end.

    Starts (4, 9) with lengths (3, 2) give 4 5 6 9 10.
    """
    ends_K = np.cumsum(lengths_K)
    return np.repeat(starts_K - (ends_K - lengths_K), lengths_K) + np.arange(
        ends_K[-1] if len(ends_K) else 0
    )


def lists(rows: pa.Table, name: str) -> Lists:
    """Return a list column as flat arrays, whatever its chunks and offsets are."""
    column = rows[name].combine_chunks()
    offsets_R1 = column.offsets.to_numpy().astype(np.int64)
    return Lists(
        values=column.values.to_numpy(zero_copy_only=False),
        starts_R=offsets_R1[:-1],
        lengths_R=np.diff(offsets_R1),
    )


def sequences(rows: pa.Table, *, prompts: Lists, responses: Lists, merge_steps: bool) -> Sequences:
    """Put each row with a response into one sequence; without `merge_steps` into one of its own.

    Merging reads the columns traj_uid and step_index, in any row order. A step missing because it
    is in another update breaks no chain, as long as the next one repeats its tokens.
    """
    rows_K = np.flatnonzero(responses.lengths_R > 0)
    begins_K = np.ones(len(rows_K), dtype=bool)
    if merge_steps and len(rows_K):
        trajectory_R = rows["traj_uid"].combine_chunks().dictionary_encode().indices.to_numpy()
        rows_K = rows_K[np.lexsort((rows["step_index"].to_numpy()[rows_K], trajectory_R[rows_K]))]
        before, after = rows_K[:-1], rows_K[1:]
        long_enough = (
            prompts.lengths_R[before] + responses.lengths_R[before] <= prompts.lengths_R[after]
        )
        for k in np.flatnonzero((trajectory_R[before] == trajectory_R[after]) & long_enough):
            begins_K[k + 1] = not _continues(
                before[k], after[k], prompts=prompts, responses=responses
            )
    return Sequences(rows_K=rows_K, first_S1=np.append(np.flatnonzero(begins_K), len(rows_K)))


def _continues(before: np.int64, after: np.int64, *, prompts: Lists, responses: Lists) -> bool:
    """Return whether the prompt of row `after` begins with prompt and response of row `before`.

    The caller has checked that it is long enough.
    """
    n_prompt, n_response = prompts.lengths_R[before], responses.lengths_R[before]
    start, repeated = prompts.starts_R[before], prompts.starts_R[after]
    response_start, repeated_response = responses.starts_R[before], repeated + n_prompt
    return np.array_equal(
        prompts.values[start : start + n_prompt], prompts.values[repeated : repeated + n_prompt]
    ) and np.array_equal(
        responses.values[response_start : response_start + n_response],
        prompts.values[repeated_response : repeated_response + n_response],
    )


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
    batch_S = None
    while batch_S is None:
        batch_S = _fitted(
            lengths_S, order_S, micro_batch_tokens=micro_batch_tokens, n_batches=n_batches
        )
        if batch_S is None:
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
