"""DeepSpeed around one policy: forward, loss, gradient, optimizer update; nothing of files, Ray or the store.

    engine = Engine(model_path=base, model=c.model, learner=c.learner, loss=c.loss, temperature=1.0, seed=0)
    stats = engine.update(micro_batches(rows, micro_batch_tokens=16384))   # one optimizer update, however it is cut
    weights = engine.state_dict()                                          # Hugging Face names, to publish
    engine.close()

One process is one rank, and has one engine at a time. Letters as in `batch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from configs import LearnerConfig, LossConfig, ModelConfig
from gigpo import BatchTotals, Terms, Tokens, interpolated_proximal, token_diagnostics
from learner.batch import MicroBatch
from learner.deepspeed_setup import initialize
from learner.objective import objective_of
from learner.policy_model import PolicyModel, load_policy

LINEAR_END = 0.1  # of the learning rate, at the end of the linear schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One optimizer update, over all its tokens. What is not finite is inf: a NaN would be NULL in the catalog."""

    loss: float  # what was differentiated: policy loss, plus kl_coef * KL, minus entropy_coef * entropy
    kl: float  # mean estimate of the KL to the reference; 0 without a reference model
    entropy: float  # mean, nats
    grad_norm: float  # 2-norm before clipping
    learning_rate: float
    n_rows: int
    n_tokens: int  # response tokens
    n_padded_tokens: int  # computed by the forward passes
    skipped: bool  # the loss or the gradient was not finite, so the weights stayed as they were
    tokens: dict[str, float]  # gigpo's `token_diagnostics`: ratios, effective sample size, mismatch, what was dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Of one micro-batch, detached: its share of the update's loss (a scalar) and the values of its N tokens."""

    loss: torch.Tensor
    tokens: Tokens
    terms: Terms
    staleness_N: torch.Tensor
    entropy_N: torch.Tensor


