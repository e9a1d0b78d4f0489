"""Estimate what a run on GPUs needs, how fast it is, and what will wait for what.

    estimate = estimate_run(config)
    estimate.play_s, estimate.learn_s     # of a learner step: the longer one is the limit
    print(describe_estimate(config))

This is arithmetic over assumptions, which `describe_estimate` prints with their sources. No part of
it was measured on a GPU. A run on a CPU gets no rates: they depend on the machine too much.

Letters: N parameters, P tokens of a prompt that are computed, R tokens of an answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from configs.check import ConfigError
from configs.derived import (
    gpus_needed,
    groups_of_a_step,
    has_critic,
    is_offline,
    least_workers,
    n_workers,
    replayed_groups,
)
from configs.per_environment import environment_weights, environments
from configs.plan import (
    BYTES,
    GIB,
    checkpoint_bytes,
    critic_parameters,
    model_billions,
    rank_bytes,
    teacher_bytes,
    version_bytes,
)
from configs.schema import Config
from printable import counted

GPU = "H100 SXM"
GPU_BYTES = 80e9
GPU_BYTES_PER_S = 3.35e12
GPU_FLOPS = {"bfloat16": 989e12, "float32": 67e12}
REACHED = 0.4  # of those peaks
SMALL_REACHED = 0.2  # by the training of models below SMALL_PARAMETERS, whose matrices are small
SMALL_PARAMETERS = 1e9
PASS_S = 0.005  # least time of a forward pass of the engine, which waits for its launches
ENGINE_BYTES = 2 * GIB  # of an engine beside weights and cache: activations, captured graphs
WORKER_S = 0.0007  # of a worker's event loop for an agent step
ENVIRONMENT_S = 0.003  # of an environment process for an agent step
COORDINATOR_S = 0.00022  # of the coordinator for an agent step
COPIED_BYTES_PER_S = 20e9  # from the device to pinned memory
HASHED_BYTES_PER_S = 8e9
WRITTEN_BYTES_PER_S = 1.25e9
LOADED_BYTES_PER_S = 4e9
# Means, as fractions of the limits in the settings. With ALFWorld's limits of 2,048 and 512 tokens
# they are the 1,000 and 100 tokens of docs/performance.md.
PROMPT_SHARE, RESPONSE_SHARE, STEPS_SHARE = 0.5, 0.2, 0.5
CHUNK_TOKENS = 512  # of the output layer, see learner/model/chunked_logprobs.py
CHUNK_TENSORS = 4  # float32, of a chunk's tokens times the vocabulary
FLOAT32_BYTES = 4
WORTH_IT = 1.1  # least gain of another split of the GPUs that is worth a line

ASSUMED = (
    f"{GPU}: 80 GB, 3.35 TB/s, 989 TFLOP/s in bfloat16 and 67 in float32 (data sheet)",
    "engine and learner reach 40 % of these, a learner below 1 billion parameters 20 %; a pass of "
    "the engine takes 5 ms at least (docs/performance.md, not measured)",
    f"prompts have half of prompt.max_prompt_tokens, answers {RESPONSE_SHARE:.0%} of "
    "actors.max_response_tokens, episodes half of env.max_steps (ALFWorld's shape)",
    "each episode in flight has a request in the engine; a slow environment needs more of them "
    "(actors.groups_in_flight)",
    "no prefix is shared between steps, but with prompt.style=chat (docs/performance.md)",
    "an agent step costs a worker's event loop 0.7 ms and the coordinator 0.22 ms (measured with "
    "the quick start), an environment process 3 ms (not measured)",
    "weights are copied at 20 GB/s, hashed at 8, written behind the next step at 1.25 and loaded "
    "at 4 (docs/gpu.md, not measured)",
    "left out: the upload to store.uri, communication between ranks, evaluations",
    "processes that share a GPU get their fraction of its speed (not measured)",
    "activations: what the layers keep, counted in configs/estimate.py (not measured)",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a language model's layers."""

    layers: int
    hidden: int
    key_values: int  # heads of keys times their size
    feed_forward: int
    vocabulary: int


