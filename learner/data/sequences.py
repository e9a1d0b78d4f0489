"""Which rows share one token sequence: the steps of a trajectory whose prompt repeats all the
tokens before it.

Two steps of a game whose prompt is its whole history, one sequence with two action spans (in
brackets):

    row 0: prompt (5, 6)            response (7, 8)      5 6[7 8]
    row 1: prompt (5, 6, 7, 8, 9)   response (4, 2)      5 6[7 8]9[4 2]

A row continues another if its prompt begins with the other's prompt and response, token for token;
then so does everything that continues it. So the sequence of a chain of rows is its last row's,
which was to be computed anyway: merging adds no token anywhere and can exceed no budget that the
last row alone does not.

Letters: R rows of the table, K rows with a response, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A list column as one flat array; row r is `values[starts_R[r]:starts_R[r] +
    lengths_R[r]]`.
    """

    values: NDArray[np.generic]
    starts_R: NDArray[np.int64]
    lengths_R: NDArray[np.int64]

    def of(self, rows_K: NDArray[np.int64], *, drop_last: bool) -> NDArray[np.generic]:
        """The lists of these rows, end to end, each whole or without its last element."""
        return self.values[ranges(self.starts_R[rows_K], self.lengths_R[rows_K] - drop_last)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Sequence s is made of `rows_K[first_S1[s]:first_S1[s + 1]]`, in step order; its tokens are
    the last one's.
    """

    rows_K: NDArray[np.int64]  # each row with a response once
    first_S1: NDArray[np.int64]  # begins with 0 and ends with K

    @property
    def last_row_S(self) -> NDArray[np.int64]:
        return self.rows_K[self.first_S1[1:] - 1]


def ranges(starts_K: NDArray[np.int64], lengths_K: NDArray[np.int64]) -> NDArray[np.int64]:
    """Consecutive integers from each start, end to end: starts (4, 9) with lengths (3, 2) give 4 5
    6 9 10.
    """
    ends_K = np.cumsum(lengths_K)
    return np.repeat(starts_K - (ends_K - lengths_K), lengths_K) + np.arange(
        ends_K[-1] if len(ends_K) else 0
    )


def lists(rows: pa.Table, name: str) -> Lists:
    """A list column, whatever chunks and offsets the table has it in."""
    column = rows[name].combine_chunks()
    offsets_R1 = column.offsets.to_numpy().astype(np.int64)
    return Lists(
        values=column.values.to_numpy(zero_copy_only=False),
        starts_R=offsets_R1[:-1],
        lengths_R=np.diff(offsets_R1),
    )


def sequences(rows: pa.Table, *, prompts: Lists, responses: Lists, merge_steps: bool) -> Sequences:
    """Each row with a response in one sequence; without `merge_steps` each is one by itself.

    Merging reads the columns traj_uid and step_index, in any row order. Steps that are missing
    (they are in another update) break no chain: what counts is that the next step present repeats
    the tokens.
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
    """Whether row `after`, whose prompt is long enough, repeats the prompt and the response of row
    `before`.
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
