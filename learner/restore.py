"""Load the checkpoint that a restart goes on from, and describe what the restart kept and lost."""

from __future__ import annotations

from collections.abc import Sequence

from configs import Config, serves_adapters
from learner.checkpoint import CheckpointError, read_content
from learner.rank_group import RankGroup
from printable import counted
from store import (
    CheckpointRecord,
    FoundAtStart,
    RollBack,
    RunLayout,
    StoreError,
    UnavailableError,
    VersionRecord,
    WeightFileError,
    files_digest,
    is_adapter,
    local_directory,
    remove_copy,
    weight_files,
)


def load_newest_whole(
    checkpoints: Sequence[CheckpointRecord], *, ranks: RankGroup, layout: RunLayout
) -> tuple[CheckpointRecord | None, list[str]]:
    """Load the first whole one of the checkpoints, which come newest first.

    Return it, and the faults of newer ones; None without checkpoints. Raises CheckpointError if
    there are checkpoints but none is whole.
    """
    faults: list[CheckpointError] = []
    for checkpoint in checkpoints:
        try:
            _load(checkpoint, ranks=ranks, layout=layout)
        except CheckpointError as error:
            faults.append(error)
        else:
            return checkpoint, list(map(str, faults))
    if faults:
        raise faults[0]
    return None, []


def weights_are_whole(weights: VersionRecord, *, layout: RunLayout, config: Config) -> bool:
    """Return whether the files of these weights are whole, and of the form that engines load."""
    directory = layout.root / weights.path
    try:
        files = weight_files(directory)
    except WeightFileError:
        return False
    # After a change of model.lora_serving engines need the other form.
    has_form = is_adapter(directory) == serves_adapters(config.model)
    return has_form and files_digest(files) == weights.digest


def _load(checkpoint: CheckpointRecord, *, ranks: RankGroup, layout: RunLayout) -> None:
    """Load a checkpoint, fetched first if it is only in the storage. Raises CheckpointError."""
    try:
        if not _is_here(checkpoint, layout):
            remove_copy(layout, checkpoint.path)
        directory = local_directory(layout, checkpoint.path)
    except UnavailableError:
        raise
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    point = ranks.load_checkpoint(directory)
    # After the loss of the disk the catalog is that of a backup. The storage may have a newer
    # checkpoint of the same learner step, from another way there.
    if point.version != checkpoint.version:
        raise CheckpointError(
            f"{directory} has the weights of version {point.version}, the catalog says "
            f"{checkpoint.version}; use an older checkpoint"
        )


def _is_here(checkpoint: CheckpointRecord, layout: RunLayout) -> bool:
    """Return whether the checkpoint on this node is the one that the catalog names.

    A learner that was on this node before, and then on another, left an older one of its name.
    """
    try:
        there = read_content(layout.root / checkpoint.path)
    except CheckpointError:
        return False
    return there.point.version == checkpoint.version


def restored_lines(
    found: FoundAtStart,
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
        available again, 3 unfinished groups are played first; 412 trajectories are kept,
        held-out ones included
        thrown away: 1 learner step, which is trained again; 4 complete groups too old now for
        version 11 (max_staleness=1), which stay in the store as stale (fewer with a smaller
        learner.checkpoint_every)
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
            f"{counted(too_old, 'complete group')} too old now for version "
            f"{version} (max_staleness={max_staleness}), which {stay} in the store as stale (fewer "
            "with a smaller learner.checkpoint_every)"
        )
    again = rolled_back.groups
    n_open = found.open
    n_kept = found.trajectories
    return (
        f"continues at learner step {learner_step} as version {version}{left_out}; "
        f"{counted(again, 'group')} consumed after the checkpoint {_is_or_are(again)} available "
        f"again, {counted(n_open, 'unfinished group')} {_is_or_are(n_open)} played first; "
        f"{counted(n_kept, 'trajectory')} {_is_or_are(n_kept)} kept, "
        "held-out ones included\n"
        f"thrown away: {'; '.join(lost) or 'nothing'}"
    )


def _is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"
