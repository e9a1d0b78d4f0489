"""Compare the learner's speed with a plain Hugging Face loop and with TRL's GRPO trainer.

    python benchmarks/learner.py [--quick] [--model DIR]

All train the same rows and model on a CPU. The figure is tokens per CPU second, from a table of
rows to new weights: padding or packing, forward, loss, backward, clipping and AdamW, in float32
with one thread. Tokens are the rows' prompts and responses without padding, equally many for all.
Each contender has its own process (support/learner_seats.py). They run alternately, and the best of
several updates counts, with the best of several sizes of a forward pass: small passes save the
others padding, down to one row a pass. The first gradients must have the same norm. Memory is
measured in passes of the size printed beside it. The model is the project's tiny model. Rows are:

    real          prompts of 24 to 80 tokens, responses of 1 to 13, as in a quick-start run
    equal         all of their mean lengths, 50 and 6: no padding to save
    all_response  1 and 55: every token needs the output layer, so nothing is saved
    long_tail     synthetic: prompts of 64 to 2,048 tokens, half below 300; responses of 8 to 512
    histories     full-history prompts, merged into one sequence, against one for each row

The Hugging Face loop pads rows on the right in the order they come, up to the longest of each pass,
with an attention mask, and computes the logits of all positions. TRL 1.16 or newer is an extra,
`pip install trl`; without it its figures are null. It uses its own training loop, loss and
optimizer, with fixed completions in place of its generation.

`publish_to_serve_ms` is the time from the learner's call to an answer of a vLLM engine with the new
weights (support/publish_to_serve.py), and with --model also for that model. The last line is JSON;
ratios above 1 favour this learner. A missed target makes the exit status 1, but not with --quick:
few rows and repeats are too noisy to judge.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser, show_table
from support.learner_contenders import HfLoop, Learner
from support.learner_rows import MIXES, make_histories, make_rows, n_tokens
from support.learner_seats import Contender, Seat, seated
from support.publish_to_serve import publish_to_serve
from support.tiny_model import make_random_tiny

from configs import TinyModelConfig
from tests.support.learner_samples import one_step_each

HAS_TRL = importlib.util.find_spec("trl") is not None
AT_LEAST = {"over_hf_loop_equal": 1.0, "over_hf_loop_real_lengths": 2.0, "over_trl": 2.0}
# The second is for 135 million parameters, most of it in writing a new file and loading it.
BELOW = {"publish_to_serve_ms": 150.0, "publish_to_serve_model_ms": 1500.0}
REQUIRED = {
    **{name: f">= {bound:g}" for name, bound in AT_LEAST.items()},
    "merged_over_rows": "",
    **{name: f"< {bound:g}" for name, bound in BELOW.items()},
}
# relative, of the first updates' norms: float32 sums in other orders, and no more
LIKE_GRADIENTS = 1e-3
Make = Callable[..., Contender]  # of rows, and pass_tokens: the tokens of a forward pass


def by_row(base: Path, rows: pa.Table, *, pass_tokens: int) -> Learner:
    """Return this learner with a sequence for each row."""
    return Learner(base, one_step_each(rows), pass_tokens=pass_tokens)


def contenders(base: Path) -> dict[str, Make]:
    made: dict[str, Make] = {
        "learner": partial(Learner, base),
        "by_row": partial(by_row, base),
        "hf_loop": partial(HfLoop, base),
    }
    if HAS_TRL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the version of vLLM, which is not used
            from support.learner_trl import TrlTrainer

        made["trl"] = partial(TrlTrainer, base)
    return made


def compared(
    made: Mapping[str, Make], rows: pa.Table, *, sizes: tuple[int, ...], repeats: int
) -> dict[str, Seat]:
    """Measure each contender with the pass size that suits it best; return their seats."""
    size_of = dict.fromkeys(made, sizes[0])
    if len(sizes) > 1:
        trials = {
            f"{name} {size}": partial(make, rows, pass_tokens=size)
            for name, make in made.items()
            for size in sizes
        }
        with seated(trials) as tried:
            in_turns(tried, repeats=2)
        size_of = {
            name: min(sizes, key=lambda size: tried[f"{name} {size}"].best_s) for name in made
        }
    suited = {name: partial(make, rows, pass_tokens=size_of[name]) for name, make in made.items()}
    with seated(suited) as seats:
        in_turns(seats, repeats=repeats)
    norms = {name: seat.grad_norm for name, seat in seats.items()}
    if max(norms.values()) - min(norms.values()) > LIKE_GRADIENTS * max(norms.values()):
        raise SystemExit(
            f"the contenders do not compute the same: their first gradients' norms are {norms}"
        )
    for name, seat in seats.items():
        tokens_per_s = n_tokens(rows) / seat.best_s
        print(
            f"  {name:12s} {tokens_per_s:9,.0f} tokens/s, {seat.peak_mib:6,.0f} MiB, passes of "
            f"{size_of[name]:6,d} tokens"
        )
    return seats


def in_turns(seats: Mapping[str, Seat], *, repeats: int) -> None:
    for _ in range(1 + repeats):
        for seat in seats.values():
            seat.update()


def ratio(seats: Mapping[str, Seat], name: str) -> float | None:
    return round(seats[name].best_s / seats["learner"].best_s, 2) if name in seats else None


def measure(base: Path, *, quick: bool) -> dict[str, float | None]:
    sizes = (1024,) if quick else (1024, 4096, 16384)
    repeats, rng = (3 if quick else 5), np.random.default_rng(0)
    made, figures = contenders(base), dict.fromkeys(REQUIRED)
    vocabulary = TinyModelConfig().vocabulary_size
    if not HAS_TRL:
        print("trl is not installed, so over_trl is null; `pip install 'trl>=1.16'`")
    for mix in ("equal", "all_response", "real") if quick else MIXES:
        # powers of two: TRL's passes all have as many rows
        n_rows = 128 if quick else 256
        if mix == "long_tail":
            n_rows = 16
        rows = make_rows(MIXES[mix](rng, n_rows), rng=rng, vocabulary=vocabulary)
        print(f"{mix}: {n_rows} rows, {n_tokens(rows):,} tokens")
        rivals = {name: make for name, make in made.items() if name != "by_row"}
        seats = compared(rivals, rows, sizes=sizes, repeats=repeats)
        figures |= {
            f"over_hf_loop_{mix}": ratio(seats, "hf_loop"),
            f"over_trl_{mix}": ratio(seats, "trl"),
        }
        figures |= {f"peak_mib_{mix}_{name}": round(seat.peak_mib) for name, seat in seats.items()}
    rows = make_histories(8 if quick else 32, rng=rng, vocabulary=vocabulary)
    print(f"histories: {rows.num_rows} rows, {n_tokens(rows):,} tokens")
    seats = compared(
        {name: made[name] for name in ("learner", "by_row")}, rows, sizes=sizes, repeats=repeats
    )
    figures |= {
        "merged_over_rows": ratio(seats, "by_row"),
        "over_hf_loop_real_lengths": figures.pop("over_hf_loop_real"),
        "over_trl": figures.pop("over_trl_real"),
        "peak_mib_merged": round(seats["learner"].peak_mib),
        "peak_mib_by_row": round(seats["by_row"].peak_mib),
    }
    return figures


def missed(figures: Mapping[str, float | None]) -> list[str]:
    """Return the names of the figures that were measured and are not as required."""
    measured = {name: figure for name, figure in figures.items() if figure is not None}
    too_low = [name for name, bound in AT_LEAST.items() if measured.get(name, bound) < bound]
    return too_low + [name for name, bound in BELOW.items() if measured.get(name, 0.0) >= bound]


def published_ms(base: Path, directory: Path, *, quick: bool) -> float:
    """Return the median of several publishes."""
    directory.mkdir()
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:-1]) or "0"
    publishes = 5 if quick else 15
    times_ms = publish_to_serve(base, publishes=publishes, cores=cores, directory=directory)
    print(f"publish to serve, {base.name}, in ms:", *(f"{time_ms:.0f}" for time_ms in times_ms))
    return round(statistics.median(times_ms), 1)


def main() -> None:
    parser = quick_parser(__doc__, quick="fewer rows, mixes and repeats, under a minute")
    parser.add_argument(
        "--model",
        type=Path,
        help="a model directory whose publishing is measured too: SmolLM2-135M",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        base = directory / "tiny"
        make_random_tiny(base, seed=0)
        figures = measure(base, quick=args.quick)
        figures["publish_to_serve_ms"] = published_ms(
            base, directory / "published", quick=args.quick
        )
        if args.model is not None:
            figures["publish_to_serve_model_ms"] = published_ms(
                args.model, directory / "published_model", quick=args.quick
            )
    show_table({name: figures[name] for name in REQUIRED}, REQUIRED)
    print(json.dumps(figures))
    if missed(figures) and not args.quick:
        raise SystemExit(f"missed: {', '.join(missed(figures))}")


if __name__ == "__main__":
    main()
