"""Merge rows into token sequences: a step whose prompt repeats all tokens before it continues them.

Two steps of a game whose prompt is its whole history become one sequence with two responses, in
brackets:

    row 0: prompt (5, 6)            response (7, 8)      5 6[7 8]
    row 1: prompt (5, 6, 7, 8, 9)   response (4, 2)      5 6[7 8]9[4 2]

The sequence of a chain of rows is its last row's, which is computed anyway. So merging adds no
token, and exceeds no budget that the last row alone does not.

Letters: R rows of the table, K of them with a response, S token sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from learner.data.arrow_lists import Lists


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Rows grouped into sequences: s has `rows_K[first_Sp1[s]:first_Sp1[s + 1]]`, by step.

    Its tokens are those of its last row.
    """

    rows_K: NDArray[np.int64]  # each row with a response once
    first_Sp1: NDArray[np.int64]  # begins with 0 and ends with K

    @property
    def last_row_S(self) -> NDArray[np.int64]:
        return self.rows_K[self.first_Sp1[1:] - 1]


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
        before_Km1, after_Km1 = rows_K[:-1], rows_K[1:]  # each row and the next, K-1 of them
        tokens_Km1 = prompts.lengths_R[before_Km1] + responses.lengths_R[before_Km1]
        is_long_Km1 = tokens_Km1 <= prompts.lengths_R[after_Km1]
        is_same_Km1 = trajectory_R[before_Km1] == trajectory_R[after_Km1]
        for k in np.flatnonzero(is_same_Km1 & is_long_Km1):
            begins_K[k + 1] = not _continues(
                before_Km1[k], after_Km1[k], prompts=prompts, responses=responses
            )
    return Sequences(rows_K=rows_K, first_Sp1=np.append(np.flatnonzero(begins_K), len(rows_K)))


def _continues(before: np.int64, after: np.int64, *, prompts: Lists, responses: Lists) -> bool:
    """Return whether the prompt of row `after` begins with prompt and response of row `before`."""
    repeated = np.concatenate([prompts.row(before), responses.row(before)])
    return np.array_equal(repeated, prompts.row(after)[: len(repeated)])
