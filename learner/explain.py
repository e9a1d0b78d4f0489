"""Explain a learner step: each group's advantages, importance ratios and gradient norm.

    explanation = explain(engine, batch)          # before the step; changes nothing
    console.print(table(explanation))

All figures use the current weights, as if the batch were one optimizer update. With several updates
in a learner step the real ones mix the groups' rows, and later ones see changed weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.table import Table

from gigpo import BatchTotals
from learner.data.batch_loader import PreparedBatch
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.data.updates import with_staleness
from learner.distributed.deepspeed_setup import PARTITIONED
from learner.distributed.optimizer_state import trainable
from learner.training.engine import Engine, with_proximal
from store import Group, TrajectoryMeta, uid_text

SHOWN_UID_DIGITS = 8  # of 32; enough to tell the groups of one batch apart
BELOW_BASELINE = "its wins are not above what the batch's groups return"
# Columns of the table: |A| is the mean size of the advantages that the loss reads, A_E and A_S are
# the episode and step terms of the rows'.
GROUP_COLUMNS = ("won", "returns", "stale")
GRADIENT_COLUMNS = ("rows", "tokens", "|A|", "|A_E|", "|A_S|", "ratio", "clipped", "gradient")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupGradient:
    """Gradient and statistics of one group's rows, or of all groups' rows.

    Advantages are means over rows, ratios over response tokens. Where each token has an advantage
    of its own, `advantage` is a mean over response tokens too.
    """

    n_rows: int
    n_tokens: int  # response tokens
    advantage: float  # mean size of those that the loss reads
    episode: float | None  # mean |episode_advantage|; None for replayed wins, which have no terms
    step: float | None  # mean |step_advantage|, before it is multiplied by omega
    ratio_min: float  # pi / mu: the policy before the step over the one that sampled
    ratio_mean: float
    ratio_max: float
    clipped: float  # fraction of tokens that the loss clips, which have no gradient
    grad_norm: float  # 2-norm of its share of the batch's gradient, before clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedGroup:
    group: Group
    members: Sequence[TrajectoryMeta]
    staleness: int | None  # versions; None for an offline group
    gradient: GroupGradient | None  # None if none of its rows is trained on
    why_not: str
    is_replayed: bool  # only its wins are trained on, again


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of a batch, with groups in the order of the claim, replayed ones last."""

    groups: Sequence[ExplainedGroup]
    total: GroupGradient | None  # sum over all trained groups; None if there are none


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupRows:
    """A group's rows, and their micro-batches."""

    rows: pa.Table
    batches: list[MicroBatch]


def explain(engine: Engine, batch: PreparedBatch) -> Explanation:
    """Explain a batch that is about to be trained on.

    Rank 0 does it alone. So it is impossible at ZeRO 3, where a rank has only a part of the
    weights.
    """
    assert engine.learner.zero_stage < PARTITIONED
    rows = pa.concat_tables([batch.rows, batch.replayed], promote_options="default")
    rows = with_staleness(rows, version=batch.version)
    played, replayed = batch.batch.groups, batch.batch.replayed
    filtered = batch.filtered
    parts = {
        group.group_uid: _group_rows(engine, rows, group_uid=group.group_uid)
        for group in (*played, *replayed)
    }
    trained = {uid: part for uid, part in parts.items() if part.batches}
    gradients, total = _gradients(engine, list(trained.values())) if trained else ([], None)
    gradient_of = dict(zip(trained, gradients, strict=True))
    members = defaultdict(list)
    for segment in (*batch.batch.segments, *batch.batch.replayed_segments):
        for trajectory in segment.trajectories:
            members[trajectory.group_uid].append(trajectory)
    groups = [
        ExplainedGroup(
            group=group,
            members=members[group.group_uid],
            staleness=batch.version - group.oldest_version if group.source is None else None,
            gradient=gradient_of.get(group.group_uid),
            why_not=filtered.get(
                group.group_uid, BELOW_BASELINE if group in replayed else "no response tokens"
            ),
            is_replayed=group in replayed,
        )
        for group in (*played, *replayed)
    ]
    return Explanation(groups=groups, total=total)


