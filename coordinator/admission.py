"""Admission: how many groups may be outstanding, so that none is too old when it is consumed.

Let B = groups_per_step and S = max_staleness. A group is *outstanding* from its lease until the
learner step that trains on it has published its weights (it is open, complete or claimed).

A worker starts a group on weights at least as new as v, the newest version at the time of the
lease. The lease is granted only while outstanding < (S + 1) * B. The learner consumes B groups per
version, oldest first, so at most S whole batches precede the new group. It is consumed at version
v + S at the latest, and its staleness is at most S.

Example: S = 1, B = 8. The learner trains on 8 claimed groups (version 4 becomes 5), so 8 more may
be played meanwhile. They start on version 4 and are consumed at version 5: staleness 1. With S = 0
no group is admitted while the learner trains, which is synchronous training.

Groups that overtake each other can break the argument, so admission only paces. The bound is
`claim` in store/catalog/batches.py: it drops a group that is too old, and records the reason.
"""

from __future__ import annotations


def free_groups(*, outstanding: int, groups_per_step: int, max_staleness: int) -> int:
    """Return how many groups may be leased now; never negative."""
    return max(0, (max_staleness + 1) * groups_per_step - outstanding)
