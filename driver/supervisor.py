"""The processes of a run: starts them, watches them, starts them again, stops them. Shared by
gigpo train and gigpo evaluate only.

    with Supervisor(config, model_path, learns=True, say=print, say_stopping=print) as session:
        session.train(progress.show)
        session.evaluate(episodes_per_task, progress.show)

Every process writes what it prints to `<run>/logs/<component>.log`. A worker or the learner whose
process dies, is stopped or hangs is killed and started again, a limited number of times; so is a
worker whose engine is lost, and a learner that lost one of its ranks. What a component reports as
an error ends the run: it is raised here, by name, and leaving the `with` block stops the others. So
does the coordinator's death: the same command goes on from what it had committed.

`driver/processes.py` starts and kills one process, `driver/coordinator_client.py` asks the
coordinator, `driver/health.py` decides who is lost, `driver/shutdown.py` ends all in order,
`driver/errors.py` says what an error was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors import EngineLostError, EngineMemoryError, EngineStartError, PromptStuckError
from configs import Config, is_offline, n_workers
from coordinator import Component, Status
from driver import processes as parts
from driver.coordinator_client import CoordinatorClient
from driver.errors import DIED, ComponentFailed, Stopped, cause_of, describe_cause
from driver.health import Restarts, Watch
from driver.processes import LEARNER, ManagedProcess
from driver.progress import said_while
from driver.run_control import wanted_workers
from driver.shutdown import AT_ONCE, STOP_TIMEOUT_S, Say, outcome, stop_held_back, stop_in_order
from envs import log_hint
from learner import RankError
from store import VersionRecord

POLL_S = 0.5
UNPLACED_S = 20.0  # a process that Ray has not begun for so long is named
PLACES_TIMEOUT_S = 600.0  # for Ray to find places for all, at the start
MAX_NAMED = 4  # processes in one line
STAGGER_S = 0.5  # between the starts of two workers, which load the same files

Show = Callable[[Status], None]


class Supervisor:
    def __init__(
        self, config: Config, model_path: str, *, learns: bool, say: Say, say_stopping: Say
    ) -> None:
        """`say` is the screen before progress is shown; `say_stopping` tells who waits for the end
        from outside.
        """
        self.config, self.model_path, self.learns = config, model_path, learns
        self.say, self.say_stopping = say, say_stopping
        self.logs = Path(config.run_dir) / "logs"
        self.restored = ""
        self.parts: dict[str, ManagedProcess] = {}
        self.watch, self.restarts = Watch(config.supervision), Restarts(config.supervision)
        self.is_up = False  # everything has been started once
        # while they start: what each was last heard to wait for
        self.components: Mapping[str, Component] = {}
        self.training = False
        self.learner_step: int | None = None  # at which the learner ended

    def __enter__(self) -> Supervisor:
        self.coordinator = CoordinatorClient(self.config, learns=self.learns)
        try:
            wanted = n_workers(self.config) if self.learns else self.config.actors.workers
            self._add([LEARNER] * self.learns)
            self._add([f"worker-{number}" for number in range(wanted)])
            with said_while(self._starting, self.say):
                # beside the coordinator: they import for seconds before they ask it anything
                self._start_due()
                self.coordinator.wait_until_up()
                while not all(part.started for part in self.parts.values()):
                    self.components = self._look(lambda status: None).components
        except BaseException as error:  # also Ctrl-C: what was started is stopped
            self._stop(error)
            raise
        self.is_up = True
        return self

    def train(self, show: Show) -> int:
        """Runs the learner to its last step; returns it."""
        self.training = True
        learner = self.parts[LEARNER]
        learner.call = learner.handle.run.remote()
        while self.learner_step is None:
            self._look(show)
        self.training = False
        return self.learner_step

    def publish(self, version: VersionRecord) -> None:
        """Weights that no learner of this session has made."""
        self.coordinator.publish(version)

    def evaluate(self, episodes_per_task: int, show: Show) -> None:
        """Plays every held-out task `episodes_per_task` times with the newest weights."""
        version = self.status().version
        if version < 0:
            raise ComponentFailed(f"{self.config.run_dir} has no weights yet; train it first")
        self.coordinator.evaluate(version, episodes_per_task)
        while self._look(show).heldout_open:
            pass

    def status(self) -> Status:
        return self.coordinator.status()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(error)

    def _stop(self, error: BaseException | None) -> None:
        """Stops everything in order, closes it, the coordinator last, as the others still commit,
        and kills what is left.

        Raises Stopped, with what came of it, if `error` is a Ctrl-C, or one comes now.
        """
        interrupted = isinstance(error, KeyboardInterrupt)
        self.say_stopping(f"stopping {self.config.run_dir}")
        if isinstance(error, ComponentFailed) and not self.coordinator.lost:
            self.say(f"stopping the others, as {error}")
        how = AT_ONCE
        try:
            # A first Ctrl-C during an end that came by itself asks for what happens anyway.
            with nullcontext() if interrupted else stop_held_back():
                how = self._stopped_in_order()
        except ComponentFailed as failure:  # the coordinator: there is nobody to stop for
            how = f"not stopped in order, as the {failure}"
        except KeyboardInterrupt:
            interrupted = True
        for part in self.parts.values():
            if part.handle is not None:
                parts.kill(part)
        self.coordinator.kill()
        if interrupted:
            raise Stopped(f"{self.config.run_dir}: {how}") from None
        if error is not None and not self.coordinator.lost:
            self.say(f"{self.config.run_dir}: {how}")

    def _stopped_in_order(self) -> str:
        """What came of it."""
        if self.coordinator.lost:
            return "not stopped in order, as the coordinator is lost; nothing that was committed is"
        alive = [part for part in self.parts.values() if part.handle is not None]
        unstopped = stop_in_order(
            alive, status=self.status, config=self.config, say=self._say_waiting
        )
        learner_step, checkpoint = self.status().learner_step, self.coordinator.newest_checkpoint()
        with said_while(lambda: "closing the coordinator", self._say_waiting):
            self.coordinator.close()
        return outcome(unstopped, learner_step=learner_step, checkpoint=checkpoint)

    def _look(self, show: Show) -> Status:
        """One look at everything: who ended, who is silent, who has to be started. Raises what ends
        the run.
        """
        calls = {part.call: part for part in self.parts.values() if part.call is not None}
        if calls:
            done, _ = ray.wait(list(calls), timeout=POLL_S)
            for call in done:
                self._ended(calls[call])
        else:
            time.sleep(POLL_S)
        status = self.status()
        for name, why in self.watch.silent(status.components).items():
            if name not in self.parts:
                self.coordinator.forget(name, "a last sign of life came after it was gone")
            elif self.parts[name].call is not None:  # nothing is asked of an idle learner
                self._lost(self.parts[name], why)
        for name, why in self.watch.starving(status.components).items():
            counts = status.counts
            self._notice(
                "starving",
                f"{name} {why}; {counts.complete} groups are ready, {counts.leased} are being "
                "played",
            )
        self._follow_wanted_workers()
        for part in self.parts.values():
            if part.handle is not None and not part.placed:
                self._look_for_place(part)
        self._start_due()
        show(status)
        return status

    def _starting(self) -> str:
        """Name the processes that are still starting, and what each waits for."""
        coming = [part.name for part in list(self.parts.values()) if not part.started]
        at = [
            self.components[name].waiting_on if name in self.components else None for name in coming
        ]
        named = [
            f"{name} ({what or 'loading libraries'})" for name, what in zip(coming, at, strict=True)
        ]
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        return f"starting {', '.join(named[:MAX_NAMED]) or 'the coordinator'}{more}"

    def _start_due(self) -> None:
        for part in self.parts.values():
            if part.handle is None and time.monotonic() >= part.due_at_s:
                parts.start(
                    part,
                    config=self.config,
                    model_path=self.model_path,
                    coordinator=self.coordinator.handle,
                )

    def _look_for_place(self, part: ManagedProcess) -> None:
        """Names a process that Ray cannot begin; while the run starts, also a limit to waiting for
        it.
        """
        waited_s = time.monotonic() - part.asked_at_s
        if waited_s < UNPLACED_S:
            return
        part.placed = parts.has_process(part)
        if part.placed:
            return
        why = f"{part.name} has had no place for {waited_s:.0f} s: {parts.why_unplaced(part, self.config)}"
        if not self.is_up and waited_s > PLACES_TIMEOUT_S:
            raise ComponentFailed(why)
        if not part.named_unplaced:
            part.named_unplaced = True
            self._notice("no place", why)

    def _ended(self, part: ManagedProcess) -> None:
        """What `part` was at has ended: `start` leads to `run`; `run` of the learner is the end;
        anything else is an error.
        """
        try:
            result = ray.get(part.call)
        except RayError as error:
            self._failed(part, error)
            return
        part.call = None
        if not part.started:
            part.started = part.placed = True
            if part.name == LEARNER:
                self.restored = self.restored or str(result)
            if part.name != LEARNER or self.training:
                part.call = part.handle.run.remote()
        elif part.name == LEARNER:
            self.learner_step = int(result)
        elif part.leaving:
            ray.wait([part.handle.close.remote()], timeout=STOP_TIMEOUT_S)
            parts.kill(part)
            self.coordinator.forget(part.name, "left, as it was asked to")
            del self.parts[part.name]
        else:
            raise ComponentFailed(
                f"{part.name} ended although nobody stopped it{self._log(part.name)}"
            )

    def _failed(self, part: ManagedProcess, error: RayError) -> None:
        """What a part's error means. Asks the coordinator first: without it all parts fail, and
        none of them is to blame.
        """
        self.status()
        cause = cause_of(error)
        if isinstance(cause, RayActorError) and not cause.actor_init_failed:
            self._lost(
                part, "lost touch with the coordinator" if isinstance(error, RayTaskError) else DIED
            )
        elif isinstance(cause, EngineLostError) and not self._will_never_start(cause):
            self._lost(part, f"lost its engine: {cause}")
        elif isinstance(cause, PromptStuckError):
            self._lost(part, f"hangs: {cause}")
        elif isinstance(cause, RankError):  # as if the learner itself had died
            self._lost(part, f"lost a rank: {cause}")
        else:
            message = f"{part.name} failed: {describe_cause(error)}"
            log = self.logs / f"{part.name}.log"
            if str(log) not in message:  # an environment's error names it already
                message += log_hint(log)
            raise ComponentFailed(message) from error

    def _will_never_start(self, cause: EngineLostError) -> bool:
        """Return whether an engine that did not start is to blame on the config: engines have not
        been up before.

        Too little free memory is a matter of time also then, after a driver that was killed.
        """
        return (
            isinstance(cause, EngineStartError)
            and not isinstance(cause, EngineMemoryError)
            and not self.is_up
        )

    def _lost(self, part: ManagedProcess, why: str) -> None:
        """Kills what is left of `part`, lets others have its groups, and has it started again after
        a pause.
        """
        parts.kill(part)
        if part.leaving:
            del self.parts[part.name]
            self.coordinator.forget(part.name, why)
            return
        pause_s = self.restarts.pause_s(part.name)
        self.coordinator.forget(part.name, why)
        if pause_s is None:
            limit = self.config.supervision.max_restarts
            raise ComponentFailed(
                f"{part.name} {why}, more than {limit} times{self._log(part.name)}. "
                "Nothing that was committed is lost; the same command goes on"
            )
        self._notice("started again", f"{part.name} {why}; it is started again in {pause_s:g} s")
        self.parts[part.name] = ManagedProcess(name=part.name, due_at_s=time.monotonic() + pause_s)

    def _add(self, names: list[str]) -> None:
        """They are started, one after the other."""
        now = time.monotonic()
        self.parts |= {
            name: ManagedProcess(name=name, due_at_s=now + STAGGER_S * place)
            for place, name in enumerate(names)
        }

    def _follow_wanted_workers(self) -> None:
        """Somebody may have asked for more workers, or fewer: `gigpo workers RUN
        N`.
        """
        wanted = wanted_workers(Path(self.config.run_dir))
        if wanted is None or not self.is_up or (self.learns and is_offline(self.config)):
            return
        names = [f"worker-{number}" for number in range(wanted)]
        self._add([name for name in names if name not in self.parts])
        for name, part in list(self.parts.items()):
            if name == LEARNER or name in names or part.leaving:
                continue
            if part.handle is None:
                del self.parts[name]
            elif part.started:
                part.leaving = True
                part.handle.stop.remote()

    def _say_waiting(self, text: str) -> None:
        self.say(text)
        self.say_stopping(text)

    def _log(self, name: str) -> str:
        return log_hint(self.logs / f"{name}.log")

    def _notice(self, what: str, detail: str) -> None:
        if self.is_up:
            self.coordinator.notice(what, detail)
        else:  # nobody shows notices yet, and what is said now is not to be shown again then
            self.say(f"{what}: {detail}")
            self.coordinator.record(what, detail)
