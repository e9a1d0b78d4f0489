"""GPUs of a run: what a config may ask for, and how many cards that takes."""

from __future__ import annotations

from configs.roles import n_workers
from configs.schema import Config

ROUNDING = 1e-6  # of sums of fractions; Ray counts GPUs in steps of 1e-4


def gpu_fault(config: Config) -> str:
    """Return what is wrong with the GPUs that a config asks for, in one line; "" if nothing is."""
    per_worker, per_rank, ranks = (
        config.actors.gpus_per_worker,
        config.learner.gpus_per_rank,
        config.learner.ranks,
    )
    if per_worker > 1 and per_worker != int(per_worker):
        return f"actors.gpus_per_worker={per_worker:g} is no whole number and no fraction of one GPU; use e.g. {int(per_worker)}"
    if per_rank > 1:
        return f"learner.gpus_per_rank={per_rank:g} is more than one GPU; use 1, and more learner.ranks for more GPUs"
    if 0 < per_rank < 1 < ranks:
        return (
            f"learner.gpus_per_rank={per_rank:g} with learner.ranks={ranks} could put two ranks on "
            "one GPU, which NCCL "
            "refuses; use learner.ranks=1, or learner.gpus_per_rank=1"
        )
    return ""


def gpus_needed(config: Config, *, learns: bool) -> int:
    """Return how many GPUs the workers and, if it `learns`, the learner's ranks take together.

    A process with a fraction needs that much of one card: three workers of 0.6 need three cards,
    four of 0.5 need two.
    """
    workers = n_workers(config) if learns else config.actors.workers
    shares = [config.actors.gpus_per_worker] * workers + [config.learner.gpus_per_rank] * (
        config.learner.ranks * learns
    )
    free: list[float] = []  # of each card that is shared
    for share in sorted((share for share in shares if 0 < share < 1), reverse=True):
        fitting = [card for card, left in enumerate(free) if left >= share - ROUNDING]
        if fitting:
            free[fitting[0]] -= share
        else:
            free.append(1.0 - share)
    return round(sum(share for share in shares if share >= 1)) + len(free)
