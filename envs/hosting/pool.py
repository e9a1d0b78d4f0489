"""Keep environments in child processes, awaited from an event loop.

    pool = EnvironmentPool("textworld", options, processes=1, answer_timeout_s=60.0)
    async with pool.environment() as environment:  # one that is idle, or a new one
        observation = await environment.reset(task)
        transition = await environment.step(action)
    pool.close()

Text engines hold Python's lock, so they do not share a process with the event loop that feeds the
model. One process holds many environment objects. Objects are reused by `reset(task)`, because some
engines leak memory with each new one.

Answers of deterministic environments are remembered (`transition_cache.py`), and kept in files if
they have a folder for them (`kept_answers.py`): an episode then asks an object only for what is
new.

An environment that raises or returns nonsense is closed, which fails its own episode. A process
that hangs is killed, which fails all episodes in it. The task that did it is then played apart from
the others (`suspect_tasks.py`). An environment whose `reset` and `step` are coroutines waits for
somebody else, such as a server: it lives on the event loop itself, unless the pool is isolated.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Protocol, cast

from envs.base import Observation, Task, Transition
from envs.error_texts import describe_error, full_traceback, where_raised
from envs.errors import EnvironmentDied, EnvironmentFailed
from envs.hosting.answers import (
    Answer,
    StepFrom,
    answer_of,
    is_deterministic,
    prepared,
    task_of,
)
from envs.hosting.child_process import end_fork_of
from envs.hosting.environment_process import EnvironmentProcess, close_safely, has_coroutines
from envs.hosting.kept_answers import AnswerKeeper
from envs.hosting.pending import PendingOperations, request_name, request_of_task
from envs.hosting.suspect_tasks import SuspectTasks
from envs.hosting.transition_cache import (
    MAX_BYTES,
    RESET,
    CachedEpisode,
    EnvironmentObject,
    TransitionCache,
)
from envs.logs import log_hint, write_log
from envs.options import Options
from envs.registry import environment_class, is_program, is_users_class

STUCK_AFTER_S = 10.0  # for a cancelled coroutine to end


class _Host(Protocol):
    """A place where environment objects live, each with an id."""

    async def call(self, environment_id: int, method: str, argument: object) -> Answer:
        """Return `method(argument)` of an environment. Raises EnvironmentDied."""
        ...

    def stuck(self) -> str | None:
        """Return a call that goes on STUCK_AFTER_S after it was cancelled; None if none does."""
        ...

    def close(self) -> None: ...


class PooledEnvironment:
    """An environment lent by a pool, for episodes one after the other."""

    def __init__(self, cache: TransitionCache, objects: _Objects) -> None:
        self._cache = cache
        self._objects = objects
        self._episode: CachedEpisode | None = None

    async def reset(self, task: Task) -> Observation:
        self.close()
        self._episode = self._cache.episode(task, self._objects)
        return cast(Observation, await self._episode.answer(RESET))

    async def step(self, action: str) -> Transition:
        assert self._episode is not None, "reset comes first"
        return cast(Transition, await self._episode.answer(action))

    def close(self) -> None:
        """Leave the environment object to other episodes."""
        if self._episode is not None:
            self._episode.close()


class EnvironmentPool:
    """Lend environments. `answer_timeout_s` limits each `reset` and `step`.

    Processes start when they are first needed, one after the other. The output of environments, and
    the traceback of every error, goes to `log`, or to this process's output.

    `isolated`: no method of a user's environment is called in this process, also none that is a
    coroutine. A driver must not be ended by one, nor led to another working directory.
    """

    def __init__(
        self,
        env_name: str,
        options: Mapping[str, object],
        *,
        processes: int,
        answer_timeout_s: float,
        log: Path | None = None,
        isolated: bool = False,
    ) -> None:
        self._hosts: list[_Host]
        self._suspects: SuspectTasks[_Objects] | None = None
        self._pending = PendingOperations()
        shared: dict[str, Any] = {"answer_timeout_s": answer_timeout_s, "log": log}
        shared["pending"] = self._pending
        make = environment_class(env_name)
        if has_coroutines(make) and not isolated:
            self._hosts = [_EventLoopHost(env_name, options, **shared)]
            self._objects = _Objects(self._hosts)
        else:
            shared["starting"] = asyncio.Lock()
            self._hosts = [
                EnvironmentProcess(env_name, options, **shared) for _ in range(processes + 1)
            ]
            self._objects = _Objects(self._hosts[:-1])
            # Its process is started only if a task ends one of the others.
            self._suspects = SuspectTasks(_Objects(self._hosts[-1:]))
        deterministic = is_deterministic(make)
        keeper = None
        # The keeper calls the class in this process. Our own classes do no harm in it.
        if deterministic and (not isolated or not is_users_class(env_name)):
            keeper = AnswerKeeper(env_name, options, pending=self._pending, log=log)
        self._cache = TransitionCache(
            env_name, deterministic=deterministic, max_bytes=MAX_BYTES, keeper=keeper
        )

    @asynccontextmanager
    async def environment(self, task: Task | None = None) -> AsyncIterator[PooledEnvironment]:
        """Lend an environment for one episode, which begins with `reset`.

        Its calls raise EnvironmentDied. Its object can be lent again however the episode ends, also
        when a call is cancelled: a host closes a failed object, and answers calls in order. If
        `task` ended a process before, it waits until it can be played apart from other tasks.
        """
        async with AsyncExitStack() as stack:
            objects = self._objects
            if task is not None and self._suspects is not None:
                apart = self._suspects.environments_for(task, objects)
                objects = await stack.enter_async_context(apart)
            environment = PooledEnvironment(self._cache, objects)
            objects.n_episodes += 1
            try:
                yield environment
            finally:
                objects.n_episodes -= 1
                environment.close()

    def oldest(self) -> tuple[str, float] | None:
        """Return the oldest unanswered call and for how many seconds it is pending; None if none.

        The call of a cancelled episode counts too: its process is still working on it.
        """
        return self._pending.oldest()

    def stuck(self) -> str | None:
        """Return a call of a coroutine that goes on though it was cancelled; None if none does.

        Only the end of this process ends it, and its episode.
        """
        return next(filter(None, (host.stuck() for host in self._hosts)), None)

    def answers(self) -> tuple[int, int]:
        """Return the number of resets and steps so far, and how many of them were remembered."""
        return self._cache.n_answers, self._cache.n_remembered

    @property
    def n_held_bytes(self) -> int:
        """Return how many bytes of answers are remembered, or kept by running episodes."""
        return self._cache.n_held_bytes

    def close(self) -> None:
        self._cache.close()
        for host in self._hosts:
            host.close()


class _Objects:
    """The environment objects of a pool that no episode holds."""

    def __init__(self, hosts: Sequence[_Host]) -> None:
        self.n_episodes = 0  # that are being played; there are at most as many objects
        self._hosts = hosts
        self._idle: list[EnvironmentObject] = []  # longest idle first
        self._n_objects = 0

    def take(self, task: Task, node: object) -> EnvironmentObject:
        """Return an object: at best one that stands at the node, then one that played the task.

        It may have the task's engine in memory. A new object disturbs no other task's.
        """
        chosen: EnvironmentObject | None = None
        for each in self._idle:
            if each.task == task and (chosen is None or each.stands_at(node)):
                chosen = each
        if chosen is None and self._n_objects < self.n_episodes:
            number, self._n_objects = self._n_objects, self._n_objects + 1
            host = self._hosts[number % len(self._hosts)]
            return EnvironmentObject(partial(host.call, number), task)
        if chosen is None:
            chosen = self._idle[0]
        self._idle.remove(chosen)
        chosen.task = task
        return chosen

    def give_back(self, returned: EnvironmentObject) -> None:
        self._idle.append(returned)


def try_environment(
    name: str,
    options: Mapping[str, object],
    task: Task,
    *,
    answer_timeout_s: float,
    log: Path | None = None,
) -> Observation | None:
    """Start the environment, reset it to `task`, and return its first observation.

    Returns None for an agent program, which needs a model to run. Raises EnvironmentFailed.
    """

    async def reset_once() -> Observation:
        pool = EnvironmentPool(
            name,
            options,
            processes=1,
            answer_timeout_s=answer_timeout_s,
            log=log,
            isolated=True,
        )
        try:
            async with pool.environment() as environment:
                return await environment.reset(task)
        finally:
            pool.close()

    try:
        return None if is_program(name) else asyncio.run(reset_once())
    except Exception as error:  # the border to a user's own code
        reason = describe_error(error, called=None)
        text = f"env.name={name} does not start with task {task.split}/{task.id}: {reason}"
        raise EnvironmentFailed(" ".join(text.split())) from error


class _EventLoopHost:
    """Hold asynchronous environments in this process, on the event loop of the caller."""

    def __init__(
        self,
        env_name: str,
        options: Mapping[str, object],
        *,
        answer_timeout_s: float,
        pending: PendingOperations,
        log: Path | None,
    ) -> None:
        self._env_name = env_name
        self._options = options
        self._answer_timeout_s = answer_timeout_s
        self._pid = os.getpid()
        self._environments: dict[int, Any] = {}
        self._tasks: dict[int, Task] = {}  # task of each environment's newest reset
        self._ends_by: dict[int, tuple[float, str]] = {}  # time.monotonic() and name of a call
        self._pending, self._log = pending, log

    async def call(self, environment_id: int, method: str, argument: object) -> Answer:
        self._pending.begin(environment_id, request_name(method, argument))
        if (task := task_of(argument)) is not None:
            self._tasks[environment_id] = task
        latest = time.monotonic() + self._answer_timeout_s + STUCK_AFTER_S
        request = request_of_task(method, argument, self._tasks[environment_id])
        self._ends_by[environment_id] = (latest, request)
        deadline, episode = asyncio.timeout(self._answer_timeout_s), asyncio.current_task()
        called: Callable[..., Any] | None = None
        try:
            make = environment_class(self._env_name)
            called = make.__init__
            if environment_id not in self._environments:
                self._environments[environment_id] = make(Options(self._options))
            environment = self._environments[environment_id]
            called = getattr(environment, method)
            async with deadline:
                result = await called(prepared(environment, _copied(argument)))
            return _with_own_images(answer_of(environment, method, result))
        except BaseException as error:  # the border to a user's own code
            self._drop(environment_id)  # it was interrupted, so its state is unknown
            if _comes_from_outside(error, episode):
                raise
            write_log(self._log, full_traceback(error))
            is_late = deadline.expired()
            raise self._death(error, request=request, called=called, is_late=is_late) from error
        finally:
            end_fork_of(self._pid)
            self._pending.end(environment_id)
            del self._ends_by[environment_id]

    def _death(
        self,
        error: BaseException,
        *,
        request: str,
        called: Callable[..., Any] | None,
        is_late: bool,
    ) -> EnvironmentDied:
        """Return the episode's failure for an error of its environment."""
        # A TimeoutError may also be the environment's own.
        if is_late and issubclass(type(error), TimeoutError):
            # The cancelled call's stack ends where it waited.
            cause = error.__cause__
            place = where_raised(error if cause is None else cause, called=called)
            fault = f"did not answer {request} within {self._answer_timeout_s:g} s"
            fault += f", at {place}" if place else ""
        else:
            fault = f"failed in {request}: {describe_error(error, called=called)}"
        # A server may say that it is not at fault.
        told = error if type(error) is EnvironmentDied else None
        return EnvironmentDied(
            f"environment {self._env_name!r} {fault}{log_hint(self._log)}",
            at_fault=told is None or told.at_fault,
            ended_process=told is not None and told.ended_process,
        )

    def stuck(self) -> str | None:
        now_s = time.monotonic()
        return next((name for latest, name in self._ends_by.values() if latest < now_s), None)

    def close(self) -> None:
        for environment_id in list(self._environments):
            self._drop(environment_id)

    def _drop(self, environment_id: int) -> None:
        if environment_id in self._environments:
            close_safely(self._environments.pop(environment_id), log=self._log)


