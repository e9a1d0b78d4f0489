"""The learner's loop: claim, train, publish, settle, checkpoint.

    run  consumes batches of complete groups, produces numbered weights
         waits for "groups" (the workers unblock it by committing); `starvation_timeout_s` ends the wait with the reason

Why a crash between any two of them is harmless: whatever was claimed or settled after the newest checkpoint is available
again at the next start, to the checkpoint's weights, published under a new number; what is too old for that number becomes
stale, with the reason, and stays in the store.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle

from configs import Config, LearnerConfig
from gigpo import AdvantageSettings, prepare_advantages, signal_settings, singleton_fraction, step_variance_share
from learner.batch import micro_batches, split_updates
from learner.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from learner.engine import Engine, UpdateStats
from learner.publish import prune_versions, write_weights
from learner.source import COORDINATOR_TIMEOUT_S, ReadyBatch, next_batch
from store import RunLayout, VersionRecord, capture_output, publish_directory

POLL_S = 0.05  # between two claims while there are too few groups
HEARTBEAT_S = 1.0
MAX_EMPTY_BATCHES = 10  # in a row; then nothing can be learned any more and the run says so
FIRST_UPDATE_ONLY = {"mismatch_kl_on_policy"}
SOLVED = 0.99  # success above which empty batches are no trouble: every group wins in the same way


class StarvationError(RuntimeError):
    """No batch came in time, or none of the last batches had anything to learn from; the message says which and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    config: Config
    model_path: str  # Hugging Face directory of the base model: version 0


class Learner:
    """`start()` restores or begins, `run()` trains until the configured step or `stop()`, `close()` frees the device."""

    def __init__(self, setup: LearnerSetup, coordinator: ActorHandle) -> None:
        self.config, self.model_path, self.coordinator = setup.config, setup.model_path, coordinator
        self.layout = RunLayout.open(Path(setup.config.run_dir))
        self.settings = advantage_settings(self.config)
        # Under mean_std a lost group's penalties weigh as much as wins do elsewhere, so leaving such groups out is a choice.
        algorithm = self.config.algorithm
        penalty = algorithm.invalid_penalty if algorithm.penalty_is_signal else 0.0
        clones = self.config.loss.policy == "behaviour_cloning"
        counted = replace(self.settings, invalid_penalty=penalty)
        self.signal = None if clones else signal_settings(counted, signal=algorithm.signal)
        self.stopping = False
        self.step = 0
        self.saved_step = 0  # of the newest checkpoint: an announced one is never written again
        self.version = 0
        self.beat_at = 0.0
        self.waiting_on: str | None = None

    def capture_output(self, name: str) -> None:
        capture_output(self.layout.logs / f"{name}.log")

    def start(self) -> str:
        """Loads the model and the newest checkpoint, publishes the first weights; says in a line what was restored."""
        for settings in filter(None, (self.settings, self.signal)):
            prepare_advantages(settings)
        self.engine = Engine(
            model_path=self.model_path,
            model=self.config.model,
            learner=self.config.learner,
            loss=self.config.loss,
            temperature=self.config.actors.temperature,
            seed=self.config.seed,
        )
        point = self._ask(self.coordinator.resume.remote())
        if point.checkpoint is not None:
            self.step = load_checkpoint(self.engine, self.layout.root / point.checkpoint.path).learner_step
            self.saved_step = self.step
        if point.latest_version is None:
            self._publish(0)
            return "a new run"
        if point.checkpoint is not None and point.checkpoint.version == point.latest_version:
            self.version = point.latest_version  # stopped in order: these very weights are the newest already
        else:  # weights of the checkpoint under a number nobody has seen: versions are never used twice
            self._publish(point.latest_version + 1)
        return (
            f"continues at learner step {self.step} as version {self.version}; {point.groups_available_again} groups "
            f"consumed after the checkpoint are available again, those within max_staleness are trained on"
        )

    def run(self) -> int:
        """Trains; returns the learner step it ended at. Raises StarvationError."""
        empty = 0
        while self.step < self.config.learner.steps and not self.stopping:
            started = time.monotonic()
            ready = self._wait_for_batch()
            if ready is None:
                break
            waited_s = time.monotonic() - started - ready.read_s - ready.advantages_s - ready.signal_s
            empty = 0 if ready.rows.num_rows else empty + 1
            if empty > MAX_EMPTY_BATCHES and ready.success < SOLVED:
                raise StarvationError(
                    f"{empty} batches in a row had no advantage to learn from, with success {ready.success:.2f}: every "
                    "group's episodes were alike. Use easier tasks, a larger algorithm.group_size, or a better model"
                )
            self._finish_step(ready, self._train(ready), waited_s=waited_s, started=started)
        if self.step != self.saved_step:
            self._checkpoint()
        return self.step

    def stop(self) -> None:
        """Asks `run` to end after the batch it is at, with a checkpoint."""
        self.stopping = True

    def close(self) -> None:
        self.engine.close()

    def _wait_for_batch(self) -> ReadyBatch | None:
        deadline = time.monotonic() + self.config.learner.starvation_timeout_s
        while not self.stopping:
            ready = next_batch(
                self.coordinator,
                self.layout,
                self.settings,
                current_version=self.version,
                signal=self.signal,
            )
            if ready is not None:
                return ready
            if time.monotonic() > deadline:
                status = self._ask(self.coordinator.status.remote())
                raise StarvationError(
                    f"no {self.config.learner.groups_per_step} complete groups within "
                    f"{self.config.learner.starvation_timeout_s:g} s: {status.counts}; waiting: {dict(status.waiting)}"
                )
            self._beat("groups")
            time.sleep(POLL_S)
        return None

    def _train(self, ready: ReadyBatch) -> list[UpdateStats]:
        """One learner step: `updates_per_step` optimizer updates over consecutive parts of the batch's shuffled rows."""
        self._beat(None)
        if not ready.rows.num_rows:
            return []
        seed = self.config.seed + self.step
        return train_on(self.engine, ready.rows, learner=self.config.learner, version=self.version, seed=seed)

    def _finish_step(self, ready: ReadyBatch, updates: list[UpdateStats], *, waited_s: float, started: float) -> None:
        self.step += 1
        step_s = time.monotonic() - started
        metrics = {
            "train/success": ready.success,
            "learner/idle_fraction": waited_s / step_s,
            "staleness/max": float(self.version - min(g.version_min for g in ready.batch.groups)),
            "time/advantages_s": ready.advantages_s,
            "time/signal_s": ready.signal_s,
            "time/read_s": ready.read_s,
            "time/step_s": step_s,
            "tokens/generated_per_s": ready.n_response_tokens / step_s,
            "tokens/trained_per_s": sum(update.n_padded_tokens for update in updates) / (step_s - waited_s),
            "groups/no_signal": float(len(ready.no_signal)),
            "anchor/singleton_fraction": singleton_fraction(ready.rows) if ready.rows.num_rows else 0.0,
            "anchor/step_variance_share": step_variance_share(ready.rows, self.settings.omega),
            **mean_of_updates(updates),
        }
        trained_at_version = self.version
        # Published before it is settled: settling lets workers start new groups, and those must find the new weights.
        self._publish(self.version + 1)
        call = self.coordinator.settle.remote(
            ready.batch.batch_id,
            learner_step=self.step,
            no_signal=ready.no_signal,
            version_in=trained_at_version,
            metrics=metrics,
        )
        self._ask(call)
        if self._checkpoint_is_due():
            self._checkpoint()

    def _publish(self, version: int) -> None:
        """Writes the weights, then tells the coordinator: a version that is announced is always whole."""
        directory = self.layout.weights_dir(version)
        digest = write_weights(self.engine.state_dict(), directory, source_dir=self.model_path)
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
        save_checkpoint(self.engine, directory, learner_step=self.step, version=self.version)
        self._ask(self.coordinator.checkpoint.remote(self.step, self.layout.relative(directory), self.version))
        self.saved_step = self.step
        prune_checkpoints(self.layout.checkpoints, keep=self.config.learner.keep_checkpoints)

    def _beat(self, waiting_on: str | None) -> None:
        """Tells the coordinator, at once if the reason changed (None: working), else about once a second."""
        now = time.monotonic()
        if waiting_on != self.waiting_on or now - self.beat_at >= HEARTBEAT_S:
            self.beat_at, self.waiting_on = now, waiting_on
            self.coordinator.heartbeat.remote("learner", waiting_on)

    def _ask(self, call: Any) -> Any:
        """The coordinator's answer. Raises Ray's GetTimeoutError: it answers in milliseconds, or it is gone."""
        return ray.get(call, timeout=COORDINATOR_TIMEOUT_S)


