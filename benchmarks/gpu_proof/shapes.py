"""Sizes of the proof: those of real models for a GPU, tiny ones that a CPU computes in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gpu_proof.report import Report

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a Qwen2 model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool  # the output layer is the embedding


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """Sizes of all sections."""

    attention_tokens: int  # of one case, all sequences together
    attention_heads: tuple[tuple[int, int, int], ...]  # of queries, of keys, size of one
    attention_sequences: tuple[int, ...]  # number of them
    attention_windows: tuple[int | None, ...]
    output_tokens: int
    output_hidden: int
    output_vocabulary: int
    trained: ModelShape  # saved, loaded and trained on at each ZeRO stage
    real: ModelShape  # throughput, mismatch, publishing
    row_mix: str  # of `support.learner_rows.MIXES`
    token_budgets: tuple[int, ...]  # of a micro-batch
    update_tokens: int  # of an optimizer update, about
    chunk_tokens: tuple[int, ...]  # of the output layer
    timed_updates: int
    adapted: ModelShape
    adapter_rank: int
    adapted_tokens: int  # of a micro-batch
    mismatch_lengths: tuple[int, ...]  # of sequences
    shared_bytes: int
    shared_piece_bytes: int


QWEN_1_5B = ModelShape(
    name="Qwen2.5-1.5B",
    layers=28,
    hidden=1536,
    heads=12,
    kv_heads=2,
    feed_forward=8960,
    vocabulary=151_936,
    tied=True,
)
QWEN_7B = ModelShape(
    name="Qwen2.5-7B",
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    feed_forward=18_944,
    vocabulary=152_064,
    tied=False,
)
SMALL = ModelShape(
    name="small",
    layers=4,
    hidden=1024,
    heads=16,
    kv_heads=4,
    feed_forward=2816,
    vocabulary=32_768,
    tied=True,
)
TINY = ModelShape(
    name="tiny",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    feed_forward=128,
    vocabulary=512,
    tied=True,
)
ON_GPU = Shapes(
    attention_tokens=4096,
    attention_heads=((4, 4, 64), (12, 2, 128), (28, 4, 128), (6, 3, 40)),
    attention_sequences=(1, 2, 7, 64),
    attention_windows=(None, 256),
    output_tokens=4099,  # no multiple of a chunk
    output_hidden=1536,
    output_vocabulary=151_936,
    trained=SMALL,
    real=QWEN_1_5B,
    row_mix="long_tail",
    token_budgets=(16_384, 32_768),
    update_tokens=32_768,
    chunk_tokens=(1024, 2048, 4096),  # 512 is the default and measured anyway
    timed_updates=3,
    adapted=QWEN_7B,
    adapter_rank=64,
    adapted_tokens=8192,
    mismatch_lengths=(600, 512, 401, 300, 257, 200, 64, 17),
    shared_bytes=GIB,
    shared_piece_bytes=256 * MIB,
)
ON_CPU = Shapes(
    attention_tokens=80,
    attention_heads=((2, 2, 16), (6, 2, 8)),
    attention_sequences=(1, 7, 64),
    attention_windows=(None, 5),
    output_tokens=1027,
    output_hidden=16,
    output_vocabulary=97,
    trained=TINY,
    real=TINY,
    row_mix="real",
    token_budgets=(256, 512),
    update_tokens=512,
    chunk_tokens=(1024,),
    timed_updates=1,
    adapted=TINY,
    adapter_rank=4,
    adapted_tokens=256,
    mismatch_lengths=(24, 17, 9, 3),
    shared_bytes=4 * MIB,
    shared_piece_bytes=MIB,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Everything that a section gets: device, sizes, a directory to work in, and its report."""

    device: torch.device
    shapes: Shapes
    case: str  # the only one to run of a section with cases; empty runs all
    work: Path  # kept from section to section of one command, then removed
    report: Report

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"
