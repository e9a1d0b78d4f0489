"""Say what a config will do: which processes run where, and their memory and disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from configs.check import ConfigError
from configs.derived import (
    KEPT_CHECKPOINTS,
    gpus_needed,
    groups_of_a_step,
    has_critic,
    is_offline,
    is_served,
    most_steps,
    n_workers,
    replayed_groups,
    serves_adapters,
)
from configs.per_environment import environment_weights, environments
from configs.schema import Config
from printable import counted

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2}
# Per parameter, always in float32: ZeRO's master weights, Adam's two moments, a gradient.
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
# gradients that ranks exchange at once, see learner/distributed/deepspeed_setup.py
BUCKET_ELEMENTS = 500_000_000


def describe_plan(config: Config) -> str:
    """Return the placement and estimates of memory and disk as text.

    Raises ConfigError if the model's size is unknown.
    """
    learner = config.learner
    billions = model_billions(config)
    gpus = gpus_needed(config, learns=True)
    rank_gib = (rank_bytes(config, parameters=billions * 1e9) + teacher_bytes(config)) / GIB
    others = ["reference"] * keeps_reference(config) + ["teacher"] * _has_teacher(config)
    gradients = " and ".join(["weights, gradients, optimizer", *others])
    if has_critic(config):
        gradients += f", and the same of a critic of {critic_parameters(config) / 1e9:.3g} billion"
    lines = [
        "",
        f"placement ({counted(gpus, 'GPU')} in all)",
        "  coordinator  1 process, CPU",
        f"  workers      {_workers_line(config)}",
        f"  learner      {counted(learner.ranks, 'rank')} x "
        f"{_count(learner.gpus_per_rank)} GPU, DeepSpeed ZeRO {learner.zero_stage}",
        f"memory ({billions:.3g} billion parameters, {config.model.dtype}, on the "
        f"{'GPU' if gpus else 'CPU'})",
        f"  each engine  {_engine_line(config, billions)}",
        f"  each rank    {rank_gib:.1f} GiB {gradients}; activations on top, "
        f"for micro-batches of {learner.micro_batch_tokens} tokens",
        f"  copies       {copies_bytes(config) / GIB:.1f} GiB of main memory on rank 0, of what is "
        "written while it trains",
        "disk (run_dir)",
        f"  checkpoints  {_n_checkpoints(config)} x {checkpoint_bytes(config) / GIB:.1f} GiB",
        f"  weights      {_n_versions(config)} versions x {version_bytes(config) / GIB:.1f} GiB; "
        "trajectories come on top",
        f"per learner step: {learner.groups_per_step} groups x {config.algorithm.group_size} "
        f"episodes x at most {most_steps(config)} steps",
    ]
    if config.environments:
        weights = environment_weights(config)
        total = sum(weights.values())
        shares = ", ".join(f"{weight / total:.0%} {name}" for name, weight in weights.items())
        lines.append(f"  of the groups that are played: {shares}")
    n_live, n_offline = groups_of_a_step(config)
    if n_extra := config.algorithm.refill_groups:
        lines.append(
            f"  at most {n_extra} more groups in place of those that teach nothing "
            f"(algorithm.refill_groups), so that {n_live} are trained on"
        )
    if n_replayed := replayed_groups(config):
        lines.append(
            f"  and the wins of {n_replayed} earlier groups again, at most "
            f"{config.replay.max_age} versions old (replay.share)"
        )
    if n_offline:
        lines.append(
            f"  {n_offline} of them offline, from {', '.join(config.source)}; each used "
            f"{config.offline.uses} times at most"
        )
    return "\n".join([*lines, ""])


def _workers_line(config: Config) -> str:
    if is_offline(config):
        return "none: nothing is played"
    actors = config.actors
    n_processes = sum(own.env.processes for own in environments(config).values())
    return (
        f"{actors.workers} x {_count(actors.gpus_per_worker)} GPU, one vLLM engine each, "
        f"{n_processes} environment processes beside each"
    )


def _engine_line(config: Config, billions: float) -> str:
    if not n_workers(config):
        return "none"
    actors = config.actors
    share = actors.gpu_memory_utilization
    cache = f"{actors.kv_cache_gib:g} GiB KV cache"
    if actors.gpus_per_worker >= 1:
        cache = f"{share:.0%} of the GPU taken in all, the rest of it for the KV cache"
    elif actors.gpus_per_worker:
        cache += f"; starts if {share * actors.gpus_per_worker:.0%} of the GPU is free"
    return f"{billions * 1e9 * BYTES[config.model.dtype] / GIB:.1f} GiB weights; {cache}"


def disk_bytes(config: Config) -> float:
    """Return the size of checkpoints and published weights on the disk of the run directory."""
    weights = 0.0 if config.store.uri else _n_versions(config) * version_bytes(config)
    return _n_checkpoints(config) * checkpoint_bytes(config) + weights


def _n_checkpoints(config: Config) -> int:
    """Count checkpoints that exist at once: the kept ones and the one being written."""
    learner = config.learner
    milestones = learner.steps // learner.keep_every if learner.keep_every else 0
    return KEPT_CHECKPOINTS + 1 + milestones


def _n_versions(config: Config) -> int:
    """Count weights that exist at once: the kept versions and the one being written."""
    return config.learner.keep_versions + 1


def checkpoint_bytes(config: Config) -> float:
    """Return the size of float32 master weights and moments. Adapters count as nothing."""
    if config.model.lora_rank:
        return 0.0
    parameters = model_billions(config) * 1e9 + critic_parameters(config)
    return parameters * (MASTER_BYTES + MOMENT_BYTES)


def version_bytes(config: Config) -> float:
    """Return the size of published weights. Adapters count as nothing, unless they are merged."""
    if serves_adapters(config.model):
        return 0.0
    return model_billions(config) * 1e9 * BYTES[config.model.dtype]


def copies_bytes(config: Config) -> float:
    """Return the main memory of rank 0 for what is written behind a learner step."""
    return version_bytes(config) + checkpoint_bytes(config) / config.learner.ranks


def _count(gpus: float) -> str:
    return f"{gpus:g}" if gpus else "no"


def rank_bytes(config: Config, *, parameters: float) -> float:
    """Return the most bytes that one learner rank holds on its device, without activations.

    Adapters count as nothing. DeepSpeed 0.19.8 keeps at an optimizer step, in float32 unless said:

        ZeRO 0    weights, gradients, two moments
        ZeRO 1    weights, gradients; sharded: master weights, two moments. With bfloat16 also a
                  float32 gradient, not sharded; with float32 a copy of the sharded part
        ZeRO 2    weights; sharded: master weights, two moments, gradients and a copy of them
        ZeRO 3    the same with the weights sharded too

    With learner.offload everything but the weights and their gradients is in main memory.
    Example: 1.5e9 bfloat16 parameters at ZeRO 1 on one rank: 2 + 2 + 4 + 4 + 8 = 20 bytes each,
    30 GB, and a buffer of 2 GB. A critic takes as much for its own parameters.
    """
    reference = parameters * BYTES[config.model.dtype] * keeps_reference(config)
    critic = _trained_bytes(config, parameters=critic_parameters(config))
    return _trained_bytes(config, parameters=parameters) + reference + critic


def _trained_bytes(config: Config, *, parameters: float) -> float:
    """Return the bytes of one trained model on a rank."""
    learner, weight = config.learner, BYTES[config.model.dtype]
    shares = {stage: learner.ranks if learner.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    held = weight / shares[3]
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
    """Return whether each rank keeps a frozen copy of the whole base model for the KL term."""
    return bool(config.loss.kl_coef) and not config.model.lora_rank


def critic_parameters(config: Config) -> float:
    """Return the number of the critic's parameters, 0 without one."""
    if not has_critic(config):
        return 0.0
    path = config.critic.path or config.model.path
    return model_billions(replace(config, model=replace(config.model, path=path))) * 1e9


