"""Assign the environments of a run to its training groups, in proportion to their weights."""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Mapping
from itertools import accumulate

# 1 / phi: no number is harder to approximate by fractions, so its multiples modulo 1 spread evenly.
GOLDEN_RATIO = 0.6180339887498949


class EnvironmentOrder:
    """Assign an environment to each training group, in proportion to weights.

    It is a function of the ordinal alone. The multiples of the golden ratio spread evenly over
    [0, 1), so the share of an environment is right in a whole run and, nearly, in each batch.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._names = list(weights)
        total = sum(weights.values())
        self._ends = list(accumulate(weight / total for weight in weights.values()))
        # By ordinal: the environment's index, and the group's number among its groups.
        self._indices, self._numbers = array("H"), array("q")
        self._n_groups = [0] * len(self._names)

    def __getitem__(self, ordinal: int) -> tuple[str, int]:
        """Return the environment of a group, and its number among that environment's groups."""
        for following in range(len(self._indices), ordinal + 1):
            share = (following + 0.5) * GOLDEN_RATIO % 1.0
            index = min(bisect(self._ends, share), len(self._names) - 1)
            self._indices.append(index)
            self._numbers.append(self._n_groups[index])
            self._n_groups[index] += 1
        return self._names[self._indices[ordinal]], self._numbers[ordinal]

    def n_before(self, ordinal: int, *, first: int) -> int:
        """Count the groups from `first` up to `ordinal` that are of the same environment."""
        _, number = self[ordinal]
        return number - self._numbers[self._indices.index(self._indices[ordinal], first)]
