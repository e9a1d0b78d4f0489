"""Measure updates of a 1.5B model: tokens/s, FLOP utilisation, peak memory against the plan.

The settings are ZeRO 1 to 3, with and without gradient checkpointing, with a reference model,
micro-batches of 16k and 32k tokens, output layer chunks of 512 to 4096 tokens. A setting that does
not fit is recorded as out of memory. `flops.py` has the formula of the utilisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from configs import Config
from learner.data.micro_batch import MicroBatch
from learner.model import chunked_logprobs as output_layer
from learner.training.engine import Engine

from gpu_proof.engines import engine_configs, make_engine, update_seconds
from gpu_proof.flops import peak_tflops, update_flops
from gpu_proof.models import free_memory, make_batches
from gpu_proof.shapes import GIB, ModelShape, Proof

OVER_PLAN = 1.05  # of the memory at an optimizer step over the plan's
PEAK_OVER_PLAN = 1.1  # of the memory of a whole update
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    key: str  # as the command line has it
    name: str
    settings: dict[str, Any]
    chunks: bool = False  # also measure with other chunks of the output layer


SAVING = {"gradient_checkpointing": True}
WITH_REFERENCE = {"zero_stage": 1, **SAVING, "kl_coef": 0.01}
CASES = (
    Case(
        key="zero1",
        name="ZeRO 1, checkpointing",
        settings={"zero_stage": 1, **SAVING},
        chunks=True,
    ),
    Case(key="plain", name="ZeRO 1", settings={"zero_stage": 1}),
    Case(key="zero2", name="ZeRO 2, checkpointing", settings={"zero_stage": 2, **SAVING}),
    Case(key="zero3", name="ZeRO 3, checkpointing", settings={"zero_stage": 3, **SAVING}),
    Case(key="reference", name="ZeRO 1, checkpointing, reference", settings=WITH_REFERENCE),
)


def run(proof: Proof) -> None:
    for case in (case for case in CASES if proof.case in ("", case.key)):
        with proof.report.case(case.name):
            _measure_case(proof, case)
        free_memory(proof)
    if not proof.on_gpu:
        proof.report.needs_cuda("memory against the plan")


def _measure_case(proof: Proof, case: Case) -> None:
    shape = proof.shapes.real
    engine = make_engine(proof, shape, **case.settings)
    for budget in proof.shapes.token_budgets:  # ascending: what does not fit ends the case
        batches = make_batches(
            proof, shape, budget_tokens=budget, total_tokens=proof.shapes.update_tokens
        )
        figures = measured(proof, engine, batches, shape=shape, frozen=False)
        proof.report.figure(f"{case.name}, {budget} tokens", figures)
        if OUT_OF_MEMORY in figures:
            break
        if proof.on_gpu:
            _peak_against_plan(proof, case, engine, budget, peak_gib=figures["peak_gib"])
        if budget == proof.shapes.token_budgets[0]:
            _with_what_fits(proof, case, engine, batches)
    engine.close()


def _with_what_fits(
    proof: Proof, case: Case, engine: Engine, batches: Sequence[MicroBatch]
) -> None:
    """Check what needs an update that was done, and measure it with other chunks."""
    proof.report.is_true(f"{case.name}: updates were applied", engine.n_updates > 0)
    if proof.on_gpu:
        _against_plan(proof, case, engine, batches)
    if case.chunks:
        _other_chunks(proof, engine, batches, name=case.name)


def _other_chunks(
    proof: Proof, engine: Engine, batches: Sequence[MicroBatch], *, name: str
) -> None:
    usual = output_layer.CHUNK_TOKENS
    try:
        for chunk in proof.shapes.chunk_tokens:
            output_layer.CHUNK_TOKENS = chunk
            figures = measured(proof, engine, batches, shape=proof.shapes.real, frozen=False)
            proof.report.figure(f"{name}, chunks of {chunk}", figures)
    finally:
        output_layer.CHUNK_TOKENS = usual


def _peak_against_plan(
    proof: Proof, case: Case, engine: Engine, budget_tokens: int, *, peak_gib: float
) -> None:
    """Compare the peak of whole updates with the plan's bytes, activations included."""
    from configs import Shape, pass_bytes, rank_bytes  # here: the tiny form compares nothing

    real = proof.shapes.real
    shape = Shape(
        layers=real.layers,
        hidden=real.hidden,
        key_values=real.kv_heads * real.hidden // real.heads,
        feed_forward=real.feed_forward,
        vocabulary=real.vocabulary,
    )
    model, learner, loss = engine_configs(proof, **case.settings)
    n_parameters = sum(map(_elements, engine.policy.causal_lm.parameters()))
    config = Config(
        model=model, learner=replace(learner, micro_batch_tokens=budget_tokens), loss=loss
    )
    planned = rank_bytes(config, parameters=n_parameters)
    planned += pass_bytes(config, shape, parameters=n_parameters)
    name = f"{case.name}, {budget_tokens} tokens: peak over the plan"
    proof.report.at_most(name, peak_gib * GIB / planned, PEAK_OVER_PLAN)


