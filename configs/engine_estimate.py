"""Estimate an engine on GPUs: its memory, its requests at once, and its speed.

Letters: N parameters, P tokens of a prompt that are computed, R tokens of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.assumptions import (
    ENGINE_BYTES,
    GPU_BYTES,
    GPU_BYTES_PER_S,
    GPU_FLOPS,
    PASS_S,
    PROMPT_SHARE,
    REACHED,
    RESPONSE_SHARE,
    STEPS_SHARE,
)
from configs.derived import groups_of_a_step, least_workers
from configs.model_size import BYTES, Shape
from configs.per_environment import environment_weights, environments
from configs.plan import GIB
from configs.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Mean sizes of the episodes, weighted over the environments of a run."""

    prompt: float  # tokens of an agent step's prompt
    new_prompt: float  # those of them that were not in an earlier prompt of the episode: P
    response: float  # tokens of an answer: R
    steps: float  # agent steps of an episode


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEstimate:
    weights_bytes: float  # on each of its GPUs, as the cache
    cache_bytes: float
    cache_tokens: float  # of all its GPUs together
    requests: float  # that it works on at once
    requests_limit: str  # what allows no more
    prefill_s: float  # of one agent step, as the next
    decode_s: float

    @property
    def steps_per_s(self) -> float:
        """Return the agent steps that it generates in a second."""
        return 1.0 / (self.prefill_s + self.decode_s)


def mean_lengths(config: Config) -> Lengths:
    """Return the assumed mean sizes of episodes.

    With style "chat" the prompts of an episode grow into one another, so each step computes only
    its part: 2,048 tokens at most and 50 steps give 1,024 / 25 = 41 of a prompt.
    """
    weights = environment_weights(config)
    own = environments(config)
    total = sum(weights.values())
    prompt = new_prompt = steps = 0.0
    for name, weight in weights.items():
        share = weight / total
        its_steps = max(1.0, STEPS_SHARE * own[name].env.max_steps)
        its_prompt = PROMPT_SHARE * own[name].prompt.max_prompt_tokens
        prompt += share * its_prompt
        new_prompt += share * (
            its_prompt / its_steps if own[name].prompt.style == "chat" else its_prompt
        )
        steps += share * its_steps
    response = RESPONSE_SHARE * config.actors.max_response_tokens
    return Lengths(prompt=prompt, new_prompt=new_prompt, response=response, steps=steps)


def part_bytes(config: Config) -> float:
    """Return the bytes of each GPU of an engine that are the engine's."""
    return GPU_BYTES * min(1.0, config.actors.gpus_per_worker)


def engine_estimate(
    config: Config, shape: Shape, lengths: Lengths, *, parameters: float
) -> EngineEstimate:
    """Return the estimate of one engine, on one GPU, several, or a part of one.

    An agent step computes its prompt, 2 N P operations, and takes part in R passes. A pass reads
    the weights and the cached keys and values of all requests.
    """
    actors, group_size = config.actors, config.algorithm.group_size + config.actors.extra_members
    n_gpus, share = max(1, round(actors.gpus_per_worker)), min(1.0, actors.gpus_per_worker)
    width = BYTES[config.model.dtype]
    weights = parameters * width / n_gpus
    cache = actors.kv_cache_gib * GIB
    if actors.gpus_per_worker >= 1:
        cache = max(0.0, actors.gpu_memory_utilization * GPU_BYTES - weights - ENGINE_BYTES)
    of_token = 2 * shape.layers * shape.key_values * width
    cache_tokens = cache * n_gpus / of_token
    allowed = {
        "actors.groups_in_flight": actors.groups_in_flight * group_size,
        "admission": _admitted_groups(config) * group_size / least_workers(actors),
        "the cache": max(1.0, cache_tokens / (lengths.prompt + lengths.response)),
    }
    requests_limit = min(allowed, key=allowed.__getitem__)
    requests = allowed[requests_limit]
    flops = GPU_FLOPS[config.model.dtype] * REACHED * n_gpus * share
    read = weights + requests * (lengths.prompt + lengths.response / 2) * of_token / n_gpus
    pass_s = max(PASS_S, read / (GPU_BYTES_PER_S * REACHED * share))
    return EngineEstimate(
        weights_bytes=weights,
        cache_bytes=cache,
        cache_tokens=cache_tokens,
        requests=requests,
        requests_limit=requests_limit,
        prefill_s=2 * parameters * lengths.new_prompt / flops,
        decode_s=lengths.response * pass_s / requests,
    )


def _admitted_groups(config: Config) -> int:
    """Return how many own groups may be outstanding at once."""
    return (config.max_staleness + 1) * groups_of_a_step(config)[0]