# Of models that may not be downloaded yet, from their config.json on the Hugging Face Hub.
SHAPES = {
    "SmolLM2-135M": Shape(
        layers=30, hidden=576, key_values=192, feed_forward=1536, vocabulary=49_152
    ),
    "Qwen2.5-1.5B": Shape(
        layers=28, hidden=1536, key_values=256, feed_forward=8960, vocabulary=151_936
    ),
    "Qwen2.5-3B": Shape(
        layers=36, hidden=2048, key_values=256, feed_forward=11_008, vocabulary=151_936
    ),
    "Qwen2.5-VL-3B": Shape(
        layers=36, hidden=2048, key_values=256, feed_forward=11_008, vocabulary=151_936
    ),
    "Qwen2.5-7B": Shape(
        layers=28, hidden=3584, key_values=512, feed_forward=18_944, vocabulary=152_064
    ),
}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    lengths: Lengths
    engine: EngineEstimate | None  # None: nothing is played
    state_bytes: float  # of a learner rank: weights, gradients, optimizer, reference
    activation_bytes: float
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


def model_shape(config: Config) -> Shape:
    """Return the sizes of the policy, from its directory or by its name. Raises ConfigError."""
    if not config.model.path:
        tiny = config.model.tiny
        return Shape(
            layers=tiny.layers,
            hidden=tiny.hidden_size,
            key_values=tiny.hidden_size,
            feed_forward=2 * tiny.hidden_size,
            vocabulary=tiny.vocabulary_size,
        )
    file = Path(config.model.path) / "config.json"
    if file.is_file():
        return _shape_in(file)
    names = [name for name in SHAPES if name in config.model.path]
    if not names:
        raise ConfigError(
            f"model.path={config.model.path!r} is no local directory, and --plan knows the sizes "
            f"of {', '.join(SHAPES)} only; download it, and give its directory"
        )
    return SHAPES[max(names, key=len)]


