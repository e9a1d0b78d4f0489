"""Own the catalog: lease groups, commit trajectories, give batches to the learner.

Consumes  lease requests and commits of workers; claims, settlements and versions of the learner
Produces  leases, batches, and the manifest that outside readers follow
Waits for nothing: every call is a short transaction on the catalog. A worker without a free group
          and a learner without a batch ask again, and name the wait in their heartbeat

The number of outstanding groups, the next task and the newest version are queries on the catalog,
so a restart has nothing to recover. Most state in memory is about processes that a restart loses
too: heartbeats, groups in play, the notices for the screen. Tasks under suspicion are read from the
catalog. These counters begin at 0 after a restart:

- how often a group was played again because it became too old (MAX_REQUEUES)
- how many groups in a row were abandoned (MAX_ABANDONED)
- how many answers of environments were remembered (the metric env/remembered)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ray

from configs import Config, groups_of_a_step, most_workers, replayed_groups
from coordinator.admission import free_groups, round_due, training_is_due
from coordinator.export_schedule import Exporter, start_maintainer
from coordinator.heartbeats import Component, HeartbeatTracker
from coordinator.leases import Lease, LeaseTable
from coordinator.logs import capture_output
from coordinator.suspects import Suspects
from coordinator.task_queue import TaskQueue
from coordinator.weight_update_lock import WeightUpdateLock
from envs import EnvironmentFailed
from store import (
    HELDOUT,
    Batch,
    Catalog,
    CheckpointRecord,
    CommitResult,
    Counts,
    FoundAtStart,
    Group,
    ReusedGroups,
    RollBack,
    RunLayout,
    SegmentMeta,
    Unfinished,
    VersionRecord,
    check_published,
    check_written,
    export,
)

# Groups in a row; then the environment is broken, and the run ends. Half as many can be bad tasks
# that stand together, which should not end a run.
MAX_ABANDONED = 10
# Without a heartbeat of its worker; then another gets the group. Much longer than silent_s, 15 s: a
# worker that is only slow keeps its groups. Those of a lost one are freed at once, by `remove`.
LEASE_S = 120.0
# Leases of workers that were heard of are renewed after this part of LEASE_S, not more often: each
# renewal writes a row.
RENEW_SHARE = 0.125
ABANDON_LEASE_S = 1.0  # of a group that is leased only to be abandoned at once
NOTICES_KEPT = 20  # the driver asks twice a second, so it sees each; the catalog keeps all
REMEMBERED = "env/remembered"  # a metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of the run, for the screen and the supervisor."""

    counts: Counts
    version: int  # newest announced; -1: none
    learner_step: int
    metrics: Mapping[str, float]  # newest value of each name
    components: Mapping[str, Component]
    heldout_open: int  # held-out groups still to be played
    notices: Mapping[int, str]  # the newest, numbered from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The state that a learner needs to go on."""

    latest_version: int | None  # None in a new run
    last_step: int  # the run ends there: at `learner.steps`, or where its offline groups end
    found: FoundAtStart
    rolled_back: RollBack
    metrics: Mapping[str, float]  # newest value of each name, up to the learner step resumed from


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """The training of one claimed batch, as the learner reports it."""

    batch_id: int
    learner_step: int
    version_in: int  # the policy version at which it was trained
    filtered: Mapping[bytes, str]  # group uid -> why the group was left out of the loss
    metrics: Mapping[str, float]  # figures of the learner step, by name
    # trajectory uid -> the critic's value of each step's state; {} without a critic
    values: Mapping[bytes, Sequence[float]] = field(default_factory=dict)


