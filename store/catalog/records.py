"""What the catalog is asked and answers. Everything here crosses a process border, so everything
here is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from store.segments import SegmentMeta


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """One group to be played: what, and which of its members are still missing."""

    group_uid: bytes
    traj_uids: tuple[bytes, ...]  # of members 0..size-1, fixed before generation
    ordinal: int
    task_id: str
    split: str
    size: int
    purpose_version: int | None  # the evaluation round of a held-out group
    missing: tuple[int, ...]  # members not yet committed
    epoch: int  # to be given back with the commit


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """One attempt at an episode that gave no trajectory."""

    group_uid: bytes
    number: int  # of the episode in its group; a spare has one from the group's size on
    version: int  # newest published when its group was leased
    begun_us: int  # UTC epoch
    ended_us: int
    n_steps: int | None  # steps played until then; None: not known, the worker was lost
    n_response_tokens: int | None
    why: str  # see WHY_UNFINISHED


WHY_UNFINISHED = {
    "straggler": "its group was whole without it (actors.spare_members)",
    "failed": "its environment failed, or it took no action in time; it is played again, env.attempts times",
    "group_failed": "its group was abandoned, because an episode of it failed at every attempt",
    "too_old": "its group was given up, because newer weights made it too old",
    "stopped": "its worker was asked to stop",
    "worker_failed": "its worker lost its engine, or failed in another way",
    "worker_lost": "its worker died, or hung and was killed: how far it got is not known",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitResult:
    """Which trajectories of a segment count: those `new` and the `duplicates` together are all of
    the segment's.
    """

    new: tuple[bytes, ...]
    duplicates: tuple[bytes, ...]  # already committed from another segment
    whole: tuple[bytes, ...]  # groups of the segment that lack no member


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedGroup:
    group_uid: bytes
    task_id: str
    ordinal: int
    version_min: int
    version_max: int
    # the id of the run that played it, if that is another: its versions are those of that run
    source: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The groups of one learner step, and the files to read them from."""

    batch_id: int
    groups: tuple[ClaimedGroup, ...]
    segments: tuple[SegmentMeta, ...]  # each lists only the trajectories of these groups
    claimed_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRecord:
    version: int
    path: str
    digest: str
    learner_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    learner_step: int
    path: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RollBack:
    """What a roll-back made available again, and what a learner finds that goes on from there."""

    batches: int
    groups: int
    checkpoints: int
    learner_steps: int  # that had been settled, and are trained again
    open: int  # training groups that were handed out and are not finished
    complete: Mapping[int, int]  # oldest version of a complete training group -> how many of those
    # all that are there: of training and held-out groups, of extra, and offline ones
    trajectories: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Training groups by state, and their committed trajectories and steps. `leased` groups are
    also `open`.
    """

    open: int
    leased: int
    complete: int
    claimed: int
    trained: int
    stale: int
    filtered: int
    trajectories: int
    steps: int

    @property
    def outstanding(self) -> int:
        """Groups handed out and not yet trained on: what admission bounds."""
        return self.open + self.complete + self.claimed


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessRate:
    """How many of some trajectories reached their goal."""

    n_trajectories: int
    n_won: int

    @property
    def rate(self) -> float | None:
        """Fraction won, None where nothing was played."""
        return self.n_won / self.n_trajectories if self.n_trajectories else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A finished evaluation round whose result is not in the metrics yet."""

    version: int  # the weights it was asked for, the oldest it was played with
    # in a round that is played while the learner goes on, those that came meanwhile play too
    newest_version: int
    learner_step: int
    success: SuccessRate
    return_sum: float  # over its trajectories: undiscounted sums of their rewards
    n_steps: int  # of all its trajectories
    # episodes of which nothing is known, because their environment failed at every attempt
    n_abandoned: int

    def metrics(self) -> dict[str, float]:
        """Return the round's figures by name. Means of no episodes are left out."""
        n_trajectories = self.success.n_trajectories
        means = {
            "heldout/return": self.return_sum / max(1, n_trajectories),
            "heldout/episode_steps": self.n_steps / max(1, n_trajectories),
        }
        return {
            "heldout/success": self.success.rate or 0.0,
            **(means if n_trajectories else {}),
            "heldout/episodes": float(n_trajectories),
            "heldout/newest_version": float(self.newest_version),
            **({"heldout/abandoned": float(self.n_abandoned)} if self.n_abandoned else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSegment:
    """A file that readers see."""

    segment_id: str
    level: int  # how often its rows were merged; 0: as a worker wrote it
    n_bytes: int
    n_steps: int
    lsn: int
    committed_us: int
    settled: bool  # no group of it is still to be played or trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """What a damaged file meant."""

    rescued: int  # trajectories that another file still holds
    lost: tuple[bytes, ...]  # traj_uids of the others
    reopened: tuple[bytes, ...]  # groups that are played again
    released: tuple[int, ...]  # claimed batches whose groups are available again
