"""Stand in for the processes that a supervisor starts, and for the coordinator that it asks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

from coordinator import Component
from driver.errors import DIED, ComponentFailed
from driver.processes import ManagedProcess
from driver.supervisor import Supervisor


def as_ray_passes_it_on(error: BaseException) -> RayTaskError:
    """Return the error that `ray.get` raises for a call that raised `error`."""
    told = "".join(traceback.format_exception(error))
    return RayTaskError(
        "f", told, error, proctitle="ray::A", pid=1, ip="127.0.0.1"
    ).as_instanceof_cause()


def of_init(error: BaseException) -> ActorDiedError:
    """Return the error that `ray.get` raises for an actor whose `__init__` raised `error`."""
    told = "".join(traceback.format_exception(error))
    return ActorDiedError.from_task_error(
        RayTaskError("__init__", told, error, proctitle="ray::A", pid=1, ip="127.0.0.1")
    )


def raised_by(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is tested
        return error
    raise AssertionError("nothing was raised")


def process(name: str, **changes: Any) -> ManagedProcess:
    """A process that was asked for long ago."""
    given: dict[str, Any] = {"handle": None, "where": None, "call": None, "asked_at_s": -1e9}
    return ManagedProcess(name=name, **given | changes)


class Calls:
    """A coordinator's process that answers, or is dead."""

    def __init__(self, *, dead: bool = False) -> None:
        self.is_lost, self.dead, self.told, self.closed = False, dead, [], False
        self.recorded: list[tuple[str, str]] = []  # events that nobody is shown
        self.handle = self.calls = self
        self.components: dict[str, Component] = {}

    def answer(self, reply: Any) -> Any:
        return reply

    def wait_until_up(self) -> None: ...

    def driver_tick(self) -> Any:
        if self.dead:
            self.is_lost = True
            raise ComponentFailed(f"coordinator {DIED}")
        return SimpleNamespace(components=self.components, learner_step=7)

    def checkpoints(self) -> Any:
        return (SimpleNamespace(learner_step=7),)

    def remove(self, name: str, why: str) -> None:
        self.told.append(("gone", why))

    def notice(self, what: str, detail: str) -> None:
        self.told.append((what, detail))

    def record(self, what: str, detail: str) -> None:
        self.recorded.append((what, detail))

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        pass


class Actor:
    """A handle whose calls are references to nothing, remembered by name."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda **given: self.asked.append(name) or f"{name} of {id(self)}"
        )


def known(session: Supervisor, process: ManagedProcess) -> ManagedProcess:
    """Have a process that the supervisor did not start."""
    session.members._processes[process.name] = process
    return process


def place(session: Supervisor, name: str, *, node: str) -> ManagedProcess:
    handle = Actor()
    handle.node = node
    given = {"handle": handle, "node": node, "call": f"run {name}"}
    return known(session, process(name, has_started=True, is_placed=True, **given))
