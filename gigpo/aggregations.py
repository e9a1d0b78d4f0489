"""Take the mean of an update's losses per token. `AGGREGATIONS` lists the means by their names.

TokenMean()(loss_N, sequence_N, totals)    # a micro-batch's share of the update's loss
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

from gigpo.lazy_torch import torch
from gigpo.tokens import sequence_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTotals:
    """The response tokens and sequences of an update, over all micro-batches and ranks."""

    n_tokens: int
    n_sequences: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_sequences <= self.n_tokens:
            raise ValueError(
                f"n_tokens={self.n_tokens}, n_sequences={self.n_sequences}: count the response "
                "tokens of the whole update, and its sequences with at least one of them"
            )


class Aggregation(Protocol):
    """The interface of an entry of AGGREGATIONS: losses per token [N] to a scalar.

    Scalars of micro-batches add up. Every aggregation is given the sequence of each token, int64
    [N].
    """

    name: ClassVar[str]

    def __call__(
        self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMean:
    """sum(loss) / n_tokens: every token has the same weight. DAPO, verl's default, GiGPO's authors.

    Worked: losses (1, 2) and (6) of two sequences: 9 / 3 = 3.
    """

    name: ClassVar[str] = "token_mean"

    def __call__(
        self, loss_N: torch.Tensor, _sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor:
        return loss_N.sum() / totals.n_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenMean:
    """Mean over sequences of the mean over their tokens. GRPO, GSPO.

    Every response has the same weight, so tokens of long ones have less. Worked: losses (1, 2) and
    (6) of two sequences: (1.5 + 6) / 2 = 3.75.
    """

    name: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(
        self, loss_N: torch.Tensor, sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor:
        n_tokens_N = sequence_sum(torch.ones_like(loss_N), sequence_N)
        return (loss_N / n_tokens_N).sum() / totals.n_sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenSumNorm:
    """Mean over sequences of their sum / norm_tokens. Dr.GRPO, arXiv 2503.20783.

    norm_tokens is one constant for the whole run, the longest response that can be generated; there
    is no published number. No token's weight depends on the length of its response, so wrong
    answers do not get cheaper by being long.

    Worked, norm_tokens 10: losses (1, 2) and (6) of two sequences: (0.3 + 0.6) / 2 = 0.45.
    """

    name: ClassVar[str] = "sequence_mean_token_sum_norm"
    norm_tokens: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.norm_tokens) and self.norm_tokens >= 1):
            raise ValueError(
                f"norm_tokens={self.norm_tokens} must be at least 1: the longest response that can "
                "be generated"
            )

    def __call__(
        self, loss_N: torch.Tensor, _sequence_N: torch.Tensor, totals: BatchTotals, /
    ) -> torch.Tensor:
        return loss_N.sum() / (totals.n_sequences * self.norm_tokens)


AGGREGATIONS: Final[Mapping[str, type[Aggregation]]] = MappingProxyType(
    {
        aggregation.name: aggregation
        for aggregation in (SequenceMeanTokenMean, SequenceMeanTokenSumNorm, TokenMean)
    }
)
