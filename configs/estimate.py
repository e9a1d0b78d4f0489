"""Estimate what a run on GPUs needs, how fast it is, and what will wait for what.

    estimate = estimate_run(config)
    estimate.play_s, estimate.learn_s     # of a learner step: the longer one is the limit

This is arithmetic over the numbers of `assumptions.py`. No part of it was measured on a GPU. A run
on a CPU gets no rates: they depend on the machine too much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs.assumptions import (
    COORDINATOR_S,
    COPIED_BYTES_PER_S,
    ENGINE_BYTES,
    ENVIRONMENT_S,
    GPU_FLOPS,
    HASHED_BYTES_PER_S,
    LOADED_BYTES_PER_S,
    REACHED,
    SMALL_PARAMETERS,
    SMALL_REACHED,
    WORKER_S,
    WORTH_IT,
    WRITTEN_BYTES_PER_S,
)
from configs.derived import (
    gpus_needed,
    groups_of_a_step,
    has_critic,
    is_offline,
    least_workers,
    n_workers,
    replayed_groups,
)
from configs.engine_estimate import (
    EngineEstimate,
    Lengths,
    engine_estimate,
    mean_lengths,
    part_bytes,
)
from configs.learner_memory import critic_parameters, pass_bytes
from configs.memory_advice import advise, own_bytes, state_bytes
from configs.model_size import Shape, model_billions, model_shape
from configs.per_environment import environments
from configs.plan import GIB, checkpoint_bytes, version_bytes
from configs.schema import Config, WorkerRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    lengths: Lengths
    engine: EngineEstimate | None  # None: nothing is played
    state_bytes: float  # of a learner rank: weights, gradients, optimizer, reference
    activation_bytes: float  # of a micro-batch's passes, with the weights that ZeRO 3 gathers
    limits: dict[str, float]  # agent steps/s at most of all that play, by what limits them
    train_steps_per_s: float  # agent steps, without publishing
    n_played: float  # agent steps of a learner step
    n_trained: float
    play_s: float  # of a learner step, with the engines' pause for new weights
    train_s: float
    publish_s: float  # to copy and hash a version
    checkpoint_s: float  # to copy one, its part of a learner step
    write_s: float  # to write both, behind the next learner step
    is_synchronous: bool
    faults: list[str]  # what does not fit

    @property
    def learn_s(self) -> float:
        """Return the learner's time for a step. It waits until the files before are written."""
        return max(self.train_s + self.publish_s + self.checkpoint_s, self.write_s)

    @property
    def step_s(self) -> float:
        """Return the time from one learner step to the next."""
        both = self.play_s, self.learn_s
        return sum(both) if self.is_synchronous else max(both)

    @property
    def slowest(self) -> str:
        """Return what limits the players."""
        return min(self.limits, key=self.limits.__getitem__)


def estimate_run(config: Config) -> Estimate:
    """Return the estimate of a run whose engines and learner are on GPUs.

    Raises ConfigError if the model's size is unknown.
    """
    assert is_on_gpus(config), "CPUs differ too much"
    shape, lengths = model_shape(config), mean_lengths(config)
    parameters = model_billions(config) * 1e9
    engine = None
    if n_workers(config):
        engine = engine_estimate(config, shape, lengths, parameters=parameters)
    state = state_bytes(config, parameters=parameters)
    activations = pass_bytes(config, shape, parameters=parameters)
    limits = _play_limits(config, engine) if engine else {}
    train_steps_per_s = _train_steps_per_s(config, lengths, parameters=parameters)
    n_own, n_offline = groups_of_a_step(config)
    group_size = config.algorithm.group_size
    n_groups_trained = n_own + n_offline + replayed_groups(config)
    n_trained = n_groups_trained * (group_size * lengths.steps)
    n_played = n_own * (group_size + config.actors.extra_members) * lengths.steps
    version = version_bytes(config)
    checkpoint = checkpoint_bytes(config) / config.learner.checkpoint_every
    pause_s = version / max(1, round(config.actors.gpus_per_worker)) / LOADED_BYTES_PER_S
    return Estimate(
        lengths=lengths,
        engine=engine,
        state_bytes=state,
        activation_bytes=activations,
        limits=limits,
        train_steps_per_s=train_steps_per_s,
        n_played=n_played,
        n_trained=n_trained,
        play_s=n_played / min(limits.values()) + pause_s if limits else 0.0,
        train_s=n_trained / train_steps_per_s,
        publish_s=version / COPIED_BYTES_PER_S + version / HASHED_BYTES_PER_S,
        checkpoint_s=checkpoint / config.learner.ranks / COPIED_BYTES_PER_S,
        write_s=(version + checkpoint) / WRITTEN_BYTES_PER_S,
        is_synchronous=config.max_staleness == 0 and not is_offline(config),
        faults=[
            *(_engine_faults(config, engine, lengths) if engine else []),
            *_learner_faults(
                config, shape, parameters=parameters, state=state, activations=activations
            ),
        ],
    )


