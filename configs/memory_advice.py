"""Advise which settings make a learner rank fit into its part of a GPU.

    advise(config, shape, parameters=7e9)   # "it fits with model.lora_rank=64, or ..."

Each change is tried by the arithmetic of `learner_memory.py`. A change that is set already, that is
refused beside the other settings, or that lowers nothing is not advised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from configs.assumptions import GPU_BYTES
from configs.check import check
from configs.derived import max_model_tokens
from configs.errors import ConfigError
from configs.learner_memory import PARTITIONED, pass_bytes, rank_bytes, teacher_bytes
from configs.model_directory import is_vision_model
from configs.model_size import Shape, check_heads
from configs.per_environment import environments
from configs.schema import Config

ADVISED_RANK = 64  # of adapters, as in configs/alfworld_qwen2.5_7b.yaml
MOST_RANKS = 1024  # of the learner that are advised
SHARED_BY = (2, 4, 8)  # ranks that share a sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of the settings."""

    words: str  # the settings, as on the command line
    config: Config  # with the change


def own_bytes(config: Config) -> float:
    """Return the bytes of its GPU that a learner rank may take."""
    return GPU_BYTES * min(1.0, config.learner.gpus_per_rank)


def state_bytes(config: Config, *, parameters: float) -> float:
    """Return the bytes of a rank's weights, gradients and optimizer, and of its frozen models."""
    return rank_bytes(config, parameters=parameters) + teacher_bytes(config)


def advise(config: Config, shape: Shape, *, parameters: float) -> str:
    """Say which changes make a learner rank fit that does not; else which ones help.

    Settings for activations are left out where the state alone is too large.
    """

    def needed(changed: Config) -> float:
        passes = pass_bytes(changed, shape, parameters=parameters)
        return state_bytes(changed, parameters=parameters) + passes

    def is_allowed(changed: Config) -> bool:
        try:
            check(changed)
            check_heads(changed)
        except ConfigError:
            return False
        return True

    def excess(changed: Config) -> float:
        return needed(changed) - own_bytes(changed)

    ladders = list(_state_changes(config))
    if state_bytes(config, parameters=parameters) <= own_bytes(config):
        ladders = [*_activation_changes(config), *ladders]
    fitting, helping = [], []
    for ladder in ladders:
        changes = [change for change in ladder if is_allowed(change.config)]
        fits = next((change for change in changes if excess(change.config) <= 0), None)
        if fits is not None:
            fitting.append(fits.words)
        elif changes and excess(changes[0].config) < excess(config):
            helping.append(changes[0].words)
    if fitting:
        return f"it fits with {', or '.join(fitting)}"
    if helping:
        return f"none of these alone is enough, but each helps: {', '.join(helping)}"
    return "no setting of the learner makes it fit; use a smaller model"


def _state_changes(config: Config) -> Iterator[list[Change]]:
    """Yield changes that lower the state of a rank, each as a list from the least to the most."""
    learner, model = config.learner, config.model
    is_vision = is_vision_model(model.path)
    if not model.lora_rank:
        # vLLM would serve no adapters of a vision tower
        serving = "merged" if is_vision else model.lora_serving
        words = f"model.lora_rank={ADVISED_RANK}"
        if serving != model.lora_serving:
            words += f" model.lora_serving={serving}"
        adapted = replace(model, lora_rank=ADVISED_RANK, lora_serving=serving)
        yield [Change(words=words, config=replace(config, model=adapted))]
    if learner.gpus_per_rank < 1:
        yield [_of_learner(config, gpus_per_rank=1)]
    stage = max(learner.zero_stage, PARTITIONED - 1 if is_vision else PARTITIONED)
    if stage > learner.zero_stage and learner.ranks > 1:
        yield [_of_learner(config, zero_stage=stage)]
    # a fraction of a GPU is for one rank
    if learner.gpus_per_rank == 1 and stage:
        staged = {"zero_stage": stage} if stage > learner.zero_stage else {}
        more = [learner.ranks << n for n in range(1, MOST_RANKS.bit_length())]
        yield [_of_learner(config, ranks=n, **staged) for n in more if n <= MOST_RANKS]
    if not learner.offload:
        staged = {} if learner.zero_stage else {"zero_stage": 1}
        yield [_of_learner(config, offload=True, **staged)]


def _activation_changes(config: Config) -> Iterator[list[Change]]:
    """Yield changes that lower a rank's activations, as `_state_changes` does."""
    learner, model = config.learner, config.model
    # a micro-batch has at least one sequence
    longest = max(max_model_tokens(own) for own in environments(config).values())
    smaller = [learner.micro_batch_tokens >> n for n in range(1, 32)]
    yield [_of_learner(config, micro_batch_tokens=n) for n in smaller if n >= longest]
    if not model.gradient_checkpointing:
        checkpointed = replace(model, gradient_checkpointing=True)
        words = "model.gradient_checkpointing=true"
        yield [Change(words=words, config=replace(config, model=checkpointed))]
    if learner.gpus_per_rank == 1 and not is_vision_model(model.path):
        larger = [n for n in SHARED_BY if n > learner.sequence_parallel]
        yield [_of_learner(config, sequence_parallel=n, **_ranks_for(config, n)) for n in larger]


def _ranks_for(config: Config, shared_by: int) -> dict[str, int]:
    """Return the least number of ranks that so many can share, if it is another one."""
    ranks = -(-config.learner.ranks // shared_by) * shared_by
    return {} if ranks == config.learner.ranks else {"ranks": ranks}


def _of_learner(config: Config, **settings: float) -> Change:
    """Return the change of some settings of the learner."""
    words = [f"learner.{key}={str(value).lower()}" for key, value in settings.items()]
    changed = replace(config.learner, **settings)  # type: ignore[arg-type]
    return Change(words=" ".join(words), config=replace(config, learner=changed))
