"""Hold environment objects in a child process: the parent's handle, and the child's loop.

The child answers requests in the order in which they arrive. It ends when its parent closes the
socket, and with its parent in any case (`child_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import pickle
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from envs.base import Environment, Task
from envs.error_texts import describe_error, describe_exit, full_traceback
from envs.errors import EnvironmentDied
from envs.hosting.answers import Answer, answer_of, prepared, task_of
from envs.hosting.child_process import (
    ChildProcess,
    end_fork_of,
    prepare_child,
    read_options,
)
from envs.hosting.pending import PendingOperations, request_name, request_of_task
from envs.logs import log_hint, write_log
from envs.options import Options
from envs.registry import environment_class

# for a process to import its environment and make the first object of it: some engines are slow
START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0  # a dying process closes its socket a moment before it has an exit code
# Requests in the socket at once. Hundreds would fill it, and the event loop would block on a hung
# process.
MAX_SENT = 32
CHUNK_BYTES = 1 << 20  # read at once
# A message begins with its length: SHORT, or -1 as SHORT and then LONG.
SHORT, LONG = struct.Struct("!i"), struct.Struct("!Q")
STARTED = -1  # stands for a request's number in the message of a process that is ready
# with `python -m` all classes would exist twice
CHILD_CODE = "from envs.hosting.environment_process import main; main()"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A request that is not answered yet."""

    number: int
    environment_id: int
    method: str
    argument: object
    description: str  # "step 'go' of task train/7"
    answer: asyncio.Future[Answer]


