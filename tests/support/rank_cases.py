"""Compute updates at every ZeRO stage, cut and spread in every way, in one process.

    # two ranks; each writes OUT/rank<RANK>.pt
    python -m tests.support.forked_ranks tests.support.rank_cases 2 ADDRESS BASE OUT

`results(...)` does the same with one rank in this process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import torch

from configs import CriticConfig, LearnerConfig, LossConfig, ModelConfig
from learner.checkpoint import load_checkpoint
from learner.data.micro_batch import MicroBatch
from learner.data.values import critic_values
from learner.distributed import deepspeed_setup
from learner.interface import NonFiniteWeightsError
from learner.training.engine import Engine
from learner.training.gradient import apply_gradient
from learner.training.step_metrics import UpdateStats
from tests.support.engine_samples import (
    CUT,
    WHOLE,
    copied,
    cut,
    far_rows,
    gradient,
    history_rows,
    random_rows,
    save_checkpoint,
    with_places,
)
from tests.support.sizes import IN_FULL

STAGES = (0, 1, 2, 3)
# Of cases beside the gradient's: DeepSpeed has one optimizer for stages 1 and 2.
MAIN_STAGES = STAGES if IN_FULL else (0, 2, 3)
# tokens per micro-batch, merged steps
CUTS = ((WHOLE, True), (WHOLE, False), (CUT, True), (1, False))
# ZeRO stages and cuts; shortened, all cuts at stage 0 and the first and the last at stage 3
CUT_AT = tuple(
    (stage, *cut)
    for stage in STAGES
    for cut in CUTS
    if IN_FULL or stage == 0 or cut == CUTS[0] or (stage, cut) == (3, CUTS[-1])
)
SHARED = (
    tuple((stage, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16"))
    if IN_FULL
    else ((1, "float32"), (2, "bfloat16"), (3, "float32"))
)
ADAPTED = (0, 3)  # ZeRO stages for LoRA
# ZeRO stage and rank of the adapters of a run with a critic; the first of each rank is compared with
VALUED = tuple(
    (stage, lora_rank)
    for lora_rank in (0, 4)
    for stage in MAIN_STAGES
    if IN_FULL or lora_rank == 0 or stage in ADAPTED
)
# ZeRO stage, dtype, learning rate, rows: weights that overflow in products, in squares, and by
# themselves.
WRECKED = (
    (0, "float32", 1e10, 8),
    (0, "float32", 1e30, 1),
    (3, "bfloat16", 1e10, 1),
    (3, "float32", 1e38, 8),
)
LEARNER = LearnerConfig(learning_rate=1e-2, grad_clip=0.1)
CRITIC = CriticConfig(learning_rate=1e-3, clip=100.0)
# Whatever a rank needs of the others' tokens: to rank them, to score them first, to average over
# sequences.
LOSSES: dict[str, dict[str, Any]] = {
    "m2po": {"corrections": ["m2po", "token_tis"], "numbers": {"m2po": {"limit": 0.2}}},
    "recomputed": {"proximal": "recomputed"},
    "interpolated": {"proximal": "interpolated", "corrections": ["m2po"]},
    "gspo": {"policy": "gspo", "numbers": {"gspo": {"clip_low": 0.1, "clip_high": 0.1}}},
}


@dataclass(frozen=True, kw_only=True)
class Result:
    stats: list[UpdateStats]
    gradient: dict[str, torch.Tensor]  # of the first update
    weights: dict[str, torch.Tensor]  # after the last; of rank 0's engine on the CPU


@dataclass(frozen=True, kw_only=True)
class Place:
    base: Path
    rank: int
    ranks: int
    address: str | None
    sequence_parallel: int = 1

    @property
    def groups(self) -> int:
        return self.ranks // self.sequence_parallel

    @contextmanager
    def engine(
        self,
        *,
        dtype: str = "float32",
        lora_rank: int = 0,
        gradient_checkpointing: bool = False,
        learner: LearnerConfig = LEARNER,
        critic: CriticConfig | None = None,
        **loss: Any,
    ) -> Iterator[Engine]:
        engine = Engine(
            model_path=self.base,
            model=ModelConfig(
                dtype=dtype, lora_rank=lora_rank, gradient_checkpointing=gradient_checkpointing
            ),
            learner=replace(learner, ranks=self.ranks, sequence_parallel=self.sequence_parallel),
            loss=LossConfig(**loss),
            critic=critic,
            temperature=1.0,
            seed=0,
            rank=self.rank,
            address=self.address,
        )
        yield engine
        engine.close()


def results(place: Place) -> dict[str, Any]:
    """Every parameter is shared out at ZeRO 3, though all of this model's are small enough to be
    kept whole.
    """
    kept, deepspeed_setup.WHOLE_ELEMENTS = deepspeed_setup.WHOLE_ELEMENTS, 0
    try:
        found: dict[str, Any] = {}
        for cases in (
            _cuts,
            _offloaded,
            _losses,
            _adapters,
            _critics,
            _skips,
            _wrecks,
            _few_rows,
            _ess_scaled,
        ):
            found |= cases(place)
        return found
    finally:
        deepspeed_setup.WHOLE_ELEMENTS = kept


def _cuts(place: Place) -> dict[str, Result]:
    found = {}
    for stage, tokens, merge_steps in CUT_AT:
        with place.engine(
            learner=replace(LEARNER, zero_stage=stage), kl_coef=0.1, entropy_coef=0.01
        ) as engine:
            first = cut(history_rows(), tokens, ranks=place.ranks, merge_steps=merge_steps)
            found[f"cut {stage} {tokens} {merge_steps}"] = result(engine, [first])
    return found


def _offloaded(place: Place) -> dict[str, Any]:
    """Two micro-batches on each rank, a bad update between two good ones."""
    good = cut(random_rows(8), 30, ranks=place.ranks)
    bad = [replace(good[0], advantages_N=good[0].advantages_N * math.nan), *good[1:]]
    found: dict[str, Any] = {}
    for stage, dtype in SHARED:
        for offload in (False, True):
            learner = replace(LEARNER, zero_stage=stage, offload=offload)
            with place.engine(learner=learner, dtype=dtype) as engine:
                stats = engine.train([good])
                before = copied(engine)
                stats += engine.train([bad])
                kept = all(
                    torch.equal(tensor, before[name]) for name, tensor in copied(engine).items()
                )
                stats += engine.train([good])
                bad_rows = tuple(sorted(set(bad[0].rows_N.tolist())))
                found[f"offload {stage} {dtype} {offload}"] = (
                    stats,
                    copied(engine),
                    engine.n_updates,
                    kept,
                    bad_rows,
                )
    return found


def _losses(place: Place) -> dict[str, Result]:
    found = {}
    for name, loss in LOSSES.items():
        with place.engine(learner=replace(LEARNER, zero_stage=2), **loss) as engine:
            parts = [
                cut(far_rows(), CUT, ranks=place.ranks),
                cut(random_rows(5, seed=1), CUT, ranks=place.ranks),
            ]
            found[f"loss {name}"] = result(engine, parts)
    return found


def _adapters(place: Place) -> dict[str, Result]:
    """Two updates, as at the first one matrix of each adapter is 0 and the other has no gradient.
    The reference is the base.
    """
    found = {}
    for stage in ADAPTED:
        with place.engine(
            learner=replace(LEARNER, zero_stage=stage), lora_rank=4, kl_coef=0.1
        ) as engine:
            parts = [
                cut(far_rows(), CUT, ranks=place.ranks),
                cut(random_rows(5, seed=1), CUT, ranks=place.ranks),
            ]
            found[f"adapters {stage}"] = result(engine, parts)
    return found


def _critics(place: Place) -> dict[str, Any]:
    """A critic of states, as of turn_ppo, then of tokens, as of ppo, and the policy beside it. After
    its checkpoint is loaded the critic's next update is the same again.
    """
    rows, found = history_rows(), {}
    targets = pa.array([float(ids[0] % 5) for ids in rows["prompt_ids"].to_pylist()])
    valued = rows.append_column("value", pa.array([0.0] * len(rows)))
    valued = valued.append_column("value_target", targets)
    updates = [
        cut(table, CUT, ranks=place.ranks, merge_steps=True)
        for table in (valued, with_places(valued))
    ]
    asked = rows.drop_columns(["advantage", "staleness"])
    for stage, lora_rank in VALUED:
        learner = replace(LEARNER, zero_stage=stage)
        with place.engine(learner=learner, lora_rank=lora_rank, critic=CRITIC) as engine:
            stats, policy = engine.train_critic(updates), engine.train(updates[1:])
            _, values_N = critic_values(
                asked,
                engine.values,
                learner=replace(learner, micro_batch_tokens=CUT, ranks=place.ranks),
            )
            directory = place.base.parent / f"critic-{stage}-{lora_rank}-{place.ranks}"
            save_checkpoint(engine, directory, learner_step=1, version=1, lsn=0)
            after = engine.train_critic(updates)
            load_checkpoint(engine, directory)
            again = engine.train_critic(updates) == after
        found[f"critic {stage} {lora_rank}"] = (stats + after, policy, values_N, again)
    return found


def _skips(place: Place) -> dict[str, Any]:
    """A loss or a gradient that is not finite on the last rank only."""
    found: dict[str, Any] = {}
    good = cut(random_rows(), CUT, ranks=place.ranks)
    last = place.ranks - 1
    bad: list[MicroBatch] = list(good)
    bad[last] = replace(bad[last], advantages_N=torch.full_like(bad[last].advantages_N, math.inf))
    for stage in MAIN_STAGES:
        with place.engine(learner=replace(LEARNER, zero_stage=stage, warmup_updates=2)) as engine:
            before = copied(engine)
            (skipped,) = engine.train([bad])
            kept = all(torch.equal(tensor, before[name]) for name, tensor in copied(engine).items())
            broken = next(engine.policy.parameters()).register_hook(
                lambda g: g * math.nan if place.rank == last else g
            )
            (no_gradient,) = engine.train([good])
            broken.remove()
            (after,) = engine.train([good])
            bad_rows = tuple(sorted(set(bad[last].rows_N.tolist())))
            found[f"skip {stage}"] = (skipped, no_gradient, after, kept, bad_rows, gradient(engine))
    return found


def _wrecks(place: Place) -> dict[str, bool]:
    """Whether the policy is refused after an update of so high a learning rate, though loss and
    gradient are finite.

    A second update may be skipped then, which does not make up for the first. With one row a second
    rank has none.
    """
    found = {}
    for stage, dtype, learning_rate, n_rows in WRECKED:
        learner = replace(LEARNER, zero_stage=stage, learning_rate=learning_rate)
        with place.engine(learner=learner, dtype=dtype) as engine:
            try:
                engine.train([cut(random_rows(n_rows), CUT, ranks=place.ranks)] * 2)
            except NonFiniteWeightsError:
                is_refused = True
            else:
                is_refused = False
            found[f"wrecked {stage} {dtype} {learning_rate:g}"] = is_refused
    return found


def _few_rows(place: Place) -> dict[str, Result]:
    """One row of the four of an update, so that a second rank has nothing but empty
    micro-batches.
    """
    found = {}
    for stage in MAIN_STAGES:
        learner = replace(LEARNER, zero_stage=stage, rows_per_update=4)
        with place.engine(
            learner=learner, corrections=["m2po"], kl_coef=0.1, entropy_coef=0.01
        ) as engine:
            one = cut(random_rows(1), CUT, ranks=place.ranks)
            found[f"one row {stage}"] = result(engine, [one])
    return found


def _ess_scaled(place: Place) -> dict[str, Result]:
    with place.engine(learner=replace(LEARNER, ess_scaled=True, zero_stage=3)) as engine:
        batches = cut(far_rows(), CUT, ranks=place.ranks)
        return {"ess_scaled": result(engine, [batches])}


def result(engine: Engine, updates: list[list[MicroBatch]]) -> Result:
    first: dict[str, torch.Tensor] = {}

    def noting(deepspeed: Any) -> float:
        grad_norm = apply_gradient(deepspeed)
        if not first:
            first.update(gradient(engine))
        return grad_norm

    with patch("learner.training.engine.apply_gradient", noting):
        stats = engine.train(updates)
    return Result(stats=stats, gradient=first, weights=copied(engine))


def main() -> None:
    rank, address, base, out = sys.argv[1:]
    # Whoever reaches the group's ports could send an object that executes code.
    with patch("torch.distributed.distributed_c10d._tensor_to_object", side_effect=AssertionError):
        found = results(Place(base=Path(base), rank=int(rank), ranks=2, address=address))
    torch.save(found, Path(out) / f"rank{rank}.pt")
