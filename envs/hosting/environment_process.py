"""A process that holds environment objects, seen from its parent and from within.

It answers requests in the order they come and ends when its parent closes the socket; with its
parent in any case (`child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from envs.base import Environment, Task
from envs.errors import exit_text, full, keep, log_hint, one_line
from envs.hosting.child_process import Child, begin, given_options
from envs.hosting.closing import close_safely
from envs.hosting.message_stream import Answers
from envs.hosting.pending import PendingOperations, request_name
from envs.options import Options
from envs.registry import environment_class
from envs.validation import checked_answer

# for a process to import its world and make the first object of it: some engines are slow
START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0  # its socket closes a moment before it has an exit code
# requests in its socket; hundreds would fill it, and the event loop would stand still with a hung
# process
MAX_SENT = 32
IS_UP = -1  # number of no request: what a process sends when it has done that
# with -m all classes would exist twice
CHILD = "from envs.hosting.environment_process import main; main()"


class EnvironmentDied(RuntimeError):
    """An environment raised, answered nonsense, hung, or its process ended, in the middle of an
    episode.

    `at_fault`: it was this episode's own request; False for one that merely lived in the same
    process.
    """

    def __init__(self, message: str, *, at_fault: bool) -> None:
        super().__init__(message)
        self.at_fault = at_fault

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep `at_fault` in another process: an exception is pickled by its positional arguments
        alone.
        """
        return _died, (str(self), self.at_fault)


def _died(message: str, at_fault: bool) -> EnvironmentDied:
    return EnvironmentDied(message, at_fault=at_fault)


