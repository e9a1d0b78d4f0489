"""A process that holds environment objects, seen from its parent and from within.

It answers requests in the order they come and ends by itself when its parent is gone: its socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from envs.base import Environment
from envs.check import checked_answer
from envs.registry import environment_class

START_TIMEOUT_S = 300.0  # for the first answer of a process: some engines are slow to import
CLOSE_TIMEOUT_S = 5.0


class EnvironmentDied(RuntimeError):
    """An environment raised, answered nonsense, hung, or its process ended, in the middle of an episode.

    `at_fault`: it was this episode's own request; False for one that merely lived in the same process.
    """

    def __init__(self, message: str, *, at_fault: bool) -> None:
        super().__init__(message)
        self.at_fault = at_fault


class EnvironmentProcess:
    """The parent's end: sends numbered requests, resolves one future per answer. Starts the process when it is needed."""

    def __init__(self, env_name: str, options: Mapping[str, object], *, answer_timeout_s: float) -> None:
        self._env_name, self._options, self._answer_timeout_s = env_name, options, answer_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any]
        self._requests = itertools.count()
        self._futures: dict[int, asyncio.Future[object]] = {}  # the first is the one it is working on
        self._here: set[int] = set()  # environments that were reset in the process of now
        self._timer: asyncio.TimerHandle | None = None
        self._has_answered = False
        self._hung = ""

    async def call(self, environment_id: int, method: str, argument: object) -> object:
        if self._process is None:
            self._start()
        if method == "reset":
            self._here.add(environment_id)
        elif environment_id not in self._here:
            message = f"the process of {self._env_name!r} that held this environment is gone, through another episode's request"
            raise EnvironmentDied(message, at_fault=False)
        request = next(self._requests)
        future = self._futures[request] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_read` is told too, and fails all that wait
            self._connection.send((request, environment_id, method, argument))
        if len(self._futures) == 1:
            self._watch()
        return await future

    def close(self) -> None:
        if self._process is None:
            return
        process = self._forget()
        try:
            process.wait(timeout=CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [
            *[sys.executable, "-m", "envs.process", str(theirs.fileno()), self._env_name],
            json.dumps(dict(self._options)),
        ]
        environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=root, env=environ, stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection = Connection(ours.detach())
        self._has_answered, self._hung = False, ""
        self._here.clear()
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)

    def _watch(self) -> None:
        """The deadline of the request it is working on now; those behind it have not begun to wait."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._futures:
            patience_s = self._answer_timeout_s if self._has_answered else max(START_TIMEOUT_S, self._answer_timeout_s)
            self._timer = asyncio.get_running_loop().call_later(patience_s, self._kill, patience_s)

    def _kill(self, patience_s: float) -> None:
        assert self._process is not None
        self._hung = f"did not answer within {patience_s:g} s and was killed"
        self._process.kill()  # the end of its socket tells `_read`

    def _read(self) -> None:
        try:
            while self._connection.poll():
                request, result, error = self._connection.recv()
                future = self._futures.pop(request)
                self._has_answered = True
                self._watch()
                if future.done():  # its episode was cancelled
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(EnvironmentDied(error, at_fault=True))
        except (EOFError, ConnectionResetError):
            self._fail_all()

    def _fail_all(self) -> None:
        """The process is gone. The first request is to blame, as it was the one being answered."""
        futures, self._futures = list(self._futures.values()), {}
        hung = self._hung
        process = self._forget()
        process.wait()
        what = hung or f"ended with exit code {process.returncode}; the worker's log may say why"
        for place, future in enumerate(futures):
            if not future.done():
                message = f"environment process {process.pid} of {self._env_name!r} {what}"
                future.set_exception(EnvironmentDied(message, at_fault=place == 0))

    def _forget(self) -> subprocess.Popen[bytes]:
        """The next request starts another process."""
        assert self._process is not None
        process, self._process = self._process, None
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        return process


def serve(connection: Connection[Any, Any], env_name: str, options: Mapping[str, object]) -> None:
    """The child's loop: consumes requests, produces answers, ends when the parent closes or dies."""
    make = environment_class(env_name)
    environments: dict[int, Environment] = {}
    while True:
        try:
            request, environment_id, method, argument = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        answer: tuple[int, object, str | None]
        try:
            if environment_id not in environments:
                environments[environment_id] = make(options)
            answer = (request, checked_answer(method, getattr(environments[environment_id], method)(argument)), None)
        except Exception as error:  # noqa: BLE001 - a process border: the parent raises it with this text
            environments.pop(environment_id, None)
            given = repr(argument) if isinstance(argument, str) else ""
            answer = (request, None, f"environment {env_name!r} failed in {method}({given}): {type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            break
    for environment in environments.values():
        environment.close()


if __name__ == "__main__":
    descriptor, env_name, options = sys.argv[1:4]
    serve(Connection(int(descriptor)), env_name, json.loads(options))
