"""What the driver asks of the coordinator, each with a deadline: without an answer the run ends
with the cause.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from configs import Config
from coordinator import CoordinatorActor, Status
from driver.errors import DIED, ComponentFailed, cause_of, describe_cause
from driver.ray_cluster import on_the_drivers_node
from envs import log_hint
from store import CheckpointRecord, VersionRecord

START_TIMEOUT_S = 600.0  # it may have games to make
ANSWER_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 60.0  # for a merge of files that is under way


class CoordinatorClient:
    """Starts it. Every call raises ComponentFailed if it is dead or silent, and is `lost` then, or
    with what it raised.
    """

    def __init__(self, config: Config, *, learns: bool) -> None:
        self.log = Path(config.run_dir) / "logs" / "coordinator.log"
        self.lost = False
        # It owns the catalog, a SQLite file in WAL mode: all its users must be on one machine.
        options = {"num_cpus": 0, "scheduling_strategy": on_the_drivers_node()}
        self.handle = CoordinatorActor.options(**options).remote(config, learns=learns)

    def wait_until_up(self) -> None:
        self._ask(self.handle.capture_output.remote("coordinator"), timeout_s=START_TIMEOUT_S)

    def status(self) -> Status:
        return self._ask(self.handle.status.remote())

    def publish(self, version: VersionRecord) -> None:
        self._ask(self.handle.publish.remote(version))

    def evaluate(self, version: int, episodes_per_task: int) -> None:
        self._ask(self.handle.evaluate.remote(version, episodes_per_task))

    def forget(self, name: str, why: str) -> None:
        self._ask(self.handle.forget.remote(name, why))

    def notice(self, what: str, detail: str) -> None:
        self._ask(self.handle.notice.remote(what, detail, "driver"))

    def record(self, what: str, detail: str) -> None:
        """Write an event that nobody is shown."""
        self._ask(self.handle.record_event.remote("driver", what, detail))

    def newest_checkpoint(self) -> int | None:
        """Its learner step."""
        records: tuple[CheckpointRecord, ...] = self._ask(self.handle.checkpoints.remote())
        return records[0].learner_step if records else None

    def close(self) -> None:
        self._ask(self.handle.close.remote(), timeout_s=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        ray.kill(self.handle)

    def _ask(self, call: Any, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        try:
            return ray.get(call, timeout=timeout_s)
        except GetTimeoutError as error:
            self.lost = True
            what = (
                f"has not answered for {timeout_s:g} s: its process is stopped, or its disk hangs"
            )
            raise ComponentFailed(f"coordinator {what}{self._goes_on()}") from error
        except RayError as error:
            cause = cause_of(error)
            self.lost = isinstance(cause, RayActorError)
            if isinstance(cause, RayActorError) and not cause.actor_init_failed:
                raise ComponentFailed(f"coordinator {DIED}{self._goes_on()}") from error
            raise ComponentFailed(
                f"coordinator failed: {describe_cause(error)}{log_hint(self.log)}"
            ) from error

    def _goes_on(self) -> str:
        return f"{log_hint(self.log)}. Nothing that was committed is lost; the same command goes on"