def advantage_settings(config: Config) -> AdvantageSettings:
    """What the config says about advantages, in gigpo's terms."""
    algorithm = config.algorithm
    return AdvantageSettings(
        estimator=algorithm.estimator,
        gamma=algorithm.gamma,
        omega=algorithm.omega,
        normalise=algorithm.normalise,
        weighting=algorithm.weighting,
        invalid_penalty=algorithm.invalid_penalty,
        anchor=algorithm.anchor,
        anchor_history=algorithm.anchor_history,
        similarity=algorithm.similarity,
        versions=algorithm.anchor_versions,
        version_window=algorithm.version_window,
    )


def train_on(engine: Engine, rows: pa.Table, *, learner: LearnerConfig, version: int, seed: int) -> list[UpdateStats]:
    """The optimizer updates of one learner step at `version`, each over a part of the rows that `seed` shuffled."""
    rows = rows.append_column("staleness", pc.subtract(version, rows["version_min"]))
    parts = split_updates(rows, learner.updates_per_step, seed=seed)
    updates = [micro_batches(part, micro_batch_tokens=learner.micro_batch_tokens) for part in parts]
    if engine.objective.proximal == "recomputed":  # for all parts, before the first of them moves the policy
        updates = [engine.with_proximal(batches) for batches in updates]
    return [engine.update(batches) for batches in updates]


def mean_of_updates(updates: list[UpdateStats]) -> dict[str, float]:
    """`loss/<name>`: each statistic averaged over the updates of a learner step that have it.

    Those of FIRST_UPDATE_ONLY are the first update's: they compare two engines at the same weights, and it moves one of them.
    """
    seen: dict[str, list[float]] = {}
    for index, update in enumerate(updates):
        record = asdict(update)
        tokens = record.pop("tokens")
        for name, value in (record | tokens).items():
            if index == 0 or name not in FIRST_UPDATE_ONLY:
                seen.setdefault(f"loss/{name}", []).append(float(value))
    return {name: sum(values) / len(values) for name, values in seen.items()}


LearnerActor = ray.remote(Learner)
