"""The processes of a run: starts them, watches them, starts them again, stops them. Shared by train.py and evaluate.py only.

    with Session(config, model_path, learns=True) as session:
        session.train(progress.show)
        session.evaluate(episodes_per_task, progress.show)

Every process writes what it prints to `<run>/logs/<component>.log`. A worker or the learner whose process dies, is stopped or
hangs is killed and started again, a limited number of times; so is a worker whose engine is lost. What a component reports as
an error ends the run: it is raised here, by name, and leaving the `with` block stops the others. So does the coordinator's
death: the same command goes on from what it had committed.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from actors import CoordinatorActor, EngineLostError, Status, WorkerActor, WorkerSetup
from configs import Config
from learner import LearnerActor, LearnerSetup
from runs import RUN_MARK, wanted_workers
from supervision import Restarts, Watch

POLL_S = 0.5
START_TIMEOUT_S = 600.0  # of the coordinator, which may have games to make
ANSWER_TIMEOUT_S = 20.0  # of the coordinator afterwards: it answers in milliseconds
STOP_TIMEOUT_S = 60.0  # for the learner to finish its batch and write a checkpoint
RAY_KILLS_WITHIN_S = 2.0
STAGGER_S = 0.5  # between the starts of two workers, which load the same files

Show = Callable[[Status], None]


class ComponentFailed(RuntimeError):
    """A part of the run failed; the message is its name, its own error and where its log is."""


@contextmanager
def ray_cluster(run_dir: str) -> Iterator[None]:
    """Joins the cluster that RAY_ADDRESS names, else starts a private one and removes everything of it at the end.

    All its processes carry RUN_MARK, by which `runs.py` knows them.
    """
    mark = {RUN_MARK: str(Path(run_dir).resolve())}
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        ray.init(ignore_reinit_error=True, log_to_driver=False, runtime_env={"env_vars": mark})
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, would starve a run on a busy machine
    os.environ.update(mark)
    context = ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(context.address_info["session_dir"], ignore_errors=True)


def available_gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


@dataclass(kw_only=True, slots=True)
class _Part:
    """A worker or the learner, as far as the driver knows it."""

    name: str
    handle: Any = None  # None: waits to be started again
    where: Any = None  # reference to (host, pid)
    call: Any = None  # reference to what it is at: `start`, then `run`
    started: bool = False
    leaving: bool = False
    due_at_s: float = 0.0  # when it is started (again)


class Session:
    def __init__(self, config: Config, model_path: str, *, learns: bool) -> None:
        self.config, self.model_path, self.learns = config, model_path, learns
        self.logs = Path(config.run_dir) / "logs"
        self.restored = ""
        self.parts: dict[str, _Part] = {}
        self.watch, self.restarts = Watch(config.supervision), Restarts(config.supervision)
        self.is_up = False  # everything has been started once
        self.training = False
        self.learner_step: int | None = None  # at which the learner ended
        self.coordinator_lost = False

    def __enter__(self) -> Session:
        self.coordinator = CoordinatorActor.options(num_cpus=0).remote(self.config, learns=self.learns)
        try:
            self._ask(self.coordinator.capture_output.remote("coordinator"), timeout_s=START_TIMEOUT_S)
            now = time.monotonic()
            names = ["learner"] * self.learns + [f"worker-{number}" for number in range(self.config.actors.workers)]
            self.parts = {name: _Part(name=name, due_at_s=now + STAGGER_S * place) for place, name in enumerate(names)}
            while not all(part.started for part in self.parts.values()):
                self._look(lambda status: None)
        except BaseException:  # also Ctrl-C: what was started is stopped
            self.__exit__()
            raise
        self.is_up = True
        return self

    def train(self, show: Show) -> int:
        """Runs the learner to its last step; returns it."""
        self.training = True
        learner = self.parts["learner"]
        learner.call = learner.handle.run.remote()
        while self.learner_step is None:
            self._look(show)
        self.training = False
        return self.learner_step

    def evaluate(self, episodes_per_task: int, show: Show) -> None:
        """Plays every held-out task `episodes_per_task` times with the newest weights."""
        version = self.status().version
        if version < 0:
            raise ComponentFailed(f"{self.config.run_dir} has no weights yet; train it first")
        self._ask(self.coordinator.evaluate.remote(version, episodes_per_task))
        while self._look(show).heldout_open:
            pass

    def status(self) -> Status:
        return self._ask(self.coordinator.status.remote())

    def __exit__(self, *_: object) -> None:
        """Stop everything, wait until it has stopped, then close it; the coordinator last, as the others still commit.

        Without a coordinator there is nobody to stop for: whoever is left is killed.
        """
        alive = [part for part in self.parts.values() if part.handle is not None]
        if not self.coordinator_lost:
            self._wait([part.handle.stop.remote() for part in alive])
            self._wait([part.call for part in alive if part.call is not None])
            self._wait([part.handle.close.remote() for part in alive])
            self._wait([self.coordinator.close.remote()])
        for part in alive:
            self._kill(part)
        ray.kill(self.coordinator)

    def _wait(self, calls: list[Any]) -> None:
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=STOP_TIMEOUT_S)

    def _look(self, show: Show) -> Status:
        """One look at everything: who ended, who is silent, who has to be started. Raises what ends the run."""
        calls = {part.call: part for part in self.parts.values() if part.call is not None}
        if calls:
            done, _ = ray.wait(list(calls), timeout=POLL_S)
            for call in done:
                self._ended(calls[call])
        else:
            time.sleep(POLL_S)
        status = self.status()
        for name, why in self.watch.silent(status.components).items():
            if name in self.parts and self.parts[name].handle is not None:
                self._lost(self.parts[name], why)
        for name, why in self.watch.starving(status.components).items():
            counts = status.counts
            self._notice("starving", f"{name} {why}; {counts.complete} groups are ready, {counts.leased} are being played")
        self._follow_wanted_workers()
        for part in self.parts.values():
            if part.handle is None and time.monotonic() >= part.due_at_s:
                self._start(part)
        show(status)
        return status

    def _start(self, part: _Part) -> None:
        if part.name == "learner":
            options = LearnerActor.options(num_cpus=0, num_gpus=self.config.learner.gpus_per_rank, max_concurrency=2)
            part.handle = options.remote(LearnerSetup(config=self.config, model_path=self.model_path), self.coordinator)
        else:
            setup = WorkerSetup(name=part.name, config=self.config, model_path=self.model_path)
            part.handle = WorkerActor.options(num_cpus=0, num_gpus=self.config.actors.gpus_per_worker).remote(
                setup, self.coordinator
            )
        part.where = part.handle.capture_output.remote(part.name)
        part.call = part.handle.start.remote()

    def _ended(self, part: _Part) -> None:
        """What `part` was at has ended: `start` leads to `run`; `run` of the learner is the end; anything else is an error."""
        try:
            result = ray.get(part.call)
        except ActorDiedError:
            self._lost(part, "died: its process was killed, ran out of memory, or crashed")
            return
        except RayError as error:
            cause = _first_cause(error)
            if isinstance(cause, EngineLostError) and self.is_up:
                self._lost(part, f"lost its engine: {cause}")
                return
            reason = str(cause).strip().splitlines()
            text = f"{type(cause).__name__}: {reason[-1] if reason else ''}"
            raise ComponentFailed(f"{part.name} failed: {text} (log: {self.logs / part.name}.log)") from error
        part.call = None
        if not part.started:
            part.started = True
            if part.name == "learner":
                self.restored = self.restored or str(result)
            if part.name != "learner" or self.training:
                part.call = part.handle.run.remote()
        elif part.name == "learner":
            self.learner_step = int(result)
        elif part.leaving:
            ray.wait([part.handle.close.remote()], timeout=STOP_TIMEOUT_S)
            self._kill(part)
            self._ask(self.coordinator.forget.remote(part.name, "left, as it was asked to"))
            del self.parts[part.name]
        else:
            raise ComponentFailed(f"{part.name} ended although nobody stopped it (log: {self.logs / part.name}.log)")

    def _lost(self, part: _Part, why: str) -> None:
        """Kills what is left of `part`, lets others have its groups, and has it started again after a pause."""
        self._kill(part)
        if part.leaving:
            del self.parts[part.name]
            self._ask(self.coordinator.forget.remote(part.name, why))
            return
        pause_s = self.restarts.pause_s(part.name) if self.is_up else None
        self._ask(self.coordinator.forget.remote(part.name, why))
        if pause_s is None:
            limit = f", more than {self.config.supervision.max_restarts} times" if self.is_up else ""
            raise ComponentFailed(
                f"{part.name} {why}{limit} (log: {self.logs / part.name}.log). "
                "Nothing that was committed is lost; the same command goes on"
            )
        self._notice("started again", f"{part.name} {why}; it is started again in {pause_s:g} s")
        self.parts[part.name] = _Part(name=part.name, due_at_s=time.monotonic() + pause_s)

    def _kill(self, part: _Part) -> None:
        """Also a process of this machine that is stopped, which does not hear Ray."""
        ray.kill(part.handle)
        with suppress(RayError, psutil.Error):  # it died before it could say where it was, or is gone
            host, pid = ray.get(part.where, timeout=1.0)
            if host == socket.gethostname():
                process = psutil.Process(pid)
                try:
                    process.wait(timeout=RAY_KILLS_WITHIN_S)
                except psutil.TimeoutExpired:
                    process.kill()

    def _follow_wanted_workers(self) -> None:
        """Somebody may have asked for more workers, or fewer: `python train.py --workers RUN N`."""
        wanted = wanted_workers(Path(self.config.run_dir))
        if wanted is None or not self.is_up:
            return
        names = {f"worker-{number}" for number in range(wanted)}
        for name in sorted(names - self.parts.keys()):
            self.parts[name] = _Part(name=name, due_at_s=time.monotonic())
        for name, part in list(self.parts.items()):
            if name == "learner" or name in names or part.leaving:
                continue
            if part.handle is None:
                del self.parts[name]
            elif part.started:
                part.leaving = True
                part.handle.stop.remote()

    def _notice(self, what: str, detail: str) -> None:
        self._ask(self.coordinator.notice.remote(what, detail, "driver"))

    def _ask(self, call: Any, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The coordinator's answer. Raises ComponentFailed if it is dead or silent, or with what it raised."""
        try:
            return ray.get(call, timeout=timeout_s)
        except (ActorDiedError, GetTimeoutError) as error:
            self.coordinator_lost = True
            what = (
                f"has not answered for {timeout_s:g} s: its process is stopped, or its disk hangs"
                if isinstance(error, GetTimeoutError)
                else "died: its process was killed, ran out of memory, or crashed"
            )
            raise ComponentFailed(
                f"coordinator {what} (log: {self.logs / 'coordinator'}.log). "
                "Nothing that was committed is lost; the same command goes on"
            ) from error
        except RayError as error:
            cause = _first_cause(error)
            raise ComponentFailed(
                f"coordinator failed: {type(cause).__name__}: {cause} (log: {self.logs / 'coordinator'}.log)"
            ) from error


def _first_cause(error: RayError) -> BaseException:
    cause: BaseException = getattr(error, "cause", None) or error
    while isinstance(cause, BaseExceptionGroup):  # of a worker's loops: the first one is why the others ended
        cause = cause.exceptions[0]
    return cause