class Coordinator:
    """Own the catalog. This class needs no Ray; `CoordinatorActor` is the Ray actor."""

    def __init__(self, config: Config, *, learns: bool) -> None:
        self.config, self.learns = config, learns
        self.layout = RunLayout.open(Path(config.run_dir))
        # The driver has looked at the directory. When it trusts a run that another user signed,
        # only its own process knows of the trust.
        self.catalog = Catalog.open(self.layout, directory_is_checked=True)
        # Now: workers may play for minutes before the learner has its model and asks.
        self._found = self.catalog.found_at_start()
        self.tasks = TaskQueue(config, learns=learns)
        self._n_own, n_offline = groups_of_a_step(config)
        self._reused = ReusedGroups(
            n_offline=n_offline,
            max_uses=config.offline.uses,
            n_replayed=replayed_groups(config),
            max_age_versions=config.replay.max_age,
        )
        self._last_step = config.learner.steps  # less where the offline groups end sooner
        self._exporter = Exporter(self.catalog, self.layout)
        self._heartbeats = HeartbeatTracker()
        self._leases = LeaseTable(extra_members=config.actors.extra_members)
        self._weight_updates = WeightUpdateLock(most_workers(config.actors))
        self._suspects = Suspects(self.catalog.times_lost())
        self._n_answers = self._n_remembered = 0  # of environments, since the last learner step
        self._rendezvous: str | None = None  # a restarted learner states a new one
        # The newest version while its files are being written. After a restart, until the learner
        # has found them whole or announced another.
        newest = self.catalog.latest_version() if learns else None
        self._unwritten = None if newest is None else newest.version
        # Groups abandoned in a row by `abandon`. The catalog does not say which call abandoned a
        # group. A restart counts from 0: failures before a repair must not end the run after it,
        # and an environment that still fails ends it MAX_ABANDONED groups later.
        self._n_abandoned = 0
        self._n_notices = 0
        self._is_closed = False
        self._notices: dict[int, str] = {}
        self.maintainer = start_maintainer(self.catalog, self.layout, config=config.store)

    def capture_output(self) -> None:
        """Append the output of this process to the coordinator's log."""
        capture_output(self.layout.logs / "coordinator.log")

    # every component

    def heartbeat(self, component: str, waiting_on: str | None, *, waits_s: float) -> None:
        """Record a heartbeat, and renew the leases of the component."""
        self._heartbeats.record(component, waiting_on, waits_s=waits_s)
        if self._is_closed:
            return
        if due := self._heartbeats.take_unwritten():
            with self.catalog.unsynced():
                self.catalog.heartbeats(due)
                if alive := self._heartbeats.take_unrenewed(every_s=RENEW_SHARE * LEASE_S):
                    self.catalog.renew_leases(alive, lease_s=LEASE_S)
            self._heartbeats.written()
        self._exporter.when_due()

    def record_event(self, component: str, what: str, *, detail: str) -> None:
        """Record a line of the view `events`. A power cut may undo it."""
        with self.catalog.unsynced():
            self.catalog.log(component=component, what=what, detail=detail)

    def notice(self, component: str, what: str, *, detail: str) -> None:
        """Record an event, and show it on the screen."""
        self.catalog.log(component=component, what=what, detail=detail)
        self._n_notices += 1
        self._notices[self._n_notices] = f"{what}: {detail}"
        self._notices.pop(self._n_notices - NOTICES_KEPT, None)

    def newest_version(self) -> VersionRecord | None:
        """Return the newest version. Writes nothing: workers ask many times a second."""
        return self.catalog.latest_version()

    def is_written(self, version: int) -> bool:
        """Return False while the newest version's files are not known to be there."""
        return version != self._unwritten

    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """Return the checkpoints on disk that a learner may start from, newest first."""
        return self.catalog.live_checkpoints()[::-1]

    # workers

    def lease(self, worker: str, serves: int | None = None) -> Lease | None:
        """Lease the next group: unfinished groups first, then a new task.

        `serves` is the version of the worker's policy, None for one that never changes. Returns
        None while admission is closed, and while the newest version is not written yet and the
        worker serves another. Raises StoreError if the maintainer has failed; the worker passes it
        on, and the run ends.
        """
        self.maintainer.check()
        self._heartbeats.touch(worker)
        self._exporter.when_due()
        with self.catalog.unsynced():
            version = self.catalog.latest_version()  # None before the first is announced
            group = None
            if version is not None and self._can_serve(version.version, serves):
                group = self._next_listed_group(worker)
        if version is None or group is None:
            return None
        played_by = self.config.evaluation if group.split == HELDOUT else self.config.actors
        lease = Lease(
            group=group,
            task=self.tasks[group.task_id],
            version=version,
            worker=worker,
            temperature=played_by.temperature,
        )
        self._leases.begin(lease)
        return lease

    def _can_serve(self, newest: int, serves: int | None) -> bool:
        """Return whether a worker has the newest version, or can load its files."""
        return serves is None or serves >= newest or self.is_written(newest)

    def _next_listed_group(self, worker: str) -> Group | None:
        """Lease the next group. Abandon those of tasks that the environment lists no more.

        A group stays open when a run stops, and the list is read anew at each start.
        """
        while (group := self._next_group(worker)) is not None and group.task_id not in self.tasks:
            reason = (
                f"task {group.task_id!r} is not among the tasks that the environment lists now; "
                "give it the same list at each start"
            )
            self.catalog.give_up(group.group_uid, worker=worker, state="abandoned", reason=reason)
            self.notice(worker, "group abandoned", detail=reason)
        return group

    def _next_group(self, worker: str) -> Group | None:
        """Lease an open group, or else a new one while admission is open.

        Suspects are played last, each alone on its worker.
        """
        self._abandon_tasks_that_kill(worker)
        suspects, playing = self._suspects.task_ids, self._leases.of(worker)
        if any(lease.task.id in suspects for lease in playing):
            return None
        trains = self.learns and training_is_due(
            self.config, self.catalog, last_step=self._last_step
        )
        split = None if trains else HELDOUT
        lease_open = partial(
            self.catalog.lease_open_group, worker=worker, lease_s=LEASE_S, split=split
        )
        group = lease_open(without=suspects)
        if group is None and suspects and not playing:
            group = lease_open(only=suspects)
            self._suspects.release(worker)
        elif group is None and self._drains_for_suspect(worker, split=split):
            return None
        if group is None and trains and self._n_admitted():
            self.tasks.open_next_group(self.catalog)
            group = lease_open(without=suspects)
        return group

    def _drains_for_suspect(self, worker: str, *, split: str | None) -> bool:
        """Return whether a worker gets no group until it can play a waiting suspect alone."""
        suspects = self._suspects.task_ids
        is_waiting = self.catalog.has_free_group(suspects, split=split)
        return is_waiting and self._suspects.begin_drain(worker)

    def _n_admitted(self) -> int:
        """Return how many groups may be opened now within the bound on staleness."""
        return free_groups(
            outstanding=self.catalog.outstanding(),
            groups_per_step=self._n_own,
            max_staleness=self.config.max_staleness,
        )

    def _abandon_tasks_that_kill(self, worker: str) -> None:
        """Abandon the open groups of tasks that kill workers; no worker plays them again."""
        to_abandon = self._suspects.to_abandon
        while to_abandon:
            group = self.catalog.lease_open_group(
                worker=worker, lease_s=ABANDON_LEASE_S, only=to_abandon
            )
            if group is None:
                return
            reason = to_abandon[group.task_id]
            self.catalog.give_up(group.group_uid, worker=worker, state="abandoned", reason=reason)

    def commit(self, segment: SegmentMeta, epoch: int) -> CommitResult:
        """Enter the trajectories of a segment. Raises FencedError for another owner's epoch.

        Raises UnavailableError if this process does not see the file in a storage on a volume.
        """
        self._heartbeats.touch(segment.worker)
        check_written(self.layout, segment.path, worker=segment.worker)
        result = self.catalog.commit(segment, epoch=epoch)
        self._leases.committed(segment)
        for group_uid in result.full:
            self._n_abandoned = 0
            if (task_id := self._leases.task_id(group_uid)) is not None:
                self._suspects.clear(task_id)
            self._leases.end(group_uid)
        self._exporter.when_due()
        return result

    def keep_extra(
        self, group_uid: bytes, task_id: str, *, segment: SegmentMeta, epoch: int
    ) -> None:
        """Enter episodes that ended after their group was whole, as groups of split "imported"."""
        if epoch == self.catalog.epoch:
            check_written(self.layout, segment.path, worker=segment.worker)
            self.catalog.import_extra(segment, task_id=task_id, of_group=group_uid)

    def record_unfinished(self, worker: str, episodes: Sequence[Unfinished], *, epoch: int) -> None:
        """Enter episodes that gave no trajectory, and end their leases.

        Ignores episodes of another owner's epoch.
        """
        if epoch != self.catalog.epoch:
            return
        failed = {episode.group_uid for episode in episodes if episode.why == "worker_failed"}
        leases = [lease for lease in self._leases.of(worker) if lease.group.group_uid in failed]
        self._suspects.report(worker, leases)
        self._leases.end_reported(worker, episodes)
        self.catalog.record_unfinished(episodes, worker=worker)

    def count_answers(self, n_answers: int, n_remembered: int) -> None:
        """Count the resets and steps of a worker's environments, and those it remembered."""
        self._n_answers += n_answers
        self._n_remembered += n_remembered

    def give_up(self, worker: str, group_uid: bytes, *, why: str) -> None:
        """Give up a group that became too old in play. Its committed trajectories stay.

        A group without any is played again, on new weights, up to MAX_REQUEUES times.
        """
        state = "open" if self._leases.end_too_old(group_uid) else "stale"
        self.catalog.give_up(group_uid, worker=worker, state=state, reason=why)

    def abandon(self, worker: str, group_uid: bytes, *, why: str) -> None:
        """Abandon a group whose environment failed at every attempt: nobody plays it again.

        Raises EnvironmentFailed at MAX_ABANDONED such groups in a row.
        """
        self._leases.end(group_uid)
        self.catalog.give_up(group_uid, worker=worker, state="abandoned", reason=why)
        self.notice(worker, "group abandoned", detail=why)
        self._n_abandoned += 1
        if self._n_abandoned >= MAX_ABANDONED:
            raise EnvironmentFailed(
                f"{self._n_abandoned} groups in a row were abandoned; the last one: {why}"
            )

    def begin_weight_update(self, worker: str) -> bool:
        """Return whether `worker` may update its weights now, until `end_weight_update`."""
        return self._weight_updates.acquire(worker)

    def end_weight_update(self, worker: str) -> None:
        """Let the next worker update its weights."""
        self._weight_updates.release(worker)

    def rendezvous(self) -> str | None:
        """Return the address from which the learner broadcasts its weights, if it does."""
        return self._rendezvous

    # learner

    def set_rendezvous(self, address: str) -> None:
        """Tell workers the address from which the learner broadcasts its weights."""
        self._rendezvous = address

    def claim(self, current_version: int) -> Batch | None:
        """Claim the oldest complete groups, the least used offline ones, and wins to replay.

        Returns None if they are too few. With `stragglers: wait` also while a group is in play that
        the next version would make too old.
        """
        if self._waits_for_stragglers(current_version):
            return None
        return self.catalog.claim(
            n_groups=self._n_own,
            current_version=current_version,
            max_staleness=self.config.max_staleness,
            reused=self._reused,
        )

    def refill(
        self, batch_id: int, *, filtered: Collection[bytes], n_groups: int, current_version: int
    ) -> Batch | None:
        """Claim `n_groups` more groups for a batch, in place of `filtered` ones.

        Returns the whole batch, or None while too few groups are complete, or one is waited for as
        in `claim`. From the first call on, workers may play others in place of the filtered groups.
        """
        return self.catalog.refill(
            batch_id,
            filtered=filtered,
            n_groups=0 if self._waits_for_stragglers(current_version) else n_groups,
            current_version=current_version,
            max_staleness=self.config.max_staleness,
        )

    def _waits_for_stragglers(self, current_version: int) -> bool:
        oldest_allowed = current_version - self.config.max_staleness
        return self.config.stragglers == "wait" and self._leases.begun_at(oldest_allowed)

    def resume(self, learner_step: int) -> ResumePoint:
        """Roll back to the checkpoint of `learner_step`; 0 is the start without one."""
        newest = self.catalog.latest_version()
        rolled_back = self.catalog.roll_back(learner_step)
        if self._reused.n_offline:
            self._end_with_offline_groups(learner_step)
        return ResumePoint(
            last_step=self._last_step,
            latest_version=newest.version if newest else None,
            found=self._found,
            rolled_back=rolled_back,
            metrics=self.catalog.latest_metrics(),
        )

    def _end_with_offline_groups(self, learner_step: int) -> None:
        """End the run where its offline groups are used up, and say so."""
        steps, reused = self.config.learner.steps, self._reused
        n_left = self.catalog.offline_batches_left(reused.n_offline, uses=reused.max_uses)
        self._last_step = min(steps, learner_step + n_left)
        if self._last_step < steps:
            self.notice(
                "learner",
                "offline rollouts",
                detail=f"they last until learner step {self._last_step} of {steps}, where the run "
                f"ends in order; raise offline.uses={reused.max_uses} for more",
            )

    def release_claims(self, learner_step: int) -> int:
        """Release the groups that were claimed after `learner_step`. Return their number."""
        return self.catalog.roll_back(learner_step).groups

    def settle(self, trained: Settlement) -> None:
        """Record that a batch was trained on, with the figures of its learner step."""
        self.catalog.settle(
            trained.batch_id,
            learner_step=trained.learner_step,
            filtered=trained.filtered,
            version_in=trained.version_in,
            values=trained.values,
        )
        metrics = trained.metrics
        if self._n_answers:
            metrics = {**metrics, REMEMBERED: self._n_remembered / self._n_answers}
        self._n_answers = self._n_remembered = 0
        if self.config.environments:
            by_environment = self.catalog.batch_success(trained.batch_id)
            metrics = {**metrics, **_named("train/success", by_environment)}
        self.catalog.record_metrics(
            learner_step=trained.learner_step, policy_version=trained.version_in, values=metrics
        )

    def announce(self, version: VersionRecord) -> None:
        """Make a version the newest one, and open its evaluation round if one is due.

        Its files are not there yet. `written` says when they are.
        """
        self._unwritten = version.version
        self.catalog.record_version(version)
        due = round_due(self.config, version, last_step=self._last_step)
        if due is not None:
            self.evaluate(due, self.config.evaluation.episodes_per_task)

    def written(self, version: int) -> None:
        """Note that the files of an announced version are there, for engines that ask."""
        if self._unwritten == version:
            self._unwritten = None

    def publish(self, version: VersionRecord) -> None:
        """Announce a version whose files are there: it is published at once."""
        self.announce(version)
        self.written(version.version)

    def export_now(self) -> int:
        """Export for outside readers. Return the catalog's lsn that they see from now on."""
        return export(self.catalog, self.layout)

    def checkpoint(self, record: CheckpointRecord, *, lsn: int) -> bool:
        """Record a checkpoint that was written. Return whether the backup knows it too.

        `lsn` is from `export_now` when it was copied: a fork of it begins there. Raises
        UnavailableError if this process does not see it in the storage.
        """
        check_published(self.layout, record.path)
        return self.catalog.record_checkpoint(record, lsn=lsn)

    # driver

    def evaluate(self, version: int, episodes_per_task: int) -> None:
        """Open an evaluation round: its groups are leased before any training group."""
        self.tasks.open_round(self.catalog, version, episodes_per_task=episodes_per_task)

    def driver_tick(self) -> Status:
        """Record the driver's heartbeat and finished evaluations, export if due. Return the state.

        The driver calls it twice a second, and sends no other heartbeats.
        """
        self._heartbeats.record("driver", None, waits_s=0.0)
        self._record_finished_evaluations()
        self._exporter.when_due()
        return self.status()

    def status(self) -> Status:
        """Return the state of the run. Writes nothing: the learner asks for it too."""
        version = self.catalog.latest_version()
        return Status(
            counts=self.catalog.counts(),
            version=version.version if version else -1,
            learner_step=self.catalog.learner_step(),
            metrics=self.catalog.latest_metrics(),
            components=self._heartbeats.components(),
            heldout_open=self.catalog.open_heldout(),
            notices=dict(self._notices),
        )

    def remove(self, component: str, why: str) -> None:
        """Remove a component that left or was lost, and free its groups for others."""
        self._heartbeats.remove(component)
        blamed = self._suspects.lose(component, self._leases.of(component), why=why)
        self.catalog.record_unfinished(self._leases.lose(component), worker=component)
        self._weight_updates.release(component)
        if blamed is not None:
            reason = self._suspects.to_abandon[blamed.task.id]
            self.catalog.give_up(
                blamed.group.group_uid, worker=component, state="abandoned", reason=reason
            )
            log = self.layout.logs / f"{component}.log"
            self.notice(component, "group abandoned", detail=f"{reason}; see {log}")
        n_groups = self.catalog.release_leases(component)
        self.catalog.log(
            component=component, what="gone", detail=f"{why}; {n_groups} groups are free for others"
        )

    def close(self) -> None:
        """Export a last time and close the catalog."""
        self.maintainer.close()
        self._record_finished_evaluations()
        export(self.catalog, self.layout)
        self._is_closed = True
        self.catalog.close()
        self.maintainer.check()

    def _record_finished_evaluations(self) -> None:
        for done in self.catalog.finished_evaluations():
            values = done.metrics()
            if self.config.environments:
                values |= _named("heldout/success", self.catalog.round_success(done.version))
            self.catalog.record_metrics(
                learner_step=done.learner_step, policy_version=done.version, values=values
            )


def _named(metric: str, by_environment: Mapping[str, float]) -> dict[str, float]:
    return {f"{metric}/{name}": value for name, value in by_environment.items()}


CoordinatorActor = ray.remote(Coordinator)
