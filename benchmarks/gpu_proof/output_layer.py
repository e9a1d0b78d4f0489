"""Compare the chunked output layer, and the whole policy on its device, with full logits.

First the output layer alone: log-probabilities, entropies and both gradients. Then a policy that
was made of a model on the device, so that the learner's self-check of packed attention runs
there. Its log-probabilities are compared with a float32 copy of the same model, which transformers
runs alone, one sequence at a time.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from learner.data.micro_batch import MicroBatch
from learner.model.chunked_logprobs import OutputLayer
from learner.model.policy_model import PolicyModel

from gpu_proof.models import make_batches, random_model, relative
from gpu_proof.shapes import GIB, Proof

TEMPERATURE = 0.7
LAYER_LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Mean absolute difference of log-probabilities, nats.
POLICY_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
NAMES = ("log-probabilities", "entropies", "gradient of hidden states", "gradient of weights")


def run(proof: Proof) -> None:
    torch.set_float32_matmul_precision("highest")
    for dtype in LAYER_LIMITS:
        name = str(dtype).removeprefix("torch.")
        with proof.report.case(f"output layer, {name}"):
            _output_layer(proof, dtype)
        with proof.report.case(f"policy, {name}"):
            _policy(proof, dtype)


def _output_layer(proof: Proof, dtype: torch.dtype) -> None:
    shapes, name = proof.shapes, str(dtype).removeprefix("torch.")
    torch.manual_seed(0)
    with proof.device:
        linear = torch.nn.Linear(shapes.output_hidden, shapes.output_vocabulary, bias=False)
        hidden_NH = torch.randn(shapes.output_tokens, shapes.output_hidden)
        ids_N = torch.randint(shapes.output_vocabulary, (shapes.output_tokens,))
        weights_N = torch.randn(2, shapes.output_tokens)
    linear = linear.to(dtype)
    hidden_NH = hidden_NH.to(dtype).requires_grad_()
    expected = _full_logits(linear, hidden_NH, ids_N, weights_N)
    if proof.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    results = OutputLayer(linear, temperature=TEMPERATURE)(hidden_NH, ids_N)
    grads = torch.autograd.grad(
        (weights_N[0] * results[0] + weights_N[1] * results[1]).sum(), (hidden_NH, linear.weight)
    )
    for what, value, right in zip(NAMES, (*results, *grads), expected, strict=True):
        error = relative(value, right)
        proof.report.at_most(f"output layer, {name}: {what}", error, LAYER_LIMITS[dtype])
    if proof.on_gpu:
        peak = torch.cuda.max_memory_allocated() - before
        proof.report.figure(f"output layer {name} peak_gib", peak / GIB)


def _full_logits(
    linear: torch.nn.Linear, hidden_NH: torch.Tensor, ids_N: torch.Tensor, weights_N: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities, entropies and gradients from all logits at once, in float32."""
    hidden = hidden_NH.detach().float().requires_grad_()
    weight = linear.weight.detach().float().requires_grad_()
    logprobs_NV = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    logprobs_N = logprobs_NV.gather(-1, ids_N[:, None]).squeeze(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    loss = (weights_N[0] * logprobs_N + weights_N[1] * entropy_N).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    return logprobs_N.detach(), entropy_N.detach(), *grads


def _policy(proof: Proof, dtype: torch.dtype) -> None:
    shape, name = proof.shapes.trained, str(dtype).removeprefix("torch.")
    model = random_model(shape, device=proof.device)
    plain_model = copy.deepcopy(model).float().eval()
    policy = PolicyModel(model.to(dtype), temperature=TEMPERATURE)  # checks itself on the device
    proof.report.is_true(f"policy, {name}: last layer is trimmed", policy.is_trimmed)
    (batch, *_) = make_batches(proof, shape, budget_tokens=2048, total_tokens=2048)
    batch = batch.to(proof.device)
    with torch.no_grad():
        logprobs_N, entropy_N = policy(batch)
        expected_N, expected_entropy_N = _one_by_one(plain_model, batch)
    limit = POLICY_LIMITS[dtype]
    for what, value_N, right_N in (
        ("log-probabilities", logprobs_N, expected_N),
        ("entropies", entropy_N, expected_entropy_N),
    ):
        error = float((value_N - right_N).abs().mean())
        proof.report.at_most(f"policy, {name}: mean difference of {what}", error, limit)


def _one_by_one(model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies by full logits of one sequence at a time."""
    logits = []
    bounds = batch.bounds_Sp1.tolist()
    for begin, end in pairwise(bounds):
        logits.append(model(batch.input_ids_T[None, begin:end]).logits[0].float())
    logits_NV = torch.cat(logits)[batch.positions_N]
    logprobs_NV = (logits_NV / TEMPERATURE).log_softmax(-1)
    logprobs_N = logprobs_NV.gather(-1, batch.response_ids_N[:, None]).squeeze(-1)
    return logprobs_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1)