def _comes_from_outside(error: BaseException, episode: asyncio.Task[Any] | None) -> bool:
    """Return whether somebody ends the episode. An environment may raise the same by itself."""
    kind = type(error)  # a class may lie to `isinstance`
    if issubclass(kind, asyncio.CancelledError):
        return episode is None or episode.cancelling() > 0
    if issubclass(kind, GeneratorExit):  # a coroutine that nobody awaits any more is closed
        try:
            return asyncio.current_task() is not episode
        except RuntimeError:  # the event loop has ended
            return True
    # Ctrl-C is heard by the main thread only; a worker plays in another one.
    return issubclass(kind, KeyboardInterrupt) and current_thread() is main_thread()


def _copied(argument: object) -> object:
    """Return the argument with a task that an environment may change: its group shares one."""
    if isinstance(argument, Task):
        return replace(argument, data=dict(argument.data))
    if isinstance(argument, StepFrom):
        return replace(argument, task=replace(argument.task, data=dict(argument.task.data)))
    return argument


def _with_own_images(answer: Answer) -> Answer:
    """Copy the images: an environment may draw its next one into the same array."""
    result = answer.result
    if isinstance(result, Observation):
        return replace(answer, result=_with_copies(result))
    return replace(answer, result=replace(result, observation=_with_copies(result.observation)))


def _with_copies(seen: Observation) -> Observation:
    return replace(seen, images=tuple(image.copy() for image in seen.images))
