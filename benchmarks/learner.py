"""How fast the learner trains the tiny model on one core, and what each of its choices is worth.

    python benchmarks/learner.py [--quick]

Rows: about 120 prompt tokens (60 to 240), 8 response tokens. Each figure is the best of several updates, in CPU seconds
of the process, so that another program on the machine does not count. The last line is JSON; ratios above 1 are gains.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs import LearnerConfig, LossConfig, ModelConfig, TinyModelConfig
from gigpo import BatchTotals, Objective, PpoClip, Tokens, TokenTis
from learner import make_tiny_model, train_tokenizer, write_weights
from learner.batch import MicroBatch, micro_batches
from learner.engine import Engine

MEAN_PROMPT_TOKENS, PROMPT_TOKENS_RANGE, RESPONSE_TOKENS = 120, (60, 240), 8
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
OBJECTIVE = Objective(policy=PpoClip(), corrections=(TokenTis(),))  # what LossConfig() is


def make_rows(n_rows: int, *, vocabulary: int) -> pa.Table:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEAN_PROMPT_TOKENS), 0.3, n_rows), *PROMPT_TOKENS_RANGE).astype(int)
    behaviour = np.full((n_rows, RESPONSE_TOKENS), -np.log(vocabulary), dtype=np.float32)
    return pa.table(
        {
            "prompt_ids": pa.array([rng.integers(0, vocabulary, n).tolist() for n in lengths], pa.list_(pa.int32())),
            "response_ids": pa.array(rng.integers(0, vocabulary, (n_rows, RESPONSE_TOKENS)).tolist(), pa.list_(pa.int32())),
            "response_logprobs": pa.array(behaviour.tolist(), pa.list_(pa.float32())),
            "advantage": pa.array(rng.normal(size=n_rows), pa.float64()),
            "staleness": pa.array(np.zeros(n_rows, dtype=np.int64)),
        }
    )


def best_s(work: Callable[[], object], *, repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def padded_to_the_longest(rows: pa.Table, *, micro_batch_tokens: int) -> list[MicroBatch]:
    """What a trainer does that pads the batch once: equal numbers of rows a micro-batch, in order of arrival."""
    (whole,) = micro_batches(rows, micro_batch_tokens=sys.maxsize)
    width = whole.input_ids_BT.shape[1]
    per_batch = micro_batch_tokens // width
    batches = []
    for start in range(0, rows.num_rows, per_batch):
        (narrow,) = micro_batches(rows.slice(start, per_batch), micro_batch_tokens=sys.maxsize)
        narrow_width = narrow.input_ids_BT.shape[1]
        batches.append(
            MicroBatch(
                input_ids_BT=torch.nn.functional.pad(narrow.input_ids_BT, (0, width - narrow_width)),
                positions_N=narrow.positions_N // narrow_width * width + narrow.positions_N % narrow_width,
                response_ids_N=narrow.response_ids_N,
                behaviour_logprobs_N=narrow.behaviour_logprobs_N,
                advantages_N=narrow.advantages_N,
                staleness_N=narrow.staleness_N,
                rows_N=narrow.rows_N,
            )
        )
    return batches


def plain_update(engine: Engine, optimizer: torch.optim.Optimizer, batches: Sequence[MicroBatch]) -> None:
    """The same update in plain torch, without DeepSpeed and without statistics."""
    totals = BatchTotals(
        n_tokens=sum(batch.n_response_tokens for batch in batches), n_sequences=sum(batch.n_rows for batch in batches)
    )
    for batch in batches:
        logprobs_N, _ = engine.policy(batch.input_ids_BT, batch.positions_N, batch.response_ids_N)
        tokens = Tokens(
            logprobs_N=logprobs_N,
            behaviour_logprobs_N=batch.behaviour_logprobs_N,
            advantages_N=batch.advantages_N,
            sequence_N=batch.rows_N,
        )
        terms = OBJECTIVE(tokens, reference_logprobs_N=None, entropy_N=None)
        OBJECTIVE.aggregation(terms.loss_N, tokens.sequence_N, totals).backward()
    torch.nn.utils.clip_grad_norm_(engine.policy.parameters(), engine.learner.grad_clip)
    optimizer.step()
    optimizer.zero_grad()


def full_logits(engine: Engine, batches: Sequence[MicroBatch]) -> None:
    """Forward and backward with the vocabulary at every position, as a plain language-model loss computes it."""
    for batch in batches:
        logits_BTV = engine.policy.causal_lm(input_ids=batch.input_ids_BT).logits
        logprobs_BTV = torch.log_softmax(logits_BTV.float(), -1)
        logprobs_BTV.flatten(0, 1)[batch.positions_N, batch.response_ids_N].sum().backward()


def response_logits(engine: Engine, batches: Sequence[MicroBatch]) -> None:
    for batch in batches:
        logprobs_N, _ = engine.policy(batch.input_ids_BT, batch.positions_N, batch.response_ids_N)
        logprobs_N.sum().backward()


def measure(engine: Engine, base: Path, *, n_rows: int, repeats: int) -> dict[str, float | int]:
    rows = make_rows(n_rows, vocabulary=engine.policy.causal_lm.config.vocab_size)
    n_tokens = sum(len(ids) for name in ("prompt_ids", "response_ids") for ids in rows[name].to_pylist())
    packing_s = best_s(lambda: micro_batches(rows, micro_batch_tokens=4096), repeats=repeats)
    by_budget = {}
    for budget in BUDGETS:
        batches = micro_batches(rows, micro_batch_tokens=budget)
        by_budget[budget] = best_s(lambda batches=batches: engine.update(batches), repeats=repeats)
        padded = sum(batch.n_padded_tokens for batch in batches)
        print(
            f"micro_batch_tokens {budget:6d}: {len(batches):3d} micro-batches, padding {padded / n_tokens - 1:6.1%}, "
            f"update {by_budget[budget]:.3f} s, {n_tokens / by_budget[budget]:8.0f} tokens/s"
        )
    best = min(by_budget, key=by_budget.__getitem__)
    batches, naive = (cut(rows, micro_batch_tokens=best) for cut in (micro_batches, padded_to_the_longest))
    naive_s = best_s(lambda: engine.update(naive), repeats=repeats)
    optimizer = torch.optim.AdamW(engine.policy.parameters(), lr=engine.learner.learning_rate)
    plain_s = best_s(lambda: plain_update(engine, optimizer, batches), repeats=repeats)
    engine_s = best_s(lambda: engine.update(batches), repeats=repeats)
    full_s = best_s(lambda: full_logits(engine, batches), repeats=repeats)
    response_s = best_s(lambda: response_logits(engine, batches), repeats=repeats)
    engine.policy.zero_grad()
    engine.policy.causal_lm.set_attn_implementation("eager")
    eager_s = best_s(lambda: engine.update(batches), repeats=repeats)
    started = time.perf_counter()
    write_weights(engine.state_dict(), base.parent / "v000001", source_dir=base)
    return {
        "tokens_per_cpu_s": round(n_tokens / by_budget[best]),
        "response_tokens_per_cpu_s": round(n_rows * RESPONSE_TOKENS / by_budget[best]),
        "best_micro_batch_tokens": best,
        "bucketed_over_padded": round(naive_s / by_budget[best], 3),
        "deepspeed_over_plain_time": round(engine_s / plain_s, 3),
        "sdpa_over_eager": round(eager_s / engine_s, 3),
        "response_logits_over_full": round(full_s / response_s, 3),
        "packing_ms": round(packing_s * 1e3, 2),
        "publish_ms": round((time.perf_counter() - started) * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats, under a minute")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        words = " ".join(f"{a}{b}{c}" for a in "bcdfglmnprst" for b in "aeiou" for c in "bcdfglmnprst")
        tiny = TinyModelConfig()
        make_tiny_model(base, train_tokenizer([words], vocabulary_size=tiny.vocabulary_size), tiny, seed=0)
        engine = Engine(
            model_path=base,
            model=ModelConfig(),
            learner=LearnerConfig(threads=1),
            loss=LossConfig(),
            temperature=1.0,
            seed=0,
        )
        n_parameters = sum(parameter.numel() for parameter in engine.policy.parameters())
        vocabulary = engine.policy.causal_lm.config.vocab_size
        print(f"{n_parameters:,} parameters, vocabulary {vocabulary}, torch threads {torch.get_num_threads()}")
        figures = measure(engine, base, n_rows=96 if quick else 768, repeats=2 if quick else 7)
        engine.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
