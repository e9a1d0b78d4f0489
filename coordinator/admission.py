"""How many groups may be under way, so that none is too old when the learner gets to it.

Let B = groups_per_step, S = max_staleness, and let a group be *outstanding* from the moment it is
handed to a worker until the learner step that trains on it has published its weights (open,
complete or claimed).

A worker starts a group on weights at least as new as the newest published version v at the time of
the lease. The lease is granted only while outstanding < (S + 1) * B. The learner consumes B groups
per version, oldest first, so at most S whole batches go ahead of the new group: it is consumed at
version v + S at the latest, and its staleness is at most S.

Example: S = 1, B = 8. The learner trains on 8 claimed groups (version 4 becoming 5), so 8 more may
be played meanwhile. They start on version 4 and are consumed by the learner at version 5: staleness
1. With S = 0 nothing is admitted while the learner trains, which is synchronous training.

Groups that overtake each other can break the argument, so it only paces: what is too old at
consumption is dropped there, by the catalog, with the reason.
"""

from __future__ import annotations

import random
from functools import lru_cache


def free_groups(*, outstanding: int, groups_per_step: int, max_staleness: int) -> int:
    """Groups that may be handed out now; never negative."""
    return max(0, (max_staleness + 1) * groups_per_step - outstanding)


def task_index(ordinal: int, n_tasks: int, *, seed: int) -> int:
    """Which task the `ordinal`-th group plays: all tasks once per pass, each pass in its own seeded
    order.
    """
    return _order(n_tasks, f"{seed}/{ordinal // n_tasks}")[ordinal % n_tasks]


@lru_cache(maxsize=2)  # asked for once a group, and there may be 100,000 tasks
def _order(n_tasks: int, seed: str) -> tuple[int, ...]:
    order = list(range(n_tasks))
    random.Random(seed).shuffle(order)
    return tuple(order)
