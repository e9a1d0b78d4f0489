"""What a config will do: who runs where, how much memory that takes, and the config that makes its
base policy.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from configs.check import ConfigError
from configs.gpus import gpus_needed
from configs.roles import groups_of_a_step, is_offline, n_workers
from configs.schema import AlgorithmConfig, Config, LossConfig, OfflineConfig

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2}
# Per parameter, in float32 whatever the model is: ZeRO's master weights, Adam's two moments, an
# accumulated gradient.
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
BUCKET_ELEMENTS = (
    500_000_000  # gradients that ranks exchange at once, `learner/distributed/deepspeed_setup.py`
)


def cloning_config(config: Config) -> Config:
    """The run that makes a tiny base policy: a scripted player's episodes through the same store,
    actors and learner.

    Groups of one episode, as there is nothing to compare; staleness without bound, as the player
    never changes.
    """
    tiny = config.model.tiny
    return replace(
        config,
        source=[],
        offline=OfflineConfig(),
        max_staleness=tiny.clone_steps,
        model=replace(config.model, lora_rank=0),
        actors=replace(
            config.actors,
            scripted=True,
            workers=1,
            gpus_per_worker=0,
            groups_in_flight=tiny.clone_episodes_per_step,
            spare_members=0,
        ),
        algorithm=AlgorithmConfig(estimator="grpo", group_size=1),  # cloning asks for no advantage
        loss=LossConfig(policy="behaviour_cloning"),
        learner=replace(
            config.learner,
            steps=tiny.clone_steps,
            groups_per_step=tiny.clone_episodes_per_step,
            updates_per_step=tiny.clone_updates_per_step,
            rows_per_update=0,
            learning_rate=tiny.clone_learning_rate,
            warmup_updates=0,
            ess_scaled=False,  # the player's log-probabilities are no policy's
            keep_versions=2,
            checkpoint_every=max(1, tiny.clone_steps // 4),
        ),
        evaluation=replace(config.evaluation, at_start=False, every=0),
    )


def describe_plan(config: Config) -> str:
    """Placement and a memory estimate, as text. Raises ConfigError if the model's size cannot be
    told.
    """
    actors, learner = config.actors, config.learner
    billions = model_billions(config)
    gpus = gpus_needed(config, learns=True)
    weight = BYTES[config.model.dtype]
    reference = keeps_reference(config)
    learner_gib = rank_bytes(config, parameters=billions * 1e9) / GIB
    engine_gib = billions * 1e9 * weight / GIB
    where = "GPU" if gpus else "CPU"
    cache = f"{actors.kv_cache_gib:g} GiB KV cache"
    if actors.gpus_per_worker >= 1:
        cache = f"{actors.gpu_memory_utilization:.0%} of the GPU taken in all, the rest of it for the KV cache"
    elif actors.gpus_per_worker:
        cache += f"; starts if {actors.gpu_memory_utilization * actors.gpus_per_worker:.0%} of the GPU is free"
    workers = (
        f"{actors.workers} x {_count(actors.gpus_per_worker)} GPU, one vLLM engine each, "
        f"{config.env.processes} environment processes beside each"
    )
    if is_offline(config):
        workers = "none: nothing is played"
    n_stored = groups_of_a_step(config)[1]
    stored = f"  {n_stored} of them stored, from {', '.join(config.source)}; each used {config.offline.uses} times at most\n"
    return (
        f"\nplacement ({gpus} GPU{'' if gpus == 1 else 's'} in all)\n"
        f"  coordinator  1 process, CPU\n"
        f"  workers      {workers}\n"
        f"  learner      {learner.ranks} rank{'' if learner.ranks == 1 else 's'} x "
        f"{_count(learner.gpus_per_rank)} GPU, "
        f"DeepSpeed ZeRO {learner.zero_stage}\n"
        f"memory ({billions:.3g} billion parameters, {config.model.dtype}, on the {where})\n"
        "  each engine  "
        f"{f'{engine_gib:.1f} GiB weights; {cache}' if n_workers(config) else 'none'}\n"
        f"  each rank    {learner_gib:.1f} GiB weights, gradients, "
        f"optimizer{' and reference' if reference else ''}; "
        f"activations on top, for micro-batches of {learner.micro_batch_tokens} tokens\n"
        f"disk (run_dir)\n"
        f"  checkpoints  {_n_checkpoints(config)} x {_checkpoint_bytes(config) / GIB:.1f} GiB\n"
        f"  weights      {_n_versions(config)} versions x {_version_bytes(config) / GIB:.1f} GiB; "
        "trajectories come on top\n"
        f"per learner step: {learner.groups_per_step} groups x {config.algorithm.group_size} "
        "episodes x "
        f"at most {config.env.max_steps} steps\n" + stored * bool(n_stored)
    )


def disk_bytes(config: Config) -> float:
    """Return what checkpoints and published weights take of the disk of the run directory."""
    weights = _n_versions(config) * _version_bytes(config)
    return _n_checkpoints(config) * _checkpoint_bytes(config) + weights * (not config.store.uri)


def _n_checkpoints(config: Config) -> int:
    """Return how many are there at once: those that are kept, and one that is being written."""
    learner = config.learner
    return (
        learner.keep_checkpoints
        + 1
        + (learner.steps // learner.keep_every if learner.keep_every else 0)
    )


def _n_versions(config: Config) -> int:
    """Return how many published versions are there at once: those that are kept, and one that is
    being written.
    """
    return config.learner.keep_versions + 1


def _checkpoint_bytes(config: Config) -> float:
    """Return the size of one: float32 master weights and moments. Adapters are counted as
    nothing.
    """
    return (
        0.0
        if config.model.lora_rank
        else model_billions(config) * 1e9 * (MASTER_BYTES + MOMENT_BYTES)
    )


def _version_bytes(config: Config) -> float:
    return model_billions(config) * 1e9 * BYTES[config.model.dtype]


def _count(gpus: float) -> str:
    return f"{gpus:g}" if gpus else "no"


def rank_bytes(config: Config, *, parameters: float) -> float:
    """Return the bytes that one learner rank holds on its device at the most, without activations.

    Adapters are counted as nothing. The terms are what DeepSpeed 0.19.8 keeps at an optimizer step,
    float32 unless said:

        ZeRO 0    weights, gradients, two moments
        ZeRO 1    weights, gradients; shared out: masters, two moments. In bfloat16 a second, float32 gradient, which is
                  not shared out; in float32 a copy of the shared part
        ZeRO 2    weights; shared out: masters, two moments, gradients and a copy of them for the step
        ZeRO 3    the same with the weights shared out too

    With learner.offload all but the weights and their gradients is in main memory. 1.5e9 bfloat16
    parameters at ZeRO 1 on one rank: 2 + 2 + 4 + 4 + 8 = 20 bytes each, 30 GB, and a buffer of 2
    GB.
    """
    learner, weight = config.learner, BYTES[config.model.dtype]
    shares = {stage: learner.ranks if learner.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    held = weight / shares[3] + weight * keeps_reference(config)
    if config.model.lora_rank:
        return parameters * held
    if learner.offload:
        held += weight / shares[2]
    elif learner.zero_stage == 0:
        held += weight + MOMENT_BYTES
    else:
        held += (MASTER_BYTES + MOMENT_BYTES) / shares[1]
        if learner.zero_stage > 1:
            held += 2 * GRADIENT_BYTES / shares[2]
        elif config.model.dtype == "bfloat16":
            held += weight + GRADIENT_BYTES
        else:
            held += weight + GRADIENT_BYTES / shares[1]
    buffer = GRADIENT_BYTES * min(BUCKET_ELEMENTS, parameters) if learner.zero_stage else 0
    return parameters * held + buffer


def keeps_reference(config: Config) -> bool:
    """Return whether each rank keeps a frozen copy of the base model, whole, for the KL term."""
    return bool(config.loss.kl_coef) and not config.model.lora_rank


def model_billions(config: Config) -> float:
    """Billions of parameters: counted from a local directory's files, else read from the model's
    name.
    """
    if not config.model.path:
        tiny = config.model.tiny
        return (
            tiny.vocabulary_size * tiny.hidden_size + 13 * tiny.layers * tiny.hidden_size**2
        ) / 1e9
    directory = Path(config.model.path)
    if directory.is_dir():
        stored = str(json.loads((directory / "config.json").read_text()).get("dtype", "bfloat16"))
        return (
            sum(file.stat().st_size for file in directory.glob("*.safetensors"))
            / BYTES.get(stored, 2)
            / 1e9
        )
    named = re.search(r"(\d+(?:\.\d+)?)([bm])\b", config.model.path, re.IGNORECASE)
    if not named:
        raise ConfigError(
            f"model.path={config.model.path!r} is no local directory and its name does not say its "
            "size (like '1.5B')"
        )
    return float(named.group(1)) * (1.0 if named.group(2).lower() == "b" else 1e-3)
