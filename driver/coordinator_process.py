"""The coordinator's process, as the driver that started it sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from configs import Config
from coordinator import CoordinatorActor, CoordinatorClient, CoordinatorSilent, Reply
from driver.cluster import on_the_drivers_node
from driver.errors import DIED, ComponentFailed, cause_of, describe_cause
from envs import log_hint

START_TIMEOUT_S = 600.0  # it may make games
ANSWER_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 60.0  # for a compaction that is under way

T = TypeVar("T")


class CoordinatorProcess:
    """Starts the coordinator. `answer(calls.status())` raises ComponentFailed if it is lost."""

    def __init__(self, config: Config, *, learns: bool) -> None:
        self.is_lost = False  # dead or silent
        self._log = Path(config.run_dir) / "logs" / "coordinator.log"
        # It owns the catalog, a SQLite file in WAL mode: all its users must be on one machine.
        options = {"num_cpus": 0, "scheduling_strategy": on_the_drivers_node()}
        self.handle = CoordinatorActor.options(**options).remote(config, learns=learns)
        self.calls = CoordinatorClient(self.handle, component="driver", timeout_s=ANSWER_TIMEOUT_S)

    def wait_until_up(self) -> None:
        """Wait until the coordinator has started."""
        self.answer(self.calls.capture_output(), timeout_s=START_TIMEOUT_S)

    def close(self) -> None:
        """Have the coordinator close the catalog."""
        self.answer(self.calls.close(), timeout_s=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the process."""
        ray.kill(self.handle)

    def answer(self, reply: Reply[T], *, timeout_s: float = ANSWER_TIMEOUT_S) -> T:
        """Wait for a reply. Raises ComponentFailed: it is lost, or the call failed."""
        try:
            return reply.get(timeout_s=timeout_s)
        except CoordinatorSilent as error:
            self.is_lost = True
            raise ComponentFailed(
                f"coordinator has not answered for {timeout_s:g} s: its process is stopped, or its "
                f"disk hangs{self._remedy()}"
            ) from error
        except RayError as error:
            cause = cause_of(error)
            self.is_lost = isinstance(cause, RayActorError)
            if isinstance(cause, RayActorError) and not cause.actor_init_failed:
                raise ComponentFailed(f"coordinator {DIED}{self._remedy()}") from error
            raise ComponentFailed(
                f"coordinator failed: {describe_cause(error)}{log_hint(self._log)}"
            ) from error

    def _remedy(self) -> str:
        return (
            f"{log_hint(self._log)}. Nothing that was committed is lost; the same command goes on"
        )
