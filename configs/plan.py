"""Say what a config will do: which processes run where, and their memory and disk."""

from __future__ import annotations

from configs.derived import (
    KEPT_CHECKPOINTS,
    gpus_needed,
    groups_of_a_step,
    has_critic,
    is_offline,
    least_workers,
    most_steps,
    most_workers,
    n_workers,
    replayed_groups,
    serves_adapters,
)
from configs.learner_memory import (
    MASTER_BYTES,
    MOMENT_BYTES,
    critic_parameters,
    has_teacher,
    keeps_reference,
    pass_bytes,
    rank_bytes,
    teacher_bytes,
)
from configs.model_size import BYTES, adapter_parameters, known_shape, model_billions, size_line
from configs.per_environment import environment_weights, environments
from configs.schema import ActorsConfig, Config
from printable import counted

GIB, MIB = 1024**3, 1024**2


def describe_plan(config: Config) -> str:
    """Return the placement and estimates of memory and disk as text.

    Raises ConfigError if the model's size is unknown.
    """
    learner = config.learner
    billions = model_billions(config)
    activations = "activations"
    if shape := known_shape(config):
        n_bytes = pass_bytes(config, shape, parameters=billions * 1e9)
        activations = f"{n_bytes / GIB:.1f} GiB activations"
    gpus = gpus_needed(config, learns=True)
    rank_gib = (rank_bytes(config, parameters=billions * 1e9) + teacher_bytes(config)) / GIB
    others = ["reference"] * keeps_reference(config) + ["teacher"] * has_teacher(config)
    gradients = " and ".join(["weights, gradients, optimizer", *others])
    if has_critic(config):
        gradients += f", and the same of a critic of {critic_parameters(config) / 1e9:.3g} billion"
    shared = share = ""
    if learner.sequence_parallel > 1:
        shared = f"; {learner.sequence_parallel} ranks share each micro-batch"
        share = f"its 1/{learner.sequence_parallel} of "
    is_range = n_workers(config) != most_workers(config.actors) and not is_offline(config)
    lines = [
        "",
        f"placement ({counted(gpus, 'GPU')} {'at the start' if is_range else 'in all'})",
        "  coordinator  1 process, CPU",
        f"  workers      {_workers_line(config)}",
        f"  learner      {counted(learner.ranks, 'rank')} x "
        f"{_count(learner.gpus_per_rank)} GPU, DeepSpeed ZeRO {learner.zero_stage}{shared}",
        f"memory ({size_line(config)}, {config.model.dtype}, on the {'GPU' if gpus else 'CPU'})",
        f"  each engine  {_engine_line(config, billions)}",
        f"  each rank    {rank_gib:.1f} GiB {gradients}; {activations} on top, "
        f"for {share}micro-batches of {learner.micro_batch_tokens} tokens",
        f"  copies       {size_text(copies_bytes(config))} of main memory on rank 0, of what is "
        "written while it trains",
        *_disk_lines(config),
        f"per learner step: {learner.groups_per_step} groups x {config.algorithm.group_size} "
        f"episodes x at most {most_steps(config)} steps",
    ]
    if config.environments:
        weights = environment_weights(config)
        total = sum(weights.values())
        shares = ", ".join(f"{weight / total:.0%} {name}" for name, weight in weights.items())
        lines.append(f"  of the groups that are played: {shares}")
    n_own, n_offline = groups_of_a_step(config)
    if n_extra := config.algorithm.refill_groups:
        lines.append(
            f"  at most {n_extra} more groups in place of those that teach nothing "
            f"(algorithm.refill_groups), so that {n_own} are trained on"
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
        f"{_range(actors)} x {_count(actors.gpus_per_worker)} GPU, one vLLM engine each, "
        f"{n_processes} environment process{'es' * (n_processes != 1)} beside each"
    )


def _range(actors: ActorsConfig) -> str:
    least, most = least_workers(actors), most_workers(actors)
    return str(least) if least == most else f"{least} to {most}"


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


def _disk_lines(config: Config) -> list[str]:
    checkpoints = f"  checkpoints  {_n_checkpoints(config)} x {size_text(checkpoint_bytes(config))}"
    weights = (
        f"  weights      {_n_versions(config)} versions x {size_text(version_bytes(config))}; "
        "trajectories come on top"
    )
    if not config.store.uri:
        return ["disk (run_dir)", checkpoints, weights]
    return ["disk (run_dir)", checkpoints, "storage (store.uri)", checkpoints, weights]


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
    """Return the size of float32 master weights and moments of what is trained."""
    if config.model.lora_rank:
        return adapter_parameters(config) * (MASTER_BYTES + MOMENT_BYTES)
    parameters = model_billions(config) * 1e9 + critic_parameters(config)
    return parameters * (MASTER_BYTES + MOMENT_BYTES)


def version_bytes(config: Config) -> float:
    """Return the size of published weights: float32 adapters, unless they are merged."""
    if serves_adapters(config.model):
        return adapter_parameters(config) * MASTER_BYTES
    return model_billions(config) * 1e9 * BYTES[config.model.dtype]


def copies_bytes(config: Config) -> float:
    """Return the main memory of rank 0 for what is written behind a learner step."""
    return version_bytes(config) + checkpoint_bytes(config) / config.learner.ranks


def size_text(n_bytes: float) -> str:
    """Return a number of bytes in MiB or GiB: `4.3 MiB`."""
    if n_bytes < GIB / 10:
        return f"{n_bytes / MIB:.1f} MiB"
    return f"{n_bytes / GIB:.1f} GiB"


def _count(gpus: float) -> str:
    return f"{gpus:g}" if gpus else "no"
