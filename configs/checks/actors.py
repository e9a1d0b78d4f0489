"""Check the section `actors`: scripted play, workers, engines."""

from __future__ import annotations

import re

from configs.derived import is_offline
from configs.engine_arguments import engine_faults
from configs.errors import ConfigError
from configs.schema import Config, WorkerRange


def check_scripted(config: Config) -> None:
    """Name everything that a scripted policy needs in one message."""
    if not config.actors.scripted or is_offline(config):  # check_offline refuses the latter
        return
    last = config.learner.steps - 1
    policy = config.loss.policy
    staleness = config.max_staleness
    wanted = []
    if policy != "behaviour_cloning":
        wanted.append(f"loss.policy=behaviour_cloning, not {policy!r}")
    if staleness < last:
        wanted.append(
            f"max_staleness={last}: with {staleness} every group is too old from learner step "
            f"{staleness + 2} on"
        )
    if wanted:
        raise ConfigError(
            "actors.scripted=true plays at version 0 for ever, to be cloned; it needs "
            f"{'; '.join(wanted)}"
        )


def check_workers(config: Config) -> None:
    """Check the range of workers, and the cores and GPUs of each."""
    workers = config.actors.workers
    if isinstance(workers, WorkerRange) and not 1 <= workers.min <= workers.max:
        raise ConfigError(
            f"actors.workers={{min: {workers.min}, max: {workers.max}}} is no range: it needs "
            "1 <= min <= max"
        )
    cores, per_worker = config.actors.cpu_cores, config.actors.gpus_per_worker
    if cores != "auto" and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cores):
        raise ConfigError(
            f"actors.cpu_cores={cores!r} is not 'auto' or a list of cores like '0' or '0,2-3'"
        )
    if per_worker > 1 and per_worker != int(per_worker):
        raise ConfigError(
            f"actors.gpus_per_worker={per_worker:g} is no whole number and no fraction of one GPU; "
            f"use e.g. {int(per_worker)}"
        )


def check_engine(config: Config) -> None:
    """Check the engine of a worker, and the arguments passed on to it."""
    if config.actors.batch_invariant and not config.actors.gpus_per_worker:
        raise ConfigError(
            "actors.batch_invariant=true with actors.gpus_per_worker=0: vLLM has no such mode for "
            "a CPU engine; leave it out"
        )
    if fault := next(engine_faults(config), ""):
        raise ConfigError(fault)