def _shape_in(file: Path) -> Shape:
    """Return the sizes in a config.json; a vision model has its text model's in `text_config`."""
    try:
        content = json.loads(file.read_text())
        sizes = content.get("text_config", content)
        heads = int(sizes["num_attention_heads"])
        hidden = int(sizes["hidden_size"])
        head = int(sizes.get("head_dim") or hidden // heads)
        return Shape(
            layers=int(sizes["num_hidden_layers"]),
            hidden=hidden,
            key_values=int(sizes.get("num_key_value_heads") or heads) * head,
            feed_forward=int(sizes["intermediate_size"]),
            vocabulary=int(sizes["vocab_size"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{file} does not say the sizes of the model ({type(error).__name__}: {error!s:.80}); "
            "--plan needs them"
        ) from error


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


def activation_bytes(config: Config, shape: Shape) -> float:
    """Return the bytes of a micro-batch's activations on a rank, without the model's.

    A layer keeps for each token, in the model's dtype: its input, two normed copies, query,
    attention's result and projection, and two sums (8 of the hidden size); keys and values; gate,
    its activation, and two more of the feed-forward size. Both norms also keep a float32 copy.
    Example: the 1.5B model in bfloat16 keeps 2 (8 x 1536 + 2 x 256 + 4 x 8960) + 8 x 1536 = 109,568
    bytes a token and layer. With gradient checkpointing a layer keeps its input only, and one layer
    at a time has everything and as many gradients. The output layer has a chunk of logits, and a
    float32 gradient of its weight unless only adapters are trained.
    """
    width = BYTES[config.model.dtype]
    of_layer = width * (8 * shape.hidden + 2 * shape.key_values + 4 * shape.feed_forward)
    of_layer += 2 * FLOAT32_BYTES * shape.hidden
    if config.model.gradient_checkpointing:
        of_token = shape.layers * width * shape.hidden + 2 * of_layer
    else:
        of_token = (shape.layers + 1) * of_layer
    output = CHUNK_TOKENS * CHUNK_TENSORS * FLOAT32_BYTES * shape.vocabulary
    if not config.model.lora_rank:
        output += FLOAT32_BYTES * shape.vocabulary * shape.hidden
    return config.learner.micro_batch_tokens * of_token + output


def estimate_run(config: Config) -> Estimate:
    """Return the estimate of a run whose engines and learner are on GPUs.

    Raises ConfigError if the model's size is unknown.
    """
    assert _is_on_gpus(config), "CPUs differ too much"
    shape, lengths = model_shape(config), mean_lengths(config)
    parameters = model_billions(config) * 1e9
    faults: list[str] = []
    engine = None
    if n_workers(config):
        engine = _engine(config, shape, lengths, parameters=parameters)
        if engine.cache_tokens < lengths.prompt + lengths.response:
            faults.append(
                f"an engine has {engine.cache_bytes / GIB:.1f} GiB for its cache, too little for "
                "one request; set actors.gpus_per_worker=2, or more"
            )
        taken, part = engine.weights_bytes + engine.cache_bytes + ENGINE_BYTES, _part(config)
        if taken > part:
            faults.append(
                f"an engine needs {taken / GIB:.1f} GiB of {part / GIB:.1f}; set a smaller "
                "actors.kv_cache_gib, or a larger actors.gpus_per_worker"
            )
    state = rank_bytes(config, parameters=parameters) + teacher_bytes(config)
    activations = activation_bytes(config, shape)
    there = GPU_BYTES * min(1.0, config.learner.gpus_per_rank)
    if state + activations > there:
        faults.append(
            f"a learner rank needs {(state + activations) / GIB:.1f} GiB of {there / GIB:.1f}; set "
            "a smaller learner.micro_batch_tokens, more learner.ranks with learner.zero_stage=3, "
            "model.gradient_checkpointing=true or learner.offload=true"
        )
    limits = _play_limits(config, engine) if engine else {}
    train_steps_per_s = _train_steps_per_s(config, lengths, parameters=parameters)
    n_live, n_offline = groups_of_a_step(config)
    of_group = config.algorithm.group_size * lengths.steps
    n_trained = (n_live + n_offline + replayed_groups(config)) * of_group
    n_played = n_live * (config.algorithm.group_size + config.actors.extra_members) * lengths.steps
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
        faults=faults,
    )


def _is_on_gpus(config: Config) -> bool:
    """Return whether the learner, and the engines of a run that plays, are on GPUs."""
    has_engines = config.actors.gpus_per_worker > 0 and not config.actors.scripted
    return config.learner.gpus_per_rank > 0 and (has_engines or not n_workers(config))


def _part(config: Config) -> float:
    """Return the bytes of each GPU of an engine that are the engine's."""
    return GPU_BYTES * min(1.0, config.actors.gpus_per_worker)


def _engine(config: Config, shape: Shape, lengths: Lengths, *, parameters: float) -> EngineEstimate:
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
    """Return how many live groups may be outstanding at once."""
    return (config.max_staleness + 1) * groups_of_a_step(config)[0]


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

    None if no other division is at least WORTH_IT times as fast, or if processes share GPUs.
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
        split = replace(
            config,
            actors=replace(config.actors, workers=workers),
            learner=replace(config.learner, ranks=ranks),
        )
        estimate = estimate_run(split)
        if not estimate.faults and estimate.step_s < least_s:
            best, least_s = split, estimate.step_s
    return None if best is None else (best, estimate_run(config).step_s / least_s)


def describe_estimate(config: Config) -> str:
    """Return the estimate, and the assumptions that it is made of, as text. Raises ConfigError."""
    n_gpus = gpus_needed(config, learns=True)
    if not _is_on_gpus(config):
        return (
            "estimate: none, because engines and learner are not both on GPUs; on two cores the "
            "quick start plays and trains on 563 agent steps/s (docs/performance.md)\n"
        )
    estimate = estimate_run(config)
    lines = [f"estimate for {counted(n_gpus, 'GPU')} of the kind {GPU}; none of it was measured"]
    if estimate.engine is not None:
        lines += _engine_lines(config, estimate.engine, estimate.lengths)
    own = config.learner.gpus_per_rank * GPU_BYTES / GIB
    lines += [
        f"  learner GPU   {estimate.state_bytes / GIB:.1f} GiB weights, gradients, optimizer; "
        f"{estimate.activation_bytes / GIB:.1f} GiB activations; of {own:.1f}",
        *(f"  does not fit  {fault}" for fault in estimate.faults),
        *_rate_lines(config, estimate),
    ]
    if split := better_split(config):
        better, factor = split
        lines.append(
            f"  better        {factor:.1f} times as fast with as many GPUs: "
            f"actors.workers={least_workers(better.actors)} learner.ranks={better.learner.ranks}"
        )
    return "\n".join([*lines, "assumed", *(f"  {line}" for line in ASSUMED), ""])


def _engine_lines(config: Config, engine: EngineEstimate, lengths: Lengths) -> list[str]:
    return [
        f"  engine GPU    {engine.weights_bytes / GIB:.1f} GiB weights; "
        f"{engine.cache_bytes / GIB:.1f} GiB KV cache, for {_number(engine.cache_tokens)} tokens "
        f"in {counted(max(1, round(config.actors.gpus_per_worker)), 'GPU')}; "
        f"{_number(engine.requests)} requests at once, limited by {engine.requests_limit}",
        f"  generation    {least_workers(config.actors)} x {_number(engine.steps_per_s)} "
        "agent steps/s, "
        f"{_number(engine.steps_per_s * lengths.response)} tokens/s each: "
        f"{engine.prefill_s * 1000:.1f} ms for a prompt of {_number(lengths.new_prompt)} tokens, "
        f"{engine.decode_s * 1000:.1f} ms for an answer of {_number(lengths.response)}",
    ]


def _rate_lines(config: Config, estimate: Estimate) -> list[str]:
    lengths, step_s = estimate.lengths, estimate.step_s
    trained_tokens = lengths.new_prompt + lengths.response
    rate = estimate.n_trained / step_s
    cores = estimate.n_played / step_s * (WORKER_S + ENVIRONMENT_S) if estimate.engine else 0.0
    return [
        f"  training      {_number(estimate.train_steps_per_s)} agent steps/s, "
        f"{_number(estimate.train_steps_per_s * trained_tokens)} tokens/s",
        f"  learner step  {_number(estimate.n_trained)} agent steps in {_number(step_s)} s: "
        f"{_number(estimate.play_s)} s to play, {_number(estimate.train_s)} s to train, "
        f"{_number(estimate.publish_s)} s to publish, {_number(estimate.checkpoint_s)} s for "
        f"checkpoints; {_number(estimate.write_s)} s to write files beside it",
        f"  together      {_number(rate)} agent steps/s, {_number(rate * trained_tokens)} tokens/s"
        + (f"; {_number(cores)} CPU cores for workers and environments" if cores else ""),
        f"  waits         {_waits(config, estimate)}",
    ]


def _waits(config: Config, estimate: Estimate) -> str:
    """Say in one line who waits for whom, and for how much of the time."""
    if estimate.engine is None:
        return "nobody: nothing is played"
    play_s, learn_s = estimate.play_s, estimate.learn_s
    if estimate.is_synchronous:
        engines, learner = learn_s / estimate.step_s, play_s / estimate.step_s
        return (
            f"the engines, {engines:.0%} of the time, and the learner, {learner:.0%}, for each "
            "other (max_staleness=0)"
        )
    if play_s > learn_s:
        return (
            f"the learner, {1 - learn_s / play_s:.0%} of the time, for groups; the limit is: "
            f"{estimate.slowest}"
        )
    return (
        f"the engines, {1 - play_s / learn_s:.0%} of the time, for admission; the limit is: learner"
    )


def _number(value: float) -> str:
    """Return a number with three digits, such as 1,230 or 0.0123."""
    return f"{float(f'{value:.3g}'):,.12g}"
