"""The owner of the catalog: hands out groups, takes in trajectories, gives batches to the learner.

Consumes  lease requests and commits of workers; claims, settlements and published versions of the
learner.
Produces  leases, batches, the manifest that outside readers follow.
Waits for nothing: every call is a short transaction on the catalog and returns; the maintainer
merges files in a thread beside
          it. Who must wait (a worker without a free group, the learner without a batch) asks again, and says so in `heartbeat`.

It keeps no counter of its own: what is outstanding, which task comes next and which version is the
newest are queries on the catalog, so a restart has nothing to recover. What it remembers beside
that dies with the processes it is about: who was heard of when (`pulse.py`), which groups are being
played and how often they were given up, which tasks workers were lost with, how many groups were
abandoned in a row, notices for the screen (the catalog has all of it as events).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from configs import Config, groups_of_a_step
from coordinator.admission import free_groups
from coordinator.batched_calls import Call
from coordinator.export_schedule import Exporter, start_maintainer
from coordinator.heartbeats import HeartbeatTracker, Status
from coordinator.leases import Lease, LeaseTable, Suspects, WeightUpdateLock
from coordinator.logs import capture_output
from coordinator.resume import ResumePoint
from coordinator.task_queue import Tasks, round_due, training_is_due
from envs import EnvironmentFailed
from store import (
    Batch,
    Catalog,
    CheckpointRecord,
    CommitResult,
    RunLayout,
    SegmentMeta,
    Unfinished,
    VersionRecord,
)

MAX_ABANDONED = 10  # groups in a row; then the environment is broken and the run says so
GIVE_UP_LEASE_S = 1.0  # of a group that is leased only to be given up in the next line
# a status every half second shows them long before they are dropped; all of them are events too
NOTICES_KEPT = 20


class Coordinator:
    """A plain class, so that tests drive it without Ray; `CoordinatorActor` is the same as a Ray
    actor.
    """

    def __init__(self, config: Config, *, learns: bool) -> None:
        self.config, self.learns = config, learns
        self.layout = RunLayout.open(Path(config.run_dir))
        self.catalog = Catalog.open(self.layout)
        self.tasks = Tasks(config, learns=learns)
        self._n_live, self._n_offline = groups_of_a_step(config)
        self._last_step = config.learner.steps  # less where offline groups do not last so long
        self._exporter = Exporter(self.catalog, self.layout)
        self._pulse = HeartbeatTracker()
        self._plays, self._turn = (
            LeaseTable(spare_members=config.actors.extra_members),
            WeightUpdateLock(),
        )
        self._suspects = Suspects(self.catalog.times_lost())
        # of this learner: the next one, after its death, has another
        self._meeting_point: str | None = None
        self._n_abandoned = self._n_notices = 0  # groups in a row; notices in all
        self._notices: dict[int, str] = {}
        self.maintainer = start_maintainer(self.catalog, self.layout, config.store)

    def capture_output(self, name: str) -> None:
        capture_output(self.layout.logs / f"{name}.log")

    # workers

    def ask_all(self, questions: Sequence[Call]) -> list[object]:
        """What one process asks at once (`shared_handle.py`): each answer, or the CallError in its
        place.
        """
        with self.catalog.synced_together():
            self._write_beats()
            return [question.put_to(self) for question in questions]

    def lease(self, worker: str) -> Lease | None:
        """The next group for this worker, or None while admission is closed: unfinished groups
        first, then a new task.

        Raises StoreError if the maintainer has failed: whoever calls ends the run, and says why.
        """
        self.maintainer.check()
        self._pulse.heard(worker)
        self._exporter.when_due()
        with self.catalog.unsynced():
            lease = self._lease(worker)
        if lease is not None:
            self._plays.begin(lease)
        return lease

    def _lease(self, worker: str) -> Lease | None:
        version = self.catalog.latest_version()
        if version is None:  # the learner has not published the first weights yet
            return None
        split = None if self._training_is_due() else "heldout"
        lease_s = self.config.actors.lease_s
        self._abandon_condemned(worker)
        suspects, playing = self._suspects.task_ids, self._plays.of(worker)
        if any(lease.task.id in suspects for lease in playing):
            return None
        group = self.catalog.lease_open_group(
            worker=worker, lease_s=lease_s, split=split, without=suspects
        )
        if group is None and suspects and not playing:
            group = self.catalog.lease_open_group(
                worker=worker, lease_s=lease_s, split=split, only=suspects
            )
            self._suspects.release(worker)
        elif (
            group is None
            and self.catalog.has_free_group(suspects, split=split)
            and self._suspects.drains(worker)
        ):
            return None
        if group is None and split is None and self._free_groups() > 0:
            self.tasks.open_next_group(self.catalog)
            group = self.catalog.lease_open_group(
                worker=worker, lease_s=lease_s, split=split, without=suspects
            )
        if group is None:
            return None
        temperature = (
            self.config.evaluation if group.split == "heldout" else self.config.actors
        ).temperature
        task = self.tasks[group.task_id]
        return Lease(
            group=group,
            task=task,
            version=version,
            worker=worker,
            temperature=temperature,
            epoch=self.catalog.epoch,
        )

    def _abandon_condemned(self, worker: str) -> None:
        """Nobody plays a task again that took workers with it: its other groups are abandoned
        too.
        """
        condemned = self._suspects.condemned
        while condemned and (
            group := self.catalog.lease_open_group(
                worker=worker, lease_s=GIVE_UP_LEASE_S, only=condemned
            )
        ):
            reason = condemned[group.task_id]
            self.catalog.give_up(group.group_uid, worker=worker, state="abandoned", reason=reason)

    def commit(self, segment: SegmentMeta, epoch: int) -> CommitResult:
        self._pulse.heard(segment.worker)
        result = self.catalog.commit(segment, epoch=epoch)
        self._plays.committed(segment)
        for group_uid in result.whole:
            self._n_abandoned = 0
            if (task_id := self._plays.task_id(group_uid)) is not None:
                self._suspects.played(task_id)
            self._plays.end(group_uid)
        self._exporter.when_due()
        return result

    def keep_extra(self, group_uid: bytes, task_id: str, segment: SegmentMeta, epoch: int) -> None:
        """Episodes that ended when their group was whole already: readers see them, as groups of
        split "imported".
        """
        if epoch == self.catalog.epoch:
            self.catalog.import_extra(segment, task_id=task_id, of_group=group_uid)

    def record_unfinished(self, worker: str, episodes: Sequence[Unfinished], epoch: int) -> None:
        """Enter episodes that gave no trajectory, unless their lease is another owner's."""
        if epoch == self.catalog.epoch:
            failed = {episode.group_uid for episode in episodes if episode.why == "worker_failed"}
            leases = [lease for lease in self._plays.of(worker) if lease.group.group_uid in failed]
            self._suspects.report(worker, leases)
            self.catalog.record_unfinished(self._plays.reported(worker, episodes), worker=worker)

    def give_up(self, worker: str, group_uid: bytes, why: str) -> None:
        """The group became too old while it was played. What was committed of it stays.

        With nothing committed it is played again, from the start and on new weights, up to
        MAX_GIVEN_UP times.
        """
        again = self._plays.may_requeue(group_uid)
        self.catalog.give_up(
            group_uid, worker=worker, state="open" if again else "stale", reason=why
        )

    def abandon(self, worker: str, group_uid: bytes, why: str) -> None:
        """The environment failed at every attempt: nobody plays this group again. Raises
        EnvironmentFailed if all fail.
        """
        self._plays.end(group_uid)
        self.catalog.give_up(group_uid, worker=worker, state="abandoned", reason=why)
        self.notice("group abandoned", why)
        self._n_abandoned += 1
        if self._n_abandoned >= MAX_ABANDONED:
            raise EnvironmentFailed(
                f"{self._n_abandoned} groups in a row were abandoned; the last one: {why}"
            )

    def heartbeat(self, component: str, waiting_on: str | None, waits_s: float) -> None:
        """Note a component's sign of life, about twice a second, and renew its leases."""
        self._pulse.beat(component, waiting_on, waits_s=waits_s)
        self._write_beats()
        self._exporter.when_due()

    def _write_beats(self) -> None:
        if due := self._pulse.to_be_written():
            with self.catalog.unsynced():
                self.catalog.heartbeats({name: beat.waiting_on for name, beat in due.items()})
                self.catalog.renew_leases(due, lease_s=self.config.actors.lease_s)

    def forget(self, component: str, why: str) -> None:
        """A component is gone, or was stopped: others may play its groups at once."""
        self._pulse.forget(component)
        blamed = self._suspects.lose(component, self._plays.of(component), why)
        self.catalog.record_unfinished(self._plays.lose(component), worker=component)
        self._turn.end(component)
        if blamed is not None:
            reason = self._suspects.condemned[blamed.task.id]
            self.catalog.give_up(
                blamed.group.group_uid, worker=component, state="abandoned", reason=reason
            )
            self.notice("group abandoned", f"{reason}; see {self.layout.logs / component}.log")
        n_groups = self.catalog.release_leases(component)
        self.catalog.log(
            component=component, what="gone", detail=f"{why}; {n_groups} groups are free for others"
        )

    def take_turn(self, worker: str) -> bool:
        """Whether `worker` may change its weights now; `end_turn` is when it has."""
        return self._turn.take(worker)

    def end_turn(self, worker: str) -> None:
        self._turn.end(worker)

    def newest_version(self) -> VersionRecord | None:
        """Asked many times a second: unlike a heartbeat it writes nothing."""
        return self.catalog.latest_version()

    def rendezvous(self) -> str | None:
        """Where the learner sends its weights from (`learner.transfer`), if it does."""
        return self._meeting_point

    def record_event(self, component: str, what: str, detail: str) -> None:
        """One line of the events view."""
        self.catalog.log(component=component, what=what, detail=detail)

    # learner

    def set_rendezvous(self, rendezvous: str) -> None:
        self._meeting_point = rendezvous

    def claim(self, current_version: int) -> Batch | None:
        """The oldest complete groups, and the least used offline ones, to train at
        `current_version`; None if they are too few.

        None too while a group is played that the next version would make too old, if `stragglers`
        says to wait for those.
        """
        if self.config.stragglers == "wait" and self._plays.begun_at(
            current_version - self.config.max_staleness
        ):
            return None
        return self.catalog.claim(
            n_groups=self._n_live,
            n_offline=self._n_offline,
            uses=self.config.offline.uses,
            current_version=current_version,
            max_staleness=self.config.max_staleness,
        )

    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """What the learner may go on from, newest first. The directories of old ones have been
        removed.
        """
        return self.catalog.live_checkpoints()[::-1]

    def resume(self, learner_step: int) -> ResumePoint:
        """The learner goes on from the checkpoint of `learner_step`, 0 without one: what came after
        it is rolled back.
        """
        newest = self.catalog.latest_version()
        again = self.catalog.roll_back(learner_step)
        if self._n_offline:
            n_left = self.catalog.offline_batches_left(
                self._n_offline, uses=self.config.offline.uses
            )
            self._last_step = min(self.config.learner.steps, learner_step + n_left)
            if self._last_step < self.config.learner.steps:
                until = f"they last until learner step {self._last_step} of {self.config.learner.steps}, where the run ends"
                self.notice(
                    "offline rollouts",
                    f"{until} in order; raise offline.uses={self.config.offline.uses} for more",
                )
        return ResumePoint(
            last_step=self._last_step,
            latest_version=newest.version if newest else None,
            rolled_back=again,
            metrics=self.catalog.latest_metrics(),
        )

    def give_back(self, learner_step: int) -> int:
        """The learner stops after `learner_step`: groups it claimed and did not train on are
        available again. How many.
        """
        return self.catalog.roll_back(learner_step).groups

    def notice(self, what: str, detail: str, component: str = "learner") -> None:
        """Something a person should see: an event in the store, and a line on the screen."""
        self.catalog.log(component=component, what=what, detail=detail)
        self._n_notices += 1
        self._notices[self._n_notices] = f"{what}: {detail}"
        self._notices.pop(self._n_notices - NOTICES_KEPT, None)

    def export_now(self) -> int:
        """The catalog's lsn, which outside readers see from now on: what was settled until now is
        in it.
        """
        return self._exporter.now()

    def checkpoint(self, learner_step: int, path: str, version: int) -> None:
        self.catalog.record_checkpoint(learner_step=learner_step, path=path, version=version)

    def settle(
        self,
        batch_id: int,
        learner_step: int,
        filtered: Mapping[bytes, str],
        version_in: int,
        metrics: Mapping[str, float],
    ) -> None:
        """The batch was trained on. Groups in `filtered` had nothing to learn from; the reason is
        kept.
        """
        self.catalog.settle(
            batch_id, learner_step=learner_step, filtered=filtered, version_in=version_in
        )
        self.catalog.record_metrics(
            learner_step=learner_step, policy_version=version_in, values=metrics
        )

    def publish(self, version: VersionRecord) -> None:
        """Makes a version the newest one. Evaluates it on the held-out tasks when that is due."""
        self.catalog.record_version(
            version=version.version,
            path=version.path,
            digest=version.digest,
            learner_step=version.learner_step,
        )
        due = round_due(self.config, version, last_step=self._last_step)
        if due is not None:
            self.evaluate(due, self.config.evaluation.episodes_per_task)

    # evaluation and the driver

    def evaluate(self, version: int, episodes_per_task: int) -> None:
        """Puts every held-out task into the queue, before any train task."""
        self.tasks.open_round(self.catalog, version, episodes_per_task=episodes_per_task)

    def status(self) -> Status:
        self._pulse.beat("driver", None, waits_s=0.0)  # it is the driver that asks
        self._record_finished_evaluations()
        version = self.catalog.latest_version()
        self._exporter.when_due()
        return Status(
            counts=self.catalog.counts(),
            version=version.version if version else -1,
            learner_step=self.catalog.learner_step(),
            metrics=self.catalog.latest_metrics(),
            components=self._pulse.components(),
            heldout_open=self.catalog.open_heldout(),
            notices=dict(self._notices),
        )

    def close(self) -> None:
        self.maintainer.close()
        self._record_finished_evaluations()
        self._exporter.last()
        self._pulse.close()
        self.catalog.close()
        self.maintainer.check()

    def _training_is_due(self) -> bool:
        return self.learns and training_is_due(self.config, self.catalog, last_step=self._last_step)

    def _free_groups(self) -> int:
        return free_groups(
            outstanding=self.catalog.outstanding(),
            groups_per_step=self._n_live,
            max_staleness=self.config.max_staleness,
        )

    def _record_finished_evaluations(self) -> None:
        for done in self.catalog.finished_evaluations():
            self.catalog.record_metrics(
                learner_step=done.learner_step, policy_version=done.version, values=done.metrics()
            )


CoordinatorActor = ray.remote(Coordinator)