class EnvironmentProcess:
    """The parent's end: sends numbered requests, resolves one future per answer. Starts the process
    when it is needed.

    `starts` is held until a process is up, as loading an engine is work for a core; whoever shares
    it starts when the one before is done. What the process prints, and the traceback of every
    error, goes to `log`.
    """

    def __init__(
        self,
        env_name: str,
        options: Mapping[str, object],
        *,
        answer_timeout_s: float,
        starts: asyncio.Lock,
        waits: PendingOperations,
        log: Path | None,
    ) -> None:
        self._starts, self._waits, self._log = starts, waits, log
        self._env_name, self._options, self._answer_timeout_s = env_name, options, answer_timeout_s
        self._process: Child | None = None
        self._channel: socket.socket
        self._answers: Answers  # that come through it
        self._connection: Connection[Any, Any]  # through which requests go
        self._requests = itertools.count()
        # the first is the one it is working on
        self._futures: dict[int, asyncio.Future[object]] = {}
        self._unsent: deque[tuple[int, int, str, object]] = deque()  # the last of them
        self._here: set[int] = set()  # environments that were reset in the process of now
        self._asked: dict[int, str] = {}  # per unanswered request: "step 'go' of task train/7"
        self._tasks: dict[int, Task] = {}  # per environment, the task of its newest reset
        self._timer: asyncio.TimerHandle | None = None
        self._is_up: asyncio.Future[None]

    async def call(self, environment_id: int, method: str, argument: object) -> object:
        if method != "reset" and environment_id not in self._here:
            message = f"the process of {self._env_name!r} that held this environment is gone, through another episode's request"
            raise EnvironmentDied(message + log_hint(self._log), at_fault=False)
        if isinstance(argument, Task):
            self._tasks[environment_id] = argument
        if self._process is None:
            async with self._starts:
                if self._process is None:
                    self._start()
                    await asyncio.shield(self._is_up)
        return await self._ask(environment_id, method, argument)

    def close(self) -> None:
        if self._process is not None:
            self._forget().end(patience_s=CLOSE_TIMEOUT_S)

    async def _ask(self, environment_id: int, method: str, argument: object) -> object:
        self._here.add(environment_id)
        request = next(self._requests)
        future = self._futures[request] = asyncio.get_running_loop().create_future()
        self._waits.begin(future, request_name(method, argument))
        self._asked[request] = asked(method, argument, self._tasks[environment_id])
        self._unsent.append((request, environment_id, method, argument))
        self._send()
        if len(self._futures) == 1:
            self._watch()
        return await future

    def _send(self) -> None:
        while self._unsent and len(self._futures) - len(self._unsent) < MAX_SENT:
            # `_read` is told too, and fails all that wait
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                request, environment_id, method, argument = self._unsent.popleft()
                # Pickled apart: an argument that cannot be read there is an error of its own
                # request.
                self._connection.send((request, environment_id, method, pickle.dumps(argument)))

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = ["-c", CHILD, str(theirs.fileno()), self._env_name]
            self._process = Child(arguments, options=self._options, channel=theirs, log=self._log)
        self._channel, self._answers = ours, Answers(ours)
        self._connection = Connection(os.dup(ours.fileno()), readable=False)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._read)
        # Ray's event loop, uvloop, changes that: of a long request the rest would be lost
        os.set_blocking(ours.fileno(), True)
        self._is_up = loop.create_future()
        # also if nobody waits for it any more
        self._is_up.add_done_callback(lambda done: done.exception())
        self._waits.begin(self._is_up, "its process to start")
        self._watch()

    def _watch(self) -> None:
        """The deadline of the request it is working on now; those behind it have not begun to
        wait.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._futures or not self._is_up.done():
            patience_s = (
                self._answer_timeout_s
                if self._is_up.done()
                else max(START_TIMEOUT_S, self._answer_timeout_s)
            )
            self._timer = asyncio.get_running_loop().call_later(patience_s, self._hangs, patience_s)

    def _hangs(self, patience_s: float) -> None:
        assert self._process is not None
        has_ended = self._process.has_ended()  # and something it started keeps the socket open
        self._fail_all(
            "" if has_ended else f"did not answer within {patience_s:g} s and was killed"
        )

    def _read(self) -> None:
        try:
            for request, result, error in self._answers.arrived():
                future = self._is_up if request == IS_UP else self._futures.pop(request)
                what = self._asked.pop(request, "")
                self._waits.end(future)
                self._send()
                if not future.done():  # else its episode was cancelled
                    if error is None:
                        try:
                            future.set_result(pickle.loads(result))
                        except Exception as unread:  # noqa: BLE001 - it runs what the classes in the answer say
                            keep(self._log, full(unread))
                            error = (
                                f"its answer cannot be read here: {one_line(unread, called=None)}"
                            )
                    if error is not None:
                        message = f"environment {self._env_name!r} failed in {what}: {error}{log_hint(self._log)}"
                        future.set_exception(EnvironmentDied(message, at_fault=True))
                self._watch()
        except EOFError:
            self._fail_all("")
        except Exception as error:  # noqa: BLE001 - a process border: it sent what is no answer
            keep(self._log, full(error))
            why = one_line(error, called=None)
            self._fail_all(f"sent something else than an answer ({why}) and was killed")

    def _fail_all(self, hung: str) -> None:
        """Ends the process. The first request is to blame, as it was the one being answered."""
        futures: list[asyncio.Future[Any]] = [
            *([] if self._is_up.done() else [self._is_up]),
            *self._futures.values(),
        ]
        doing = next(iter(self._asked.values()), "") if self._is_up.done() else "its start"
        self._futures, self._asked = {}, {}
        self._unsent.clear()
        process = self._forget()
        if hung:
            process.end_hung()
            what = hung
        else:
            what = f"ended with {exit_text(process.end(patience_s=EXIT_TIMEOUT_S))}"
        message = f"environment process {process.pid} of {self._env_name!r} {what}, in {doing}{process.place()}"
        keep(self._log, f"{message}\n{process.dump()}")
        for place, future in enumerate(futures):
            self._waits.end(future)
            if not future.done():
                future.set_exception(
                    EnvironmentDied(message + log_hint(self._log), at_fault=place == 0)
                )

    def _forget(self) -> Child:
        """The next request starts another process."""
        assert self._process is not None
        process, self._process = self._process, None
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._channel)
        self._connection.close()
        self._channel.close()
        self._here.clear()
        return process


def asked(method: str, argument: object, task: Task) -> str:
    """Name a request with its task: "reset of task train/7", "step 'go' of task train/7"."""
    request = method if isinstance(argument, Task) else request_name(method, argument)
    return f"{request} of task {task.split}/{task.id}"


def serve(connection: Connection[Any, Any], env_name: str, options: Mapping[str, object]) -> None:
    """The child's loop: consumes requests, produces answers, ends when the parent closes or
    dies.
    """
    environments: dict[int, Environment] = {}
    spare: list[Environment] = []
    # the first request makes one too, and is told what is wrong
    with contextlib.suppress(Exception, SystemExit):
        spare.append(environment_class(env_name)(Options(options)))
    connection.send((IS_UP, pickle.dumps(None), None))
    while True:
        try:
            request, environment_id, method, argument = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        answer: tuple[int, bytes | None, str | None]
        called: Callable[..., object] | None = None
        try:
            if environment_id not in environments and spare:
                environments[environment_id] = spare.pop()
            elif environment_id not in environments:
                make = environment_class(env_name)
                called = make.__init__
                environments[environment_id] = make(Options(options))
            called = getattr(environments[environment_id], method)
            # Pickled apart: an answer that cannot be read by the parent is an error of its own
            # request.
            answer = (
                request,
                pickle.dumps(checked_answer(method, called(pickle.loads(argument)))),
                None,
            )
        except BaseException as error:  # noqa: BLE001 - a process border: the parent raises it with this text
            keep(None, full(error))
            if environment_id in environments:
                close_safely(environments.pop(environment_id))
            answer = (request, None, one_line(error, called=called))
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            break
    for environment in (*environments.values(), *spare):
        close_safely(environment)


def main() -> None:
    """The child: descriptor of its socket, environment, descriptor of its options, descriptor for
    the dump of a crash.
    """
    descriptor, env_name, options, dump = sys.argv[1:5]
    begin(dump)
    serve(Connection(int(descriptor)), env_name, given_options(options))