def model_billions(config: Config) -> float:
    """Return the billions of parameters, counted from a local directory or read from the name."""
    if not config.model.path:
        tiny = config.model.tiny
        # four square matrices of the attention, three of the feed-forward layer twice as large
        layer_parameters = 10 * tiny.hidden_size**2
        return (tiny.vocabulary_size * tiny.hidden_size + tiny.layers * layer_parameters) / 1e9
    directory = Path(config.model.path)
    if directory.is_dir():
        return _billions_in(directory)
    named = re.search(r"(\d+(?:\.\d+)?)([bm])\b", config.model.path, re.IGNORECASE)
    if not named:
        raise ConfigError(
            f"model.path={config.model.path!r} is no local directory and its name does not say its "
            "size (like '1.5B')"
        )
    return float(named.group(1)) * (1.0 if named.group(2).lower() == "b" else 1e-3)


def _billions_in(directory: Path) -> float:
    content = json.loads((directory / "config.json").read_text())
    dtype = str(content.get("dtype", content.get("torch_dtype", "bfloat16")))  # the older name
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return size / BYTES.get(dtype, 2) / 1e9


def _has_teacher(config: Config) -> bool:
    """Return whether the learner loads a teacher."""
    return bool(config.loss.teacher) and not is_served(config.loss.teacher)


def teacher_bytes(config: Config) -> float:
    """Return the bytes of the teacher's weights, which each rank holds whole."""
    if not _has_teacher(config):
        return 0.0
    return _billions_in(Path(config.loss.teacher)) * 1e9 * BYTES[config.model.dtype]
