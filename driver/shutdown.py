"""End a run in order: every process finishes its work, the learner with a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from configs import Config
from coordinator import Component, Status
from driver.errors import describe_cause
from driver.health import HealthMonitor
from driver.processes import LEARNER, ManagedProcess
from driver.progress import said_while

POLL_S = 0.5  # between two looks at the processes that still close
STOP_TIMEOUT_S = 60.0  # for a worker to commit its finished episodes, and for closing
SAY_EVERY_S = 5.0  # between two lines that name them

AT_ONCE = (
    "ended at once, not in order: learner steps since the newest checkpoint are trained again, "
    "episodes that were not committed are played again; nothing that was committed is lost"
)

Say = Callable[[str], None]


def stop_in_order(
    processes: Collection[ManagedProcess],
    *,
    status: Callable[[], Status],
    config: Config,
    say: Say,
) -> dict[str, str]:
    """Tell all processes to stop, wait for them, and close those that stopped.

    A learner that trains may take `learner.step_timeout_s`, any other process STOP_TIMEOUT_S.
    Returns the reason for each process that did not stop; the caller kills it. Raises what `status`
    raises, because without a coordinator nothing can be committed.
    """
    running = {
        process.call: process
        for process in processes
        if process.call is not None and process.closes_by_s is None and _is_made(process)
    }
    for process in running.values():
        process.handle.stop.remote()
    unstopped = _wait(running, status=status, config=config, say=say)
    for call, process in running.items():
        if process.name not in unstopped and process.has_started:
            try:
                ray.get(call)
            except RayError as error:
                unstopped[process.name] = describe_cause(error)
    idle = [process for process in processes if process.call is None and process.has_started]
    closing = [
        process.handle.close.remote()
        for process in [*running.values(), *idle]
        if process.name not in unstopped
    ]
    if closing:
        names = ", ".join(process.name for process in processes)
        with said_while(lambda: f"closing {names}", say):
            ray.wait(closing, num_returns=len(closing), timeout=STOP_TIMEOUT_S)
    return unstopped


def outcome(unstopped: Mapping[str, str], *, learner_step: int, checkpoint: int | None) -> str:
    """Say in one line how a run ended; `checkpoint` is the newest one's learner step."""
    others = [f"{name} did not stop in order ({why})" for name, why in sorted(unstopped.items())]
    how = "; ".join(others) if others else "stopped in order"
    if checkpoint is None and learner_step == 0:
        kept = "before the first learner step"
    elif checkpoint == learner_step:
        kept = f"with a checkpoint at learner step {learner_step}"
    elif checkpoint is None:
        kept = f"learner steps (there is no checkpoint) up to {learner_step} are trained again"
    else:
        kept = (
            f"learner steps after {checkpoint}, the newest checkpoint, up to {learner_step} are "
            "trained again"
        )
    return f"{how}, {kept}; nothing that was committed is lost"


def _is_made(process: ManagedProcess) -> bool:
    """Return whether the process answers; an actor without a process cannot be told to stop."""
    done, _ = ray.wait([process.where], timeout=0.0)
    return bool(done)


def _wait(
    running: Mapping[Any, ManagedProcess], *, status: Callable[[], Status], config: Config, say: Say
) -> dict[str, str]:
    """Wait until each process has ended, is silent or is late. Return the reasons of the last."""
    begun_s, said_s = time.monotonic(), float("-inf")
    monitor = HealthMonitor(config.supervision)
    waiting, unstopped = dict(running), {}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_S)
        for call in done:
            del waiting[call]
        components = status().components
        silent = monitor.silent(components)
        for call, process in list(waiting.items()):
            trains = process.name == LEARNER and process.has_started
            patience_s = config.learner.step_timeout_s if trains else STOP_TIMEOUT_S
            if process.name in silent:
                unstopped[process.name] = silent[process.name]
                del waiting[call]
            elif time.monotonic() - begun_s > patience_s:
                unstopped[process.name] = f"it took longer than {patience_s:g} s"
                del waiting[call]
        if waiting and time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            names = [_doing(process.name, components) for process in waiting.values()]
            say(
                f"stopping for {said_s - begun_s:.0f} s: waiting for {', '.join(names)}; Ctrl-C "
                "once more ends it at once"
            )
    return unstopped


def _doing(name: str, components: Mapping[str, Component]) -> str:
    """Return a component's name, with its wait in brackets."""
    component = components.get(name)
    if component is None or not component.waiting_on:
        return name
    return f"{name} ({component.waiting_on}, {component.waits_s:.0f} s)"
