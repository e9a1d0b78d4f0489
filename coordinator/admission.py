"""Decide how many training groups may be leased now, and whether an evaluation round is due.

`free_groups` paces the workers by `max_staleness`. `training_is_due` and `round_due` say which of
training and evaluation is played.
"""

from __future__ import annotations

from configs import Config, is_offline
from store import Catalog, VersionRecord

FIRST_ROUND = 0  # the evaluation of the base model before training, under version 0


def round_due(config: Config, version: VersionRecord, *, last_step: int) -> int | None:
    """Return the version to evaluate now that `version` is announced, None if none is due.

    A run that goes on before its first checkpoint announces the base model again, under a new
    number. Its round is still that of version 0: opened once, finished if it was not.
    """
    step, evaluation = version.learner_step, config.evaluation
    if step is None or is_offline(config):
        return None
    if step == 0:
        return FIRST_ROUND if evaluation.at_start else None
    is_due = evaluation.every and step % evaluation.every == 0 and step < last_step
    return version.version if is_due else None


def training_is_due(config: Config, catalog: Catalog, *, last_step: int) -> bool:
    """Return whether training groups may be leased."""
    learner_step = catalog.learner_step()
    # With training groups beside the first evaluation, version 1 would be announced during it.
    if config.evaluation.at_start and learner_step == 0 and catalog.open_heldout():
        return False
    return learner_step < last_step


def free_groups(*, outstanding: int, groups_per_step: int, max_staleness: int) -> int:
    """Return how many groups may be leased now, so that none is too old when it is consumed.

    Let B = groups_per_step and S = max_staleness. A group is *outstanding* (open, complete or
    claimed) from its lease until its batch is settled, after the weights of that learner step were
    announced. A claimed group that teaches nothing is not, once its batch asks for another in its
    place.

    A worker starts a group on weights at least as new as v, the newest version at the time of the
    lease. The lease is granted only while outstanding < (S + 1) * B. The learner consumes B groups
    or more per version, oldest first, so at most S whole batches precede the new group. It is
    consumed at version v + S at the latest, and its staleness is at most S.

    Example: S = 1, B = 8. The learner trains on 8 claimed groups (version 4 becomes 5), so 8 more
    may be played meanwhile. They start on version 4 and are consumed at version 5: staleness 1.
    With S = 0 no group is admitted while the learner trains, which is synchronous training.

    Groups that overtake each other can break the argument, so this only paces. The bound is
    `drop_stale` in store/catalog/batches.py: it drops a group that is too old, and records the
    reason.
    """
    return max(0, (max_staleness + 1) * groups_per_step - outstanding)