def _against_plan(proof: Proof, case: Case, engine: Engine, batches: Sequence[MicroBatch]) -> None:
    """Compare the peak of an optimizer step, which has no activations, with the plan's bytes."""
    from configs import rank_bytes  # here: the tiny form has nothing to compare

    model, learner, loss = engine_configs(proof, **case.settings)
    n_parameters = sum(map(_elements, engine.policy.causal_lm.parameters()))
    config = Config(model=model, learner=learner, loss=loss)
    planned = rank_bytes(config, parameters=n_parameters)
    held = _step_bytes(engine, batches)
    figures = {
        "parameters": n_parameters,
        "planned": planned / n_parameters,
        "at a step": held / n_parameters,
        "between updates": torch.cuda.memory_allocated() / n_parameters,
    }
    proof.report.figure(f"{case.name}, bytes a parameter", figures)
    proof.report.at_most(f"{case.name}: memory over the plan", held / planned, OVER_PLAN)


def _step_bytes(engine: Engine, batches: Sequence[MicroBatch]) -> int:
    """Train once; return the most memory that was allocated during the optimizer's own step."""
    step, peaks = engine.deepspeed.step, []

    def measuring() -> None:
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated())

    engine.deepspeed.step = measuring
    try:
        engine.train([batches])
    finally:
        engine.deepspeed.step = step
    return max(peaks)


def measured(
    proof: Proof,
    engine: Engine,
    batches: Sequence[MicroBatch],
    *,
    shape: ModelShape,
    frozen: bool,
) -> dict[str, Any]:
    """Return the figures of an update. After one that is out of memory the engine is of no use."""
    n_tokens = sum(batch.n_tokens for batch in batches)
    figures: dict[str, Any] = {"tokens": n_tokens, "micro_batches": len(batches)}
    if proof.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = update_seconds(engine, batches, repeats=proof.shapes.timed_updates)
    except torch.OutOfMemoryError:
        return figures | {OUT_OF_MEMORY: True, "peak_gib": _peak_gib()}
    tflops = update_flops(shape, batches, frozen=frozen) / seconds / 1e12
    peak = peak_tflops(torch.cuda.get_device_name()) if proof.on_gpu else None
    return figures | {
        "response_tokens": sum(batch.n_response_tokens for batch in batches),
        "update_s": seconds,
        "tokens_per_s": n_tokens / seconds,
        "tflops_per_s": tflops,
        "peak_tflops_per_s": peak,
        "mfu": None if peak is None else tflops / peak,
        "peak_gib": _peak_gib() if proof.on_gpu else None,
    }


def _peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / GIB


def _elements(parameter: torch.nn.Parameter) -> int:
    """Count a parameter's elements, also while ZeRO 3 keeps them elsewhere."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
