"""Define the types that the catalog takes and returns. They cross processes, so all are frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from store.hashing import uid
from store.segments import SegmentMeta

# Splits of a group. TRAIN and HELDOUT are those of its task. IMPORTED is the split of other runs'
# groups. They are never leased, and claimed only if they have a source.
TRAIN, HELDOUT, IMPORTED = "train", "heldout", "imported"
NO_ORDINAL = -1  # of a group that the catalog does not have yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The attempts at one task: a row of the catalog's table `grp`."""

    group_uid: bytes
    split: str  # TRAIN, HELDOUT or IMPORTED
    ordinal: int  # its number among the groups of the split, and of the evaluation round
    task_id: str
    size: int  # members in all
    evaluated_version: int | None  # of a held-out group: the version that its round evaluates
    state: str  # open, complete, claimed, trained, stale, filtered or abandoned
    version_min: int | None  # oldest and newest policy version of its trajectories
    version_max: int | None  # None: no member is committed
    source: str | None  # id of the run that played an offline group; its versions are that run's
    missing: tuple[int, ...]  # members not yet committed
    epoch: int  # of the catalog's owner that handed it out; a commit carries it

    @classmethod
    def imported(cls, *, group_uid: bytes, task_id: str, size: int) -> Group:
        """Describe a group of another run, which the catalog does not have yet."""
        return cls(
            group_uid=group_uid,
            split=IMPORTED,
            ordinal=NO_ORDINAL,
            task_id=task_id,
            size=size,
            evaluated_version=None,
            state="abandoned",
            version_min=None,
            version_max=None,
            source=None,
            missing=(),  # nobody plays it
            epoch=0,
        )

    @property
    def traj_uids(self) -> tuple[bytes, ...]:
        """Return the uids of members 0 to size - 1. They are fixed before generation."""
        return tuple(uid(self.group_uid, member) for member in range(self.size))

    @property
    def oldest_version(self) -> int:
        """Return `version_min` of a group that has committed members."""
        assert self.version_min is not None
        return self.version_min


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """One attempt at an episode that gave no trajectory."""

    group_uid: bytes
    number: int  # of the episode in its group; from the group's size on: extra
    version: int  # newest announced when its group was leased
    begun_us: int  # UTC epoch
    ended_us: int
    n_steps: int | None  # steps played until then; None: unknown, the worker was lost
    n_response_tokens: int | None
    why: str  # see WHY_UNFINISHED


# With a uid behind it: where an imported group is from that has one extra episode of that group.
EXTRA_OF = "extra of group"
WHY_UNFINISHED = {
    "straggler": "its group was complete without it (actors.extra_members)",
    "failed": "its environment failed, or took too long; it is played env.attempts times at most",
    "group_failed": "its group was abandoned, because an episode of it failed at every attempt",
    "too_old": "its group was given up, because newer weights made it too old",
    "stopped": "its worker was asked to stop",
    "worker_failed": "its worker lost its engine, or failed in another way",
    "worker_lost": "its worker died, or hung and was killed: how far it got is not known",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownResults:
    """The moment up to which the results of tasks count."""

    lsn: int
    version: int  # newest then; 0 before the first


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeGroup:
    """The result of one training group, all of whose members were committed."""

    task_id: str
    size: int
    n_won: int
    return_sum: float
    version_max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitResult:
    """The trajectories of a committed segment."""

    new: tuple[bytes, ...]  # they count from this segment
    duplicates: tuple[bytes, ...]  # already committed from another segment
    full: tuple[bytes, ...]  # groups of the segment that have all members


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusedGroups:
    """The number and limits of the groups of a batch that are not new ones of the run."""

    n_offline: int = 0  # offline groups; they never become stale
    max_uses: int = 1  # of one offline group, by all batches
    n_replayed: int = 0  # groups whose wins are replayed, or fewer if there are not so many
    max_age_versions: int = 0  # of replayed groups, behind the learner's version


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The groups of one learner step, and the files to read them from."""

    batch_id: int
    groups: tuple[Group, ...]
    segments: tuple[SegmentMeta, ...]  # each lists only the trajectories of these groups
    replayed: tuple[Group, ...]  # trained on before, and now again for the episodes that won
    replayed_segments: tuple[SegmentMeta, ...]  # of the replayed groups
    claimed_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRecord:
    """An announced set of weights."""

    version: int  # policy version
    path: str  # of its directory, within the run's
    digest: str  # of its weight files, in hex
    learner_step: int | None  # that made it; None: no learner step of this run


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A learner state that a run goes on from."""

    learner_step: int  # the last one in it
    path: str  # of its directory, within the run's
    version: int  # policy version of its weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RollBack:
    """The groups that a roll-back made available, and those that are complete after it."""

    batches: int
    groups: int
    checkpoints: int
    learner_steps: int  # settled ones, which will be trained again
    complete: Mapping[int, int]  # oldest version -> number of complete training groups


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundAtStart:
    """The rollouts that a start of the run found, before its workers played any."""

    open: int  # training groups that lack members
    trajectories: int  # in live segments, of all groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Training groups by state, and their committed trajectories and steps."""

    open: int
    leased: int  # these are open, too
    complete: int
    claimed: int
    trained: int
    stale: int
    filtered: int
    trajectories: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessRate:
    """The number of some trajectories that reached their goal."""

    n_trajectories: int
    n_won: int

    @property
    def rate(self) -> float | None:
        """Return the fraction won, None without trajectories."""
        return self.n_won / self.n_trajectories if self.n_trajectories else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A finished evaluation round whose result is not in the metrics yet."""

    version: int  # the weights that the round was opened for
    newest_version: int  # newest weights that played in it, while the learner went on
    learner_step: int
    success: SuccessRate
    # of all its trajectories: undiscounted sums of rewards; None if they cancel out at infinity
    return_sum: float | None
    n_steps: int  # of all its trajectories
    n_abandoned: int  # episodes whose environment failed at every attempt

    def metrics(self) -> dict[str, float]:
        """Return the round's figures by name.

        Means of no episodes are left out, and so is a return that is no finite number.
        """
        n_trajectories = self.success.n_trajectories
        means = {"heldout/episode_steps": self.n_steps / max(1, n_trajectories)}
        if self.return_sum is not None and math.isfinite(self.return_sum):
            means["heldout/return"] = self.return_sum / max(1, n_trajectories)
        return {
            "heldout/success": self.success.rate or 0.0,
            **(means if n_trajectories else {}),
            "heldout/episodes": float(n_trajectories),
            "heldout/newest_version": float(self.newest_version),
            **({"heldout/abandoned": float(self.n_abandoned)} if self.n_abandoned else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSegment:
    """A segment that later snapshots contain."""

    segment_id: str
    level: int  # how often its rows were merged; 0: as a worker wrote it
    n_bytes: int
    n_steps: int
    lsn: int
    committed_us: int
    settled: bool  # none of its groups is still to be played or trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """The consequences of setting a damaged file aside."""

    rescued: int  # trajectories that another file holds
    lost: tuple[bytes, ...]  # traj_uids of the others
    reopened: tuple[bytes, ...]  # groups that will be played again
    released: tuple[int, ...]  # claimed batches whose groups are available again
