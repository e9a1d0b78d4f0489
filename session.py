"""The processes of a run: starts them, watches them, stops them. Shared by train.py and evaluate.py only.

    with Session(config, model_path, learns=True) as session:
        session.train(progress.show)
        session.evaluate(episodes_per_task, progress.show)

Every process writes what it prints to `<run>/logs/<component>.log`. A component that fails ends the run: its error is
raised here, by name, and leaving the `with` block stops the others.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from actors import CoordinatorActor, Status, WorkerActor, WorkerSetup
from configs import Config
from learner import LearnerActor, LearnerSetup

POLL_S = 0.5
ANSWER_TIMEOUT_S = 600.0  # the longest is an engine's start with a large model
STOP_TIMEOUT_S = 60.0  # for the learner to finish its batch and write a checkpoint

Show = Callable[[Status], None]


class ComponentFailed(RuntimeError):
    """A part of the run failed; the message is its name, its own error and where its log is."""


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Joins the cluster that RAY_ADDRESS names, else starts a private one and removes everything of it at the end."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, would starve a run on a busy machine
    context = ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(context.address_info["session_dir"], ignore_errors=True)


def available_gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


class Session:
    def __init__(self, config: Config, model_path: str, *, learns: bool) -> None:
        self.config, self.model_path, self.learns = config, model_path, learns
        self.logs = Path(config.run_dir) / "logs"
        self.restored = ""
        self.components: dict[str, Any] = {}
        self.running: dict[str, Any] = {}  # component -> its loop

    def __enter__(self) -> Session:
        actors = self.config.actors
        self.coordinator = self._add(
            "coordinator", CoordinatorActor.options(num_cpus=0).remote(self.config, learns=self.learns)
        )
        if self.learns:
            learner = LearnerActor.options(num_cpus=0, num_gpus=self.config.learner.gpus_per_rank, max_concurrency=2)
            setup = LearnerSetup(config=self.config, model_path=self.model_path)
            self._add("learner", learner.remote(setup, self.coordinator))
        for name in [f"worker-{number}" for number in range(actors.workers)]:
            worker = WorkerActor.options(num_cpus=0, num_gpus=actors.gpus_per_worker)
            self._add(
                name,
                worker.remote(WorkerSetup(name=name, config=self.config, model_path=self.model_path), self.coordinator),
            )
        starting = {name: c.start.remote() for name, c in self.components.items() if name != "coordinator"}
        try:
            results = {name: self._result(name, call) for name, call in starting.items()}
        except BaseException:  # also Ctrl-C: what was started is stopped
            self.__exit__()
            raise
        self.restored = str(results.get("learner", ""))
        self.running = {name: c.run.remote() for name, c in self.components.items() if name.startswith("worker")}
        return self

    def _add(self, name: str, component: Any) -> Any:
        component.capture_output.remote(name)
        self.components[name] = component
        return component

    def train(self, show: Show) -> int:
        """Runs the learner to its last step; returns it."""
        self.running["learner"] = self.components["learner"].run.remote()
        self._watch(show, until=lambda status: False)
        return int(self._result("learner", self.running.pop("learner")))

    def evaluate(self, episodes_per_task: int, show: Show) -> None:
        """Plays every held-out task `episodes_per_task` times with the newest weights."""
        version = self.status().version
        if version < 0:
            raise ComponentFailed(f"{self.config.run_dir} has no weights yet; train it first")
        self._result("coordinator", self.coordinator.evaluate.remote(version, episodes_per_task))
        self._watch(show, until=lambda status: status.heldout_open == 0)

    def status(self) -> Status:
        return self._result("coordinator", self.coordinator.status.remote())

    def __exit__(self, *_: object) -> None:
        """Stop everything, wait until it has stopped, then close it; the coordinator last, as the others still commit."""
        others = [component for name, component in self.components.items() if name != "coordinator"]
        self._wait([component.stop.remote() for component in others])
        self._wait(list(self.running.values()))
        self._wait([component.close.remote() for component in others])
        self._wait([self.coordinator.close.remote()])
        for component in self.components.values():
            ray.kill(component)

    def _wait(self, calls: list[Any]) -> None:
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=STOP_TIMEOUT_S)

    def _watch(self, show: Show, *, until: Callable[[Status], bool]) -> None:
        """Shows the status until the learner returns or `until` holds; raises what a component raised."""
        names = {reference: name for name, reference in self.running.items()}
        while True:
            done, _ = ray.wait(list(names), timeout=POLL_S)
            status = self.status()
            show(status)
            for reference in done:
                name = names[reference]
                self._result(name, reference)
                if name == "learner":
                    return
                raise ComponentFailed(f"{name} ended although nobody stopped it (log: {self.logs / name}.log)")
            if until(status):
                return

    def _result(self, name: str, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=ANSWER_TIMEOUT_S)
        except ActorDiedError as error:
            raise ComponentFailed(
                f"{name}'s process died: killed, out of memory, or crashed (log: {self.logs / name}.log). "
                "Nothing that was committed is lost; the same command goes on"
            ) from error
        except RayError as error:
            cause: BaseException = getattr(error, "cause", None) or error
            while isinstance(cause, BaseExceptionGroup):  # of a worker's loops: the first one is why the others ended
                cause = cause.exceptions[0]
            reason = str(cause).strip().splitlines()
            text = f"{type(cause).__name__}: {reason[-1] if reason else ''}"
            raise ComponentFailed(f"{name} failed: {text} (log: {self.logs / name}.log)") from error
