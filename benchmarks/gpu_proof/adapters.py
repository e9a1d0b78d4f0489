"""Measure updates of adapters on a 7B model, with and without TF32 for the adapters' products."""

from __future__ import annotations

import learner.training.engine

from gpu_proof.engines import make_engine
from gpu_proof.models import make_batches
from gpu_proof.shapes import Proof
from gpu_proof.throughput import measured

# By the case of the command line. It acts on a GPU only.
TF32 = {"tf32": True, "float32": False}


def run(proof: Proof) -> None:
    shapes, report = proof.shapes, proof.report
    figures: dict[str, object] = {}
    if proof.on_gpu:
        figures["tf32"] = TF32[proof.case]
        learner.training.engine.adapters_in_tf32 = lambda *_: TF32[proof.case]
    else:
        report.needs_cuda("TF32")
    engine = make_engine(
        proof,
        shapes.adapted,
        zero_stage=1,
        gradient_checkpointing=True,
        lora_rank=shapes.adapter_rank,
    )
    budget = shapes.adapted_tokens
    batches = make_batches(proof, shapes.adapted, budget_tokens=budget, total_tokens=budget)
    figures |= measured(proof, engine, batches, shape=shapes.adapted, frozen=True)
    report.figure(f"LoRA {shapes.adapter_rank}, {budget} tokens", figures)
    report.is_true("adapters were updated", engine.n_updates > 0)
    engine.close()
