"""TRL's GRPO trainer without generation: its training loop, loss, clipping and optimizer.

    trl = TrlTrainer(base, rows, pass_tokens=4096)    # importing this needs trl
    grad_norm = trl.update()                          # one step over all rows

The trainer runs in a thread, held before each optimizer step until `update` asks for it, so that
other contenders can be measured in between. It ends with its process. One method is replaced:
`_generate_and_score_completions` returns the rows instead of generating, padded as TRL pads:
prompts on the left, completions on the right, to the longest of all rows. The time from
`on_step_begin` to `on_step_end` is measured, without loading the next (empty) batch and logging.
"""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from support.learner_contenders import CLIP, GRAD_CLIP, LEARNING_RATE, WEIGHT_DECAY, rows_per_pass
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

PATIENCE_S = 600.0
ENDLESS_STEPS = 1_000_000
SIDES = ("left", "right")


class TrlTrainer:
    """Fixed rows, one optimizer step over all of them for each `update`."""

    def __init__(self, base: Path, rows: pa.Table, *, pass_tokens: int) -> None:
        n_rows = rows_per_pass(rows, pass_tokens=pass_tokens)
        passes, remainder = divmod(rows.num_rows, n_rows)
        if remainder:
            raise ValueError(
                f"{rows.num_rows} rows in passes of {n_rows} leave {remainder} over; TRL drops them"
            )
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        # DeepSpeed wants it; TRL would take this for one process of several
        os.environ.pop("LOCAL_RANK", None)
        self._trainer = _FixedCompletions(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            args=GRPOConfig(
                output_dir=tempfile.gettempdir(),  # nothing is written
                per_device_train_batch_size=n_rows,
                gradient_accumulation_steps=passes,
                num_generations=2,  # the fewest it takes; the advantages are given
                max_steps=ENDLESS_STEPS,
                loss_type="dapo",  # the mean over the tokens of all rows
                beta=0.0,
                lr_scheduler_type="constant",
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                learning_rate=LEARNING_RATE,
                weight_decay=WEIGHT_DECAY,
                max_grad_norm=GRAD_CLIP,
                epsilon=CLIP,
            ),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": [""] * rows.num_rows}),
            processing_class=AutoTokenizer.from_pretrained(base),
            callbacks=[_Gate(self)],
        )
        self._trainer.completions = _as_trl_pads(rows)
        self._training = ThreadPoolExecutor(1).submit(self._trainer.train)
        # it failed: `update` must not wait
        self._training.add_done_callback(lambda _: self.done.release())

    def update(self) -> float:
        self.go.release()
        if not self.done.acquire(timeout=PATIENCE_S):
            raise TimeoutError(f"TRL made no step within {PATIENCE_S:g} s; give it fewer rows")
        if self._training.done():
            self._training.result()
        return self._trainer.grad_norm


class _Gate(TrainerCallback):
    """Hold the trainer before each optimizer step."""

    def __init__(self, owner: TrlTrainer) -> None:
        self.owner = owner

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.owner.go.acquire()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.owner.done.release()


class _FixedCompletions(GRPOTrainer):
    completions: dict[str, torch.Tensor]
    grad_norm: float

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.completions)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.grad_norm = float(norm)
        return norm


def _as_trl_pads(rows: pa.Table) -> dict[str, torch.Tensor]:
    """Return the tensors [rows, longest row] that TRL computes of generated completions."""
    prompts, responses, logprobs = (
        list(map(torch.tensor, rows[name].to_pylist()))
        for name in ("prompt_ids", "response_ids", "response_logprobs")
    )
    prompt_masks, response_masks = map(torch.ones_like, prompts), map(torch.ones_like, responses)
    left, right = (partial(pad_sequence, batch_first=True, padding_side=side) for side in SIDES)
    return {
        "prompt_ids": left(prompts),
        "prompt_mask": left(list(prompt_masks)),
        "completion_ids": right(responses),
        "completion_mask": right(list(response_masks)),
        "advantages": torch.tensor(rows["advantage"].to_pylist()),
        "old_per_token_logps": right(logprobs),
        "num_items_in_batch": torch.tensor(sum(len(row) for row in responses)),
    }
