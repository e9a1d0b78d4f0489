"""The learner's loop: take a batch, train, announce weights, settle the batch, save a checkpoint.

Announcing and saving copy what is to be written into main memory. Two threads write the files
behind the next learner step (`files/write_behind.py`), at most one version and one checkpoint:

    publishing   writes versions, so that engines can load them
    saving       syncs those versions to the disk, and writes checkpoints

So an engine's next version waits neither for the disk nor for a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ray.actor import ActorHandle

from configs import KEPT_CHECKPOINTS, has_critic, is_offline
from coordinator import (
    CoordinatorClient,
    Heartbeat,
    ResumePoint,
    Settlement,
    heartbeat_every_s,
)
from gigpo import prepare_advantages
from learner.checkpoint import kept_checkpoints, prune_checkpoints
from learner.data.batch_loader import PreparedBatch, make_loader
from learner.data.prefetch import Prefetch
from learner.files.atomic_directory import prune_oldest, sync_whole
from learner.files.write_behind import WriteBehind
from learner.interface import (
    LEARNER_STEP,
    CollapseError,
    LearnerSetup,
    NonFiniteWeightsError,
    StarvationError,
)
from learner.rank_group import RankGroup
from learner.restore import load_newest_whole, restored_lines, weights_are_whole
from learner.step_times import StepClock, StepTimes
from learner.training.critic import CriticStats, critic_metrics
from learner.training.engine import train_batch
from learner.training.run_health import (
    ALARM,
    ALARM_ENDED,
    BAD_ROWS,
    BAD_UPDATE,
    RunHealth,
    StarvationDeadline,
    non_finite_weights,
)
from learner.training.step_metrics import UpdateStats, step_metrics
from store import (
    CheckpointRecord,
    RunLayout,
    VersionRecord,
    local_model,
    prune_published,
    publish_directory,
)

# Between two looks for a request to stop or a failed writer. A finished batch ends the wait at
# once, so half of it would only look twice as often.
POLL_S = 0.05
POLL_DEADLINE_S = 10.0  # a loop that waits sends its next heartbeat within this time
START_TIMEOUT_S = 1800.0  # for loading a large model and its checkpoint
NO_DEADLINE = float("inf")
REFILL_BOUND = "refill bound reached"  # an event


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """A position in the run to go on from: a checkpoint, which is loaded, or the beginning."""

    checkpoint: CheckpointRecord | None  # None: the beginning
    faults: Sequence[str]  # of newer checkpoints, which cannot be loaded
    learner_step: int  # the checkpoint's; 0: the beginning
    point: ResumePoint  # after the run was rolled back to this learner step


class Learner:
    """A model in training and its position in the run. The constructor restores or begins the run.

    The coordinator undoes everything after the newest checkpoint at a restart. So a crash between
    any two calls of the loop, or while files are written behind it, is harmless: claimed and
    settled batches are available again, and the checkpoint's weights are announced under a new
    number. Groups too old for that number become stale and stay in the store. A damaged checkpoint
    is skipped for the one before it.
    """

    def __init__(
        self, setup: LearnerSetup, coordinator: ActorHandle, *, stopping: threading.Event
    ) -> None:
        """Load the model and the newest checkpoint, and announce the first weights.

        `stopping` ends `run` after the current learner step. `restored` says where the run goes on.
        """
        self.config, self.stopping = setup.config, stopping
        self.coordinator = CoordinatorClient(coordinator, component="learner")
        self.layout = RunLayout.open(Path(self.config.run_dir))
        self.loader = make_loader(
            self.config,
            self.layout,
            claim=lambda version: self.coordinator.claim(version).get(),
            refill=lambda batch_id, **wanted: self.coordinator.refill(batch_id, **wanted).get(),
            ask_critic=lambda micro_batches: self.ranks.values(micro_batches),
        )
        self.heartbeat = Heartbeat(
            self.coordinator.heartbeat, every_s=heartbeat_every_s(self.config)
        )
        # The module's docstring says what each of the two writes.
        self.publishing = WriteBehind()
        self.saving = WriteBehind()
        # Done when the checkpoint of `saved_step` is written; None until this process copies one.
        self.checkpoint_written: Future[None] | None = None
        with ExitStack() as after_failure:
            after_failure.callback(self.heartbeat.close)
            self.heartbeat.report("the model's start", waits_s=0.0, within_s=START_TIMEOUT_S)
            prepare_advantages(self.loader.settings.advantages)
            model_path = local_model(self.layout, setup.model_path)
            self.ranks = RankGroup(self.config, model_path=model_path)
            after_failure.callback(self.ranks.close)
            after_failure.callback(self.saving.close)
            after_failure.callback(self.publishing.close)
            self._tell_rendezvous()
            start = self._load_start()
            self.step = start.learner_step  # steps done
            # The newest checkpoint's, also before it is written.
            self.saved_step = start.learner_step
            # Below `learner.steps` if offline groups run out before.
            self.last_step = start.point.last_step
            self.health = RunHealth(self.config, figures=start.point.metrics)
            self.version = self._first_version(start)  # announced last
            self.restored = self._report_start(start)
            after_failure.pop_all()
        self._report_work(NO_DEADLINE)  # until the driver has started the other processes

    def run(self) -> int:
        """Train until the last learner step or a request to stop. Return the learner step reached.

        Consumes batches of complete groups. Produces numbered weights, settled batches and
        checkpoints. Waits for "groups", which workers unblock by committing them; after
        `learner.starvation_timeout_s` the wait ends with StarvationError. Without a heartbeat for
        `learner.step_timeout_s` the driver kills and restarts this process.
        """
        clock, alarms = StepClock(), list[str]()
        with self.saving.finishing(), self.publishing.finishing():
            with closing(Prefetch(self.loader)) as prefetch:
                for batch in self._batches(prefetch, clock):
                    updates, critic = self._train(batch)
                    self.step += 1
                    # Settling lets workers begin new groups, so new weights are announced before.
                    with clock.timed("publish_s"):
                        self.version = self._announce(self.version + 1)
                    times = clock.end_step()
                    alarms = self._settle(batch, updates=updates, critic=critic, times=times)
                    if self.step % self.config.learner.checkpoint_every == 0:
                        with clock.timed("checkpoint_s"):
                            self._save_checkpoint()
                    if alarms and self.config.alarms.stop:
                        break
                self._report_work(self.config.learner.step_timeout_s)  # to read, and to write
            if prefetch.under_way:
                self.coordinator.release_claims(self.step).get()
            if self.step != self.saved_step:
                self._save_checkpoint()
        self._report_work(NO_DEADLINE)  # only `close` is left
        if alarms and self.config.alarms.stop and self.step < self.last_step:
            raise CollapseError(
                f"{alarms[0]}; alarms.stop=true ended the run, with a checkpoint. The same "
                "command goes on"
            )
        return self.step

    def close(self) -> None:
        """Free the devices and end the other ranks."""
        self.heartbeat.close()
        self.publishing.close()
        self.saving.close()
        self.ranks.close()

    def _tell_rendezvous(self) -> None:
        """Tell the coordinator, which may still be starting, where weights are broadcast from."""
        if self.ranks.broadcast is not None:
            self.coordinator.set_rendezvous(self.ranks.broadcast.address).get(
                timeout_s=START_TIMEOUT_S
            )

    def _load_start(self) -> _Start:
        """Load the newest whole checkpoint, and roll the run back to it or to its beginning."""
        checkpoints = self.coordinator.checkpoints().get(timeout_s=START_TIMEOUT_S)
        checkpoint, faults = load_newest_whole(checkpoints, ranks=self.ranks, layout=self.layout)
        learner_step = 0 if checkpoint is None else checkpoint.learner_step
        point = self.coordinator.resume(learner_step).get()
        return _Start(checkpoint=checkpoint, faults=faults, learner_step=learner_step, point=point)

    def _first_version(self, start: _Start) -> int:
        """Return the version whose weights the model has: announced before, or announced now.

        A number is never used twice. So the newest is kept only if the checkpoint has its weights.
        """
        newest = start.point.latest_version
        if newest is None:
            return self._announce(0)
        is_newest = start.checkpoint is not None and start.checkpoint.version == newest
        if is_newest and self._newest_weights_are_whole():
            self.coordinator.written(newest).get()
            return newest
        return self._announce(newest + 1)

    def _report_start(self, start: _Start) -> str:
        """Return what the restart kept and lost. Record an event for each damaged checkpoint."""
        if start.point.latest_version is None:
            return "a new run"
        for fault in start.faults:
            instead = f"going on from learner step {self.step} instead"
            self._notice("checkpoint left out", f"{instead}: {fault}")
        return restored_lines(
            start.point.found,
            start.point.rolled_back,
            start.faults,
            learner_step=self.step,
            version=self.version,
            max_staleness=self.config.max_staleness,
        )

    def _newest_weights_are_whole(self) -> bool:
        newest = self.coordinator.newest_version().get()
        assert newest is not None, "a checkpoint follows a version"
        return weights_are_whole(newest, layout=self.layout, config=self.config)

    def _batches(self, prefetch: Prefetch, clock: StepClock) -> Iterator[PreparedBatch]:
        """Yield the batch of each learner step, while the next one is prepared in a thread."""
        # With max_staleness=0 no group of the current version is left to prepare in advance. With a
        # critic the values of a batch are those of the critic after the step before.
        has_groups = self.config.max_staleness > 0 or is_offline(self.config)
        prefetches = has_groups and not has_critic(self.config)
        while self.step < self.last_step and not self.stopping.is_set():
            if not prefetch.under_way:
                prefetch.start(version=self.version, learner_step=self.step + 1)
            batch = self._wait_for_batch(prefetch, clock)
            if batch is None:
                return
            assert batch.version == self.version, (
                f"prepared for version {batch.version}, not {self.version}"
            )
            if prefetches and self.step + 1 < self.last_step:
                prefetch.start(version=self.version + 1, learner_step=self.step + 2)
            yield batch

    def _wait_for_batch(self, prefetch: Prefetch, clock: StepClock) -> PreparedBatch | None:
        """Return the batch under way, or None after a request to stop. Raises StarvationError."""
        started_s = time.monotonic()
        deadline = StarvationDeadline(
            self.config.learner.starvation_timeout_s, progress=(0, prefetch.n_claims)
        )
        is_reading = False
        while not self.stopping.is_set():
            self.publishing.check()  # engines wait for weights that cannot be written
            self.saving.check()
            batch = prefetch.take(timeout_s=POLL_S)
            if batch is not None:
                clock.waited_for_batch(since_s=started_s, groups_at_s=batch.claimed_at_s)
                return batch
            if not prefetch.has_groups:
                is_reading = False
                self._check_starvation(deadline, n_claims=prefetch.n_claims)
                waits_s = time.monotonic() - started_s
                self.heartbeat.report("groups", waits_s=waits_s, within_s=POLL_DEADLINE_S)
            # Reported once for each claim: a thread that hangs while it reads must become overdue.
            elif not is_reading:
                is_reading = True
                self._report_work(self.config.learner.step_timeout_s)
        return None

    def _check_starvation(self, deadline: StarvationDeadline, *, n_claims: int) -> None:
        if not deadline.check_is_due():
            return
        status = self.coordinator.status().get()
        if deadline.has_passed((status.heldout_open, n_claims)):
            components = status.components.items()
            waiting = {name: one.waiting_on for name, one in components if one.waiting_on}
            raise StarvationError(
                "too few complete groups for the next batch within "
                f"{self.config.learner.starvation_timeout_s:g} s: {status.counts}; waiting: "
                f"{waiting}"
            )

    def _train(self, batch: PreparedBatch) -> tuple[list[UpdateStats], list[CriticStats]]:
        """Apply the optimizer updates of one learner step. Raises an error instead of announcing.

        StarvationError, BadUpdatesError and NonFiniteWeightsError end the run.
        """
        self.heartbeat.report(
            LEARNER_STEP, waits_s=0.0, within_s=self.config.learner.step_timeout_s
        )
        self.health.check_batch(batch)
        try:
            updates, critic = train_batch(
                self.ranks, batch.updates, config=self.config, learner_step=self.step + 1
            )
        except NonFiniteWeightsError as error:
            raise non_finite_weights(
                learner_step=self.step + 1, checkpoint=self.saved_step, config=self.config
            ) from error
        if updates:  # none while the critic warms up
            for bad in self.health.bad_updates(batch, updates, learner_step=self.step + 1):
                if bad.rows is not None:
                    self.coordinator.record(BAD_ROWS, bad.rows).get()
                self._notice(BAD_UPDATE, bad.line)
        return updates, critic

    def _announce(self, version: int) -> int:
        """Announce the weights as `version`, and have them written behind the next step. Return it.

        Until they are written, engines are told to wait for them. If this process ends before, the
        number is not used again, and a restart announces its checkpoint's weights under the next.
        """
        self.publishing.wait()  # at most one version is unwritten
        self.saving.check()
        digest = self.ranks.copy_weights()
        record = VersionRecord(
            version=version,
            path=self.layout.relative(self.layout.weights_dir(version)),
            digest=digest,
            learner_step=self.step,
        )
        self.coordinator.announce(record).get()
        written = self.publishing.start(partial(self._write_weights, version))
        self.saving.start(partial(self._sync_weights, version, written=written))
        return version

    def _write_weights(self, version: int) -> None:
        """Write the announced weights: they are whole for every reader as soon as one sees them."""
        directory, keep = self.layout.weights_dir(version), self.config.learner.keep_versions
        self.ranks.write_weights(directory)
        publish_directory(self.layout, directory)
        self.coordinator.written(version).get()
        prune_oldest(self.layout.weights, keep=keep)
        prune_published(self.layout, self.layout.weights, kept=lambda names: names[-keep:])

    def _sync_weights(self, version: int, *, written: Future[None]) -> None:
        """Return when the weights are on disk, or were removed because newer ones are there.

        A power cut before that may tear them. The next start detects it, and announces the
        checkpoint's weights under a new number.
        """
        written.result()
        with suppress(FileNotFoundError):
            sync_whole(self.layout.weights_dir(version))

    def _settle(
        self,
        batch: PreparedBatch,
        *,
        updates: list[UpdateStats],
        critic: list[CriticStats],
        times: StepTimes,
    ) -> list[str]:
        """Record the batch as consumed, with the step's figures. Return the alarms that began."""
        figures, alarms = self.health.judge(
            step_metrics(batch, updates=updates, times=times) | critic_metrics(critic),
            learner_step=self.step,
        )
        self.coordinator.settle(
            Settlement(
                batch_id=batch.batch.batch_id,
                learner_step=self.step,
                version_in=batch.version,
                filtered=batch.filtered,
                metrics=figures,
                values=batch.state_values,
            )
        ).get()
        if batch.n_missing:
            self.coordinator.record(REFILL_BOUND, self._refill_line(batch)).get()
        for line in alarms.began:
            self._notice(ALARM, line)
        for line in alarms.ended:
            self._notice(ALARM_ENDED, line)
        return alarms.began

    def _refill_line(self, batch: PreparedBatch) -> str:
        n_wanted = self.loader.n_own
        return (
            f"learner step {self.step} trained on {n_wanted - batch.n_missing} groups instead of "
            f"{n_wanted}: algorithm.refill_groups={self.loader.refill_groups} more groups were "
            "played, and too few of all of them differ within themselves"
        )

    def _save_checkpoint(self) -> None:
        """Copy the learner's state, and have it written behind the next step."""
        if self.checkpoint_written is not None:
            self.checkpoint_written.result()  # at most one checkpoint is unwritten
        lsn = self.coordinator.export_now().get()
        record = CheckpointRecord(
            learner_step=self.step,
            path=self.layout.relative(self.layout.checkpoint_dir(self.step)),
            version=self.version,
        )
        self.ranks.copy_checkpoint(learner_step=self.step, version=self.version, lsn=lsn)
        self.saved_step = self.step
        self.checkpoint_written = self.saving.start(
            partial(self._write_checkpoint, record, lsn=lsn)
        )

    def _write_checkpoint(self, record: CheckpointRecord, *, lsn: int) -> None:
        """Write a checkpoint, announce it, and remove the ones that no rule keeps.

        Its version, whose weights a restart may need, is on disk already: `saving` works in order,
        and `_announce` began that before.
        """
        directory = self.layout.root / record.path
        self.ranks.write_checkpoint(directory)
        publish_directory(self.layout, directory)
        is_backed_up = self.coordinator.checkpoint(record, lsn=lsn).get()
        announced = self.coordinator.checkpoints().get()
        kept = partial(
            kept_checkpoints,
            live={Path(one.path).name for one in announced},
            keep=KEPT_CHECKPOINTS,
            keep_every=self.config.learner.keep_every,
        )
        prune_checkpoints(self.layout.checkpoints, kept=kept)
        if is_backed_up:  # otherwise whoever goes on from the storage knows only older ones
            prune_published(self.layout, self.layout.checkpoints, kept=kept)

    def _report_work(self, within_s: float) -> None:
        """Report that the loop works, and that its next report comes `within_s`."""
        self.heartbeat.report(None, waits_s=0.0, within_s=within_s)

    def _notice(self, what: str, detail: str) -> None:
        self.coordinator.notice(what, detail).get()
