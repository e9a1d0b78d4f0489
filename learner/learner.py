"""The learner's loop: take a batch, train, publish, settle, checkpoint.

    run  consumes batches of complete groups, which `prefetch.py` makes ready beside it, produces numbered weights
         waits for "groups" (the workers unblock it by committing); `starvation_timeout_s` ends the wait with the reason;
         whatever else it does, it is killed and started again if nothing is heard of it within `step_timeout_s`

Why a crash between any two of them is harmless: whatever was claimed or settled after the newest
checkpoint is available again at the next start, to the checkpoint's weights, published under a new
number; what is too old for that number becomes stale, with the reason, and stays in the store. If
that checkpoint is damaged the same holds for the one before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ray.actor import ActorHandle

from configs import is_offline
from coordinator import CoordinatorClient, Heartbeat
from gigpo import prepare_advantages
from learner.checkpointing.checkpoint import CheckpointError, prune_checkpoints
from learner.data.batch_loader import PreparedBatch, source_of
from learner.data.prefetch import Prefetch
from learner.publishing.publish import prune_versions, weight_files
from learner.rank_group import RankGroup
from learner.ray_actor import LEARNER_STEP, LearnerSetup
from learner.restored import restored_lines
from learner.training.alarms import (
    ALARM,
    ALARM_ENDED,
    BAD_IN_A_ROW,
    BAD_UPDATE,
    EMPTY_IN_A_ROW,
    CollapseError,
    bad_update_line,
    check_batches,
    collapse_alarms,
    starved,
    too_many_bad_updates,
    wrecked_policy,
)
from learner.training.engine import NonFiniteWeightsError
from learner.training.patience import Patience
from learner.training.step_metrics import Times, step_metrics
from learner.training.update_stats import UpdateStats
from store import Batch, CheckpointRecord, RunLayout, VersionRecord, files_digest, publish_directory

POLL_S = 0.05  # between two looks whether the batch is ready, or somebody said stop
POLL_PATIENCE_S = 10.0  # between two such looks it may take this long to be heard of again
START_TIMEOUT_S = 1800.0  # for loading a large model and its checkpoint


class Learner:
    """`start()` restores or begins, `run()` trains until the configured step or `stop()`, `close()`
    frees the devices.

    `stop` and `close` may be called beside the others, from another thread.
    """

    def __init__(self, setup: LearnerSetup, coordinator: ActorHandle) -> None:
        self.config, self.model_path = setup.config, setup.model_path
        self.coordinator = CoordinatorClient(coordinator, component="learner")
        self.layout = RunLayout.open(Path(setup.config.run_dir))
        self.source = source_of(self.config, self.layout, claim=self._claim)
        self.stopping = False
        self.collapse: str | None = None  # the alarm that ends the run
        self.step = 0
        self.saved_step = 0  # of the newest checkpoint: an announced one is never written again
        self.version = 0
        self.bad_updates = self.empty_batches = 0  # in a row
        self.figures: Mapping[str, float] = {}  # of the last learner step, as the store has them
        self.times = Times(began_at_s=time.monotonic())  # of the learner step that is under way
        self.at_work = threading.Lock()  # held by `start` and `run`
        self.heart = Heartbeat(self.coordinator.heartbeat)

    def start(self) -> str:
        """Loads the model and the newest checkpoint, publishes the first weights; says in a line
        what was restored.
        """
        with self.at_work:
            restored = self._start()
            # it waits for the others to be started
            self.heart.promise(None, waits_s=0.0, within_s=float("inf"))
            return restored

    def run(self) -> int:
        """Trains; returns the learner step it ended at. Raises the errors of `guards.py`."""
        with self.at_work:
            return self._run()

    def stop(self) -> None:
        """Asks `run` to end after the learner step it is at, with a checkpoint."""
        self.stopping = True

    def close(self) -> None:
        """Stops, waits until `start` or `run` has returned, or for `step_timeout_s`, and frees the
        devices and the ranks.

        A rank that is killed while a checkpoint is saved would take it with it.
        """
        self.stop()
        has_ended = self.at_work.acquire(timeout=self.config.learner.step_timeout_s)
        self.heart.close()
        self.ranks.close()
        if has_ended:
            self.at_work.release()

    def _start(self) -> str:
        self.heart.promise("the model's start", waits_s=0.0, within_s=START_TIMEOUT_S)
        prepare_advantages(self.source.advantages)
        self.ranks = RankGroup(self.config, model_path=self.model_path)
        if self.ranks.broadcast is not None:
            # as below
            self.coordinator.set_rendezvous(self.ranks.broadcast.address).get(
                timeout_s=START_TIMEOUT_S
            )
        checkpoint, faults = self._restore()
        point = self.coordinator.resume(self.step).get()
        self.figures = point.metrics
        # before `learner.steps` if stored groups are used up there
        self.last_step = point.last_step
        self.bad_updates = int(self.figures.get(BAD_IN_A_ROW, 0))
        self.empty_batches = int(self.figures.get(EMPTY_IN_A_ROW, 0))
        if point.latest_version is None:
            self._publish(0)
            return "a new run"
        if (
            checkpoint is not None
            and checkpoint.version == point.latest_version
            and self._newest_are_whole()
        ):
            # stopped in order: these very weights are the newest already
            self.version = point.latest_version
        # weights of the checkpoint under a number nobody has seen: versions are never used twice
        else:
            self._publish(point.latest_version + 1)
        for fault in faults:
            self._notice(
                "checkpoint left out", f"going on from learner step {self.step} instead: {fault}"
            )
        return restored_lines(
            point.rolled_back,
            faults,
            learner_step=self.step,
            version=self.version,
            max_staleness=self.config.max_staleness,
        )

    def _run(self) -> int:
        self.times = Times(began_at_s=time.monotonic())
        with Prefetch(self.source) as batches:
            while self.step < self.last_step and not self.stopping:
                started = time.monotonic()
                ready = self._wait_for_batch(batches)
                if ready is None:
                    break
                waited_s = time.monotonic() - started
                if (
                    self.config.max_staleness > 0 or is_offline(self.config)
                ) and self.step + 1 < self.last_step:
                    batches.start(version=self.version + 1, learner_step=self.step + 2)
                updates = self._train(ready)
                self.times.groups_wait_s = min(max(0.0, ready.claimed_at_s - started), waited_s)
                self.times.batch_wait_s = waited_s - self.times.groups_wait_s
                self._finish_step(ready, updates)
            # the thread may be reading, and the last checkpoint is still to be written
            self._promise_to_work()
        if batches.under_way:
            self.coordinator.release_claims(self.step).get()
        if self.step != self.saved_step:
            self._checkpoint()
        # all that is left to it is to be closed
        self.heart.promise(None, waits_s=0.0, within_s=float("inf"))
        if self.collapse is not None and self.step < self.last_step:
            raise CollapseError(
                f"{self.collapse}; alarms.stop=true ended the run, with a checkpoint. The same "
                "command goes on"
            )
        return self.step

    def _promise_to_work(self) -> None:
        """Whatever it does now hangs if nothing more is heard of it for as long as a learner step
        may take.
        """
        self.heart.promise(None, waits_s=0.0, within_s=self.config.learner.step_timeout_s)

    def _newest_are_whole(self) -> bool:
        newest = self.coordinator.newest_version().get()
        assert newest is not None, "a checkpoint follows a version"
        return files_digest(weight_files(self.layout.root / newest.path)) == newest.digest

    def _claim(self, version: int) -> Batch | None:
        return self.coordinator.claim(version).get()

    def _restore(self) -> tuple[CheckpointRecord | None, list[str]]:
        """Loads the newest checkpoint that is whole; which, and what is wrong with newer ones.
        CheckpointError if none is.
        """
        faults: list[CheckpointError] = []
        # it starts beside this
        for checkpoint in self.coordinator.checkpoints().get(timeout_s=START_TIMEOUT_S):
            try:
                self.step = self.ranks.load_checkpoint(
                    self.layout.root / checkpoint.path
                ).learner_step
            except CheckpointError as error:
                faults.append(error)
            else:
                self.saved_step = self.step
                return checkpoint, list(map(str, faults))
        if faults:
            raise faults[0]
        return None, []

    def _wait_for_batch(self, batches: Prefetch) -> PreparedBatch | None:
        started = time.monotonic()
        if not batches.under_way:
            batches.start(version=self.version, learner_step=self.step + 1)
        patience = Patience(self.config.learner.starvation_timeout_s)
        is_reading = False
        while not self.stopping:
            ready = batches.take(timeout_s=POLL_S)
            if ready is not None:
                assert ready.version == self.version, (
                    f"prepared for version {ready.version}, not {self.version}"
                )
                return ready
            if patience.look_is_due() and not batches.has_groups:
                status = self.coordinator.status().get()
                if not patience.has_ended(status.heldout_open):
                    continue
                waiting = {
                    name: one.waiting_on
                    for name, one in status.components.items()
                    if one.waiting_on is not None
                }
                raise starved(self.config, counts=status.counts, waiting=waiting)
            if not batches.has_groups:
                self.heart.promise(
                    "groups", waits_s=time.monotonic() - started, within_s=POLL_PATIENCE_S
                )
            # said once: a thread that is stuck in reading is not to look alive
            elif not is_reading:
                is_reading = True
                self._promise_to_work()
        return None

    def _train(self, ready: PreparedBatch) -> list[UpdateStats]:
        """The optimizer updates of one learner step. Raises the errors of `guards.py`, before
        anything is published.
        """
        self.heart.promise(LEARNER_STEP, waits_s=0.0, within_s=self.config.learner.step_timeout_s)
        self.empty_batches = 0 if ready.rows.num_rows else self.empty_batches + 1
        check_batches(self.empty_batches, success=ready.success, no_signal=ready.no_signal)
        if not ready.updates:
            return []
        try:
            updates = self.ranks.train([update.micro_batches for update in ready.updates])
        except NonFiniteWeightsError as error:
            raise wrecked_policy(
                learner_step=self.step + 1, checkpoint=self.saved_step, config=self.config
            ) from error
        self._guard_updates(ready, updates)
        return updates

    def _guard_updates(self, ready: PreparedBatch, updates: list[UpdateStats]) -> None:
        """Says which rows made an update not finite. Raises BadUpdatesError after too many in a
        row.
        """
        for number, (update, stats) in enumerate(zip(ready.updates, updates, strict=True), start=1):
            self.bad_updates = self.bad_updates + 1 if stats.skipped else 0
            if stats.skipped:
                self._notice(
                    BAD_UPDATE,
                    bad_update_line(update, stats, learner_step=self.step + 1, number=number),
                )
            if self.bad_updates > self.config.learner.max_bad_updates:
                raise too_many_bad_updates(
                    self.bad_updates,
                    learner_step=self.step + 1,
                    rows_named=bool(stats.bad_rows),
                    config=self.config,
                )

    def _finish_step(self, ready: PreparedBatch, updates: list[UpdateStats]) -> None:
        self.step += 1
        # Published before it is settled: settling lets workers start new groups, and those must
        # find the new weights.
        trained_at_s = time.monotonic()
        self._publish(self.version + 1)
        times, self.times = self.times, Times(began_at_s=time.monotonic())
        times.publish_s, times.step_s = (
            self.times.began_at_s - trained_at_s,
            self.times.began_at_s - times.began_at_s,
        )
        metrics = step_metrics(ready, updates, times)
        alarms = collapse_alarms(
            metrics, before=self.figures, learner_step=self.step, config=self.config
        )
        in_a_row = {
            BAD_IN_A_ROW: float(self.bad_updates),
            EMPTY_IN_A_ROW: float(self.empty_batches),
        }
        self.figures = {**metrics, **alarms.values, **in_a_row}
        self.coordinator.settle(
            ready.batch.batch_id,
            learner_step=self.step,
            no_signal=ready.no_signal,
            version_in=ready.version,
            metrics=self.figures,
        ).get()
        for what, lines in ((ALARM, alarms.began), (ALARM_ENDED, alarms.ended)):
            for line in lines:
                self._notice(what, line)
        if alarms.began and self.config.alarms.stop:
            self.stopping, self.collapse = True, alarms.began[0]
        if self.step % self.config.learner.checkpoint_every == 0:
            self._checkpoint()

    def _publish(self, version: int) -> None:
        """Writes the weights, then tells the coordinator: an announced version is whole for all who
        read it.

        A power cut before the next checkpoint may tear it; then `start` publishes the checkpoint's
        under a new number.
        """
        directory = self.layout.weights_dir(version)
        digest = self.ranks.publish(directory)
        publish_directory(self.layout, directory, keep=self.config.learner.keep_versions)
        record = VersionRecord(
            version=version,
            path=self.layout.relative(directory),
            digest=digest,
            learner_step=self.step,
        )
        self.coordinator.publish(record).get()
        self.version = version
        prune_versions(self.layout.weights, keep=self.config.learner.keep_versions)

    def _checkpoint(self) -> None:
        started = time.monotonic()
        directory = self.layout.checkpoint_dir(self.step)
        lsn = self.coordinator.export_now().get()
        self.ranks.save_checkpoint(directory, learner_step=self.step, version=self.version, lsn=lsn)
        path = self.layout.relative(directory)
        self.coordinator.checkpoint(self.step, path, self.version).get()
        self.saved_step = self.step
        live = {Path(record.path).name for record in self.coordinator.checkpoints().get()}
        keep, keep_every = self.config.learner.keep_checkpoints, self.config.learner.keep_every
        prune_checkpoints(self.layout.checkpoints, live=live, keep=keep, keep_every=keep_every)
        self.times.checkpoint_s = time.monotonic() - started

    def _notice(self, what: str, detail: str) -> None:
        self.coordinator.notice(what, detail).get()
