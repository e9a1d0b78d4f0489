"""The orderly end of a run: everybody finishes what it is at, the learner with a checkpoint, and
what came of it is said.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError

from configs import Config
from coordinator import Status
from driver.errors import describe_cause
from driver.health import Watch
from driver.processes import LEARNER, ManagedProcess
from driver.progress import said_while

POLL_S = 0.5
STOP_TIMEOUT_S = 60.0  # for a worker to commit what is finished, and for anybody to close
SAY_EVERY_S = 5.0

AT_ONCE = (
    "ended at once, not in order: learner steps since the newest checkpoint are trained again, "
    "episodes that were not "
    "committed are played again; nothing that was committed is lost"
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` and Slurm signal a process and then its group, which is one wish to stop, not two
REPEAT_S = 1.0

Say = Callable[[str], None]


class Interrupt:
    """Makes a KeyboardInterrupt of SIGINT and of SIGTERM. A signal within REPEAT_S of another is
    the same one.
    """

    def __init__(self) -> None:
        self._heard_at_s = float("-inf")

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._heard)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_repeat, self._heard_at_s = now_s - self._heard_at_s < REPEAT_S, now_s
        if not is_repeat:
            raise KeyboardInterrupt


@contextmanager
def stop_held_back() -> Iterator[None]:
    """For what is not to be left half done: a SIGINT or SIGTERM that comes meanwhile is heard at
    its end. One more, REPEAT_S or longer after it, is heard at once."""
    heard_at_s: list[float] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        if heard_at_s and time.monotonic() - heard_at_s[-1] >= REPEAT_S:
            raise KeyboardInterrupt
        heard_at_s.append(time.monotonic())

    before = {number: signal.signal(number, hold) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard_at_s:
        raise KeyboardInterrupt


def stop_in_order(
    parts: Collection[ManagedProcess], *, status: Callable[[], Status], config: Config, say: Say
) -> dict[str, str]:
    """Asks all to stop and waits: a learner that trains may take `learner.step_timeout_s`, others
    STOP_TIMEOUT_S.

    Then closes those that stopped. Why each of the others did not, by name; they are left to be
    killed. Raises what `status` raises: without a coordinator there is nobody to stop for.
    """
    running = {part.call: part for part in parts if part.call is not None and _is_made(part)}
    for part in running.values():
        part.handle.stop.remote()
    unstopped = _wait(running, status=status, config=config, say=say)
    for call, part in running.items():
        if part.name not in unstopped and part.started:
            try:
                ray.get(call)
            except RayError as error:
                unstopped[part.name] = describe_cause(error)
    idle = [part for part in parts if part.call is None and part.started]
    closing = [
        part.handle.close.remote()
        for part in [*running.values(), *idle]
        if part.name not in unstopped
    ]
    if closing:
        with said_while(lambda: f"closing {', '.join(part.name for part in parts)}", say):
            ray.wait(closing, num_returns=len(closing), timeout=STOP_TIMEOUT_S)
    return unstopped


def outcome(unstopped: Mapping[str, str], *, learner_step: int, checkpoint: int | None) -> str:
    """What came of a stop, in a line. `checkpoint`: learner step of the newest one, None if there
    is none.
    """
    others = [f"{name} did not stop in order ({why})" for name, why in sorted(unstopped.items())]
    how = "; ".join(others) if others else "stopped in order"
    if checkpoint is None and learner_step == 0:
        kept = "before the first learner step"
    elif checkpoint == learner_step:
        kept = f"with a checkpoint at learner step {learner_step}"
    else:
        since = (
            f"after {checkpoint}, the newest checkpoint,"
            if checkpoint is not None
            else "(there is no checkpoint)"
        )
        kept = f"learner steps {since} up to {learner_step} are trained again"
    return f"{how}, {kept}; nothing that was committed is lost"


def _is_made(part: ManagedProcess) -> bool:
    """Whether its process answers; without that there is nothing in it to stop."""
    done, _ = ray.wait([part.where], timeout=0.0)
    return bool(done)


def _wait(
    running: Mapping[Any, ManagedProcess], *, status: Callable[[], Status], config: Config, say: Say
) -> dict[str, str]:
    """Until all have ended, are silent, or have had their time; those that have not ended, and
    why.
    """
    begun_s, said_s = time.monotonic(), float("-inf")
    watch = Watch(config.supervision)
    waiting, unstopped = dict(running), {}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_S)
        for call in done:
            del waiting[call]
        components = status().components
        silent = watch.silent(components)
        for call, part in list(waiting.items()):
            patience_s = (
                config.learner.step_timeout_s
                if part.name == LEARNER and part.started
                else STOP_TIMEOUT_S
            )
            late = (
                f"it took longer than {patience_s:g} s"
                if time.monotonic() - begun_s > patience_s
                else None
            )
            why = silent.get(part.name, late)
            if why is not None:
                unstopped[part.name] = why
                del waiting[call]
        if waiting and time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            at = []
            for part in waiting.values():
                component = components.get(part.name)
                doing = (
                    f" ({component.waiting_on}, {component.waits_s:.0f} s)"
                    if component and component.waiting_on
                    else ""
                )
                at.append(part.name + doing)
            say(
                f"stopping for {said_s - begun_s:.0f} s: waiting for {', '.join(at)}; Ctrl-C once "
                "more ends it at once"
            )
    return unstopped
