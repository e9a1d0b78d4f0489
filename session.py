"""The processes of a run: starts them, watches them, stops them. Shared by train.py and evaluate.py only.

    with Session(config, model_path, learns=True) as session:
        session.train(progress)
        session.evaluate(progress)

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
from ray.exceptions import RayError

from actors import CoordinatorActor, Status, WorkerActor, WorkerSetup
from configs import Config
from learner import LearnerActor, LearnerSetup

POLL_S = 0.5
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

    def __enter__(self) -> Session:
        actors = self.config.actors
        self.coordinator = self._add("coordinator", CoordinatorActor.options(num_cpus=0).remote(self.config))
        if self.learns:
            learner = LearnerActor.options(num_cpus=0, num_gpus=self.config.learner.gpus, max_concurrency=2)
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
        self.playing = {name: c.run.remote() for name, c in self.components.items() if name.startswith("worker")}
        return self

    def _add(self, name: str, component: Any) -> Any:
        component.capture_output.remote(name)
        self.components[name] = component
        return component

    def train(self, show: Show) -> int:
        """Runs the learner to its last step; returns it."""
        learning = {"learner": self.components["learner"].run.remote()}
        try:
            self._watch(learning, show, until=lambda status: False)
        except KeyboardInterrupt:
            ray.get(self.components["learner"].stop.remote())
            ray.wait(list(learning.values()), timeout=STOP_TIMEOUT_S)
            raise
        return int(self._result("learner", learning["learner"]))

    def evaluate(self, episodes_per_task: int, show: Show) -> None:
        """Plays every held-out task `episodes_per_task` times with the newest weights."""
        ray.get(self.coordinator.evaluate.remote(self.status().version, episodes_per_task))
        self._watch({}, show, until=lambda status: status.heldout_open == 0)

    def status(self) -> Status:
        return self._result("coordinator", self.coordinator.status.remote())

    def __exit__(self, *_: object) -> None:
        for name, component in self.components.items():
            if name.startswith("worker"):
                component.stop.remote()
        ending = [c.close.remote() for name, c in self.components.items() if name != "coordinator"]
        ray.wait(ending, num_returns=len(ending), timeout=STOP_TIMEOUT_S)
        ray.wait([self.coordinator.close.remote()], timeout=STOP_TIMEOUT_S)
        for component in self.components.values():
            ray.kill(component)

    def _watch(self, learning: dict[str, Any], show: Show, *, until: Callable[[Status], bool]) -> None:
        """Shows the status until the learner returns or `until` holds; raises what a component raised."""
        running = {**self.playing, **learning}
        names = {reference: name for name, reference in running.items()}
        while True:
            done, _ = ray.wait(list(names), timeout=POLL_S)
            status = self.status()
            show(status)
            for reference in done:
                name = names[reference]
                self._result(name, reference)
                if name == "learner":
                    return
                raise ComponentFailed(f"{name} ended although nobody stopped it; its log: {self.logs / name}.log")
            if until(status):
                return

    def _result(self, name: str, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            reason = str(cause).strip().splitlines()
            text = f"{type(cause).__name__}: {reason[-1] if reason else ''}"
            raise ComponentFailed(f"{name} failed: {text} (log: {self.logs / name}.log)") from error
