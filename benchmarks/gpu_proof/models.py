"""Make what several sections need: models with random weights, micro-batches, timings."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner.data.micro_batch import MicroBatch, micro_batches
from support.learner_rows import MIXES, make_rows
from transformers import AutoModelForCausalLM, Qwen2Config

from gpu_proof.shapes import ModelShape, Proof

INITIAL_STD = 0.02
# Spread of the logits. Untouched random weights give nearly equal logits, unlike any trained model.
LOGITS_STD = 4.0
MAX_POSITIONS = 32_768


def model_directory(proof: Proof, shape: ModelShape) -> Path:
    """Return a Hugging Face directory of the shape with random bf16 weights, made once."""
    directory = proof.work / f"model-{shape.name}"
    if directory.is_dir():
        return directory
    unfinished = directory.with_suffix(".tmp")
    random_model(shape, device=proof.device).save_pretrained(unfinished)
    unfinished.rename(directory)
    free_memory(proof)  # or the section would count the maker's memory as its own
    return directory


def free_memory(proof: Proof) -> None:
    """Give back what no object holds any more, and count the peak from here."""
    gc.collect()
    if proof.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random_model(shape: ModelShape, *, device: torch.device) -> Any:
    """Return a Qwen2 model with random bf16 weights and logits as unequal as a trained model's."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=INITIAL_STD,
        tie_word_embeddings=shape.tied,
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(LOGITS_STD / (INITIAL_STD * shape.hidden**0.5))
    return model


def make_batches(
    proof: Proof, shape: ModelShape, *, budget_tokens: int, total_tokens: int
) -> list[MicroBatch]:
    """Return the same micro-batches every time, of at most `budget_tokens` each.

    Together they have about `total_tokens`. The lengths are those of the shapes' `row_mix`.
    """
    rng = np.random.default_rng(0)
    mix, n_rows = MIXES[proof.shapes.row_mix], 8
    while True:
        rows = make_rows(mix(rng, n_rows), rng=rng, vocabulary=shape.vocabulary)
        batches = micro_batches(rows, micro_batch_tokens=budget_tokens, ranks=1)
        if sum(batch.n_tokens for batch in batches) >= total_tokens:
            return batches[: max(1, total_tokens // budget_tokens)]
        n_rows *= 2


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference, computed in float32."""
    value, reference = value.detach().float(), reference.detach().float()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-30))


def seconds_of(work: Callable[[], object], *, proof: Proof) -> float:
    """Return how long a call takes until the device has finished it."""
    if proof.on_gpu:
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    work()
    if proof.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started_s
