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
from dataclasses import dataclass
from pathlib import Path

import torch

from configs import LearnerConfig, LossConfig, ModelConfig
from gigpo import POLICY_LOSSES, clip_fraction, ess, kl_k3, mismatch_kl, ratio_range, token_mean
from learner.batch import MicroBatch
from learner.deepspeed_setup import initialize
from learner.policy_model import PolicyModel, load_policy

LINEAR_END = 0.1  # of the learning rate, at the end of the linear schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One optimizer update, over all its tokens. What is not finite is inf: a NaN would be NULL in the catalog."""

    loss: float  # what was differentiated: policy loss, plus kl_coef * KL, minus entropy_coef * entropy
    kl: float  # mean k3 estimate to the reference; 0 without a reference model
    entropy: float  # mean, nats
    grad_norm: float  # 2-norm before clipping
    learning_rate: float
    ratio_min: float  # of rho = pi / mu over the tokens
    ratio_mean: float
    ratio_max: float
    clip_fraction: float  # tokens that the trust region leaves without gradient
    ess: float  # effective sample size of rho as a fraction, 1 = on-policy
    mismatch_kl: float  # KL(mu || pi), nats
    n_rows: int
    n_tokens: int  # response tokens
    n_padded_tokens: int  # computed by the forward passes
    skipped: bool  # the loss or the gradient was not finite, so the weights stayed as they were


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Of one micro-batch, detached: its share of the update's loss (a scalar) and the values of its N tokens."""

    loss: torch.Tensor
    logprobs_N: torch.Tensor
    ratio_N: torch.Tensor
    clipped_N: torch.Tensor
    entropy_N: torch.Tensor
    kl_N: torch.Tensor


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
        if loss.policy not in POLICY_LOSSES:
            raise ValueError(f"loss.policy={loss.policy!r} is none of {sorted(POLICY_LOSSES)}")
        torch.manual_seed(seed)
        if not torch.cuda.is_available():
            torch.set_num_threads(learner.threads)
        self.learner, self.loss = learner, loss
        self.n_updates = 0  # optimizer updates that were applied; the warm-up counts in them
        self.policy = _load(model_path, model, temperature=temperature)
        self.deepspeed = initialize(self.policy, dtype=model.dtype, learner=learner)
        self.reference: PolicyModel | None = None
        if loss.kl_coef > 0.0:
            self.reference = _load(model_path, model, temperature=temperature).requires_grad_(False)
            self.reference.to(self.deepspeed.device)

    def update(self, micro_batches: Sequence[MicroBatch]) -> UpdateStats:
        """One optimizer update with the gradient of the token mean over all `micro_batches`."""
        n_tokens = sum(batch.n_response_tokens for batch in micro_batches)
        if not n_tokens:
            raise ValueError("an update needs at least one response token; leave empty batches out")
        learning_rate = scheduled(self.learner, n_updates=self.n_updates)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        passes = []
        for index, batch in enumerate(micro_batches):
            # By hand, because the number of micro-batches differs from update to update: the last one reduces.
            self.deepspeed.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            passes.append(self._backward(batch.to(self.deepspeed.device), n_tokens=n_tokens))
        grad_norm = self._step()
        skipped = not math.isfinite(grad_norm)
        self.n_updates += not skipped
        return _stats(passes, micro_batches, grad_norm=grad_norm, learning_rate=learning_rate, skipped=skipped)

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The current policy's logprobs_N of each micro-batch, on the CPU, without gradient."""
        with torch.no_grad():
            return [_forward(self.policy, batch.to(self.deepspeed.device))[0].cpu() for batch in micro_batches]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights by Hugging Face names, those of the loss. Not copies: read them before the next update."""
        return self.policy.weights()

    def close(self) -> None:
        """Frees what DeepSpeed holds; the process group stays for the next engine of this process."""
        self.deepspeed.destroy()

    def _backward(self, batch: MicroBatch, *, n_tokens: int) -> _Pass:
        logprobs_N, entropy_N = _forward(self.deepspeed, batch)
        policy = POLICY_LOSSES[self.loss.policy](
            logprobs_N,
            batch.behaviour_logprobs_N,
            batch.advantages_N,
            clip_low=self.loss.clip_low,
            clip_high=self.loss.clip_high,
            dual_clip=self.loss.dual_clip,
            tis_cap=self.loss.tis_cap,
        )
        loss_N, kl_N = policy.loss_N, torch.zeros_like(logprobs_N)
        if self.reference is not None:
            with torch.no_grad():
                reference_logprobs_N, _ = _forward(self.reference, batch)
            kl_N = kl_k3(logprobs_N, reference_logprobs_N)
            loss_N = loss_N + self.loss.kl_coef * kl_N
        if self.loss.entropy_coef:
            loss_N = loss_N - self.loss.entropy_coef * entropy_N
        loss = token_mean(loss_N, n_tokens)
        if not torch.isfinite(loss):
            # A non-finite loss may have a finite gradient. Made NaN, it cannot be overlooked, on no rank, in `_step`.
            loss = loss * math.nan
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        return _Pass(
            loss=loss.detach(),
            logprobs_N=logprobs_N.detach(),
            ratio_N=policy.ratio_N,
            clipped_N=policy.clipped_N,
            entropy_N=entropy_N.detach(),
            kl_N=kl_N.detach(),
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


def _stats(
    passes: Sequence[_Pass],
    micro_batches: Sequence[MicroBatch],
    *,
    grad_norm: float,
    learning_rate: float,
    skipped: bool,
) -> UpdateStats:
    """Over the tokens of all micro-batches at once: a ratio's ESS or maximum is not the mean of the micro-batches'."""
    ratio_N = torch.cat([p.ratio_N for p in passes])
    behaviour_logprobs_N = torch.cat([batch.behaviour_logprobs_N for batch in micro_batches]).to(ratio_N.device)
    ratio_min, ratio_max = ratio_range(ratio_N)
    return UpdateStats(
        loss=_finite_or_inf(sum(float(p.loss) for p in passes)),
        kl=_finite_or_inf(float(torch.cat([p.kl_N for p in passes]).mean())),
        entropy=_finite_or_inf(float(torch.cat([p.entropy_N for p in passes]).mean())),
        grad_norm=_finite_or_inf(grad_norm),
        learning_rate=learning_rate,
        ratio_min=_finite_or_inf(ratio_min),
        ratio_mean=_finite_or_inf(float(ratio_N.mean())),
        ratio_max=_finite_or_inf(ratio_max),
        clip_fraction=clip_fraction(torch.cat([p.clipped_N for p in passes])),
        ess=_finite_or_inf(ess(ratio_N)),
        mismatch_kl=_finite_or_inf(mismatch_kl(torch.cat([p.logprobs_N for p in passes]), behaviour_logprobs_N)),
        n_rows=sum(batch.input_ids_BT.shape[0] for batch in micro_batches),
        n_tokens=ratio_N.numel(),
        n_padded_tokens=sum(batch.n_padded_tokens for batch in micro_batches),
        skipped=skipped,
    )


def _finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
