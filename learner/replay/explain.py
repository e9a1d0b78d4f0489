"""What each group of a batch brings into a learner step: its advantages, its importance ratios, the
norm of its gradient.

    explained = explain(engine, ready)          # before the step; changes nothing
    console.print(table(explained))

Everything is by the weights as they are, as if the whole batch was one optimizer update. With
several updates in a learner step the step's own updates mix the groups' rows, and all but the first
see weights that have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.table import Table

from gigpo import BatchTotals
from learner.data.batch_loader import PreparedBatch, with_staleness
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.distributed.deepspeed_setup import PARTITIONED
from learner.distributed.optimizer_state import trainable
from learner.training.engine import Engine, with_proximal
from store import uid_text

SHOWN_UID_DIGITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupGradient:
    """What the rows of a group, or of all groups, teach. Advantages are means over rows, ratios
    over response tokens.
    """

    n_rows: int
    n_tokens: int  # response tokens
    advantage: float  # mean |advantage|
    episode: float  # mean |episode_advantage|
    step: float  # mean |step_advantage|, before it is multiplied by omega
    ratio_min: float  # of pi / mu: the policy before the step over the one that sampled
    ratio_mean: float
    ratio_max: float
    clipped: float  # fraction of the tokens that the loss clips, and so gets no gradient from
    grad_norm: float  # 2-norm of its share of the batch's gradient, before clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    group_uid: bytes
    task_id: str
    n_members: int
    n_won: int
    return_min: float
    return_max: float
    # versions, of its oldest token; None of an offline group, whose versions are another run's
    staleness: int | None
    learnt: GroupGradient | None  # None: it has nothing to teach
    why_not: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    groups: Sequence[Group]  # as claimed
    total: (
        GroupGradient | None
    )  # of all that have something to teach; its gradient is the sum of theirs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A group's rows, as micro-batches."""

    rows: pa.Table
    batches: list[MicroBatch]


def explain(engine: Engine, ready: PreparedBatch) -> Explanation:
    """Of a batch that is about to be trained on. Rank 0 does it alone, so not at ZeRO 3, where it
    has a part of the weights.
    """
    assert engine.learner.zero_stage < PARTITIONED
    rows = with_staleness(ready.rows, version=ready.version)
    parts = {group.group_uid: _part(engine, rows, group.group_uid) for group in ready.batch.groups}
    taught = {uid: part for uid, part in parts.items() if part.batches}
    learnt, total = _learnt(engine, list(taught.values())) if taught else ([], None)
    of_group = dict(zip(taught, learnt, strict=True))
    members = [
        trajectory for segment in ready.batch.segments for trajectory in segment.trajectories
    ]
    groups = []
    for group in ready.batch.groups:
        mine = [trajectory for trajectory in members if trajectory.group_uid == group.group_uid]
        returns = [trajectory.episode_return for trajectory in mine]
        groups.append(
            Group(
                group_uid=group.group_uid,
                task_id=group.task_id,
                n_members=len(mine),
                n_won=sum(trajectory.won for trajectory in mine),
                return_min=min(returns),
                return_max=max(returns),
                staleness=ready.version - group.oldest_version if group.source is None else None,
                learnt=of_group.get(group.group_uid),
                why_not=ready.filtered.get(group.group_uid, "no response tokens"),
            )
        )
    return Explanation(groups=groups, total=total)


