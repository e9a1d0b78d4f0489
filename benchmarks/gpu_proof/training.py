"""Train, save, make a new engine, load and train on: at each ZeRO stage, offloaded, with adapters.

The update after the restart must be the update of the engine that was not stopped: bit for bit on
a CPU, nearly so on a GPU, whose kernels add up in any order. Then two engines train alike: their
weights must be equal on a CPU, and on a GPU with learner.deterministic. Last the guard: a loss that
is not finite must change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from learner.checkpoint import copy_checkpoint, load_checkpoint, write_checkpoint
from learner.data.micro_batch import MicroBatch

from gpu_proof.engines import copied_weights, distance, make_engine
from gpu_proof.models import free_memory, make_batches
from gpu_proof.shapes import Proof

# Largest difference on a GPU, as a share of one update's length. A CPU must give 0.
SAME_UPDATE = 0.1
UPDATES = 2  # before the checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    settings: dict[str, Any]
    on_cpu: bool = False  # also in the tiny form, which has each stage and each feature once


CASES = (
    *(
        Case(
            name=f"float32, ZeRO {stage}",
            settings={"dtype": "float32", "zero_stage": stage},
            on_cpu=stage == 0,
        )
        for stage in (0, 1, 2, 3)
    ),
    *(
        Case(name=f"bf16, ZeRO {stage}", settings={"zero_stage": stage}, on_cpu=stage != 2)
        for stage in (1, 2, 3)
    ),
    *(
        Case(
            name=f"bf16, ZeRO {stage}, offload",
            settings={"zero_stage": stage, "offload": True},
            on_cpu=stage == 2,
        )
        for stage in (1, 2, 3)
    ),
    Case(name="LoRA on bf16, ZeRO 0", settings={"zero_stage": 0, "lora_rank": 8}),
    Case(name="LoRA on bf16, ZeRO 1", settings={"zero_stage": 1, "lora_rank": 8}, on_cpu=True),
)


def run(proof: Proof) -> None:
    for case in (case for case in CASES if proof.on_gpu or case.on_cpu):
        with proof.report.case(case.name):
            _go_on(proof, case)
        free_memory(proof)
    # A CPU adds up in one order, so the setting is for a GPU only.
    for settings in ({"deterministic": False}, {"deterministic": True}) if proof.on_gpu else ({},):
        with proof.report.case(f"repeat with {settings}"):
            _repeat(proof, settings)
        free_memory(proof)
    if not proof.on_gpu:
        proof.report.needs_cuda("deterministic mode")
    with proof.report.case("guard"):
        _guard(proof)


def _go_on(proof: Proof, case: Case) -> None:
    batches = _batches(proof)
    engine = make_engine(proof, proof.shapes.trained, **case.settings)
    engine.train([batches] * UPDATES)
    path = proof.work / "checkpoint"  # replaced by the next case
    copy = copy_checkpoint(engine, learner_step=1, version=1, lsn=0)
    write_checkpoint(copy, path, others=list)
    saved = copied_weights(engine)
    engine.train([batches])
    expected = copied_weights(engine)
    engine.close()
    del engine
    engine = make_engine(proof, proof.shapes.trained, **case.settings)
    point = load_checkpoint(engine, path)
    loaded = copied_weights(engine)
    engine.train([batches])
    trained = copied_weights(engine)
    engine.close()
    report, length = proof.report, distance(expected, saved)
    report.is_true(f"{case.name}: the place is restored", point.n_updates == UPDATES)
    report.is_true(f"{case.name}: weights are restored", distance(loaded, saved) == 0.0)
    report.is_true(f"{case.name}: an update moves the weights", length > 0.0)
    difference = distance(trained, expected) / max(length, 1e-30)
    limit = SAME_UPDATE if proof.on_gpu else 0.0
    report.at_most(f"{case.name}: the next update is the same", difference, limit)


def _repeat(proof: Proof, settings: dict[str, bool]) -> None:
    """Train two engines in the same way: equal weights on a CPU, or in deterministic mode."""
    results = []
    for _ in range(2):
        engine = make_engine(proof, proof.shapes.trained, zero_stage=1, **settings)
        engine.train([_batches(proof)] * UPDATES)
        results.append(copied_weights(engine))
        engine.close()
    equal = distance(*results) == 0.0
    name = f"training repeats bit for bit with {settings}"
    if settings.get("deterministic", True):
        proof.report.is_true(name, equal)
    else:
        proof.report.figure(name, equal)


def _guard(proof: Proof) -> None:
    engine = make_engine(proof, proof.shapes.trained, zero_stage=1)
    batches = _batches(proof)
    before = copied_weights(engine)
    bad = replace(batches[0], advantages_N=torch.full_like(batches[0].advantages_N, torch.nan))
    (stats,) = engine.train([[bad, *batches[1:]]])
    proof.report.is_true("a loss that is not finite is refused", stats.skipped)
    unchanged = distance(copied_weights(engine), before) == 0.0
    proof.report.is_true("a refused update changes nothing", unchanged)
    (stats,) = engine.train([batches])
    proof.report.is_true("the next update is applied", not stats.skipped)
    engine.close()


def _batches(proof: Proof) -> list[MicroBatch]:
    budget, total = 256, 512  # two micro-batches, so that gradients are accumulated
    if proof.on_gpu:
        budget, total = 4096, 8192
    return make_batches(proof, proof.shapes.trained, budget_tokens=budget, total_tokens=total)
