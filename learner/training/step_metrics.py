"""Compute the figures of an optimizer update, and name those of a learner step for the store.

    passes = [Pass(loss=..., figures_6N=token_values(...)), ...]    # this rank's micro-batches
    losses = gathered([done.loss for done in passes], batches, ranks=2)   # all, on every rank
    stats = update_stats(batches, everyone, grad_norm=..., learning_rate=..., skipped=False)
    figures = step_metrics(batch, updates=[stats], times=clock.end_step())

Letters as in `micro_batch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from gigpo import (
    Terms,
    Tokens,
    anchor_size_shares,
    step_variance_share,
    token_diagnostics,
)
from learner.data.batch_loader import PreparedBatch
from learner.data.batch_summary import Episodes
from learner.data.micro_batch import MicroBatch
from learner.distributed.deepspeed_setup import tensors_from_all_ranks
from learner.step_times import StepTimes
from learner.training.alarms import LENGTH

# It compares two engines at the same weights, and the first update changes one of them.
FIRST_UPDATE_ONLY = {"mismatch_kl_on_policy"}


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
    """The figures of one micro-batch, detached."""

    loss: torch.Tensor  # scalar: its share of the update's loss
    # float32, six of each token: log-probability, entropy, loss, factor, clipped, KL
    figures_6N: torch.Tensor


def token_values(
    terms: Terms, *, logprobs_N: torch.Tensor, entropy_N: torch.Tensor
) -> torch.Tensor:
    """Stack log-probability, entropy, loss, factor, clipped (0 or 1) and KL as float32 [6, N]."""
    figures = (logprobs_N, entropy_N, terms.loss_N, terms.factor_N, terms.clipped_N, terms.kl_N)
    return torch.stack([figure_N.detach().float() for figure_N in figures])


def gathered(
    mine: Sequence[torch.Tensor], batches: Sequence[MicroBatch], *, ranks: int
) -> list[torch.Tensor]:
    """Return the tensors of all micro-batches, in their order, on every rank.

    All ranks call it together; rank r brings those of batches[r::ranks], on the CPU.
    Batches (a, b, c, d) on 2 ranks: rank 0 brings (a, c), rank 1 (b, d), both get (a, b, c, d).
    The ranks of a sequence group bring the same, so their first one's are taken.
    """
    everyone = [mine[0]] * len(batches)
    groups = len(batches) // len(mine)
    of_groups = tensors_from_all_ranks(mine, ranks=ranks)[:: ranks // groups]
    for g, of_group in enumerate(of_groups):
        everyone[g::groups] = of_group
    return everyone


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
        [done.figures_6N for done in passes], dim=1
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


def step_metrics(
    batch: PreparedBatch, *, updates: list[UpdateStats], times: StepTimes
) -> dict[str, float]:
    """Return the figures of a learner step by name."""
    n_computed = sum(update.n_tokens_computed for update in updates)
    figures = {
        "learner/idle_fraction": times.groups_wait_s / times.step_s,
        "time/read_s": batch.times.read_s,
        "time/advantages_s": batch.times.advantages_s,
        "time/advantages_cpu_s": batch.times.advantages_cpu_s,
        "time/filter_s": batch.times.filter_s,
        "time/pack_s": batch.times.pack_s,
        "time/batch_wait_s": times.batch_wait_s,
        "time/publish_s": times.publish_s,
        "time/checkpoint_s": times.checkpoint_s,
        "time/step_s": times.step_s,
        "tokens/trained_per_s": n_computed / (times.step_s - times.groups_wait_s),
    }
    if batch.state_values:
        figures["time/values_s"] = batch.times.values_s
    if batch.summary.own is not None:
        figures["tokens/generated_per_s"] = batch.summary.n_own_tokens / times.step_s
    return figures | timeless_metrics(batch, updates)


def timeless_metrics(batch: PreparedBatch, updates: list[UpdateStats]) -> dict[str, float]:
    """Return the figures that depend on batch and weights alone, which a replay repeats."""
    summary, filtered = batch.summary, batch.filtered
    own = [group for group in batch.batch.groups if group.source is None]
    figures = {
        **episode_metrics("train", summary.own),
        **episode_metrics("offline", summary.offline),
        LENGTH: summary.n_response_tokens / summary.n_rows,
        "learner/updates": float(len(updates)),
        "groups/filtered": float(len(filtered)),
        "groups/trained": float(len(batch.batch.groups) - len(filtered)),
        "groups/offline": float(len(batch.batch.groups) - len(own)),
        "anchor/step_variance_share": step_variance_share(batch.rows),
    }
    for name, share in anchor_size_shares(batch.rows).items():
        figures[f"anchor/{name}"] = share
    if summary.values_digest is not None:
        figures["critic/values_digest"] = float(summary.values_digest)
    if batch.batch.replayed:
        ages = [batch.version - group.oldest_version for group in batch.batch.replayed]
        figures["replay/groups"] = float(len(ages))
        figures["replay/steps"] = float(batch.replayed.num_rows)
        figures["replay/age"] = sum(ages) / len(ages)
    if own:
        oldest = min(group.oldest_version for group in own)
        figures["staleness/max"] = float(batch.version - oldest)
    return figures | mean_of_updates(updates)


def episode_metrics(prefix: str, episodes: Episodes | None) -> dict[str, float]:
    """Return the figures of own ("train") or offline episodes, none without any."""
    if episodes is None:
        return {}
    return {
        f"{prefix}/success": episodes.success,
        f"{prefix}/return": episodes.mean_return,
        f"{prefix}/episode_steps": episodes.mean_steps,
    }


def mean_of_updates(updates: list[UpdateStats]) -> dict[str, float]:
    """Return `loss/<name>`: each statistic's mean over the updates that have it.

    Statistics of FIRST_UPDATE_ONLY are taken from the first update.
    """
    records = []
    for index, update in enumerate(updates):
        record = asdict(update)
        tokens, bad_rows = record.pop("tokens"), record.pop("bad_rows")
        figures = record | tokens | {"bad_rows": len(bad_rows)}
        records.append(
            {
                f"loss/{name}": float(value)
                for name, value in figures.items()
                if index == 0 or name not in FIRST_UPDATE_ONLY
            }
        )
    return means(records)


def means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return each figure's mean over the records that have it.

    Example: {"a": 1, "b": 5} and {"a": 3} give {"a": 2, "b": 5}.
    """
    seen: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            seen.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in seen.items()}