class EnvironmentProcess:
    """Send numbered requests to a process, and resolve one future for each answer.

    The process is started when it is needed. `starting` is held until it is ready: loading an
    engine keeps a core busy, so processes that share the lock start one after the other. The output
    of the process, and the traceback of every error, goes to `log`.
    """

    def __init__(
        self,
        env_name: str,
        options: Mapping[str, object],
        *,
        answer_timeout_s: float,
        starting: asyncio.Lock,
        pending: PendingOperations,
        log: Path | None,
    ) -> None:
        self._env_name = env_name
        self._options = options
        self._answer_timeout_s = answer_timeout_s
        self._starting = starting
        self._pending = pending
        self._log = log
        self._process: ChildProcess | None = None
        self._channel: socket.socket
        self._messages: MessageStream  # answers come through it
        self._connection: Connection[Any, Any]  # requests go through it
        self._numbers = itertools.count()
        # by number, oldest first: the process is working on the first
        self._unanswered: dict[int, _Request] = {}
        self._unsent: deque[_Request] = deque()  # the newest of the unanswered ones
        self._held_ids: set[int] = set()  # environments that exist in the current process
        self._tasks: dict[int, Task] = {}  # task of each environment's newest reset
        # What was said of a process that ended while it answered nobody: a thread did it. The first
        # episode that asks again is blamed, so that somebody is.
        self._unexplained_end = ""
        self._timer: asyncio.TimerHandle | None = None
        self._ready: asyncio.Future[None]

    async def call(self, environment_id: int, method: str, argument: object) -> Answer:
        if task_of(argument) is None and environment_id not in self._held_ids:
            raise self._end_meanwhile()
        if (task := task_of(argument)) is not None:
            self._tasks[environment_id] = task
        if self._process is None:
            async with self._starting:
                if self._process is None:
                    self._start()
                    await asyncio.shield(self._ready)
            if self._process is None:  # it has ended since, before this task went on
                raise self._end_meanwhile()
        return await self._request(environment_id, method, argument)

    def _end_meanwhile(self) -> EnvironmentDied:
        """Return the error of an episode whose process ended while it asked for nothing."""
        unexplained, self._unexplained_end = self._unexplained_end, ""
        gone = f"the process of {self._env_name!r} that held this environment is gone, through "
        gone += f"another episode's request{log_hint(self._log)}"
        return EnvironmentDied(unexplained or gone, at_fault=bool(unexplained), ended_process=True)

    def stuck(self) -> str | None:
        """Return None: a process that does not answer is killed."""
        return None

    def close(self) -> None:
        if self._process is not None:
            self._detach().end(patience_s=CLOSE_TIMEOUT_S)

    async def _request(self, environment_id: int, method: str, argument: object) -> Answer:
        self._held_ids.add(environment_id)
        request = _Request(
            number=next(self._numbers),
            environment_id=environment_id,
            method=method,
            argument=argument,
            description=request_of_task(method, argument, self._tasks[environment_id]),
            answer=asyncio.get_running_loop().create_future(),
        )
        self._unanswered[request.number] = request
        self._unsent.append(request)
        self._pending.begin(request.answer, request_name(method, argument))
        self._send()
        if len(self._unanswered) == 1:
            self._set_deadline()
        return await request.answer

    def _send(self) -> None:
        while self._unsent and len(self._unanswered) - len(self._unsent) < MAX_SENT:
            request = self._unsent.popleft()
            # pickled by itself: if the child cannot read the argument, only this request fails
            argument = pickle.dumps(request.argument)
            # `_read` gets an error too, and fails all requests
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._connection.send(
                    (request.number, request.environment_id, request.method, argument)
                )

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = ["-c", CHILD_CODE, str(theirs.fileno()), self._env_name]
            self._process = ChildProcess(
                arguments, options=self._options, channel=theirs, log=self._log
            )
        self._channel, self._messages = ours, MessageStream(ours)
        self._connection = Connection(os.dup(ours.fileno()), readable=False)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._read)
        # uvloop, on which Ray runs, makes the socket non-blocking: a long request would be cut off
        os.set_blocking(ours.fileno(), True)
        self._ready = loop.create_future()
        # marks the exception as seen, also if nobody waits for it any more
        self._ready.add_done_callback(lambda ready: ready.exception())
        self._pending.begin(self._ready, "its process to start")
        self._set_deadline()

    def _set_deadline(self) -> None:
        """Start the time limit of the request that the process works on now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self._ready.done():
            timeout_s = max(START_TIMEOUT_S, self._answer_timeout_s)
        elif self._unanswered:
            timeout_s = self._answer_timeout_s
        else:
            return
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end_late, timeout_s)

    def _end_late(self, timeout_s: float) -> None:
        assert self._process is not None
        if self._process.has_ended():  # a process that it started keeps the socket open
            self._fail_all()
        else:
            self._fail_all(f"did not answer within {timeout_s:g} s and was killed")

    def _read(self) -> None:
        try:
            for number, result, error in self._messages.received():
                if number == STARTED:
                    self._pending.end(self._ready)
                    self._ready.set_result(None)
                else:
                    request = self._unanswered.pop(number)
                    self._pending.end(request.answer)
                    self._send()
                    if not request.answer.done():  # a cancelled episode has no use for it
                        self._resolve(request, result, error)
                self._set_deadline()
        except EOFError:
            self._fail_all()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a process border: malformed
            reason = describe_error(error, called=None)
            self._fail_all(
                f"sent something else than an answer ({reason}) and was killed",
                details=full_traceback(error),
            )

    def _resolve(self, request: _Request, result: bytes, error: str | None) -> None:
        details = ""
        if error is None:
            try:
                request.answer.set_result(pickle.loads(result))
                return
            except (Exception, SystemExit) as unreadable:  # noqa: BLE001 - the author's classes
                details = full_traceback(unreadable)
                error = f"its answer cannot be read here: {describe_error(unreadable, called=None)}"
        message = f"environment {self._env_name!r} failed in {request.description}: {error}"
        request.answer.set_exception(EnvironmentDied(message + log_hint(self._log), at_fault=True))
        if details:  # the child has logged its own error
            write_log(self._log, details)

    def _fail_all(self, fault: str = "", *, details: str = "") -> None:
        """End the process and fail all requests. Only the first is at fault: it was being answered.

        `fault` says why the process is killed; "" if it has ended. `details` are for the log.
        """
        if self._ready.done():
            failing: list[asyncio.Future[Any]] = []
            doing = next((request.description for request in self._unanswered.values()), "")
        else:
            failing, doing = [self._ready], "its start"
        failing += [request.answer for request in self._unanswered.values()]
        self._unanswered = {}
        self._unsent.clear()
        process = self._detach()
        if fault:
            process.end_hung()
        else:
            fault = f"ended with {describe_exit(process.end(patience_s=EXIT_TIMEOUT_S))}"
        where = f"in {doing}" if doing else "while it answered nobody"
        message = f"environment process {process.pid} of {self._env_name!r} {fault}, {where}"
        message += process.crash_place()
        said = message + log_hint(self._log)
        if not failing:
            self._unexplained_end = said
        for index, future in enumerate(failing):  # before the log, whose disk may be slow
            self._pending.end(future)
            if not future.done():
                died = EnvironmentDied(said, at_fault=index == 0, ended_process=True)
                future.set_exception(died)
        write_log(self._log, "\n".join(filter(None, (message, details, process.dump()))))

    def _detach(self) -> ChildProcess:
        """Return the process, which is not used any more. The next request starts another."""
        assert self._process is not None
        process, self._process = self._process, None
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._channel)
        self._connection.close()
        self._channel.close()
        self._held_ids.clear()
        return process


class MessageStream:
    """Receive the messages of a `Connection` without waiting for the rest of one.

    `Connection.recv` waits for a whole message. The event loop would stand still for as long as the
    sender is stopped in the middle of one. The socket stays the caller's.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._buffer = channel, bytearray()

    def received(self) -> Iterator[Any]:
        """Yield the complete messages, whenever the socket can be read.

        Raises EOFError after them if the other end is closed.
        """
        is_open = self._fill_buffer()
        while (message := self._take_message()) is not None:
            yield pickle.loads(message)
        if not is_open:
            raise EOFError

    def _fill_buffer(self) -> bool:
        """Read all that has arrived. Return whether the other end is open."""
        try:
            while chunk := self._channel.recv(CHUNK_BYTES, socket.MSG_DONTWAIT):
                self._buffer += chunk
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        return False

    def _take_message(self) -> bytes | None:
        start = SHORT.size
        if len(self._buffer) < start:
            return None
        (length,) = SHORT.unpack_from(self._buffer)
        if length < 0:
            start += LONG.size
            if len(self._buffer) < start:
                return None
            (length,) = LONG.unpack_from(self._buffer, SHORT.size)
        if len(self._buffer) < start + length:
            return None
        message = bytes(self._buffer[start : start + length])
        del self._buffer[: start + length]
        return message


