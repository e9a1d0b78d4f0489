"""Measure how far bf16 log-probabilities lie from float32 ones, packed and padded.

The packed side is the learner's own: variable-length attention, trimmed last layer. The padded
side is transformers alone over a padded batch. Each has its output layer in bf16, as the learner
has, and in float32, as with `model.float32_head`. KL is exact, over the whole vocabulary, in nats,
at the response tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.model.packed_attention import packed_hidden
from learner.model.policy_model import load_policy
from transformers import AutoModelForCausalLM

from gpu_proof.models import free_memory, model_directory
from gpu_proof.shapes import Proof

RESPONSE_SHARE = 8  # one token of so many
# Packing may cost as much again as padding does, and a rounding error of float32.
MORE_THAN_PADDED, ROUNDING = 2.0, 1e-6


def run(proof: Proof) -> None:
    batch = _batch(proof)
    reference_NV = _padded(proof, batch, dtype=torch.float32)[torch.float32]
    padded = _padded(proof, batch, dtype=torch.bfloat16)
    packed = _packed(proof, batch)
    kl = {}
    for head in (torch.bfloat16, torch.float32):
        name = f"{str(head).removeprefix('torch.')} output layer"
        for side, logprobs in (("padded", padded), ("packed", packed)):
            kl[f"{side}, {name}"] = _divergence(reference_NV, logprobs[head])
            change_N = _sampled(logprobs[head], batch) - _sampled(reference_NV, batch)
            proof.report.figure(
                f"log-probability difference, {side}, {name}",
                {"mean": float(change_N.abs().mean()), "max": float(change_N.abs().max())},
            )
        kl[f"packed from padded, {name}"] = _divergence(padded[head], packed[head])
        limit = MORE_THAN_PADDED * kl[f"padded, {name}"] + ROUNDING
        proof.report.at_most(f"KL to float32, packed, {name}", kl[f"packed, {name}"], limit)
    proof.report.figure("mean KL in nats", kl)


def _batch(proof: Proof) -> MicroBatch:
    """Return one micro-batch of random sequences, longest first, on the device."""
    rng = np.random.default_rng(0)
    vocabulary, lengths = proof.shapes.real.vocabulary, proof.shapes.mismatch_lengths
    n_responses = [max(1, length // RESPONSE_SHARE) for length in lengths]
    sizes = list(zip(lengths, n_responses, strict=True))
    responses = [rng.integers(0, vocabulary, n).tolist() for n in n_responses]
    rows = pa.table(
        {
            "traj_uid": pa.array([rng.bytes(16) for _ in lengths], pa.binary(16)),
            "step_index": pa.array([0] * len(lengths), pa.int32()),
            "prompt_ids": [rng.integers(0, vocabulary, n - m).tolist() for n, m in sizes],
            "response_ids": responses,
            "response_logprobs": [[-1.0] * n for n in n_responses],
            "advantage": [1.0] * len(lengths),
            "staleness": [0] * len(lengths),
        }
    )
    (batch,) = micro_batches(rows, micro_batch_tokens=sum(lengths), ranks=1)
    return batch.to(proof.device)


@torch.no_grad()
def _padded(
    proof: Proof, batch: MicroBatch, *, dtype: torch.dtype
) -> dict[torch.dtype, torch.Tensor]:
    """Return log softmax over the vocabulary [N, V] by the dtype of the output layer."""
    path = model_directory(proof, proof.shapes.real)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(proof.device).eval()
    lengths = batch.bounds_Sp1.diff().tolist()
    longest = max(lengths)
    sequences = batch.input_ids_T.split(lengths)
    ids_SL = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    mask_SL = torch.arange(longest, device=proof.device) < batch.bounds_Sp1.diff()[:, None]
    hidden_SLH = model.get_decoder()(
        input_ids=ids_SL, attention_mask=mask_SL.long(), use_cache=False
    ).last_hidden_state
    hidden_NH = hidden_SLH[mask_SL][batch.positions_N]
    result = _by_head(hidden_NH, model.get_output_embeddings().weight)
    del model
    free_memory(proof)
    return result


@torch.no_grad()
def _packed(proof: Proof, batch: MicroBatch) -> dict[torch.dtype, torch.Tensor]:
    """Return the same from the learner's policy."""
    path = model_directory(proof, proof.shapes.real)
    policy = load_policy(path, dtype="bfloat16", gradient_checkpointing=False, temperature=1.0)
    policy.to(proof.device)
    if not policy.is_trimmed:
        raise RuntimeError("the last layer was not trimmed; a Qwen2 layer should be")
    hidden_NH = packed_hidden(
        policy.causal_lm,
        input_ids_T=batch.input_ids_T,
        position_ids_T=batch.position_ids_T,
        bounds_Sp1=batch.bounds_Sp1,
        positions_N=batch.positions_N,
    )
    result = _by_head(hidden_NH, policy.output.weight)
    # The learner's own output layer must be the bf16 one of the two, or the other if it is chosen.
    for head, limit in ((torch.bfloat16, 0.05), (torch.float32, 1e-3)):
        policy.output.float32 = head == torch.float32
        own_N, _ = policy(batch)
        difference = float((own_N - _sampled(result[head], batch)).abs().max())
        name = f"the learner's output layer is the {str(head).removeprefix('torch.')} one"
        proof.report.at_most(name, difference, limit)
    return result


def _by_head(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    """Return log softmax [N, V] for an output layer in bf16 and for one in float32."""
    heads = {hidden_NH.dtype, torch.float32}
    return {
        dtype: (hidden_NH.to(dtype) @ weight_VH.to(dtype).T).float().log_softmax(-1)
        for dtype in heads
    }


def _sampled(logprobs_NV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return logprobs_NV.gather(-1, batch.response_ids_N[:, None]).squeeze(-1)


def _divergence(one_NV: torch.Tensor, other_NV: torch.Tensor) -> float:
    """Return the mean KL(one || other) over the N positions."""
    terms_NV = one_NV.double().exp() * (one_NV.double() - other_NV.double())
    return float(terms_NV.sum(-1).mean())
