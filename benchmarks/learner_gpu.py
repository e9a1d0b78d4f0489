"""How fast the learner trains on one GPU in bf16: tokens per second, model FLOP utilisation and peak memory.

    python benchmarks/learner_gpu.py --model DIR [--quick]         # SmolLM2-135M, or any other Hugging Face causal LM
    python benchmarks/learner_gpu.py --layers 28 --hidden 1536     # random weights, where there is no model
    python benchmarks/learner_gpu.py --device cpu --quick --layers 2 --hidden 64     # checks the script where there is no GPU

Whole optimizer updates of the learner's Engine (forward, loss, backward, clipping, AdamW on fp32 masters; ZeRO 1) on random
tokens: prompts of 64 to 2,048 tokens, half below 300, responses of 8 to 512, packed without padding. Tokens are both together.
The median of several updates counts, after two that are not timed.

The FLOPs of an update are those that the model needs, whatever the implementation computes again or leaves out:

    6 N T            N elements of the layers' matrices, T tokens: 2 forward, 4 backward
    6 V H R          the output layer, which R response tokens need and the others do not
    6 A sum L^2      causal attention of each of the layers: half of 2 * 2 L^2 A forward, A heads times their size, and
                     twice that backward; L tokens of each sequence

Utilisation is that over the time and over the device's dense bf16 peak, from its data sheet or --peak-tflops; null without one.
Peak memory is what torch has allocated on the GPU; of --device cpu the whole process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.learner_rows import MIXES, make_rows

if TYPE_CHECKING:
    from learner.batch import MicroBatch
    from learner.engine import Engine

# Dense bf16 TFLOP/s by the name that the driver gives, of NVIDIA's data sheets; the first that is in the name counts.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
VOCABULARY, HEAD_SIZE, MAX_POSITIONS = 49152, 64, 4096  # of a random model
WARM_UP_UPDATES = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory")
    parser.add_argument("--layers", type=int, default=30, help="of a random model; 30 and 576 are SmolLM2-135M's")
    parser.add_argument("--hidden", type=int, default=576, help="of a random model, a multiple of 64")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bf16 peak, if it is not in the table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer rows and updates, under a minute")
    return parser.parse_args()


def make_model(path: Path, *, layers: int, hidden: int) -> None:
    if hidden < HEAD_SIZE or hidden % HEAD_SIZE:
        raise SystemExit(f"--hidden {hidden} must be a multiple of {HEAD_SIZE}, the size of a head")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // (3 * HEAD_SIZE)) * HEAD_SIZE,  # 8 / 3 of hidden, rounded up
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)


def update_flops(model: PreTrainedModel, batches: Sequence[MicroBatch]) -> float:
    """6 N T + 6 V H R + 6 A sum L^2 for each layer. N = 100, T = 10 in two sequences of 5, one layer of A = 8, and an
    output layer of 32 x 4 for R = 3: 6,000 + 2,304 + 2,400 = 10,704."""
    output = model.get_output_embeddings()
    matrices = [layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not output]
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    squares = sum(float(batch.bounds_S1.diff().double().square().sum()) for batch in batches)
    return 6.0 * (
        sum(matrices) * sum(batch.n_tokens for batch in batches)
        + output.weight.numel() * sum(batch.n_response_tokens for batch in batches)
        + config.num_hidden_layers * config.num_attention_heads * head_size * squares
    )


def timed_updates(engine: Engine, batches: Sequence[MicroBatch], *, repeats: int) -> float:
    """Seconds of the median update. An update's statistics are read on the host, so that it is over when it returns."""
    seconds = []
    for index in range(WARM_UP_UPDATES + repeats):
        started = time.perf_counter()
        (stats,) = engine.train([batches])
        seconds.append(time.perf_counter() - started)
        if stats.skipped:
            raise SystemExit(f"update {index} was skipped: loss {stats.loss}, gradient norm {stats.grad_norm}")
    return statistics.median(seconds[WARM_UP_UPDATES:])


def peak_memory_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB


def peak_tflops(name: str, given: float | None) -> float | None:
    return given or next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def measure(model_path: Path, args: argparse.Namespace) -> dict[str, float | int | str | None]:
    # Not before the arguments are read: importing the learner settles which device it takes.
    from configs import LearnerConfig, LossConfig, ModelConfig
    from learner.batch import micro_batches
    from learner.engine import Engine

    engine = Engine(
        model_path=model_path,
        model=ModelConfig(dtype="bfloat16", gradient_checkpointing=args.gradient_checkpointing),
        learner=LearnerConfig(
            gpus_per_rank=int(args.device == "cuda"),
            zero_stage=1,
            micro_batch_tokens=args.micro_batch_tokens,
            threads=os.cpu_count() or 1,
        ),
        loss=LossConfig(),
        temperature=1.0,
        seed=0,
    )
    model, rng = engine.policy.causal_lm, np.random.default_rng(0)
    n_rows = (16 if args.quick else 64) if args.device == "cpu" else (128 if args.quick else 512)
    rows = make_rows(MIXES["long_tail"](rng, n_rows), rng=rng, vocabulary=model.config.vocab_size)
    batches = micro_batches(rows, micro_batch_tokens=args.micro_batch_tokens, merge_steps=True, ranks=1)
    update_s = timed_updates(engine, batches, repeats=3 if args.quick else 10)
    engine.close()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    tflops = update_flops(model, batches) / update_s / 1e12
    peak = peak_tflops(name, args.peak_tflops) if args.device == "cuda" else None
    n_tokens = sum(batch.n_tokens for batch in batches)
    return {
        "device": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "micro_batches": len(batches),
        "tokens": n_tokens,
        "response_tokens": sum(batch.n_response_tokens for batch in batches),
        "update_s": round(update_s, 4),
        "tokens_per_s": round(n_tokens / update_s),
        "model_tflops_per_s": round(tflops, 3),
        "peak_tflops_per_s": peak,
        "model_flop_utilisation": None if peak is None else round(tflops / peak, 4),
        "peak_memory_gib": round(peak_memory_bytes(args.device) / 2**30, 3),
    }


def main() -> None:
    args = arguments()
    if args.device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # the learner takes a GPU where it sees one
    elif not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no CUDA device; run this on one, or check the script with --device cpu"
        )
    with tempfile.TemporaryDirectory() as directory:
        path = args.model
        if path is None:
            path = Path(directory)
            make_model(path, layers=args.layers, hidden=args.hidden)
        figures = measure(path, args)
    for name, figure in figures.items():
        print(f"{name:24s} {figure:,}" if isinstance(figure, int) else f"{name:24s} {figure}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