def close_safely(environment: Environment, *, log: Path | None) -> None:
    """Close an environment, and log its error if it raises one: it may be broken already.

    Any error is its own, also one that would end this process.
    """
    try:
        environment.close()
    except BaseException as error:  # noqa: BLE001 - the border to a user's own code
        write_log(log, full_traceback(error))


class _Caller:
    """Call the code of an environment: on an event loop of this process if it has coroutines."""

    def __init__(self, env_name: str) -> None:
        self._env_name = env_name
        self._runner = asyncio.Runner()  # makes a loop when it is first needed

    def call(self, work: Callable[[], T]) -> T:
        """Return `work()`, which may make an environment or close one."""
        if not self._has_coroutines:
            return work()

        async def on_loop() -> T:
            return work()

        return self._runner.run(on_loop())

    def answer(self, method: Callable[[object], Any], argument: object) -> object:
        """Return the answer of `reset` or `step`."""
        if not self._has_coroutines:
            return method(argument)

        async def on_loop() -> object:
            return await method(argument)

        return self._runner.run(on_loop())

    def close(self) -> None:
        self._runner.close()

    @cached_property
    def _has_coroutines(self) -> bool:
        return has_coroutines(environment_class(self._env_name))


def has_coroutines(make: type[Environment]) -> bool:
    """Return whether the methods of a class are awaited on an event loop."""
    return inspect.iscoroutinefunction(make.step)


def serve(connection: Connection[Any, Any], env_name: str, options: Mapping[str, object]) -> None:
    """Answer requests until the parent closes the connection: the child's loop."""
    pid = os.getpid()
    caller = _Caller(env_name)
    environments: dict[int, Environment] = {}
    unused: list[Environment] = []  # the first object, until a request needs it

    def make_environment() -> Environment:
        return environment_class(env_name)(Options(options))

    def close(environment: Environment) -> None:
        caller.call(lambda: close_safely(environment, log=None))

    # The first request makes an object too, and is told the error.
    with contextlib.suppress(Exception, SystemExit):
        unused.append(caller.call(make_environment))
    end_fork_of(pid)
    connection.send((STARTED, pickle.dumps(None), None))
    while True:
        try:
            number, environment_id, method, pickled_argument = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        answer: tuple[int, bytes | None, str | None]
        called: Callable[..., Any] | None = None
        try:
            if environment_id not in environments:
                if unused:
                    environments[environment_id] = unused.pop()
                else:
                    called = environment_class(env_name).__init__
                    environments[environment_id] = caller.call(make_environment)
            environment = environments[environment_id]
            called = getattr(environment, method)
            argument = prepared(environment, pickle.loads(pickled_argument))
            result = answer_of(environment, method, caller.answer(called, argument))
            # The result is pickled by itself: if the parent cannot read it, only this request
            # fails.
            answer = (number, pickle.dumps(result), None)
        except BaseException as error:  # noqa: BLE001 - a process border: the parent is told
            write_log(None, full_traceback(error))
            if environment_id in environments:
                close(environments.pop(environment_id))
            answer = (number, None, describe_error(error, called=called))
        end_fork_of(pid)
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            break
    for environment in (*environments.values(), *unused):
        close(environment)
    caller.close()


def main() -> None:
    """Run the child. Arguments: socket, environment, and descriptors of options and dump."""
    descriptor, env_name, options, dump = sys.argv[1:5]
    prepare_child(dump)
    serve(Connection(int(descriptor)), env_name, read_options(options))