def table(explanation: Explanation) -> Table:
    """Make a table with a row per group and a total."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("group")
    shown.add_column("task", max_width=24, overflow="ellipsis", no_wrap=True)
    for name in (*GROUP_COLUMNS, *GRADIENT_COLUMNS):
        shown.add_column(name, justify="right", no_wrap=True)
    all_won: list[bool] = []
    for one in explanation.groups:
        figures = ["-"] * len(GRADIENT_COLUMNS)
        if one.gradient is not None:
            figures = _figures(one.gradient)
        won = [member.won for member in one.members]
        all_won += won
        returns = [member.episode_return for member in one.members]
        shown.add_row(
            uid_text(one.group.group_uid)[:SHOWN_UID_DIGITS] + " again" * one.is_replayed,
            Path(one.group.task_id).name,
            f"{sum(won)}/{len(won)}",
            f"{min(returns):g}..{max(returns):g}",
            "-" if one.staleness is None else str(one.staleness),
            *figures,
        )
    if explanation.total is not None:
        won_of_all = f"{sum(all_won)}/{len(all_won)}"
        shown.add_section()
        shown.add_row("total", "", won_of_all, "", "", *_figures(explanation.total))
    return shown


def left_out_lines(explanation: Explanation) -> list[str]:
    """Return a line for each group that is not trained on, with the reason."""
    return [
        f"{uid_text(one.group.group_uid)[:SHOWN_UID_DIGITS]} is left out: {one.why_not}"
        for one in explanation.groups
        if one.gradient is None
    ]


def _figures(gradient: GroupGradient) -> list[str]:
    return [
        str(gradient.n_rows),
        str(gradient.n_tokens),
        f"{gradient.advantage:.3f}",
        "-" if gradient.episode is None else f"{gradient.episode:.3f}",
        "-" if gradient.step is None else f"{gradient.step:.3f}",
        f"{gradient.ratio_min:.3f} {gradient.ratio_mean:.3f} {gradient.ratio_max:.3f}",
        f"{gradient.clipped:.1%}",
        f"{gradient.grad_norm:.4f}",
    ]


def _group_rows(engine: Engine, rows: pa.Table, *, group_uid: bytes) -> _GroupRows:
    mine = rows.filter(pc.equal(rows["group_uid"], pa.scalar(group_uid, rows["group_uid"].type)))
    tokens = engine.learner.micro_batch_tokens
    batches = micro_batches(mine, micro_batch_tokens=tokens, ranks=1)
    return _GroupRows(rows=mine, batches=batches)


def _gradients(
    engine: Engine, parts: Sequence[_GroupRows]
) -> tuple[list[GroupGradient], GroupGradient]:
    """Return the gradient of each group, and of all groups together."""
    batches = _number_rows(parts)
    with torch.no_grad():
        scores = [engine.policy(batch.to(engine.deepspeed.device))[0].cpu() for batch in batches]
    if engine.objective.proximal == "recomputed":
        batches = with_proximal(batches, scores)
    factors: Sequence[torch.Tensor | None] = [None] * len(batches)
    if engine.objective.batch_wide:
        factors = engine.batch_wide_factors(batches, scores)
    totals = BatchTotals(
        n_tokens=sum(batch.n_response_tokens for batch in batches),
        n_sequences=sum(batch.n_rows for batch in batches),
    )
    parameters = list(trainable(engine.policy.causal_lm).values())
    sum_gradient = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    groups, all_seen_2N = [], []
    todo = list(zip(batches, factors, strict=True))
    for part in parts:
        mine, todo = todo[: len(part.batches)], todo[len(part.batches) :]
        gradient = [torch.zeros_like(total) for total in sum_gradient]
        seen = []
        for batch, factor_N in mine:
            on_device = None if factor_N is None else factor_N.to(engine.deepspeed.device)
            loss, figures_6N = engine.loss(
                batch.to(engine.deepspeed.device), engine.policy, factor_N=on_device, totals=totals
            )
            # `backward` would add to the gradient that DeepSpeed collects for the step.
            _add(gradient, torch.autograd.grad(loss, parameters, allow_unused=True))
            logprobs_N, _entropy_N, _loss_N, _factor_N, clipped_N, _kl_N = figures_6N.cpu()
            ratio_N = torch.exp(logprobs_N - batch.behaviour_logprobs_N)  # pi / mu
            seen.append(torch.stack([ratio_N, clipped_N]))
        _add(sum_gradient, gradient)
        groups.append(_summary(part.rows, seen_2N=torch.cat(seen, dim=1), gradient=gradient))
        all_seen_2N += seen
    rows = pa.concat_tables([part.rows for part in parts])
    return groups, _summary(rows, seen_2N=torch.cat(all_seen_2N, dim=1), gradient=sum_gradient)


def _add(totals: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None:
            total += gradient


def _number_rows(parts: Sequence[_GroupRows]) -> list[MicroBatch]:
    """Return all micro-batches with consecutive row numbers: equal rows_N are one sequence."""
    batches, before = [], 0
    for part in parts:
        batches += [replace(batch, rows_N=batch.rows_N + before) for batch in part.batches]
        before += part.rows.num_rows
    return batches


def _summary(
    rows: pa.Table, *, seen_2N: torch.Tensor, gradient: Sequence[torch.Tensor]
) -> GroupGradient:
    ratio_N, clipped_N = seen_2N
    return GroupGradient(
        n_rows=rows.num_rows,
        n_tokens=len(ratio_N),
        advantage=_mean_abs_advantage(rows),
        episode=_mean_abs(rows, "episode_advantage"),
        step=_mean_abs(rows, "step_advantage"),
        ratio_min=float(ratio_N.min()),
        ratio_mean=float(ratio_N.mean()),
        ratio_max=float(ratio_N.max()),
        clipped=float(clipped_N.mean()),
        grad_norm=float(torch.nn.utils.get_total_norm(gradient)),
    )


def _mean_abs_advantage(rows: pa.Table) -> float:
    advantages = rows["advantage"]
    if "token_advantage" in rows.column_names:
        advantages = pc.list_flatten(rows["token_advantage"])
    return float(pc.mean(pc.abs(advantages)).as_py())


def _mean_abs(rows: pa.Table, column: str) -> float | None:
    """Return the mean size of a column's values that are there; None if there are none."""
    mean: float | None = pc.mean(pc.abs(rows[column])).as_py()
    return mean
