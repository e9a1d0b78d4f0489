"""Environments in processes of their own, awaited from an event loop.

    pool = EnvironmentPool("textworld", options, processes=1, answer_timeout_s=60.0)
    async with pool.environment() as environment:       # an idle one is used again, else a new one is made
        observation = await environment.reset(task)
        transition = await environment.step(action)
    pool.close()

Text engines hold the interpreter lock, so they do not share a process with the event loop that
feeds the model. A process holds many environment objects and answers requests in the order they
come; objects are kept and reused by `reset(task)`, because some engines leak with every new object,
so there are never more than there were episodes at once. One that raises or answers nonsense is
closed, which costs the episode that asked; a process that hangs is killed, and the next request
starts another. Environments whose `reset` and `step` are coroutines wait for somebody else (a
server, a browser): they live on the event loop itself.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from envs.base import Observation, Task, Transition
from envs.errors import full, keep, log_hint, one_line, where_raised
from envs.hosting.closing import close_safely
from envs.hosting.environment_process import EnvironmentDied, EnvironmentProcess, asked
from envs.hosting.pending import PendingOperations, request_name
from envs.options import Options
from envs.registry import environment_class, is_program
from envs.validation import EnvironmentFailed, checked_answer


class _Host(Protocol):
    """Where environment objects live: calls `method(argument)` of one of them. Raises
    EnvironmentDied.
    """

    async def call(self, environment_id: int, method: str, argument: object) -> object: ...

    def close(self) -> None: ...


class PooledEnvironment:
    """A place for one environment object, wherever it lives; `reset` makes the object if there is
    none.
    """

    def __init__(self, host: _Host, environment_id: int) -> None:
        self._host = host
        self._id = environment_id

    async def reset(self, task: Task) -> Observation:
        return cast(Observation, await self._host.call(self._id, "reset", task))

    async def step(self, action: str) -> Transition:
        return cast(Transition, await self._host.call(self._id, "step", action))


class EnvironmentPool:
    """Processes start when they are first needed, one after the other. `answer_timeout_s` bounds
    each `reset` and `step`.

    What environments print, and the traceback of every error, goes to `log`; without one, to where
    this process prints.
    """

    def __init__(
        self,
        env_name: str,
        options: Mapping[str, object],
        *,
        processes: int,
        answer_timeout_s: float,
        log: Path | None = None,
    ) -> None:
        self._hosts: list[_Host]
        self._waits = PendingOperations()
        if inspect.iscoroutinefunction(environment_class(env_name).step):
            here = _OnThisLoop(
                env_name, options, answer_timeout_s=answer_timeout_s, waits=self._waits, log=log
            )
            self._hosts = [here]
        else:
            starts = asyncio.Lock()
            self._hosts = [
                EnvironmentProcess(
                    *(env_name, options),
                    answer_timeout_s=answer_timeout_s,
                    starts=starts,
                    waits=self._waits,
                    log=log,
                )
                for _ in range(processes)
            ]
        self._idle: list[PooledEnvironment] = []
        self._ids = itertools.count()

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[PooledEnvironment]:
        """An environment for one episode, which has to begin with `reset`. Raises EnvironmentDied
        with the reason if it fails.

        However the episode ends, also when it is cancelled in the middle of a request, the next one
        can have it: a host closes what has failed, and answers in order, so a `reset` comes after
        whatever was asked before.
        """
        if self._idle:
            environment = self._idle.pop()
        else:
            number = next(self._ids)
            environment = PooledEnvironment(self._hosts[number % len(self._hosts)], number)
        try:
            yield environment
        finally:
            self._idle.append(environment)

    def oldest(self) -> tuple[str, float] | None:
        """The unanswered request that was made first ("reset of task ...", "step ..."), and how
        many seconds ago; or None.

        Also one whose episode was given up meanwhile: its process works on it all the same.
        """
        return self._waits.oldest()

    def close(self) -> None:
        for host in self._hosts:
            host.close()


def try_environment(
    name: str,
    options: Mapping[str, object],
    task: Task,
    *,
    answer_timeout_s: float,
    log: Path | None = None,
) -> Observation | None:
    """Start the environment once and reset it to `task`. Return its first observation, None for an
    agent program.

    Raises EnvironmentFailed with its error, or if it hangs.
    """

    async def once() -> Observation:
        pool = EnvironmentPool(
            name, options, processes=1, answer_timeout_s=answer_timeout_s, log=log
        )
        try:
            async with pool.environment() as environment:
                return await environment.reset(task)
        finally:
            pool.close()

    try:
        if is_program(name):
            return None  # to run it takes a model
        return asyncio.run(once())
    except Exception as error:  # the border to a user's own code
        why = (
            str(error) if isinstance(error, EnvironmentDied) else f"{type(error).__name__}: {error}"
        )
        raise EnvironmentFailed(
            f"env.name={name} does not start with task {task.split}/{task.id}: "
            f"{' '.join(why.split())}"
        ) from error


class _OnThisLoop:
    """Asynchronous environments, in the process and on the event loop of whoever awaits them."""

    def __init__(
        self,
        env_name: str,
        options: Mapping[str, object],
        *,
        answer_timeout_s: float,
        waits: PendingOperations,
        log: Path | None,
    ) -> None:
        self._env_name, self._options, self._answer_timeout_s = env_name, options, answer_timeout_s
        self._environments: dict[int, Any] = {}
        self._tasks: dict[int, Task] = {}  # of its newest reset
        self._waits, self._log = waits, log

    async def call(self, environment_id: int, method: str, argument: object) -> object:
        self._waits.begin(environment_id, request_name(method, argument))
        if isinstance(argument, Task):
            self._tasks[environment_id] = argument
        deadline = asyncio.timeout(self._answer_timeout_s)
        called: Callable[..., Any] | None = None
        try:
            make = environment_class(self._env_name)
            called = make.__init__
            if environment_id not in self._environments:
                self._environments[environment_id] = make(Options(self._options))
            called = getattr(self._environments[environment_id], method)
            async with deadline:
                answer = await called(argument)
            return checked_answer(method, answer)
        except asyncio.CancelledError:  # half done: nobody knows what it would do next
            self._drop(environment_id)
            raise
        except (Exception, SystemExit) as error:  # the border to a user's own code
            self._drop(environment_id)
            what = asked(method, argument, self._tasks[environment_id])
            # it may raise one of its own
            if isinstance(error, TimeoutError) and deadline.expired():
                stopped = error.__cause__ or error  # the cancelled call says where it waited
                place = where_raised(stopped, called=called)
                why = f"did not answer {what} within {self._answer_timeout_s:g} s" + (
                    f", at {place}" if place else ""
                )
            elif isinstance(error, EnvironmentDied):  # a server's, which has said where
                why = f"failed in {what}: {error}"
            else:
                why = f"failed in {what}: {one_line(error, called=called)}"
            keep(self._log, full(error))
            at_fault = getattr(error, "at_fault", True)  # a server may say that it is not
            message = f"environment {self._env_name!r} {why}{log_hint(self._log)}"
            raise EnvironmentDied(message, at_fault=at_fault) from error
        finally:
            self._waits.end(environment_id)

    def close(self) -> None:
        for environment_id in list(self._environments):
            self._drop(environment_id)

    def _drop(self, environment_id: int) -> None:
        if environment_id in self._environments:
            close_safely(self._environments.pop(environment_id))
