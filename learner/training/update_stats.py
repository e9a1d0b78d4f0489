"""Statistics of an optimizer update, over the tokens of all its micro-batches and ranks.

    passes = [Pass(loss=..., values_6N=token_values(...)), ...]    # this rank's micro-batches
    everyone = gathered(passes, batches, ranks=2)                  # all, on every rank
    stats = update_stats(
        batches, everyone, grad_norm=..., learning_rate=..., skipped=False
    )

Letters as in `micro_batch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from gigpo import Terms, Tokens, token_diagnostics
from learner.data.micro_batch import MicroBatch

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One optimizer update, over all its tokens.

    Values that are not finite are inf: a NaN would be NULL in the catalog.
    """

    loss: float  # policy loss, plus kl_coef * KL, minus entropy_coef * entropy
    kl: float  # mean estimate of the KL to the reference; 0 without a reference model
    entropy: float  # mean, nats
    grad_norm: float  # 2-norm before clipping
    learning_rate: float
    n_rows: int
    n_tokens: int  # response tokens
    n_tokens_computed: int  # by the forward passes with a gradient
    skipped: bool  # the loss or the gradient was not finite, so the weights did not change
    bad_rows: tuple[int, ...]  # rows whose loss or log-probabilities are not finite, ascending
    # gigpo's `token_diagnostics`: ratios, effective sample size, mismatch, dropped tokens
    tokens: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One micro-batch's share of the update's loss (a scalar) and its `token_values`, detached."""

    loss: torch.Tensor
    values_6N: torch.Tensor


def token_values(
    terms: Terms, *, logprobs_N: torch.Tensor, entropy_N: torch.Tensor
) -> torch.Tensor:
    """Stack log-probability, entropy, loss, factor, clipped (0 or 1) and KL as float32 [6, N]."""
    values = (logprobs_N, entropy_N, terms.loss_N, terms.factor_N, terms.clipped_N, terms.kl_N)
    return torch.stack([value_N.detach().float() for value_N in values])


def gathered(passes: Sequence[Pass], batches: Sequence[MicroBatch], *, ranks: int) -> list[Pass]:
    """Return the passes over all micro-batches, in their order, on the CPU of every rank.

    All ranks call it together; rank r brings those over batches[r::ranks]. Batches (a, b, c, d) on
    2 ranks: rank 0 brings (a, c), rank 1 (b, d), both get (a, b, c, d).
    """
    losses = torch.stack([done.loss for done in passes]).cpu()
    values_6N = torch.cat([done.values_6N for done in passes], dim=1).cpu()
    everyone = [passes[0]] * len(batches)
    for r, (losses_K, of_rank_6N) in enumerate(from_all_ranks((losses, values_6N), ranks=ranks)):
        n_tokens = [batch.n_response_tokens for batch in batches[r::ranks]]
        everyone[r::ranks] = [
            Pass(loss=loss, values_6N=part_6N)
            for loss, part_6N in zip(losses_K, of_rank_6N.split(n_tokens, dim=1), strict=True)
        ]
    return everyone


def from_all_ranks(value: Value, *, ranks: int) -> list[Value]:
    """Return each rank's value, by rank, on every rank. All ranks call it together.

    Tensors must be on the CPU.
    """
    if ranks == 1:
        return [value]
    values = [value] * ranks
    dist.all_gather_object(values, value)
    return values


def update_stats(
    batches: Sequence[MicroBatch],
    passes: Sequence[Pass],
    *,
    grad_norm: float,
    learning_rate: float,
    skipped: bool,
) -> UpdateStats:
    """Compute statistics over all tokens at once: a ratio's ESS or maximum is no mean of parts."""
    logprobs_N, entropy_N, loss_N, factor_N, clipped_N, kl_N = torch.cat(
        [done.values_6N for done in passes], dim=1
    )
    rows_N = torch.cat([batch.rows_N for batch in batches])
    tokens = Tokens(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.cat([batch.behaviour_logprobs_N for batch in batches]),
        advantages_N=torch.cat([batch.advantages_N for batch in batches]),
        sequence_N=rows_N,
    )
    return UpdateStats(
        loss=finite_or_inf(sum(float(done.loss) for done in passes)),
        kl=finite_or_inf(float(kl_N.mean())),
        entropy=finite_or_inf(float(entropy_N.mean())),
        grad_norm=finite_or_inf(grad_norm),
        learning_rate=learning_rate,
        n_rows=sum(batch.n_rows for batch in batches),
        n_tokens=len(rows_N),
        n_tokens_computed=sum(batch.n_tokens for batch in batches),
        skipped=skipped,
        bad_rows=tuple(rows_N[~torch.isfinite(loss_N + logprobs_N)].unique().tolist()),
        tokens=token_diagnostics(
            tokens,
            factor_N=factor_N,
            clipped_N=clipped_N.bool(),
            staleness_N=torch.cat([batch.staleness_N for batch in batches]),
        ),
    )


def finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
