"""Start, watch, restart and stop the processes of a run.

    with Supervisor(config, model_path, learns=True, say=print, say_stopping=print) as supervisor:
        supervisor.train(progress.show)
        supervisor.evaluate(episodes_per_task, progress.show)

Consumes  the results of the workers' and the learner's calls, and the coordinator's status
Produces  processes, restarts, notices
Waits for a call that ends, POLL_S at most; every wait of another process is limited by its
          heartbeats (`health.py`)

Each process writes its output to `<run>/logs/<component>.log`. A worker or a learner that dies,
hangs, loses its engine or loses a rank is killed and started again, a limited number of times. Any
other error of a component is raised here and ends the run; leaving the `with` block stops the other
processes. The death of the coordinator ends the run too: the same command continues from the last
commit.

`process_set.py` owns the processes. `worker_scaling.py` has workers join and leave, with the nodes
of a cluster and when a person asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from actors import EngineLostError, EngineMemoryError, EngineStartError, PromptStuckError
from configs import Config, is_offline, least_workers
from coordinator import Component, Status
from driver import processes
from driver.cluster import is_joined
from driver.errors import DIED, ComponentFailed, Stopped, cause_of, describe_cause
from driver.health import HealthMonitor, Restarts
from driver.interrupt import hold_interrupts
from driver.nodes import node_of
from driver.process_set import ProcessSet
from driver.processes import LEARNER, CoordinatorProcess, ManagedProcess
from driver.progress import said_while
from driver.shutdown import AT_ONCE, STOP_TIMEOUT_S, Say, outcome, stop_in_order
from driver.worker_scaling import MAX_NAMED, UNPLACED_S, WorkerScaling, worker_names, workers_line
from envs import EnvironmentStuckError, log_hint
from learner import RankError
from store import RunLayout, VersionRecord

POLL_S = 0.5  # between two looks at all processes
PLACES_TIMEOUT_S = 600.0  # for Ray to find places for all processes at the start
ENGINE_METRICS_S = 2.0  # for the answers of the workers; Prometheus waits 10 s by default

Show = Callable[[Status], None]


class Supervisor:
    """The processes of one run, as a context manager."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        *,
        learns: bool,
        say: Say,
        say_stopping: Say,
        warn: Say | None = None,
    ) -> None:
        """Start the coordinator.

        `say` writes to the screen before progress is shown, and `warn` what went wrong, by default
        the same way. `say_stopping` tells a waiting `gigpo stop` how far the stop is.
        """
        self.config = config
        self.run_id = RunLayout.open(Path(config.run_dir)).info.run_id
        self.model_path = model_path
        self.learns = learns
        self.say, self.say_stopping = say, say_stopping
        self.warn = warn or say
        self.logs = Path(config.run_dir) / "logs"
        self.restored = ""  # the learner's line on the checkpoint it started from
        self.members = ProcessSet(self._start)
        self.scaling = WorkerScaling(
            self.members, config, learns=learns, remove=self._remove, notice=self._notice
        )
        self.monitor = HealthMonitor(config.supervision)
        self.restarts = Restarts(config.supervision)
        self.is_up = False  # everything has been started once
        self.components: Mapping[str, Component] = {}  # while they start
        self.is_training = False
        self.results: dict[str, Any] = {}  # of processes whose `run` ended
        self._playing: frozenset[str] = frozenset()  # workers, when they were last recorded
        self._why_gone: dict[str, str] = {}  # of those that are not recorded as ended yet
        self.coordinator = CoordinatorProcess(config, learns=learns)

    def __enter__(self) -> Supervisor:
        try:
            if self.learns:
                self.members.plan([LEARNER])
            if not self._plays_nothing():
                self.members.plan(worker_names(least_workers(self.config.actors)))
            with said_while(self._starting, self.say):
                # Beside the coordinator: they import for seconds before they call it.
                self.members.start_due()
                self.coordinator.wait_until_up()
                while self._n_starting():
                    self.components = self._watch_once(lambda status: None).components
        except BaseException as error:  # also Ctrl-C: what was started is stopped
            self._stop(error)
            raise
        self.is_up = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop(error)

    def train(self, show: Show) -> int:
        """Run the learner to its last step, and return that step."""
        self.is_training = True
        learner = self.members.processes[LEARNER]
        learner.call = learner.handle.run.remote()
        while LEARNER not in self.results:
            self._watch_once(show)
        self.is_training = False
        return int(self.results[LEARNER])

    def publish(self, version: VersionRecord) -> None:
        """Publish weights that no learner of this run has made."""
        self.coordinator.answer(self.coordinator.calls.publish(version))

    def evaluate(self, episodes_per_task: int, show: Show) -> None:
        """Play every held-out task `episodes_per_task` times with the newest weights."""
        version = self.status().version
        if version < 0:
            raise ComponentFailed(f"{self.config.run_dir} has no weights yet; train it first")
        self.coordinator.answer(self.coordinator.calls.evaluate(version, episodes_per_task))
        while self._watch_once(show).heldout_open:
            pass

    def status(self) -> Status:
        """Return the coordinator's status. The call is the driver's heartbeat too."""
        return self.coordinator.answer(self.coordinator.calls.driver_tick())

    def engine_metrics(self) -> Mapping[str, Sequence[Any]]:
        """Return vLLM's own figures of each worker that answers. Any thread may call it."""
        calls = {
            process.handle.engine_metrics.remote(): process.name
            for process in list(self.members.processes.values())
            if process.has_started and process.name != LEARNER
        }
        if not calls:
            return {}
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ENGINE_METRICS_S)
        found = {}
        for call in done:
            with suppress(RayError):  # it has just died, which the supervisor finds too
                found[calls[call]] = ray.get(call)
        return found

    # watching

    def _watch_once(self, show: Show) -> Status:
        """Handle ended calls, lost processes and due starts once. Raises what ends the run."""
        self._wait_for_calls()
        status = self.status()
        self._end_silent(status)
        self._notice_starving(status)
        self._follow_cluster()
        for process in list(self.members.processes.values()):
            if not process.is_placed:
                self._look_for_place(process)
        self._tell_workers()
        self.members.start_due()
        show(status)
        return status

    def _wait_for_calls(self) -> None:
        """Wait a moment for calls to end, and handle those that did."""
        calls = {
            process.call: process
            for process in self.members.processes.values()
            if process.call is not None
        }
        if calls:
            done, _ = ray.wait(list(calls), timeout=POLL_S)
            for call in done:
                self._ended(calls[call])
        else:
            time.sleep(POLL_S)

    def _end_silent(self, status: Status) -> None:
        """End each process that is silent for too long. It is started again."""
        for name, why in self.monitor.silent(status.components).items():
            process = self.members.processes.get(name)
            if process is None or not (process.has_started or processes.has_process(process)):
                # Remove a late heartbeat of a process that is gone, perhaps with its node.
                self._remove(name, "a last sign of life came after it was gone")
            elif process.call is not None:  # an idle learner may be silent
                self._lost(process, why)

    def _notice_starving(self, status: Status) -> None:
        """Say which process has waited too long for groups."""
        for name, why in self.monitor.starving(status.components).items():
            counts = status.counts
            self._notice(
                "starving",
                f"{name} {why}; {counts.complete} groups are ready, {counts.leased} are being "
                "played",
            )

    def _ended(self, process: ManagedProcess) -> None:
        """Handle the end of a call: `run` follows `start`, and `close` the `run` of a leaving one.

        The `run` of any other worker does not end.
        """
        try:
            result = ray.get(process.call)
        except RayError as error:
            if process.closes_by_s is None:
                self._failed(process, error)
            else:
                self.scaling.forget(process)
            return
        process.call = None
        if process.closes_by_s is not None:
            self.scaling.forget(process)
        elif not process.has_started:
            process.has_started = process.is_placed = True
            process.node = node_of(process.handle) if is_joined() else ""
            if process.name == LEARNER:
                self.restored = self.restored or str(result)
            if process.name != LEARNER or self.is_training:
                process.call = process.handle.run.remote()
        elif process.name == LEARNER:
            self.results[LEARNER] = result
        elif process.leaving_why:
            self._remove(process.name, process.leaving_why)  # its groups are free for others
            process.closes_by_s = time.monotonic() + STOP_TIMEOUT_S
            process.call = process.handle.close.remote()
        else:
            raise ComponentFailed(
                f"{process.name} ended although nobody stopped it{self._log(process.name)}"
            )

    def _failed(self, process: ManagedProcess, error: RayError) -> None:
        """Restart a process after an error that a restart may mend; otherwise end the run."""
        # Without a coordinator every process fails, and none of them is to blame.
        self.status()
        cause = cause_of(error)
        if isinstance(cause, RayActorError) and not cause.actor_init_failed:
            is_the_coordinators = isinstance(error, RayTaskError)
            why = "lost touch with the coordinator" if is_the_coordinators else DIED
            self._lost(process, why)
        elif isinstance(cause, EngineLostError) and not self._will_never_start(cause):
            self._lost(process, f"lost its engine: {cause}")
        elif isinstance(cause, PromptStuckError | EnvironmentStuckError):
            self._lost(process, f"hangs: {cause}")
        elif isinstance(cause, TaskCancelledError) and process.name != LEARNER:
            self._lost(process, "was cancelled, as code of an environment can do")
        elif isinstance(cause, RankError):
            self._lost(process, f"lost a rank: {cause}")
        else:
            message = f"{process.name} failed: {describe_cause(error)}"
            log = self.logs / f"{process.name}.log"
            if str(log) not in message:  # an environment's error names it already
                message += log_hint(log)
            raise ComponentFailed(message) from error

    def _will_never_start(self, cause: EngineLostError) -> bool:
        """Return whether the config is to blame: no engine has started with it before.

        Too little free memory may be a driver that was just killed, so it passes.
        """
        return (
            isinstance(cause, EngineStartError)
            and not isinstance(cause, EngineMemoryError)
            and not self.is_up
        )

    def _lost(self, process: ManagedProcess, why: str) -> None:
        """Kill a process, free its groups for others, and plan its restart after a pause."""
        if process.leaving_why:
            self._remove(process.name, why)
            self.scaling.forget(process)
            return
        self.members.end(process)
        if process.node in self.scaling.drained_nodes:
            self._remove(process.name, f"{why}; its node left the cluster")
            self._notice(
                "started again",
                f"{process.name} {why}, with its node; it is started again where there is room",
            )
            self.members.plan([process.name])
            return
        if process.name == LEARNER and not process.has_started:
            self.scaling.make_room()  # a rank may have found none
        pause_s = self.restarts.pause_s(process.name)
        self._remove(process.name, why)
        if pause_s is None:
            limit = self.config.supervision.max_restarts
            raise ComponentFailed(
                f"{process.name} {why}, more than {limit} times{self._log(process.name)}. "
                "Nothing that was committed is lost; the same command goes on"
            )
        self._notice("started again", f"{process.name} {why}; it is started again in {pause_s:g} s")
        self.members.plan([process.name], after_s=pause_s)

    # starting

    def _start(self, name: str) -> ManagedProcess:
        return processes.start(
            name,
            run_id=self.run_id,
            config=self.config,
            model_path=self.model_path,
            coordinator=self.coordinator.handle,
        )

    def _n_starting(self) -> int:
        started = sum(process.has_started for process in self.members.processes.values())
        return len(self.members.due) + len(self.members.processes) - started

    def _starting(self) -> str:
        """Return a line on the processes that are still starting, and what each waits for."""
        known = list(self.members.processes.values())  # another thread than this one starts them
        names = [process.name for process in known if not process.has_started]
        names += list(self.members.due)
        named = []
        for name in names[:MAX_NAMED]:
            component = self.components.get(name)
            waiting_on = component.waiting_on if component is not None else None
            named.append(f"{name} ({waiting_on or 'loading libraries'})")
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return f"starting {', '.join(named) or 'the coordinator'}{more}"

    def _look_for_place(self, process: ManagedProcess) -> None:
        """Report a process that Ray cannot place. While the run starts, end it at the deadline."""
        waited_s = time.monotonic() - process.asked_at_s
        if waited_s < UNPLACED_S:
            return
        process.is_placed = processes.has_process(process)
        if process.is_placed:
            return
        if process.name == LEARNER and self.is_up:
            self.scaling.make_room()
        elif self.is_up and len(self.members.placed_workers()) >= least_workers(self.config.actors):
            return  # the cluster has no more now
        reason = processes.why_unplaced(process.name, self.config)
        why = f"{process.name} has had no place for {waited_s:.0f} s: {reason}"
        if not self.is_up and waited_s > PLACES_TIMEOUT_S:
            raise ComponentFailed(why)
        if not process.is_named_unplaced:
            process.is_named_unplaced = True
            self._notice("no place", why)

    def _follow_cluster(self) -> None:
        """Have workers join and leave with the nodes of a cluster, and as `gigpo workers` asks."""
        self.scaling.end_late_closings()
        self.scaling.leave_draining_nodes()
        if self.is_up and not self._plays_nothing():
            self.scaling.follow_wanted_workers()

    def _tell_workers(self) -> None:
        """Record who began and who ended, when the workers that play change."""
        if not self.is_up:
            return
        before, now = self._playing, self.scaling.playing()
        if now != before:
            self._playing = now
            why_ended = {name: self._why_gone.pop(name, "") for name in before - now}
            for process in self.members.workers():
                if process.name in why_ended and process.leaving_why:
                    why_ended[process.name] = process.leaving_why
            wanted = self.scaling.wanted_line()
            detail = workers_line(before, now, why_ended=why_ended, wanted=wanted)
            self.coordinator.answer(self.coordinator.calls.record("workers", detail))

    def _plays_nothing(self) -> bool:
        return self.learns and is_offline(self.config)

    # stopping

    def _stop(self, error: BaseException | None) -> None:
        """Stop all processes in order, the coordinator last, and kill what is left.

        Raises Stopped, which says how the run ended, if `error` is a Ctrl-C or one comes now.
        """
        interrupted = isinstance(error, KeyboardInterrupt)
        self.say_stopping(f"stopping {self.config.run_dir}")
        if isinstance(error, ComponentFailed) and not self.coordinator.is_lost:
            self.say(f"stopping the others, as {error}")
        how = AT_ONCE
        try:
            # Where the run ends by itself, a first Ctrl-C asks for what happens anyway.
            with nullcontext() if interrupted else hold_interrupts():
                how = self._stop_in_order()
        except ComponentFailed as failure:  # the coordinator: nothing can be committed
            how = f"not stopped in order, as the {failure}"
        except KeyboardInterrupt:
            interrupted = True
        for process in self.members.processes.values():
            processes.kill(process)
        self.coordinator.kill()
        if interrupted:
            raise Stopped(f"{self.config.run_dir}: {how}") from None
        if error is not None and not self.coordinator.is_lost:
            self.say(f"{self.config.run_dir}: {how}")

    def _stop_in_order(self) -> str:
        """Stop and close all processes. Return how the run ended."""
        if self.coordinator.is_lost:
            return "not stopped in order: no coordinator; nothing that was committed is lost"

        def say(text: str) -> None:
            self.say(text)
            self.say_stopping(text)

        unstopped = stop_in_order(
            list(self.members.processes.values()), status=self.status, config=self.config, say=say
        )
        learner_step = self.status().learner_step
        checkpoints = self.coordinator.answer(self.coordinator.calls.checkpoints())
        newest = checkpoints[0].learner_step if checkpoints else None
        with said_while(lambda: "closing the coordinator", say):
            self.coordinator.close()
        return outcome(unstopped, learner_step=learner_step, checkpoint=newest)

    # telling

    def _remove(self, name: str, why: str) -> None:
        if name in self._playing:
            self._why_gone[name] = why
        self.coordinator.answer(self.coordinator.calls.remove(name, why))

    def _notice(self, what: str, detail: str) -> None:
        if self.is_up:
            self.coordinator.answer(self.coordinator.calls.notice(what, detail))
        else:  # progress is not shown yet, and a notice would be shown a second time then
            self.warn(f"{what}: {detail}")
            self.coordinator.answer(self.coordinator.calls.record(what, detail))

    def _log(self, name: str) -> str:
        return log_hint(self.logs / f"{name}.log")
