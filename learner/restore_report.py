"""Describe what a restarted learner has again, and what was thrown away."""

from __future__ import annotations

from collections.abc import Sequence

from printable import counted
from store import RollBack


def restored_lines(
    rolled_back: RollBack,
    faults: Sequence[str],
    *,
    learner_step: int,
    version: int,
    max_staleness: int,
) -> str:
    """Describe in two lines what a restarted learner has again, and what was thrown away.

    `faults` are those of newer checkpoints; `version` is the new number of the restored weights.
    Example of a run killed after learner step 9, with a checkpoint at every fourth step:

        continues at learner step 8 as version 11; 8 groups consumed after the checkpoint are
        available again, 3 unfinished groups are played first; 412 trajectories are kept
        thrown away: 1 learner step, which is trained again; 4 complete groups, of those or of
        others, too old for version 11 (max_staleness=1), which stay in the store as stale (fewer
        with a smaller learner.checkpoint_every)
    """
    left_out = f", as newer checkpoints cannot be loaded ({'; '.join(faults)})" if faults else ""
    oldest_allowed = version - max_staleness
    too_old = sum(n for oldest, n in rolled_back.complete.items() if oldest < oldest_allowed)
    lost = []
    if rolled_back.learner_steps:
        n = rolled_back.learner_steps
        lost.append(f"{counted(n, 'learner step')}, which {_is_or_are(n)} trained again")
    if too_old:
        stay = "stays" if too_old == 1 else "stay"
        lost.append(
            f"{counted(too_old, 'complete group')}, of those or of others, too old for version "
            f"{version} (max_staleness={max_staleness}), which {stay} in the store as stale (fewer "
            "with a smaller learner.checkpoint_every)"
        )
    again = rolled_back.groups
    n_open = rolled_back.open
    n_kept = rolled_back.trajectories
    return (
        f"continues at learner step {learner_step} as version {version}{left_out}; "
        f"{counted(again, 'group')} consumed after the checkpoint {_is_or_are(again)} available "
        f"again, {counted(n_open, 'unfinished group')} {_is_or_are(n_open)} played first; "
        f"{counted(n_kept, 'trajectory')} {_is_or_are(n_kept)} kept\n"
        f"thrown away: {'; '.join(lost) or 'nothing'}"
    )


def _is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"