def misfits(config: Config) -> list[str]:
    """Say what of a run does not fit its GPUs; nothing of a run that has no estimate.

    Raises ConfigError if the model's size is unknown.
    """
    return estimate_run(config).faults if is_on_gpus(config) else []


def _engine_faults(config: Config, engine: EngineEstimate, lengths: Lengths) -> list[str]:
    """Say for what an engine's part of its GPUs is too small."""
    faults = []
    if engine.cache_tokens < lengths.prompt + lengths.response:
        faults.append(
            f"an engine has {engine.cache_bytes / GIB:.1f} GiB for its cache, too little for "
            "one request; set actors.gpus_per_worker=2, or more"
        )
    needed_bytes = engine.weights_bytes + engine.cache_bytes + ENGINE_BYTES
    own_bytes = part_bytes(config)
    if needed_bytes > own_bytes:
        faults.append(
            f"an engine needs {needed_bytes / GIB:.1f} GiB of {own_bytes / GIB:.1f}; set a smaller "
            "actors.kv_cache_gib, or a larger actors.gpus_per_worker"
        )
    return faults


def _learner_faults(
    config: Config, shape: Shape, *, parameters: float, state: float, activations: float
) -> list[str]:
    """Say whether a learner rank needs more than its part of a GPU, and what would help."""
    needed, own = state + activations, own_bytes(config)
    if needed <= own:
        return []
    alone = ""
    if state > own:
        alone = f", {state / GIB:.1f} of them for weights, gradients and optimizer alone"
    return [
        f"a learner rank needs {needed / GIB:.1f} GiB of {own / GIB:.1f}{alone}; "
        + advise(config, shape, parameters=parameters)
    ]


def is_on_gpus(config: Config) -> bool:
    """Return whether the learner, and the engines of a run that plays, are on GPUs."""
    has_engines = config.actors.gpus_per_worker > 0 and not config.actors.scripted
    return config.learner.gpus_per_rank > 0 and (has_engines or not n_workers(config))


def _play_limits(config: Config, engine: EngineEstimate) -> dict[str, float]:
    """Return the agent steps per second at most, by what limits them."""
    n_processes = sum(own.env.processes for own in environments(config).values())
    workers = least_workers(config.actors)
    return {
        "engines": workers * engine.steps_per_s,
        "environment processes": workers * n_processes / ENVIRONMENT_S,
        "workers' event loops": workers / WORKER_S,
        "coordinator": 1.0 / COORDINATOR_S,
    }


def _train_steps_per_s(config: Config, lengths: Lengths, *, parameters: float) -> float:
    """Return the agent steps that all ranks together train on in a second.

    Forward and backward pass take 6 N operations a token, 4 N with frozen weights. Each further
    forward pass takes 2 N: of checkpointed layers, of a reference or a teacher, of a recomputed
    proximal policy, of the check of stale data.
    """
    learner, loss = config.learner, config.loss
    passes = 4.0 if config.model.lora_rank else 6.0
    passes += 2.0 * config.model.gradient_checkpointing
    passes += 2.0 * (loss.kl_coef > 0) + 2.0 * bool(loss.teacher)
    passes += 2.0 * (loss.proximal == "recomputed") + 2.0 * learner.ess_scaled
    flops_of_token = passes * parameters
    if has_critic(config):  # its values are computed before it is trained
        flops_of_token += (8.0 + 2.0 * config.model.gradient_checkpointing) * critic_parameters(
            config
        )
    reached = SMALL_REACHED if parameters < SMALL_PARAMETERS else REACHED
    flops = GPU_FLOPS[config.model.dtype] * reached * learner.ranks * min(1, learner.gpus_per_rank)
    return flops / (flops_of_token * (lengths.new_prompt + lengths.response))


def better_split(config: Config) -> tuple[Config, float] | None:
    """Return a config that divides the same GPUs better, and its speed over that of `config`.

    A range of workers gets another `min`. None if no other division is at least WORTH_IT times as
    fast, or if processes share GPUs.
    """
    own = config.actors.gpus_per_worker
    if is_offline(config) or own < 1 or config.learner.gpus_per_rank != 1:
        return None
    n_gpus, best = gpus_needed(config, learns=True), None
    least_s = estimate_run(config).step_s / WORTH_IT
    for workers in range(1, n_gpus):
        ranks = n_gpus - workers * round(own)
        if ranks < 1:
            break
        if ranks % config.learner.sequence_parallel:
            continue
        split = replace(
            config,
            actors=replace(config.actors, workers=_with_least(config.actors.workers, workers)),
            learner=replace(config.learner, ranks=ranks),
        )
        estimate = estimate_run(split)
        if not estimate.faults and estimate.step_s < least_s:
            best, least_s = split, estimate.step_s
    return None if best is None else (best, estimate_run(config).step_s / least_s)


def _with_least(workers: int | WorkerRange, least: int) -> int | WorkerRange:
    """Return the setting `actors.workers` of which `least` are waited for."""
    if isinstance(workers, WorkerRange):
        return WorkerRange(min=least, max=max(least, workers.max))
    return least
