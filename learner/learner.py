"""The learner's loop: take a batch, train, publish, settle, checkpoint.

    run  consumes batches of complete groups, which `prefetch.py` makes ready beside it, produces numbered weights
         waits for "groups" (the workers unblock it by committing); `starvation_timeout_s` ends the wait with the reason

Why a crash between any two of them is harmless: whatever was claimed or settled after the newest checkpoint is available
again at the next start, to the checkpoint's weights, published under a new number; what is too old for that number becomes
stale, with the reason, and stays in the store. If that checkpoint is damaged the same holds for the one before it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from configs import Config
from gigpo import prepare_advantages
from learner.checkpoint import CheckpointError, prune_checkpoints
from learner.guards import (
    ALARM,
    ALARM_ENDED,
    BAD_UPDATE,
    CollapseError,
    bad_update_line,
    collapse_alarms,
    too_many_bad_updates,
)
from learner.metrics import Times, step_metrics
from learner.prefetch import Prefetch
from learner.publish import prune_versions, weight_files
from learner.ranks import Ranks
from learner.source import ReadyBatch, source_of
from learner.stats import UpdateStats
from store import Batch, CheckpointRecord, Heartbeat, RunLayout, VersionRecord, capture_output, files_digest, publish_directory

POLL_S = 0.05  # between two looks whether the batch is ready, or somebody said stop
POLL_PATIENCE_S = 10.0  # between two such looks it may take this long to be heard of again
START_TIMEOUT_S = 1800.0  # for loading a large model and its checkpoint
COORDINATOR_TIMEOUT_S = 60.0  # it answers in milliseconds, or it is gone
MAX_EMPTY_BATCHES = 10  # in a row; then nothing can be learned any more and the run says so
SOLVED = 0.99  # success above which empty batches are no trouble: every group wins in the same way


class StarvationError(RuntimeError):
    """No batch came in time, or none of the last batches had anything to learn from; the message says which and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    config: Config
    model_path: str  # Hugging Face directory of the base model: version 0