class Engine:
    """Holds the model, the optimizer and, where `kl_coef` > 0, a frozen copy of the base model."""

    def __init__(
        self,
        *,
        model_path: str | Path,
        model: ModelConfig,
        learner: LearnerConfig,
        loss: LossConfig,
        temperature: float,
        seed: int,
    ) -> None:
        self.objective = objective_of(loss)
        torch.manual_seed(seed)
        if not torch.cuda.is_available():
            torch.set_num_threads(learner.threads)
        self.learner = learner
        self.n_updates = 0  # optimizer updates that were applied; the warm-up counts in them
        self.policy = _load(model_path, model, temperature=temperature)
        self.deepspeed = initialize(self.policy, dtype=model.dtype, learner=learner)
        self.reference: PolicyModel | None = None
        if self.objective.kl_coef > 0.0:
            self.reference = _load(model_path, model, temperature=temperature).requires_grad_(False)
            self.reference.to(self.deepspeed.device)

    def update(self, micro_batches: Sequence[MicroBatch]) -> UpdateStats:
        """One optimizer update with the gradient of the objective over all `micro_batches`, however they were cut.

        They are of one table: equal rows_N are one sequence. With loss.proximal=recomputed they come from `with_proximal`.
        """
        if not micro_batches:
            raise ValueError("an update needs at least one response token; leave empty batches out")
        totals = BatchTotals(
            n_tokens=sum(batch.n_response_tokens for batch in micro_batches),
            n_sequences=sum(batch.n_rows for batch in micro_batches),
        )
        learning_rate = scheduled(self.learner, n_updates=self.n_updates)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        factors = self._batch_wide_factors(micro_batches) if self.objective.batch_wide else [None] * len(micro_batches)
        passes = []
        for index, (batch, factor_N) in enumerate(zip(micro_batches, factors, strict=True)):
            # By hand, because the number of micro-batches differs from update to update: the last one reduces.
            self.deepspeed.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            passes.append(self._backward(batch.to(self.deepspeed.device), factor_N=factor_N, totals=totals))
        grad_norm = self._step()
        skipped = not math.isfinite(grad_norm)
        self.n_updates += not skipped
        n_padded_tokens = sum(batch.n_padded_tokens for batch in micro_batches)
        return _stats(
            passes,
            totals,
            n_padded_tokens=n_padded_tokens,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=skipped,
        )

    def with_proximal(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The same with the log-probabilities of the policy as it is now: the centre of decoupled PPO's trust region."""
        scores = self.score(micro_batches)
        return [replace(batch, proximal_logprobs_N=score_N) for batch, score_N in zip(micro_batches, scores, strict=True)]

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The current policy's logprobs_N of each micro-batch, on the CPU, without gradient."""
        with torch.no_grad():
            return [_forward(self.policy, batch.to(self.deepspeed.device))[0].cpu() for batch in micro_batches]

    def _batch_wide_factors(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The corrections' factors of each micro-batch, from a forward pass over all before the one that learns.

        A correction that ranks the update's tokens would, by micro-batch, drop others with every other cut.
        """
        scored = [self._tokens(batch, score_N) for batch, score_N in zip(micro_batches, self.score(micro_batches), strict=True)]
        factor_N = self.objective.factor(_joined(scored)).to(self.deepspeed.device)
        return list(factor_N.split([batch.n_response_tokens for batch in micro_batches]))

    def _tokens(self, batch: MicroBatch, logprobs_N: torch.Tensor) -> Tokens:
        proximal_N = batch.proximal_logprobs_N
        if self.objective.proximal == "interpolated":
            proximal_N = interpolated_proximal(logprobs_N, batch.behaviour_logprobs_N, batch.staleness_N)
        return Tokens(
            logprobs_N=logprobs_N,
            behaviour_logprobs_N=batch.behaviour_logprobs_N,
            advantages_N=batch.advantages_N,
            sequence_N=batch.rows_N,
            proximal_logprobs_N=proximal_N,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights by Hugging Face names, those of the loss. Not copies: read them before the next update."""
        return self.policy.weights()

    def close(self) -> None:
        """Frees what DeepSpeed holds; the process group stays for the next engine of this process."""
        self.deepspeed.destroy()

    def _backward(self, batch: MicroBatch, *, factor_N: torch.Tensor | None, totals: BatchTotals) -> _Pass:
        logprobs_N, entropy_N = _forward(self.deepspeed, batch)
        reference_logprobs_N = None
        if self.reference is not None:
            with torch.no_grad():
                reference_logprobs_N, _ = _forward(self.reference, batch)
        tokens = self._tokens(batch, logprobs_N)
        terms = self.objective(tokens, reference_logprobs_N=reference_logprobs_N, entropy_N=entropy_N, factor_N=factor_N)
        loss = self.objective.aggregation(terms.loss_N, tokens.sequence_N, totals)
        if not torch.isfinite(loss):
            # A non-finite loss may have a finite gradient. Made NaN, it cannot be overlooked, on no rank, in `_step`.
            loss = loss * math.nan
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        return _Pass(
            loss=loss.detach(),
            tokens=replace(tokens, logprobs_N=logprobs_N.detach()),
            terms=replace(terms, loss_N=terms.loss_N.detach()),
            staleness_N=batch.staleness_N,
            entropy_N=entropy_N.detach(),
        )

    def _step(self) -> float:
        """Clips and applies the gradient unless it is not finite; returns its norm.

        DeepSpeed's ZeRO and bf16 optimizers refuse such a gradient by themselves; at stage 0 nothing looks at it.
        """
        if self.deepspeed.zero_optimization():
            self.deepspeed.step()
            return float(self.deepspeed.get_global_grad_norm())
        gradients = [parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None]
        grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(grad_norm):
            self.deepspeed.step()
        else:
            self.deepspeed.zero_grad()
        return grad_norm


def scheduled(learner: LearnerConfig, *, n_updates: int) -> float:
    """The learning rate of the update after `n_updates`.

    Linear from learning_rate / warmup_updates at the first update to learning_rate at the last of the warm-up; with the
    "linear" schedule times a factor that falls from 1 at the first update to LINEAR_END at the last of the run.
    """
    warm = min(1.0, (n_updates + 1) / max(1, learner.warmup_updates))
    last = learner.steps * learner.updates_per_step - 1
    fall = (1.0 - LINEAR_END) * min(1.0, n_updates / max(1, last)) if learner.schedule == "linear" else 0.0
    return learner.learning_rate * warm * (1.0 - fall)


def _load(path: str | Path, model: ModelConfig, *, temperature: float) -> PolicyModel:
    return load_policy(
        Path(path),
        dtype=model.dtype,
        gradient_checkpointing=model.gradient_checkpointing,
        temperature=temperature,
    )


def _forward(module: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_N, entropy_N = module(batch.input_ids_BT, batch.positions_N, batch.response_ids_N)
    return logprobs_N, entropy_N


def _joined(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of several micro-batches as one."""
    columns = {item.name: [getattr(part, item.name) for part in parts] for item in fields(Tokens)}
    return Tokens(**{name: torch.cat(column) for name, column in columns.items() if column[0] is not None})


def _stats(
    passes: Sequence[_Pass],
    totals: BatchTotals,
    *,
    n_padded_tokens: int,
    grad_norm: float,
    learning_rate: float,
    skipped: bool,
) -> UpdateStats:
    """Over the tokens of all micro-batches at once: a ratio's ESS or maximum is not the mean of the micro-batches'."""
    return UpdateStats(
        loss=_finite_or_inf(sum(float(p.loss) for p in passes)),
        kl=_finite_or_inf(float(torch.cat([p.terms.kl_N for p in passes]).mean())),
        entropy=_finite_or_inf(float(torch.cat([p.entropy_N for p in passes]).mean())),
        grad_norm=_finite_or_inf(grad_norm),
        learning_rate=learning_rate,
        n_rows=totals.n_sequences,
        n_tokens=totals.n_tokens,
        n_padded_tokens=n_padded_tokens,
        skipped=skipped,
        tokens=token_diagnostics(
            _joined([p.tokens for p in passes]),
            factor_N=torch.cat([p.terms.factor_N for p in passes]),
            clipped_N=torch.cat([p.terms.clipped_N for p in passes]),
            staleness_N=torch.cat([p.staleness_N for p in passes]),
        ),
    )


def _finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