def table(explanation: Explanation) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("group")
    shown.add_column("task", max_width=24, overflow="ellipsis", no_wrap=True)
    # |A| is the mean size of the advantages, A_E and A_S that of their episode and step terms.
    for name in (
        "won",
        "returns",
        "stale",
        "rows",
        "tokens",
        "|A|",
        "|A_E|",
        "|A_S|",
        "ratio",
        "clipped",
        "gradient",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for group in explanation.groups:
        returns = f"{group.return_min:g}..{group.return_max:g}"
        first = [
            uid_text(group.group_uid)[:SHOWN_UID_DIGITS],
            Path(group.task_id).name,
            f"{group.n_won}/{group.n_members}",
        ]
        figures = _figures(group.learnt) if group.learnt is not None else ["-"] * 8
        shown.add_row(
            *first, returns, "-" if group.staleness is None else str(group.staleness), *figures
        )
    if explanation.total is not None:
        n_members, n_won = (
            sum(numbers)
            for numbers in zip(*((g.n_members, g.n_won) for g in explanation.groups), strict=True)
        )
        shown.add_section()
        shown.add_row("total", "", f"{n_won}/{n_members}", "", "", *_figures(explanation.total))
    return shown


def reasons(explanation: Explanation) -> list[str]:
    """A line for each group that has nothing to teach."""
    silent = [group for group in explanation.groups if group.learnt is None]
    return [
        f"{uid_text(group.group_uid)[:SHOWN_UID_DIGITS]} is left out: {group.why_not}"
        for group in silent
    ]


def _figures(learnt: GroupGradient) -> list[str]:
    return [
        str(learnt.n_rows),
        str(learnt.n_tokens),
        f"{learnt.advantage:.3f}",
        f"{learnt.episode:.3f}",
        f"{learnt.step:.3f}",
        f"{learnt.ratio_min:.3f} {learnt.ratio_mean:.3f} {learnt.ratio_max:.3f}",
        f"{learnt.clipped:.1%}",
        f"{learnt.grad_norm:.4f}",
    ]


def _part(engine: Engine, rows: pa.Table, group_uid: bytes) -> _Part:
    mine = rows.filter(
        pc.equal(rows["group_uid"], pa.scalar(group_uid, rows.schema.field("group_uid").type))
    )
    learner = engine.learner
    batches = micro_batches(
        mine,
        micro_batch_tokens=learner.micro_batch_tokens,
        merge_steps=learner.merge_steps,
        ranks=1,
    )
    return _Part(rows=mine, batches=batches)


def _learnt(engine: Engine, parts: Sequence[_Part]) -> tuple[list[GroupGradient], GroupGradient]:
    """Of each part, and of all together."""
    batches = _of_one_table(parts)
    with torch.no_grad():
        scores = [engine.policy(batch.to(engine.deepspeed.device))[0].cpu() for batch in batches]
    if engine.objective.proximal == "recomputed":
        batches = with_proximal(batches, scores)
    factors = (
        engine.batch_wide_factors(batches, scores)
        if engine.objective.batch_wide
        else [None] * len(batches)
    )
    totals = BatchTotals(
        n_tokens=sum(batch.n_response_tokens for batch in batches),
        n_sequences=sum(batch.n_rows for batch in batches),
    )
    parameters = list(trainable(engine.policy.causal_lm).values())
    whole, learnt, values = [torch.zeros_like(p, dtype=torch.float32) for p in parameters], [], []
    todo = list(zip(batches, factors, strict=True))
    for part in parts:
        mine, todo = todo[: len(part.batches)], todo[len(part.batches) :]
        gradient = [torch.zeros_like(total) for total in whole]
        seen = []
        for batch, factor_N in mine:
            factor_N = None if factor_N is None else factor_N.to(engine.deepspeed.device)
            loss, values_6N = engine.loss(
                batch.to(engine.deepspeed.device), engine.policy, factor_N=factor_N, totals=totals
            )
            # Not `backward`: that would add to what DeepSpeed collects for the step.
            for total, grad in zip(
                gradient, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if grad is not None:
                    total += grad
            seen.append(_ratios_and_clips(batch, values_6N.cpu()))
        for total, grad in zip(whole, gradient, strict=True):
            total += grad
        learnt.append(_summed_up(part.rows, torch.cat(seen, dim=1), gradient))
        values += seen
    return learnt, _summed_up(
        pa.concat_tables([part.rows for part in parts]), torch.cat(values, dim=1), whole
    )


def _of_one_table(parts: Sequence[_Part]) -> list[MicroBatch]:
    """All their micro-batches, with the rows counted through: to the corrections equal rows_N are
    one sequence.
    """
    batches, before = [], 0
    for part in parts:
        batches += [replace(batch, rows_N=batch.rows_N + before) for batch in part.batches]
        before += part.rows.num_rows
    return batches


def _ratios_and_clips(batch: MicroBatch, values_6N: torch.Tensor) -> torch.Tensor:
    """[2, N]: pi / mu, and 1 where it is clipped."""
    logprobs_N, clipped_N = values_6N[0], values_6N[4]
    return torch.stack([torch.exp(logprobs_N - batch.behaviour_logprobs_N), clipped_N])


def _summed_up(
    rows: pa.Table, seen_2N: torch.Tensor, gradient: Sequence[torch.Tensor]
) -> GroupGradient:
    ratio_N, clipped_N = seen_2N
    return GroupGradient(
        n_rows=rows.num_rows,
        n_tokens=len(ratio_N),
        advantage=_mean_size(rows, "advantage"),
        episode=_mean_size(rows, "episode_advantage"),
        step=_mean_size(rows, "step_advantage"),
        ratio_min=float(ratio_N.min()),
        ratio_mean=float(ratio_N.mean()),
        ratio_max=float(ratio_N.max()),
        clipped=float(clipped_N.mean()),
        grad_norm=float(torch.nn.utils.get_total_norm(gradient)),
    )


def _mean_size(rows: pa.Table, column: str) -> float:
    return float(pc.mean(pc.abs(rows[column])).as_py())
