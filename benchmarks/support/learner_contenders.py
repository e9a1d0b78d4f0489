"""Two contenders of benchmarks/learner.py: this learner, and a plain Hugging Face loop.

    loop = HfLoop(base, rows, pass_tokens=4096)
    grad_norm = loop.update()    # one update over all rows: pad, forward, loss, backward, AdamW

Rows, model, float32, loss (PPO-clip around the recorded log-probabilities, mean over the tokens of
all rows) and optimizer (AdamW, clipped gradient) are the same for all. So the first update's
gradient must have the same norm. TRL's trainer is in learner_trl.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from configs import LearnerConfig, LossConfig, ModelConfig
from learner.data.micro_batch import micro_batches
from learner.training.engine import Engine

LEARNING_RATE = 1e-6
WEIGHT_DECAY = 0.01
GRAD_CLIP = 1.0
CLIP = 0.2
NO_DUAL_CLIP = 1e9  # the others have none


class Learner:
    """Run this learner on one rank: pack the rows, make one update with all its statistics."""

    def __init__(self, base: Path, rows: pa.Table, *, pass_tokens: int) -> None:
        self.rows = rows
        self.pass_tokens = pass_tokens
        self.engine = Engine(
            model_path=base,
            model=ModelConfig(),
            learner=LearnerConfig(
                learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, grad_clip=GRAD_CLIP
            ),
            loss=LossConfig(
                corrections=[],
                numbers={
                    "ppo_clip": {"clip_low": CLIP, "clip_high": CLIP, "dual_clip": NO_DUAL_CLIP}
                },
            ),
            temperature=1.0,
            seed=0,
        )

    def update(self) -> float:
        batches = micro_batches(self.rows, micro_batch_tokens=self.pass_tokens, ranks=1)
        (stats,) = self.engine.train([batches])
        return stats.grad_norm


class HfLoop:
    """Train in a loop as one writes it in half an hour.

    Rows are padded on the right in the order they come, and all positions get logits.
    """

    def __init__(self, base: Path, rows: pa.Table, *, pass_tokens: int) -> None:
        self.rows, self.rows_per_pass = rows, rows_per_pass(rows, pass_tokens=pass_tokens)
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )

    def update(self) -> float:
        records = self.rows.to_pylist()
        n_response_tokens = sum(len(row["response_ids"]) for row in records)
        for start in range(0, len(records), self.rows_per_pass):
            self._backward(records[start : start + self.rows_per_pass], n_response_tokens)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(grad_norm)

    def _backward(self, records: Sequence[dict[str, Any]], n_response_tokens: int) -> None:
        ids = []
        attended = []
        learned = []
        behaviour = []
        for row in records:
            n_prompt, n_response = len(row["prompt_ids"]), len(row["response_ids"])
            ids.append(row["prompt_ids"] + row["response_ids"])
            attended.append([1] * (n_prompt + n_response))
            learned.append([0] * n_prompt + [1] * n_response)
            behaviour.append([0.0] * n_prompt + row["response_logprobs"])
        ids_BT, attended_BT, learned_BT, behaviour_BT = (
            _padded(rows) for rows in (ids, attended, learned, behaviour)
        )
        advantages_B1 = torch.tensor([[row["advantage"]] for row in records])
        logits_BTV = self.model(input_ids=ids_BT, attention_mask=attended_BT).logits
        logprobs_BTV = torch.log_softmax(logits_BTV[:, :-1].float(), -1)
        logprobs_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        ratio_BT = torch.exp(logprobs_BT - behaviour_BT[:, 1:])
        clipped_BT = ratio_BT.clamp(1.0 - CLIP, 1.0 + CLIP)
        loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
        ((loss_BT * learned_BT[:, 1:]).sum() / n_response_tokens).backward()


def rows_per_pass(rows: pa.Table, *, pass_tokens: int) -> int:
    """Return the most rows, a power of two, that fit `pass_tokens` when padded to the longest."""
    lengths = pc.add(
        pc.list_value_length(rows["prompt_ids"]), pc.list_value_length(rows["response_ids"])
    )
    fitting = max(1, pass_tokens // pc.max(lengths).as_py())
    return min(1 << (fitting.bit_length() - 1), rows.num_rows)


def _padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
