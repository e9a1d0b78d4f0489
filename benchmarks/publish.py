"""Measure what publishing weights costs the learner, and how long an engine waits for them.

    python benchmarks/publish.py [--quick] [--model DIR]

The model has 135 million random float32 parameters, unless one is given. The last line is JSON:

    learner_idle_s        the learner's loop stands still for a version: it waits for the version
                          before, copies, computes the digest and announces it (median; the metric
                          time/publish_s of a real loop without Ray)
    publish_to_serve_s    from the learner's call to an answer of a vLLM engine with the new
                          weights, which come as files (support/publish_to_serve.py)
    sent_gb_per_s         a version is written, sent to one engine's receiver over gloo, and its
                          digest verified there (learner.transfer=broadcast)
    bytes_lora_over_full  bytes of a version with model.lora_rank=16, over those without

`learner_idle_at_once_s` and `checkpoint_idle_at_once_s` are what the loop would stand still if it
wrote the files itself, from the same process. `checkpoint_idle_s` is the time that a checkpoint
costs it. They count on a machine with nothing else to do. A missed target makes the exit status 1,
but not with --quick.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser, show_json, show_table
from support.publish_to_serve import publish_to_serve
from support.publishing_learner import lora_over_full, measured, sent
from support.tiny_model import make_random_tiny

from configs import TinyModelConfig

# 22 layers of 10 x 768^2 parameters, and the embedding: 133 million.
MODEL = TinyModelConfig(vocabulary_size=4096, hidden_size=768, layers=22)
LEARNER_IDLE_S = 0.3
REQUIRED = {"learner_idle_s": f"< {LEARNER_IDLE_S}"}


def main() -> None:
    parser = quick_parser(__doc__, quick="fewer learner steps and publishes, about a minute")
    parser.add_argument("--model", type=Path, help="a model directory instead of the random one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        base = args.model
        if base is None:
            base = directory / "model"
            make_random_tiny(base, seed=0, tiny=MODEL)
        figures: dict[str, float | None] = {
            **measured(base, steps=5 if args.quick else 9, directory=directory),
            **lora_over_full(base),
            **sent(base, directory=directory),
        }
        show_table(figures, REQUIRED)
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:-1]) or "0"
        (published := directory / "published").mkdir()  # only versions: old ones are removed
        times_ms = publish_to_serve(
            base, publishes=3 if args.quick else 9, cores=cores, directory=published
        )
        figures["publish_to_serve_s"] = statistics.median(times_ms) / 1e3
    show_json(figures, figures)
    idle_s = figures["learner_idle_s"]
    if not args.quick and idle_s is not None and idle_s >= LEARNER_IDLE_S:
        raise SystemExit("missed: learner_idle_s")


if __name__ == "__main__":
    main()
