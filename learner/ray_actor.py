"""Run the learner in a Ray actor, and import torch in that process only."""

from __future__ import annotations

import gc
import os
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from configs import holds_secrets
from coordinator import capture_output
from learner.interface import LearnerSetup, RankError
from store import RunLayout, compile_elsewhere, keep_private

if TYPE_CHECKING:
    from learner.learner import Learner


class LearnerProcess:
    """Run a `Learner` for the driver.

    `start` loads the model and restores the run, `run` trains. `stop` and `close` may be called
    from another thread meanwhile.
    """

    def __init__(self, setup: LearnerSetup, coordinator: ActorHandle) -> None:
        compile_elsewhere()
        config = setup.config
        if holds_secrets(config):
            keep_private(Path(config.run_dir))
        layout = RunLayout.join(
            Path(config.run_dir), storage_uri=config.store.uri, run_id=setup.run_id
        )
        capture_output(layout.logs / "learner.log")
        # Garbage collection takes a fifth of the import's time. Imported objects stay for good, so
        # `freeze` excludes them from later collections too.
        gc.disable()
        import learner.learner  # noqa: F401  (in this process's main thread)

        gc.freeze()
        gc.enable()
        self._setup, self._coordinator = setup, coordinator
        self._started: Future[Learner] = Future()
        self._stopping = threading.Event()
        self._at_work = threading.Lock()  # held by `start` and `run`

    def where(self) -> tuple[str, int]:
        """Return the host and pid of this process."""
        return socket.gethostname(), os.getpid()

    def start(self) -> str:
        """Load the model and the newest checkpoint. Return a line that says where the run goes on.

        Raises RankError if a GPU is full: it may be free after a restart.
        """
        from torch import OutOfMemoryError

        from learner.learner import Learner

        with self._at_work:
            try:
                learner = Learner(self._setup, self._coordinator, stopping=self._stopping)
            except OutOfMemoryError as error:
                raise RankError(f"the learner's GPU has no room for its start: {error}") from error
            self._started.set_result(learner)
            return learner.restored

    def run(self) -> int:
        """Train, and return the learner step reached. Call it after `start`."""
        with self._at_work:
            return self._started.result(timeout=0).run()

    def stop(self) -> None:
        """Ask `run` to end after the current learner step, with a checkpoint."""
        self._stopping.set()

    def close(self) -> None:
        """Stop, wait until `start` or `run` has returned, and free devices and ranks.

        Killing a rank during a checkpoint would lose the checkpoint, so wait for as long as a
        learner step may take.
        """
        self.stop()
        is_idle = self._at_work.acquire(timeout=self._setup.config.learner.step_timeout_s)
        try:
            if self._started.done():
                self._started.result().close()
        finally:
            if is_idle:
                self._at_work.release()


LearnerActor = ray.remote(LearnerProcess)
