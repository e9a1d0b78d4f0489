"""Environments in processes of their own, awaited from an event loop.

    pool = EnvironmentPool("textworld", options, processes=1)
    async with pool.environment() as environment:       # an idle one is used again, else a new one is made
        observation = await environment.reset(task)
        transition = await environment.step(action)
    pool.close()

Text engines hold the interpreter lock, so they do not share a process with the event loop that feeds the model. A process
holds many environment objects and answers requests in the order they come; objects are kept and reused by `reset(task)`,
because some engines leak with every new object. A process ends by itself when its parent is gone: its socket closes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from envs.base import Environment, Observation, Task, Transition
from envs.registry import environment_class


class EnvironmentDied(RuntimeError):
    """An environment raised, or its process ended, in the middle of an episode."""


class PooledEnvironment:
    """One environment object in one of the pool's processes."""

    def __init__(self, process: _EnvironmentProcess, environment_id: int) -> None:
        self._process = process
        self._id = environment_id

    async def reset(self, task: Task) -> Observation:
        return cast(Observation, await self._process.call(self._id, "reset", task))

    async def step(self, action: str) -> Transition:
        return cast(Transition, await self._process.call(self._id, "step", action))


class EnvironmentPool:
    def __init__(self, env_name: str, options: Mapping[str, object], *, processes: int) -> None:
        self._processes = [_EnvironmentProcess(env_name, options) for _ in range(processes)]
        self._idle: list[PooledEnvironment] = []
        self._ids = itertools.count()

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[PooledEnvironment]:
        """An environment for one episode. Raises EnvironmentDied with the reason if it fails; it is then not reused."""
        if self._idle:
            environment = self._idle.pop()
        else:
            number = next(self._ids)
            environment = PooledEnvironment(self._processes[number % len(self._processes)], number)
        yield environment
        self._idle.append(environment)

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _EnvironmentProcess:
    """The parent's end of a process: sends numbered requests, resolves one future per answer."""

    def __init__(self, env_name: str, options: Mapping[str, object]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "envs.pool", str(theirs.fileno()), env_name, json.dumps(dict(options))]
        environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=root, env=environ, stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._requests = itertools.count()
        self._futures: dict[int, asyncio.Future[object]] = {}
        self._listening = False

    async def call(self, environment_id: int, method: str, argument: object) -> object:
        loop = asyncio.get_running_loop()
        if not self._listening:
            loop.add_reader(self._connection.fileno(), self._read)
            self._listening = True
        request = next(self._requests)
        self._futures[request] = loop.create_future()
        try:
            self._connection.send((request, environment_id, method, argument))
        except (BrokenPipeError, ConnectionResetError):
            del self._futures[request]
            raise EnvironmentDied(self._death()) from None
        return await self._futures[request]

    def _read(self) -> None:
        try:
            while self._connection.poll():
                request, result, error = self._connection.recv()
                future = self._futures.pop(request)
                if future.done():  # its episode was cancelled
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(EnvironmentDied(error))
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(EnvironmentDied(self._death()))
            self._futures.clear()

    def _death(self) -> str:
        return f"environment process {self._process.pid} ended with exit code {self._process.poll()}; see its output in the log"

    def close(self) -> None:
        if self._listening:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._listening = False
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(connection: Connection[Any, Any], env_name: str, options: Mapping[str, object]) -> None:
    """The child's loop: consumes requests, produces answers, ends when the parent closes or dies."""
    make = environment_class(env_name)
    environments: dict[int, Environment] = {}
    while True:
        try:
            request, environment_id, method, argument = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            if environment_id not in environments:
                environments[environment_id] = make(options)
            answer: tuple[int, object, str | None] = (
                request,
                getattr(environments[environment_id], method)(argument),
                None,
            )
        except Exception as error:  # noqa: BLE001 - a process border: the parent raises it with this text
            environments.pop(environment_id, None)
            detail = f"environment {env_name!r} failed in {method}({argument!r}): {type(error).__name__}: {error}"
            answer = (request, None, detail)
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            break
    for environment in environments.values():
        environment.close()


if __name__ == "__main__":
    descriptor, env_name, options = sys.argv[1:4]
    serve(Connection(int(descriptor)), env_name, json.loads(options))
