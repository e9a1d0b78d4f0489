"""Share the tokens of each micro-batch among the ranks of a sequence group (DeepSpeed-Ulysses).

    group = join_sequence_group(learner)         # None: a rank computes its own micro-batches
    share = group.share_of(batch)                # this rank's tokens
    heads = group.tokens_for_heads(query_1AKD, key_1AKD, value_1AKD)  # all tokens, own heads
    out_1KAD = group.heads_for_tokens(out_1TAD)  # own tokens, all heads
    results_2N = group.joined(results_2Y, indices_Y=share.indices_Y, n_tokens=N)

Attention is the only operation in which tokens meet, so every other one is computed for a rank's
own tokens alone. Before attention each rank sends every other one its tokens of that one's heads,
and after it the other way round (arXiv 2309.14509). Every rank of a group has the same micro-batch,
and computes the same loss of the same N results. Its backward pass gives the gradient of that loss
by way of its own tokens, so the gradient of the loss is the sum over the group's ranks.

    W  ranks of the group
    T  tokens of a micro-batch, with its padding
    K  tokens of one rank: T / W
    N  response tokens of a micro-batch
    P  response tokens that one rank's tokens predict
    S  sequences
    A  attention heads
    D  size of one head
    F  numbers that two ranks exchange of a token
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from configs import LearnerConfig
from learner.data.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """One rank's tokens of a micro-batch.

    Two ranks, sequences of 3 and 2 tokens: rank 0 has tokens 0 to 2, rank 1 the other two and one
    of padding, which is a sequence of its own. bounds_Sp1 is [0, 3, 5, 6] on both.
    """

    input_ids_K: torch.Tensor  # int64
    position_ids_K: torch.Tensor  # int64, of the tokens within their sequences
    bounds_Sp1: torch.Tensor  # int32, of all T tokens
    positions_Y: torch.Tensor  # int64, index into K: its output predicts a response token
    indices_Y: torch.Tensor  # int64, index into N: that response token


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceGroup:
    """The ranks that share micro-batches with this one. `join_sequence_group` makes it."""

    group: dist.ProcessGroup
    rank: int  # of this process within the group
    ranks: int

    def share_of(self, batch: MicroBatch) -> TokenShare:
        """Return this rank's tokens. Padding gives all ranks equally many, at least one."""
        n_own = math.ceil(batch.n_tokens / self.ranks)
        n_padding = n_own * self.ranks - batch.n_tokens
        own = slice(self.rank * n_own, (self.rank + 1) * n_own)
        bounds_Sp1 = batch.bounds_Sp1
        if n_padding:
            bounds_Sp1 = torch.cat([bounds_Sp1, bounds_Sp1[-1:] + n_padding])
        is_own_N = batch.positions_N // n_own == self.rank
        return TokenShare(
            input_ids_K=pad(batch.input_ids_T, (0, n_padding))[own],
            position_ids_K=pad(batch.position_ids_T, (0, n_padding))[own],
            bounds_Sp1=bounds_Sp1,
            positions_Y=batch.positions_N[is_own_N] - own.start,
            indices_Y=is_own_N.nonzero().squeeze(-1),
        )

    def tokens_for_heads(
        self, query_1AKD: torch.Tensor, key_1AKD: torch.Tensor, value_1AKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange own tokens of all heads, [1, A, K, D], for all tokens of own heads.

        These are [1, A / W, T, D]. Heads of keys and values that W does not divide are repeated
        first: 2 of them for 8 queries on 4 ranks are sent as 4, so that each rank has one of them
        with its 2 queries.
        """
        parts = []
        for heads_1AKD in (query_1AKD, key_1AKD, value_1AKD):
            times = math.lcm(heads_1AKD.shape[1], self.ranks) // heads_1AKD.shape[1]
            heads_AKD = heads_1AKD[0].unsqueeze(1).expand(-1, times, -1, -1).flatten(0, 1)
            parts.append(heads_AKD.unflatten(0, (self.ranks, -1)).transpose(1, 2).flatten(2))
        received_WKF = _exchanged(torch.cat(parts, dim=-1), self.group)
        query_TF, key_TF, value_TF = received_WKF.flatten(0, 1).split(
            [part_WKF.shape[-1] for part_WKF in parts], dim=-1
        )
        return (
            _apart(query_TF, head_size=query_1AKD.shape[-1]),
            _apart(key_TF, head_size=key_1AKD.shape[-1]),
            _apart(value_TF, head_size=value_1AKD.shape[-1]),
        )

    def heads_for_tokens(self, out_1TAD: torch.Tensor) -> torch.Tensor:
        """Exchange results of all tokens, [1, T, A / W, D], for own tokens' of all heads.

        These are [1, K, A, D].
        """
        parts_WKF = out_1TAD[0].unflatten(0, (self.ranks, -1)).flatten(2)
        received_KWF = _exchanged(parts_WKF, self.group).transpose(0, 1)
        return received_KWF.flatten(1).unflatten(1, (-1, out_1TAD.shape[-1])).unsqueeze(0)

    def joined(
        self, results_2Y: torch.Tensor, *, indices_Y: torch.Tensor, n_tokens: int
    ) -> torch.Tensor:
        """Return the results [2, N] of all ranks' tokens, on every rank."""
        own_2N = results_2Y.new_zeros(2, n_tokens).index_copy(1, indices_Y, results_2Y)
        joined_2N: torch.Tensor = _Joined.apply(own_2N, self.group)
        return joined_2N


def join_sequence_group(learner: LearnerConfig) -> SequenceGroup | None:
    """Return the sequence group of this rank, None for one rank by itself.

    All ranks call it together, after `join_ranks`. Neighbours are a group: of four ranks in groups
    of two, 0 and 1 are one, 2 and 3 the other.
    """
    if learner.sequence_parallel == 1:
        return None
    return _group(learner.ranks, learner.sequence_parallel)


@functools.cache  # a process has its groups for its life, as DeepSpeed's
def _group(ranks: int, sequence_parallel: int) -> SequenceGroup:
    firsts = range(0, ranks, sequence_parallel)
    groups = [dist.new_group([*range(first, first + sequence_parallel)]) for first in firsts]
    number, rank = divmod(dist.get_rank(), sequence_parallel)
    return SequenceGroup(group=groups[number], rank=rank, ranks=sequence_parallel)


def _apart(heads_TF: torch.Tensor, *, head_size: int) -> torch.Tensor:
    """Return heads that lie side by side in each token's numbers as [1, A / W, T, D]."""
    return heads_TF.unflatten(1, (-1, head_size)).transpose(0, 1).unsqueeze(0)


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    exchanged: torch.Tensor = _Exchange.apply(parts, group)
    return exchanged


class _Exchange(torch.autograd.Function):
    """Send part w of the first dimension to rank w. The gradients take the same ways back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients, ctx.group), None


class _Joined(torch.autograd.Function):
    """Add up tensors in which each rank has its own elements, and 0 for those of the others."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        joined = own.clone()
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Not the sum over ranks: all compute one loss, and each has its whole gradient.
        return gradient, None
