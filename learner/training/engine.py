"""DeepSpeed around one policy: forward, loss, gradient, optimizer update; nothing of files, Ray or
the store.

    engine = Engine(model_path=base, model=c.model, learner=c.learner, loss=c.loss, temperature=1.0, seed=0)
    stats = engine.train([micro_batches(rows, ...)])         # one optimizer update for each list, however it is cut
    for name, tensor in engine.weights():                    # Hugging Face names, to publish
        ...
    engine.close()

One process is one rank, and has one engine at a time. With `learner.ranks` above 1 each rank has an
engine of its own, and all of them call the same methods with the same arguments at the same time
(`ranks.py` sees to it): rank r computes micro-batches r, r + ranks, ...; what a method returns is
about all of them. Letters as in `batch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from configs import LearnerConfig, LossConfig, ModelConfig
from gigpo import BatchTotals, Tokens, ess, interpolated_proximal, log_ratio
from learner.data.micro_batch import MicroBatch, share_of_update, shortest_sequence
from learner.distributed.deepspeed_setup import (
    forget_gradient,
    initialize,
    join_ranks,
    own_elements,
)
from learner.distributed.device import adapters_in_tf32, prepare_device
from learner.distributed.optimizer_state import trainable
from learner.model.lora import adapters_off, add_adapters, merged
from learner.model.policy_model import PolicyModel, load_policy
from learner.model.vision import names_to_publish
from learner.objective import objective_of
from learner.training.update_stats import (
    Pass,
    UpdateStats,
    from_all_ranks,
    gathered,
    token_values,
    update_stats,
)
from printable import UserError

LINEAR_END = 0.1  # of the learning rate, at the end of the linear schedule


class NonFiniteWeightsError(UserError, RuntimeError):
    """Updates with finite gradients left a policy that has no finite log-probabilities, or will not
    have any.
    """


class Engine:
    """Holds the model, the optimizer and, where `kl_coef` > 0, a frozen copy of the base model,
    whole on each rank.

    With `model.lora_rank` only adapters are trained, and the base model is the policy without them:
    no copy.

    `address` is where the ranks meet (`deepspeed_setup.host_ranks`); one rank alone needs none.
    Every rank reads the whole model into main memory once, also at ZeRO 3, where it then keeps its
    part.
    """

    def __init__(
        self,
        *,
        model_path: str | Path,
        model: ModelConfig,
        learner: LearnerConfig,
        loss: LossConfig,
        temperature: float,
        seed: int,
        rank: int = 0,
        address: str | None = None,
    ) -> None:
        self.objective = objective_of(loss)
        prepare_device(learner)
        torch.manual_seed(seed)
        self.learner, self.rank, self.ranks = learner, rank, learner.ranks
        self.n_updates = 0  # optimizer updates that were applied; the schedule counts in them
        self.policy = _load(model_path, model, temperature=temperature)
        self.names = names_to_publish(Path(model_path), self.policy, learner)
        self.has_adapters = model.lora_rank > 0
        if self.has_adapters:
            tf32 = adapters_in_tf32(learner, model)
            add_adapters(
                self.policy.causal_lm, rank=model.lora_rank, alpha=model.lora_alpha, tf32=tf32
            )
        join_ranks(rank, ranks=self.ranks, address=address)
        # bf16 mode would round adapters with their base
        trained_dtype = "float32" if self.has_adapters else model.dtype
        self.deepspeed = initialize(self.policy, dtype=trained_dtype, learner=learner)
        self.policy.check_on_device(self.deepspeed.device)
        self.reference: PolicyModel | None = None
        if self.objective.kl_coef > 0.0 and not self.has_adapters:
            self.reference = _load(model_path, model, temperature=temperature).requires_grad_(False)
            self.reference.to(self.deepspeed.device)

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        """One optimizer update for each list of micro-batches, in order: the updates of one learner
        step.

        They have one proximal policy, that of before the first of them. Raises NonFiniteWeightsError,
        on every rank, if the policy is no longer fit to be published.
        """
        stats = self._train(updates)
        applied = [
            batches for batches, stat in zip(updates, stats, strict=True) if not stat.skipped
        ]
        if applied and not self._is_finite(applied[0]):
            raise NonFiniteWeightsError(
                "the weights, or log-probabilities by them, are not finite or too large to compute "
                "with"
            )
        return stats

    def _train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        if self.objective.proximal != "recomputed":
            return [self.update(batches) for batches in updates]
        scores = [self.score(batches) for batches in updates]
        anchored = [
            with_proximal(batches, scored) for batches, scored in zip(updates, scores, strict=True)
        ]
        # Until the first update the policy is the proximal one; after it the others are to be
        # scored anew where that counts.
        return [
            self._update(batches, scores=None if k else scores[0])
            for k, batches in enumerate(anchored)
        ]

    def update(self, micro_batches: Sequence[MicroBatch]) -> UpdateStats:
        """One optimizer update with the gradient of the objective over all `micro_batches`, however
        they were cut.

        They are of one table: equal rows_N are one sequence. With loss.proximal=recomputed they
        come from `with_proximal`. A loss or gradient that is not finite leaves everything as it
        was, on all ranks.
        """
        return self._update(micro_batches, scores=None)

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The current policy's logprobs_N of every micro-batch, float32 on the CPU, without
        gradient.
        """
        mine = self._mine(micro_batches)
        with torch.no_grad():
            scores = [self.policy(batch.to(self.deepspeed.device))[0].cpu() for batch in mine]
        joined: list[torch.Tensor] = [torch.empty(0)] * len(micro_batches)
        for rank, scores_N in enumerate(from_all_ranks(torch.cat(scores), ranks=self.ranks)):
            of_rank = micro_batches[rank :: self.ranks]
            joined[rank :: self.ranks] = scores_N.split(
                [batch.n_response_tokens for batch in of_rank]
            )
        return joined

    def batch_wide_factors(
        self, batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The corrections' factors of each micro-batch, from the scores of the whole update.

        A correction that ranks the update's tokens would, by micro-batch or rank, drop others with
        every other cut.
        """
        scored = [
            self._tokens(batch, score_N) for batch, score_N in zip(batches, scores, strict=True)
        ]
        return list(
            self.objective.factor(_joined(scored)).split(
                [batch.n_response_tokens for batch in batches]
            )
        )

    def loss(
        self,
        batch: MicroBatch,
        policy: torch.nn.Module,
        *,
        factor_N: torch.Tensor | None,
        totals: BatchTotals,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The share of a micro-batch, which is on the device, in the loss of an update of `totals`,
        and its `token_values`.

        `policy` computes it: `self.deepspeed` to learn from it, `self.policy` to look at it.
        """
        reference_logprobs_N = (
            self._reference_logprobs(batch) if self.objective.kl_coef > 0.0 else None
        )
        logprobs_N, entropy_N = policy(batch)
        tokens = self._tokens(batch, logprobs_N)
        terms = self.objective(
            tokens,
            reference_logprobs_N=reference_logprobs_N,
            entropy_N=entropy_N,
            factor_N=factor_N,
        )
        loss = self.objective.aggregation(terms.loss_N, tokens.sequence_N, totals)
        return loss, token_values(terms, logprobs_N=logprobs_N, entropy_N=entropy_N)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights of the loss by Hugging Face names, each once: a tied output layer has no entry of
        its own. Adapters are merged into the weights they adapt.

        All ranks iterate to the end, together; at ZeRO 3 each weight is gathered when its turn
        comes. On rank 0 they are on the CPU, and not copies if the model is: use them before the
        next update.
        """
        for name, tensor in merged(self.policy.causal_lm):
            yield self.names.get(name, name), tensor.cpu() if self.rank == 0 else tensor

    def close(self) -> None:
        """Frees what DeepSpeed holds; the process group stays for the next engine of this
        process.
        """
        self.deepspeed.destroy()

    def _update(
        self, micro_batches: Sequence[MicroBatch], *, scores: Sequence[torch.Tensor] | None
    ) -> UpdateStats:
        """As `update`; `scores` are those of the policy as it is, None if nobody made them yet."""
        mine = self._mine(micro_batches)
        totals = BatchTotals(
            n_tokens=sum(batch.n_response_tokens for batch in micro_batches),
            n_sequences=sum(batch.n_rows for batch in micro_batches),
        )
        if scores is None:
            scores = (
                self.score(micro_batches)
                if self.objective.batch_wide or self.learner.ess_scaled
                else []
            )
        learning_rate = scheduled(self.learner, n_updates=self.n_updates)
        if self.learner.ess_scaled:
            learning_rate *= _ess_fraction(micro_batches, scores)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        factors = (
            self.batch_wide_factors(micro_batches, scores)[self.rank :: self.ranks]
            if self.objective.batch_wide
            else []
        )
        passes = []
        for index, batch in enumerate(mine):
            # By hand, because the number of micro-batches differs from update to update: the last
            # one reduces.
            self.deepspeed.set_gradient_accumulation_boundary(index == len(mine) - 1)
            factor_N = factors[index].to(self.deepspeed.device) if factors else None
            passes.append(
                self._backward(batch.to(self.deepspeed.device), factor_N=factor_N, totals=totals)
            )
        grad_norm = self._step()
        skipped = not math.isfinite(grad_norm)
        self.n_updates += not skipped
        everyone = gathered(passes, micro_batches, ranks=self.ranks)
        return update_stats(
            micro_batches,
            everyone,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=skipped,
        )

    def _is_finite(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Whether the policy can be computed with: the norm of its weights, and the
        log-probabilities of a short sequence on each rank, which were finite before an update of
        the `micro_batches`.

        Where weights are so large that their squares overflow, the model's norms give 0 and the
        log-probabilities are uniform: finite, though the policy is lost. So both are looked at.
        """
        weights_norm = torch.nn.utils.get_total_norm(
            map(own_elements, trainable(self.policy.causal_lm).values())
        )
        short = shortest_sequence(self._mine(micro_batches)[0])
        with torch.no_grad():
            logprobs_N, _ = self.policy(short.to(self.deepspeed.device))
        is_sound = bool(weights_norm.isfinite()) and bool(logprobs_N.isfinite().all())
        return all(from_all_ranks(is_sound, ranks=self.ranks))

    def _mine(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """This rank's share. At ZeRO 3 a pass needs all ranks, so a rank with fewer of them would
        wait for ever.
        """
        if not any(batch.n_response_tokens for batch in micro_batches):
            raise ValueError("an update needs at least one response token; leave empty batches out")
        if len(micro_batches) % self.ranks:
            raise ValueError(
                f"{len(micro_batches)} micro-batches cannot be shared by {self.ranks} ranks; cut "
                f"them with ranks={self.ranks}"
            )
        return micro_batches[self.rank :: self.ranks]

    def _tokens(self, batch: MicroBatch, logprobs_N: torch.Tensor) -> Tokens:
        proximal_N = batch.proximal_logprobs_N
        if self.objective.proximal == "interpolated":
            proximal_N = interpolated_proximal(
                logprobs_N, batch.behaviour_logprobs_N, batch.staleness_N
            )
        return Tokens(
            logprobs_N=logprobs_N,
            behaviour_logprobs_N=batch.behaviour_logprobs_N,
            advantages_N=batch.advantages_N,
            sequence_N=batch.rows_N,
            proximal_logprobs_N=proximal_N,
        )

    def _backward(
        self, batch: MicroBatch, *, factor_N: torch.Tensor | None, totals: BatchTotals
    ) -> Pass:
        loss, values_6N = self.loss(batch, self.deepspeed, factor_N=factor_N, totals=totals)
        # A non-finite loss may have a finite gradient. Made NaN, it cannot be overlooked, on no
        # rank, in `_step`. The totals are the whole update's, so ranks add up to its loss;
        # DeepSpeed takes their mean.
        full = self.ranks * share_of_update(
            totals.n_sequences, rows_per_update=self.learner.rows_per_update
        )
        scale = torch.where(torch.isfinite(loss.detach()), full, math.nan)
        self.deepspeed.backward(loss * scale, scale_wrt_gas=False)
        return Pass(loss=loss.detach(), values_6N=values_6N)

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            if self.reference is not None:
                return self.reference(batch)[0]
            with adapters_off(self.policy.causal_lm):
                return self.policy(batch)[0]

    def _step(self) -> float:
        """Clips and applies the gradient unless it is not finite; returns its norm, the same on all
        ranks.

        DeepSpeed's ZeRO optimizers refuse such a gradient by themselves; at stage 0 nothing looks
        at it.
        """
        if self.deepspeed.zero_optimization():
            self.deepspeed.step()
            grad_norm = float(self.deepspeed.get_global_grad_norm())
            if not math.isfinite(grad_norm):
                forget_gradient(self.deepspeed)
            return grad_norm
        gradients = [
            parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None
        ]
        grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(grad_norm):
            self.deepspeed.step()
        else:
            self.deepspeed.zero_grad()
        return grad_norm


def scheduled(learner: LearnerConfig, *, n_updates: int) -> float:
    """The learning rate of the update after `n_updates`.

    Linear from learning_rate / warmup_updates at the first update to learning_rate at the last of
    the warm-up; with the "linear" schedule times a factor that falls from 1 at the first update to
    LINEAR_END at the last of the run.

    A function of the updates applied and of the config, with no state of its own. So a run that
    goes on with another learner.steps jumps to the line of its new length: after 100 of 100 updates
    the factor is 0.1, and after 100 of 200 it is 0.55, as if 200 had been the number from the
    start. `loss/learning_rate` shows it.
    """
    warm = min(1.0, (n_updates + 1) / max(1, learner.warmup_updates))
    last = learner.steps * learner.updates_per_step - 1
    fall = (
        (1.0 - LINEAR_END) * min(1.0, n_updates / max(1, last))
        if learner.schedule == "linear"
        else 0.0
    )
    return learner.learning_rate * warm * (1.0 - fall)


def with_proximal(
    micro_batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]
) -> list[MicroBatch]:
    """The same with their `Engine.score` as the proximal policy: the centre of decoupled PPO's
    trust region.
    """
    return [
        replace(batch, proximal_logprobs_N=score_N)
        for batch, score_N in zip(micro_batches, scores, strict=True)
    ]


def _ess_fraction(batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]) -> float:
    """(sum rho)^2 / (n sum rho^2) over the update's n tokens, rho = pi / mu before it: 1 on policy,
    small on stale data.

    It costs a forward pass over the update before the one that learns, unless a correction or, at a
    learner step's first update, the recomputed proximal policy needs that anyway.
    """
    behaviour_N = torch.cat([batch.behaviour_logprobs_N for batch in batches])
    fraction = ess(torch.exp(log_ratio(torch.cat(list(scores)), behaviour_N)))
    # a NaN among the scores: the update will be skipped
    return fraction if math.isfinite(fraction) else 1.0


def _load(path: str | Path, model: ModelConfig, *, temperature: float) -> PolicyModel:
    return load_policy(
        Path(path),
        dtype=model.dtype,
        gradient_checkpointing=model.gradient_checkpointing,
        temperature=temperature,
    )


def _joined(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of several micro-batches as one."""
    columns = {item.name: [getattr(part, item.name) for part in parts] for item in fields(Tokens)}
    return Tokens(
        **{name: torch.cat(column) for name, column in columns.items() if column[0] is not None}
    )
