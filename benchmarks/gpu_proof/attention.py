"""Compare packed attention with ordinary attention in float32, forward and backward.

The cases are grouped heads, windows, and 1 to 64 sequences of unequal length, one of them of a
single token. On a GPU bf16 goes through the variable-length kernel: the section counts its calls
and fails if another path was taken. float32 goes through one call per sequence, on both devices.
Each case is computed again with heads that went through the exchange of a sequence group, here of
one rank, with NCCL on a GPU and gloo on a CPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from learner.distributed.sequence_group import SequenceGroup
from learner.model import packed_attention as attention

from gpu_proof.models import relative
from gpu_proof.shapes import Proof

# Relative; gradients of bf16 keys and values are sums over the query heads that share them.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    n_sequences: int
    window: int | None
    dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        window = f"window {self.window}" if self.window else "no window"
        heads = f"{self.heads}/{self.kv_heads} heads of {self.size}"
        return f"{dtype}, {heads}, {self.n_sequences} sequences, {window}"


def run(proof: Proof) -> None:
    # The reference multiplies in float32 without TF32, whatever was set before.
    torch.set_float32_matmul_precision("highest")
    worst: dict[str, float] = {}
    # an engine of another section may have formed the group in this process
    if forms_group := not dist.is_initialized():
        backend = "nccl" if proof.on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    exchanging = SequenceGroup(group=dist.group.WORLD, rank=0, ranks=1)
    for case, group in itertools.product(cases(proof), (None, exchanging)):
        label = f"{case.name}{', exchanged' if group else ''}"
        with proof.report.case(label):
            for name, error in compare(proof, case, group=group).items():
                proof.report.at_most(f"{label}: {name}", error, LIMITS[case.dtype])
                key = f"{str(case.dtype).removeprefix('torch.')} {name}"
                worst[key] = max(worst.get(key, 0.0), error)
    if forms_group:
        dist.destroy_process_group()
    proof.report.figure("largest relative error", worst)
    if not proof.on_gpu:
        proof.report.needs_cuda("variable-length kernel")


def cases(proof: Proof) -> Iterator[Case]:
    """Yield every combination of heads, number of sequences, window and dtype."""
    sizes = proof.shapes
    for (heads, kv_heads, size), n_sequences, window, dtype in itertools.product(
        sizes.attention_heads, sizes.attention_sequences, sizes.attention_windows, LIMITS
    ):
        yield Case(
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            n_sequences=n_sequences,
            window=window,
            dtype=dtype,
        )


def compare(proof: Proof, case: Case, *, group: SequenceGroup | None) -> dict[str, float]:
    """Return the relative errors of the output and of the three gradients.

    `group` is None for a rank that has all tokens.
    """
    lengths = unequal_lengths(proof.shapes.attention_tokens, case.n_sequences)
    generator = torch.Generator(device=proof.device).manual_seed(case.n_sequences)

    def random(n_heads: int) -> torch.Tensor:
        sizes = (1, n_heads, sum(lengths), case.size)
        values = torch.randn(sizes, generator=generator, device=proof.device)
        return values.to(case.dtype).requires_grad_()

    inputs = (random(case.heads), random(case.kv_heads), random(case.kv_heads))
    floats = tuple(one.detach().float().requires_grad_() for one in inputs)
    grad = random(case.heads).detach().transpose(1, 2)
    with counted_kernel() as calls:
        out = packed(inputs, lengths=lengths, window=case.window, group=group)
        grads = torch.autograd.grad(out, inputs, grad)
    is_kernel = proof.on_gpu and case.dtype == torch.bfloat16
    if len(calls) != int(is_kernel):
        raise RuntimeError(
            f"{len(calls)} calls of the variable-length kernel, not {int(is_kernel)}"
        )
    expected = ordinary(floats, lengths=lengths, window=case.window)
    expected_grads = torch.autograd.grad(expected, floats, grad.float())
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    pairs = zip((out, *grads), (expected, *expected_grads), strict=True)
    return {name: relative(*pair) for name, pair in zip(names, pairs, strict=True)}


def packed(
    inputs: tuple[torch.Tensor, ...],
    *,
    lengths: list[int],
    window: int | None,
    group: SequenceGroup | None,
) -> torch.Tensor:
    """Call the learner's attention as transformers calls it; returns [1, T, A, D]."""
    bounds_Sp1 = torch.tensor([0, *lengths], device=inputs[0].device).cumsum(0).int()
    sequences = attention.PackedSequences(bounds_Sp1=bounds_Sp1, lengths=lengths, group=group)
    module = torch.nn.Module()
    query, key, value = inputs
    out, _ = attention.packed_attention(
        module, query, key, value, None, sliding_window=window, sequences=sequences
    )
    return out


def ordinary(
    inputs: tuple[torch.Tensor, ...], *, lengths: list[int], window: int | None
) -> torch.Tensor:
    """Compute softmax attention sequence by sequence from its definition; returns [1, T, A, D]."""
    query, key, value = inputs
    repeats = query.shape[1] // key.shape[1]
    outs, begin = [], 0
    for length in lengths:
        part = slice(begin, begin + length)
        keys = key[:, :, part].repeat_interleave(repeats, dim=1)
        values = value[:, :, part].repeat_interleave(repeats, dim=1)
        scores = query[:, :, part] @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        sees = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if window is not None:
            sees = sees.triu(1 - window)
        outs.append(scores.masked_fill(~sees, -torch.inf).softmax(-1) @ values)
        begin += length
    return torch.cat(outs, dim=2).transpose(1, 2)


def unequal_lengths(n_tokens: int, n_sequences: int) -> list[int]:
    """Cut the tokens into sequences of unequal length, the last of one token. 10 in 3: 6, 3, 1."""
    if n_sequences == 1:
        return [n_tokens]
    weights = [2 + index % 3 for index in range(n_sequences - 1)][::-1]
    left = n_tokens - 1
    lengths = [max(1, left * weight // sum(weights)) for weight in weights]
    lengths[0] += left - sum(lengths)
    return [*lengths, 1]


@contextmanager
def counted_kernel() -> Iterator[list[None]]:
    """Count the calls of the variable-length kernel by the learner's attention."""
    kernel, calls = attention.varlen_attn, []

    @functools.wraps(kernel)  # its signature too, by which the arguments may be chosen
    def counting(*args: Any, **keywords: Any) -> Any:
        calls.append(None)
        return kernel(*args, **keywords)

    attention.varlen_attn = counting
    try:
        yield calls
    finally:
        attention.varlen_attn = kernel
