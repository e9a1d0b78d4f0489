"""Measure updates of adapters on a 7B model, with and without TF32 for their float32 matrices."""

from __future__ import annotations

import torch

from gpu_proof.engines import make_engine
from gpu_proof.models import make_batches
from gpu_proof.shapes import Proof
from gpu_proof.throughput import OUT_OF_MEMORY, measured

# Of torch.set_float32_matmul_precision: "highest" is plain float32, "high" lets TF32 in.
PRECISIONS = ("highest", "high")


def run(proof: Proof) -> None:
    shapes, report = proof.shapes, proof.report
    engine = make_engine(
        proof,
        shapes.adapted,
        zero_stage=1,
        gradient_checkpointing=True,
        lora_rank=shapes.adapter_rank,
    )
    budget = shapes.adapted_tokens
    batches = make_batches(proof, shapes.adapted, budget_tokens=budget, total_tokens=budget)
    if not proof.on_gpu:
        report.needs_cuda("TF32")
    before = torch.get_float32_matmul_precision()
    report.figure("precision as the learner sets it", before)
    try:
        for precision in PRECISIONS if proof.on_gpu else PRECISIONS[:1]:
            with report.case(precision):
                torch.set_float32_matmul_precision(precision)
                figures = measured(proof, engine, batches, shape=shapes.adapted, frozen=True)
                report.figure(f"float32 matmul precision {precision}", figures)
                if OUT_OF_MEMORY in figures:
                    break
    finally:
        torch.set_float32_matmul_precision(before)
    report.is_true("adapters were updated", engine.n_updates > 0)
    engine.close()