class Learner:
    """`start()` restores or begins, `run()` trains until the configured step or `stop()`, `close()` frees the devices."""

    def __init__(self, setup: LearnerSetup, coordinator: ActorHandle) -> None:
        self.config, self.model_path, self.coordinator = setup.config, setup.model_path, coordinator
        self.layout = RunLayout.open(Path(setup.config.run_dir))
        self.source = source_of(self.config, self.layout, claim=self._claim)
        self.stopping = False
        self.collapse: str | None = None  # the alarm that ends the run
        self.step = 0
        self.saved_step = 0  # of the newest checkpoint: an announced one is never written again
        self.version = 0
        self.bad_updates = 0  # in a row
        self.empty_batches = 0  # in a row
        self.figures: Mapping[str, float] = {}  # of the last learner step, as the store has them
        self.heart = Heartbeat(lambda waiting_on: coordinator.heartbeat.remote("learner", waiting_on))

    def capture_output(self, name: str) -> tuple[str, int]:
        """From now on prints go to the log `name`. Where this process is: host and pid."""
        capture_output(self.layout.logs / f"{name}.log")
        return socket.gethostname(), os.getpid()

    def start(self) -> str:
        """Loads the model and the newest checkpoint, publishes the first weights; says in a line what was restored."""
        self.heart.promise("the model's start", within_s=START_TIMEOUT_S)
        prepare_advantages(self.source.advantages)
        self.ranks = Ranks(self.config, model_path=self.model_path)
        checkpoint, faults = self._restore()
        point = self._ask(self.coordinator.resume.remote(self.step))
        self.figures = point.metrics
        if point.latest_version is None:
            self._publish(0)
            return "a new run"
        if checkpoint is not None and checkpoint.version == point.latest_version and self._newest_are_whole():
            self.version = point.latest_version  # stopped in order: these very weights are the newest already
        else:  # weights of the checkpoint under a number nobody has seen: versions are never used twice
            self._publish(point.latest_version + 1)
        for fault in faults:
            self._notice("checkpoint left out", f"going on from learner step {self.step} instead: {fault}")
        left_out = f", as newer checkpoints cannot be loaded ({'; '.join(faults)})" if faults else ""
        return (
            f"continues at learner step {self.step} as version {self.version}{left_out}; {point.groups_available_again} groups "
            f"consumed after the checkpoint are available again, those within max_staleness are trained on"
        )

    def run(self) -> int:
        """Trains; returns the learner step it ended at. Raises StarvationError, BadUpdatesError, CollapseError."""
        with Prefetch(self.source) as batches:
            while self.step < self.config.learner.steps and not self.stopping:
                started = time.monotonic()
                ready = self._wait_for_batch(batches)
                if ready is None:
                    break
                waited_s = time.monotonic() - started
                if self.config.max_staleness > 0 and self.step + 1 < self.config.learner.steps:
                    batches.start(version=self.version + 1, learner_step=self.step + 2)
                updates = self._train(ready)
                groups_wait_s = min(max(0.0, ready.claimed_at_s - started), waited_s)
                times = Times(
                    groups_wait_s=groups_wait_s,
                    batch_wait_s=waited_s - groups_wait_s,
                    step_s=time.monotonic() - started,
                )
                self._finish_step(ready, updates, times)
        self.heart.promise(None, within_s=float("inf"))  # all that is left to it is to be closed
        if batches.under_way:
            self._ask(self.coordinator.give_back.remote(self.step))
        if self.step != self.saved_step:
            self._checkpoint()
        if self.collapse is not None and self.step < self.config.learner.steps:
            raise CollapseError(f"{self.collapse}; alarms.stop=true ended the run, with a checkpoint. The same command goes on")
        return self.step

    def stop(self) -> None:
        """Asks `run` to end after the batch it is at, with a checkpoint."""
        self.stopping = True

    def close(self) -> None:
        self.heart.close()
        self.ranks.close()

    def _newest_are_whole(self) -> bool:
        newest: VersionRecord = self._ask(self.coordinator.newest_version.remote())
        return files_digest(weight_files(self.layout.root / newest.path)) == newest.digest

    def _claim(self, version: int) -> Batch | None:
        return self._ask(self.coordinator.claim.remote(version))

    def _restore(self) -> tuple[CheckpointRecord | None, list[str]]:
        """Loads the newest checkpoint that is whole; which, and what is wrong with newer ones. CheckpointError if none is."""
        faults: list[CheckpointError] = []
        for checkpoint in self._ask(self.coordinator.checkpoints.remote()):
            try:
                self.step = self.ranks.load_checkpoint(self.layout.root / checkpoint.path).learner_step
            except CheckpointError as error:
                faults.append(error)
            else:
                self.saved_step = self.step
                return checkpoint, list(map(str, faults))
        if faults:
            raise faults[0]
        return None, []

    def _wait_for_batch(self, batches: Prefetch) -> ReadyBatch | None:
        if not batches.under_way:
            batches.start(version=self.version, learner_step=self.step + 1)
        deadline = time.monotonic() + self.config.learner.starvation_timeout_s
        while not self.stopping:
            ready = batches.take(timeout_s=POLL_S)
            if ready is not None:
                assert ready.version == self.version, f"prepared for version {ready.version}, not {self.version}"
                return ready
            if time.monotonic() > deadline and not batches.has_groups:
                status = self._ask(self.coordinator.status.remote())
                waiting = {name: one.waiting_on for name, one in status.components.items() if one.waiting_on is not None}
                raise StarvationError(
                    f"no {self.config.learner.groups_per_step} complete groups within "
                    f"{self.config.learner.starvation_timeout_s:g} s: {status.counts}; waiting: {waiting}"
                )
            self.heart.promise(None if batches.has_groups else "groups", within_s=POLL_PATIENCE_S)
        return None

    def _train(self, ready: ReadyBatch) -> list[UpdateStats]:
        """The optimizer updates of one learner step. Raises StarvationError after too many batches without any."""
        self.heart.promise(None, within_s=self.config.learner.step_timeout_s)
        self.empty_batches = 0 if ready.rows.num_rows else self.empty_batches + 1
        if self.empty_batches > MAX_EMPTY_BATCHES and ready.success < SOLVED:
            raise StarvationError(
                f"{self.empty_batches} batches in a row had no advantage to learn from, with success {ready.success:.2f}: "
                "every group's episodes were alike. Use easier tasks, a larger algorithm.group_size, or a better model"
            )
        if not ready.updates:
            return []
        updates = self.ranks.train([update.micro_batches for update in ready.updates])
        self._guard_updates(ready, updates)
        return updates

    def _guard_updates(self, ready: ReadyBatch, updates: list[UpdateStats]) -> None:
        """Says which rows made an update not finite. Raises BadUpdatesError after too many in a row."""
        for number, (update, stats) in enumerate(zip(ready.updates, updates, strict=True), start=1):
            self.bad_updates = self.bad_updates + 1 if stats.skipped else 0
            if stats.skipped:
                self._notice(BAD_UPDATE, bad_update_line(update, stats, learner_step=self.step + 1, number=number))
            if self.bad_updates > self.config.learner.max_bad_updates:
                raise too_many_bad_updates(
                    self.bad_updates, learner_step=self.step + 1, rows_named=bool(stats.bad_rows), config=self.config
                )

    def _finish_step(self, ready: ReadyBatch, updates: list[UpdateStats], times: Times) -> None:
        self.step += 1
        metrics = step_metrics(ready, updates, times)
        alarms = collapse_alarms(metrics, before=self.figures, learner_step=self.step, config=self.config)
        self.figures = {**metrics, **alarms.values}
        # Published before it is settled: settling lets workers start new groups, and those must find the new weights.
        self._publish(self.version + 1)
        call = self.coordinator.settle.remote(
            ready.batch.batch_id,
            learner_step=self.step,
            no_signal=ready.no_signal,
            version_in=ready.version,
            metrics=self.figures,
        )
        self._ask(call)
        for what, lines in ((ALARM, alarms.began), (ALARM_ENDED, alarms.ended)):
            for line in lines:
                self._notice(what, line)
        if alarms.began and self.config.alarms.stop:
            self.stopping, self.collapse = True, alarms.began[0]
        if self._checkpoint_is_due():
            self._checkpoint()

    def _publish(self, version: int) -> None:
        """Writes the weights, then tells the coordinator: a version that is announced is always whole."""
        directory = self.layout.weights_dir(version)
        digest = self.ranks.publish(directory)
        publish_directory(self.layout, directory, keep=self.config.learner.keep_versions)
        record = VersionRecord(
            version=version,
            path=self.layout.relative(directory),
            digest=digest,
            learner_step=self.step,
        )
        self._ask(self.coordinator.publish.remote(record))
        self.version = version
        prune_versions(self.layout.weights, keep=self.config.learner.keep_versions)

    def _checkpoint_is_due(self) -> bool:
        return self.step % self.config.learner.checkpoint_every == 0

    def _checkpoint(self) -> None:
        directory = self.layout.checkpoint_dir(self.step)
        lsn = self._ask(self.coordinator.export_now.remote())
        self.ranks.save_checkpoint(directory, learner_step=self.step, version=self.version, lsn=lsn)
        self._ask(self.coordinator.checkpoint.remote(self.step, self.layout.relative(directory), self.version))
        self.saved_step = self.step
        keep, keep_every = self.config.learner.keep_checkpoints, self.config.learner.keep_every
        prune_checkpoints(self.layout.checkpoints, newest=self.step, keep=keep, keep_every=keep_every)

    def _notice(self, what: str, detail: str) -> None:
        self._ask(self.coordinator.notice.remote(what, detail))

    def _ask(self, call: Any) -> Any:
        """The coordinator's answer. Raises Ray's GetTimeoutError: it answers in milliseconds, or it is gone."""
        return ray.get(call, timeout=COORDINATOR_TIMEOUT_S)


LearnerActor = ray.remote(Learner)
