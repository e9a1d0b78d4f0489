"""What a learner says when it goes on: what it has again, and what is thrown away."""

from __future__ import annotations

from collections.abc import Sequence

from store import RollBack


def restored_lines(
    rolled_back: RollBack,
    faults: Sequence[str],
    *,
    learner_step: int,
    version: int,
    max_staleness: int,
) -> str:
    """Two lines. `faults` is what is wrong with newer checkpoints, `version` the number that the
    restored weights have now.

    Example, of a run that was killed after learner step 9, with max_staleness=1 and checkpoints of
    every fourth step:

        continues at learner step 8 as version 11; 8 groups consumed after the checkpoint are available again, 3 unfinished
        groups are played first; 412 trajectories are kept
        thrown away: 1 learner step, which is trained again; 4 complete groups, of those or of others, too old for version 11
        (max_staleness=1), which stay in the store as stale (fewer with a smaller learner.checkpoint_every)
    """
    left_out = f", as newer checkpoints cannot be loaded ({'; '.join(faults)})" if faults else ""
    too_old = sum(
        n for oldest, n in rolled_back.complete.items() if oldest < version - max_staleness
    )
    lost = []
    if rolled_back.learner_steps:
        n = rolled_back.learner_steps
        lost.append(f"{counted(n, 'learner step')}, which {be(n)} trained again")
    if too_old:
        bound = f"too old for version {version} (max_staleness={max_staleness})"
        lost.append(
            f"{counted(too_old, 'complete group')}, of those or of others, {bound}, which "
            f"{'stays' if too_old == 1 else 'stay'}"
            " in the store as stale (fewer with a smaller learner.checkpoint_every)"
        )
    again, unfinished = (
        counted(rolled_back.groups, "group"),
        counted(rolled_back.open, "unfinished group"),
    )
    kept = counted(rolled_back.trajectories, "trajectory", "trajectories")
    return (
        f"continues at learner step {learner_step} as version {version}{left_out}; "
        f"{again} consumed after the checkpoint {be(rolled_back.groups)} available again, "
        f"{unfinished} {be(rolled_back.open)} played first; {kept} {be(rolled_back.trajectories)} "
        "kept\n"
        f"thrown away: {'; '.join(lost) or 'nothing'}"
    )


def counted(n: int, one: str, many: str | None = None) -> str:
    """Example: `1 group`, `2 groups`."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def be(n: int) -> str:
    """Example: `1 group is`, `2 groups are`."""
    return "is" if n == 1 else "are"
