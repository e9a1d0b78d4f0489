"""Read list columns of Arrow tables as flat arrays.

Letters: R rows of the table, K chosen rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A list column as one flat array, with the start and length of each row."""

    values: NDArray[np.generic]
    starts_R: NDArray[np.int64]
    lengths_R: NDArray[np.int64]

    def of(self, rows_K: NDArray[np.int64], *, drop_last: bool = False) -> NDArray[np.generic]:
        """Return the lists of these rows end to end, each whole or without its last element."""
        return self.values[ranges(self.starts_R[rows_K], self.lengths_R[rows_K] - drop_last)]

    def row(self, row: np.int64) -> NDArray[np.generic]:
        return self.values[self.starts_R[row] : self.starts_R[row] + self.lengths_R[row]]


Numbers = NDArray[np.float64] | Lists  # one a row, or one a response token


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
    offsets_Rp1 = column.offsets.to_numpy().astype(np.int64)
    return Lists(
        values=column.values.to_numpy(zero_copy_only=False),
        starts_R=offsets_Rp1[:-1],
        lengths_R=np.diff(offsets_Rp1),
    )
