"""Train one policy with DeepSpeed: forward pass, loss, gradient, optimizer update.

    engine = Engine(
        model_path=base, model=config.model, learner=config.learner, loss=config.loss,
        temperature=1.0, seed=0,
    )
    stats = engine.train([micro_batches(rows, ...)])    # one optimizer update per list
    for name, tensor in engine.weights(): ...           # Hugging Face names, to publish
    engine.close()

It knows nothing of files, Ray or the store. One process is one rank and has one engine at a time.
With several `learner.ranks` all engines call the same methods with the same arguments at the same
time (`rank_group.py`). Rank r computes micro-batches r, r + ranks, ...; results are about all of
them. Ranks of one sequence group compute the same micro-batches together and count as one rank
there (`sequence_group.py`). Letters as in `micro_batch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from configs import (
    Config,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    has_critic,
    is_served,
    sequence_groups,
    serves_adapters,
)
from gigpo import BatchTotals, Tokens, ess, interpolated_proximal, log_ratio
from learner.data.micro_batch import MicroBatch
from learner.data.updates import Update, share_of_update
from learner.distributed.deepspeed_setup import (
    PARTITIONED,
    adapters_in_tf32,
    from_all_ranks,
    initialize,
    initialize_frozen,
    join_ranks,
    own_elements,
    prepare_device,
)
from learner.distributed.optimizer_state import trainable
from learner.distributed.partitioned_load import is_partitioned
from learner.distributed.sequence_group import join_sequence_group
from learner.interface import NonFiniteWeightsError
from learner.loss_settings import objective_of
from learner.model.lora import adapter_weights, adapters_off, add_adapters, merged
from learner.model.policy_model import PolicyModel, load_policy
from learner.model.vision import names_to_publish
from learner.training.critic import Critic, CriticStats
from learner.training.gradient import add_gradient, apply_gradient, share_of_rank
from learner.training.step_metrics import Pass, UpdateStats, gathered, token_values, update_stats

# Share of the learning rate that the last update of the linear schedule has: not 0, so it counts.
LINEAR_END = 0.1


class Engine:
    """A model, its optimizer and, if `kl_coef` > 0, a frozen copy of the base model.

    With a teacher's directory there is that model too. Each rank has them whole, or at ZeRO 3 its
    parts of them. `critic` asks for a value network beside it, see `critic.py`; None: no such
    network.

    With `model.lora_rank` only adapters are trained, and the base model is the policy without them:
    no copy. `address` is the rendezvous of several ranks (`deepspeed_setup.host_ranks`). Every rank
    reads the whole model into main memory once, but at ZeRO 3 (`partitioned_load.py`).
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
        critic: CriticConfig | None = None,
        rank: int = 0,
        address: str | None = None,
    ) -> None:
        self.objective = objective_of(loss)
        prepare_device(learner)
        torch.manual_seed(seed)
        self.learner = learner
        self.rank = rank
        self.ranks = learner.ranks
        self.group, self.groups = rank // learner.sequence_parallel, sequence_groups(learner)
        self.n_updates = 0  # optimizer updates that were applied; the schedule counts in them
        join_ranks(rank, ranks=self.ranks, address=address)  # before ZeRO 3 divides a model
        self.policy = _load(model_path, model, learner=learner, temperature=temperature)
        self.names = names_to_publish(Path(model_path), policy=self.policy, learner=learner)
        self.has_adapters = model.lora_rank > 0
        self.publishes_adapters = serves_adapters(model)
        if self.has_adapters:
            tf32 = adapters_in_tf32(learner, model)
            add_adapters(
                self.policy.causal_lm, rank=model.lora_rank, alpha=model.lora_alpha, tf32=tf32
            )
        # In DeepSpeed's bf16 mode adapters would be rounded like their base.
        trained_dtype = "float32" if self.has_adapters else model.dtype
        self.deepspeed = initialize(self.policy, dtype=trained_dtype, learner=learner)
        self.policy.check_on_device(self.deepspeed.device)
        if sequence_group := join_sequence_group(learner):
            self.policy.share_tokens(sequence_group)
        self._frozen: list[Any] = []  # DeepSpeed's engines of models that are not trained
        self.reference: PolicyModel | None = None
        if self.objective.kl_coef > 0.0 and not self.has_adapters:
            self.reference = self._load_frozen(model_path, model, temperature=temperature)
        self.teacher: PolicyModel | None = None
        if loss.teacher and not is_served(loss.teacher):
            self.teacher = self._load_frozen(loss.teacher, model, temperature=temperature)
        self.critic: Critic | None = None
        if critic is not None:
            self.critic = Critic(
                model_path=model_path,
                model=model,
                critic=critic,
                learner=learner,
                rank=rank,
            )

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        """Apply one optimizer update per list of micro-batches: those of one learner step.

        They share one proximal policy, the one before the first update. Raises
        NonFiniteWeightsError on every rank if the policy must not be published.
        """
        stats = self._train(updates)
        outcomes = zip(updates, stats, strict=True)
        applied = [batches for batches, outcome in outcomes if not outcome.skipped]
        if applied and not self._is_finite(applied[0]):
            raise NonFiniteWeightsError(
                "the weights, or log-probabilities by them, are not finite or too large to compute "
                "with"
            )
        return stats

    def train_critic(self, updates: Sequence[Sequence[MicroBatch]]) -> list[CriticStats]:
        """Apply one optimizer update of the critic per list of micro-batches."""
        assert self.critic is not None
        return [self.critic.update(batches) for batches in updates]

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the critic's values_N per micro-batch. See `Critic.values`."""
        assert self.critic is not None
        return self.critic.values(micro_batches)

    def _train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        if self.objective.proximal != "recomputed":
            return [self.update(batches) for batches in updates]
        scores = [self.score(batches) for batches in updates]
        anchored = [
            with_proximal(batches, scored) for batches, scored in zip(updates, scores, strict=True)
        ]
        # The first update sees the policy that was scored; later ones need their own scores.
        return [
            self.update(batches, scores=None if index else scores[0])
            for index, batches in enumerate(anchored)
        ]

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        scores: Sequence[torch.Tensor] | None = None,
    ) -> UpdateStats:
        """Apply one optimizer update with the gradient over all `micro_batches`.

        The result does not depend on how they were cut. They come from one table: equal rows_N are
        one sequence. With loss.proximal=recomputed they come from `with_proximal`. `scores` are the
        current policy's; None: not computed yet. A loss or gradient that is not finite changes
        nothing, on all ranks.
        """
        mine = share_of_rank(micro_batches, rank=self.group, ranks=self.groups)
        totals = BatchTotals(
            n_tokens=sum(batch.n_response_tokens for batch in micro_batches),
            n_sequences=sum(batch.n_rows for batch in micro_batches),
        )
        if scores is None:
            needs_scores = self.objective.batch_wide or self.learner.ess_scaled
            scores = self.score(micro_batches) if needs_scores else []
        learning_rate = scheduled(self.learner, n_updates=self.n_updates)
        if self.learner.ess_scaled:
            learning_rate *= _ess_fraction(micro_batches, scores)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        factors: Sequence[torch.Tensor] = []
        if self.objective.batch_wide:
            factors = self.batch_wide_factors(micro_batches, scores)[self.group :: self.groups]
        passes = []
        for index, batch in enumerate(mine):
            factor_N = factors[index].to(self.deepspeed.device) if factors else None
            passes.append(
                self._backward(
                    batch.to(self.deepspeed.device),
                    factor_N=factor_N,
                    totals=totals,
                    is_last=index == len(mine) - 1,
                )
            )
        grad_norm = apply_gradient(self.deepspeed)
        skipped = not math.isfinite(grad_norm)
        self.n_updates += not skipped
        losses = [one.loss.cpu() for one in passes]
        figures = [one.figures_6N.cpu() for one in passes]
        everyone = [
            Pass(loss=loss, figures_6N=figures_6N)
            for loss, figures_6N in zip(
                gathered(losses, micro_batches, ranks=self.ranks),
                gathered(figures, micro_batches, ranks=self.ranks),
                strict=True,
            )
        ]
        return update_stats(
            micro_batches,
            everyone,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=skipped,
        )

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the current policy's logprobs_N per micro-batch: float32, on the CPU, detached."""
        mine = share_of_rank(micro_batches, rank=self.group, ranks=self.groups)
        with torch.no_grad():
            scores = [self.policy(batch.to(self.deepspeed.device))[0].cpu() for batch in mine]
        return gathered(scores, micro_batches, ranks=self.ranks)

    def batch_wide_factors(
        self, batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the corrections' factors per micro-batch, from all of the update's scores.

        A correction that ranks tokens would otherwise drop different ones with every cut.
        """
        pairs = zip(batches, scores, strict=True)
        tokens = _joined([self._tokens(batch, score_N) for batch, score_N in pairs])
        n_tokens = [batch.n_response_tokens for batch in batches]
        return list(self.objective.factor(tokens).split(n_tokens))

    def loss(
        self,
        batch: MicroBatch,
        policy: torch.nn.Module,
        *,
        factor_N: torch.Tensor | None,
        totals: BatchTotals,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a micro-batch's share of the update's loss, and its `token_values`.

        The micro-batch is on the device; `totals` are the update's. `policy` is `self.deepspeed`
        for training, or `self.policy` for a look without an effect on DeepSpeed.
        """
        reference_logprobs_N = None
        if self.objective.kl_coef > 0.0:
            reference_logprobs_N = self._reference_logprobs(batch)
        logprobs_N, entropy_N = policy(batch)
        tokens = self._tokens(batch, logprobs_N)
        if self.teacher is not None:
            with torch.no_grad():
                teacher_N, _ = self.teacher(batch)
            tokens = replace(tokens, teacher_logprobs_N=teacher_N)
        terms = self.objective(
            tokens,
            reference_logprobs_N=reference_logprobs_N,
            entropy_N=entropy_N,
            factor_N=factor_N,
        )
        loss = self.objective.aggregation(terms.loss_N, tokens.sequence_N, totals)
        return loss, token_values(terms, logprobs_N=logprobs_N, entropy_N=entropy_N)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) of every weight once, with adapters merged.

        A tied output layer has no entry. All ranks iterate to the end together; at ZeRO 3 the
        weights are gathered layer by layer. They are on the engine's device, and may be the
        model's own storage: use each before the next one.
        """
        for name, tensor in merged(self.policy.causal_lm):
            yield self.names.get(name, name), tensor

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the version's files, tensor) of what engines need of this policy.

        With `model.lora_serving=adapter` those are the adapters, else `weights`. The same rules
        hold.
        """
        if self.publishes_adapters:
            return adapter_weights(self.policy.causal_lm)
        return self.weights()

    def close(self) -> None:
        """Free DeepSpeed's memory. The process group stays for the next engine of this process."""
        if self.critic is not None:
            self.critic.close()
        for engine in (*self._frozen, self.deepspeed):
            engine.destroy()

    def _load_frozen(
        self, path: str | Path, model: ModelConfig, *, temperature: float
    ) -> PolicyModel:
        """Load a model that is not trained, on this rank's device. All ranks call it together."""
        frozen = _load(path, model, learner=self.learner, temperature=temperature)
        frozen.requires_grad_(False)
        if is_partitioned(frozen):
            engine = initialize_frozen(frozen, dtype=model.dtype, learner=self.learner)
            self._frozen.append(engine)
        else:
            frozen.to(self.deepspeed.device)
        if sequence_group := join_sequence_group(self.learner):
            frozen.share_tokens(sequence_group)
        return frozen

    def _is_finite(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether the weights' norm and a short sequence's log-probabilities are finite.

        Both are needed: if weights are so large that their squares overflow, the model's own norms
        give 0 and the log-probabilities are uniform, hence finite, although the policy is lost.
        """
        parameters = trainable(self.policy.causal_lm).values()
        weights_norm = torch.nn.utils.get_total_norm(map(own_elements, parameters))
        mine = share_of_rank(micro_batches, rank=self.group, ranks=self.groups)
        # The shortest sequence is the cheapest pass over real tokens.
        short = mine[0].only_sequence(int(mine[0].bounds_Sp1.diff().argmin()))
        with torch.no_grad():
            logprobs_N, _ = self.policy(short.to(self.deepspeed.device))
        is_finite = bool(weights_norm.isfinite()) and bool(logprobs_N.isfinite().all())
        return all(from_all_ranks(is_finite, ranks=self.ranks))

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
            teacher_logprobs_N=batch.teacher_logprobs_N,
        )

    def _backward(
        self,
        batch: MicroBatch,
        *,
        factor_N: torch.Tensor | None,
        totals: BatchTotals,
        is_last: bool,
    ) -> Pass:
        loss, figures_6N = self.loss(batch, self.deepspeed, factor_N=factor_N, totals=totals)
        share = share_of_update(totals.n_sequences, rows_per_update=self.learner.rows_per_update)
        add_gradient(self.deepspeed, loss, scale=self.ranks * share, is_last=is_last)
        return Pass(loss=loss.detach(), figures_6N=figures_6N)

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            if self.reference is not None:
                return self.reference(batch)[0]
            with adapters_off(self.policy.causal_lm):
                return self.policy(batch)[0]


class Trainer(Protocol):
    """Train a policy and its critic: an Engine, or a RankGroup of several."""

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]: ...

    def train_critic(self, updates: Sequence[Sequence[MicroBatch]]) -> list[CriticStats]: ...


def train_batch(
    trainer: Trainer, updates: Sequence[Update], *, config: Config, learner_step: int
) -> tuple[list[UpdateStats], list[CriticStats]]:
    """Apply a learner step's updates: to the critic, if the run has one, and to the policy.

    In the first `critic.warmup_steps` learner steps the policy is left as it is.
    """
    batches = [update.micro_batches for update in updates]
    if not batches:
        return [], []
    if not has_critic(config):
        return trainer.train(batches), []
    critic = trainer.train_critic(batches)
    if learner_step <= config.critic.warmup_steps:
        return [], critic
    return trainer.train(batches), critic


def scheduled(learner: LearnerConfig, *, n_updates: int) -> float:
    """Return the learning rate of the update after `n_updates` applied ones.

    It rises linearly from learning_rate / warmup_updates to learning_rate during the warm-up. With
    the "linear" schedule it is multiplied by a factor that falls from 1 at the first update to
    LINEAR_END at the last of the run.

    There is no other state. So a run continued with another learner.steps jumps to the line of its
    new length: after 100 of 100 updates the factor is 0.1, after 100 of 200 it is 0.55.
    """
    warm = min(1.0, (n_updates + 1) / max(1, learner.warmup_updates))
    last = learner.steps * learner.updates_per_step - 1
    fall = 0.0
    if learner.schedule == "linear":
        fall = (1.0 - LINEAR_END) * min(1.0, n_updates / max(1, last))
    return learner.learning_rate * warm * (1.0 - fall)


def with_proximal(
    micro_batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]
) -> list[MicroBatch]:
    """Attach the `Engine.score` of each micro-batch as proximal policy, for decoupled PPO."""
    return [
        replace(batch, proximal_logprobs_N=score_N)
        for batch, score_N in zip(micro_batches, scores, strict=True)
    ]


def _ess_fraction(batches: Sequence[MicroBatch], scores: Sequence[torch.Tensor]) -> float:
    """Return (sum rho)^2 / (n sum rho^2) over the update's n tokens, with rho = pi / mu before it.

    It is 1 on policy and small on stale data. Unless another setting needs the scores anyway, it
    costs one forward pass over the update.
    """
    behaviour_N = torch.cat([batch.behaviour_logprobs_N for batch in batches])
    fraction = ess(torch.exp(log_ratio(torch.cat(list(scores)), behaviour_N)))
    # With a NaN among the scores the update will be skipped.
    return fraction if math.isfinite(fraction) else 1.0


def _load(
    path: str | Path, model: ModelConfig, *, learner: LearnerConfig, temperature: float
) -> PolicyModel:
    return load_policy(
        Path(path),
        dtype=model.dtype,
        gradient_checkpointing=model.gradient_checkpointing,
        temperature=temperature,
        float32_head=model.float32_head,
        divided_by=learner if learner.zero_stage == PARTITIONED else None,
    )


def _joined(parts: Sequence[Tokens]) -> Tokens:
    """Join the tokens of several micro-batches."""
    joined = {}
    for item in fields(Tokens):
        column = [getattr(part, item.name) for part in parts]
        joined[item.name] = None if column[0] is None else torch.cat(column)
    return Tokens(**joined)
