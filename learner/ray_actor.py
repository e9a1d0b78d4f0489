"""What the driver knows of the learner: how its process is made, what it is at, what it may lose.

Loads nothing that computes: torch, DeepSpeed and transformers take seconds of CPU, which only the
learner's own process pays.
"""

from __future__ import annotations

import gc
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RaySettings  # type: ignore[attr-defined]
from ray.actor import ActorHandle

from configs import Config
from coordinator import capture_output
from printable import UserError
from store import RunLayout

# Ray 2.60 leaves CUDA_VISIBLE_DEVICES as it is in an actor with num_gpus=0. With this variable, in
# the environment of Ray's processes or of a job, it is set to "" there: before the actor's class is
# loaded, so torch and DeepSpeed see no GPU.
RAY_HIDES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
# in a file: of a command line `ps` shows everything
RAY_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_BYTES = 32
LEARNER_STEP = "learner step"  # what the learner is said to be at while it trains: work, not a wait


@contextmanager
def ray_token(directory: Path) -> Iterator[None]:
    """Have a Ray that is started here answer only to a new token, which is in a file of `directory`
    for this user alone.

    Ray's ports are open to every user of the machine, and to the network. By itself Ray takes one
    token for all clusters, from a file in the home directory that other users may be able to read.
    End Ray before the block ends.
    """
    path = directory / "token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    before = {name: os.environ.pop(name) for name in RAY_TOKEN if name in os.environ}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    _read_token_again()
    try:
        yield
    finally:
        for name in RAY_TOKEN:
            os.environ.pop(name, None)
        os.environ.update(before)
        _read_token_again()


def _read_token_again() -> None:
    """Have Ray look at the environment once more. It keeps what it read when it was loaded."""
    RaySettings.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


class RankError(UserError, RuntimeError):
    """A rank of the learner is lost, and a restart may help. The message says which one and why.

    Another rank died or failed, or the learner's own GPU was full at its start: a killed process
    may not have given back its memory yet.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    config: Config
    model_path: str  # Hugging Face directory of the base model: version 0


class LearnerProcess:
    """A `Learner` for Ray, which has to know the methods before the class is loaded."""

    def __init__(self, setup: LearnerSetup, coordinator: ActorHandle) -> None:
        capture_output(RunLayout.open(Path(setup.config.run_dir)).logs / "learner.log")
        # a fifth of the import's time; what it made stays for good and need not be looked through
        # again
        gc.disable()
        from learner.learner import Learner  # here, in the process that trains

        gc.freeze()
        gc.enable()
        self._learner = Learner(setup, coordinator)

    def where(self) -> tuple[str, int]:
        """Host and pid of this process."""
        return socket.gethostname(), os.getpid()

    def start(self) -> str:
        """Start the learner. Raises RankError where a GPU is full, which a restart may find
        free.
        """
        from torch import OutOfMemoryError

        try:
            return self._learner.start()
        except OutOfMemoryError as error:
            raise RankError(f"the learner's GPU has no room for its start: {error}") from error

    def run(self) -> int:
        return self._learner.run()

    def stop(self) -> None:
        self._learner.stop()

    def close(self) -> None:
        self._learner.close()


LearnerActor = ray.remote(LearnerProcess)
