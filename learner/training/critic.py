"""Train the critic: it values the state before each step, and has its own optimizer.

    critic = Critic(
        model_path=base, model=config.model, critic=config.critic, learner=config.learner,
        rank=0,
    )
    values = critic.values(batches)          # per micro-batch, float32 [N]
    stats = critic.update(batches)           # one optimizer update; batches with values, targets

The network is a language model's trunk, a copy of the policy's or a smaller one, with one linear
layer in place of its vocabulary. The value of a step is the output at the last token of its prompt,
before the first response token. The value of a token, for estimator `ppo`, is the output at the
token before it. It starts at 0 everywhere. With adapters in the policy the critic's trunk has
adapters too, and its value head is trained beside them.

It is trained on the policy's micro-batches, on the same ranks, in the same way. Letters as in
`micro_batch.py`; K values that are learnt of a micro-batch: one a row, or with `ppo` one a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs import CriticConfig, LearnerConfig, ModelConfig, sequence_groups
from gigpo import explained_variance, value_loss
from learner.data.micro_batch import MicroBatch
from learner.data.updates import share_of_update
from learner.distributed.deepspeed_setup import (
    PARTITIONED,
    adapters_in_tf32,
    initialize,
    shape_of,
)
from learner.distributed.sequence_group import join_sequence_group
from learner.model.lora import add_adapters
from learner.model.policy_model import PolicyModel, load_policy
from learner.training.gradient import add_gradient, apply_gradient, share_of_rank
from learner.training.step_metrics import finite_or_inf, gathered, means


class ValueHead(nn.Module):
    """Compute values_N = hidden_NH w + b in float32. It takes the place of an `OutputLayer`."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(
        self, hidden_NH: torch.Tensor, response_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, and 0 for the entropies that a policy has."""
        values_N1 = nn.functional.linear(hidden_NH.float(), self.weight.float(), self.bias.float())
        values_N = values_N1.squeeze(-1)
        return values_N, torch.zeros_like(values_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticStats:
    """One optimizer update of the critic, over all its values. Non-finite figures are inf."""

    loss: float
    grad_norm: float  # 2-norm before clipping
    value_mean: float  # before the update, in units of returns
    # share of the targets' variance that the values before the update explain, at most 1; None: all
    # targets are equal
    explained_variance: float | None
    clip_fraction: float  # values that moved by more than `critic.clip`, and have no gradient
    skipped: bool  # the loss or the gradient was not finite, so the weights did not change


class Critic:
    """A value network and its optimizer on one rank. `Engine` makes it, after joining the ranks."""

    def __init__(
        self,
        *,
        model_path: str | Path,
        model: ModelConfig,
        critic: CriticConfig,
        learner: LearnerConfig,
        rank: int,
    ) -> None:
        """Load the network, whose tokenizer is the policy's."""
        self.clip = critic.clip
        self.learner = learner
        self.ranks = learner.ranks
        self.group, self.groups = rank // learner.sequence_parallel, sequence_groups(learner)
        path = critic.path or str(model_path)
        self.network = _load(path, model, learner=learner)
        trained_dtype = "float32" if model.lora_rank else model.dtype
        own = replace(learner, learning_rate=critic.learning_rate)
        self.deepspeed = initialize(self.network, dtype=trained_dtype, learner=own)
        self.network.check_on_device(self.deepspeed.device)
        if sequence_group := join_sequence_group(learner):
            self.network.share_tokens(sequence_group)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the value before each response token per micro-batch: float32 [N], on the CPU."""
        mine = share_of_rank(micro_batches, rank=self.group, ranks=self.groups)
        with torch.no_grad():
            values = [self.network(batch.to(self.deepspeed.device))[0].cpu() for batch in mine]
        return gathered(values, micro_batches, ranks=self.ranks)

    def update(self, micro_batches: Sequence[MicroBatch]) -> CriticStats:
        """Apply one optimizer update: the mean of `gigpo.value_loss` over all values.

        The result does not depend on how they were cut. A loss or gradient that is not finite
        changes nothing, on all ranks.
        """
        n_rows = sum(batch.n_rows for batch in micro_batches)
        n_values = sum(batch.n_values for batch in micro_batches)
        share = share_of_update(n_rows, rows_per_update=self.learner.rows_per_update)
        mine = share_of_rank(micro_batches, rank=self.group, ranks=self.groups)
        done_4K = []
        for index, batch in enumerate(mine):
            is_last = index == len(mine) - 1
            loss, values_4K = self._loss(batch.to(self.deepspeed.device), n_values=n_values)
            add_gradient(self.deepspeed, loss, scale=self.ranks * share, is_last=is_last)
            done_4K.append(values_4K.cpu())
        grad_norm = apply_gradient(self.deepspeed)
        loss_K, clipped_K, old_K, targets_K = torch.cat(
            gathered(done_4K, micro_batches, ranks=self.ranks), dim=1
        )
        explained = explained_variance(old_K, targets_K)
        return CriticStats(
            loss=finite_or_inf(float(loss_K.mean())),
            grad_norm=finite_or_inf(grad_norm),
            value_mean=finite_or_inf(float(old_K.mean())),
            explained_variance=None if math.isnan(explained) else explained,
            clip_fraction=float(clipped_K.mean()),
            skipped=not math.isfinite(grad_norm),
        )

    def close(self) -> None:
        """Free DeepSpeed's memory."""
        self.deepspeed.destroy()

    def _loss(self, batch: MicroBatch, *, n_values: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a micro-batch's share of the loss; loss, clipped, old value and target [4, K]."""
        assert batch.values_N is not None and batch.value_targets_N is not None
        values_N, _ = self.deepspeed(batch)
        at_K = batch.valued_tokens()
        old_K, targets_K = batch.values_N[at_K], batch.value_targets_N[at_K]
        loss_K, clipped_K = value_loss(values_N[at_K], old_K, targets_K, clip=self.clip)
        # A filler has no values. Its loss of 0 depends on every parameter too, as each rank's must.
        loss = (loss_K.sum() + 0.0 * values_N.sum()) / n_values
        return loss, torch.stack([loss_K.detach(), clipped_K.float(), old_K, targets_K])


def critic_metrics(updates: Iterable[CriticStats]) -> dict[str, float]:
    """Return `critic/<name>`: each statistic's mean over the updates that have it."""
    return means(map(_named_statistics, updates))


def _named_statistics(update: CriticStats) -> dict[str, float]:
    known = {name: value for name, value in asdict(update).items() if value is not None}
    return {f"critic/{name}": float(value) for name, value in known.items()}


def _load(path: str, model: ModelConfig, *, learner: LearnerConfig) -> PolicyModel:
    network = load_policy(
        Path(path),
        dtype=model.dtype,
        gradient_checkpointing=model.gradient_checkpointing,
        temperature=1.0,
        divided_by=learner if learner.zero_stage == PARTITIONED else None,
    )
    causal_lm: Any = network.causal_lm
    embedding = causal_lm.get_input_embeddings().weight
    if model.lora_rank:
        tf32 = adapters_in_tf32(learner, model)
        add_adapters(causal_lm, rank=model.lora_rank, alpha=model.lora_alpha, tf32=tf32)
    causal_lm.set_output_embeddings(nn.Identity())  # a vocabulary's projection is never computed
    dtype = torch.float32 if model.lora_rank else embedding.dtype
    network.output = ValueHead(shape_of(embedding)[1], dtype=dtype)
    return network
