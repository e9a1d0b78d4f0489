"""Run agent programs: a user's own agents, which call a chat model themselves.

    pool = ProgramPool("my_agent:Agent", options, processes=4)
    outcome = await pool.run(task, client, deadline_s=600.0)
    pool.close()

`envs/base.py` has the class to write. A program may block, so each has a process to itself while it
runs. Process and object are used again for the next task. A process is killed, with all that it
started, when it is late, when its episode is cancelled, and when the worker dies.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from envs.base import ClientSettings, Outcome, Program, Task, task_to_json
from envs.error_texts import describe_error, describe_exit, full_traceback
from envs.errors import EnvironmentDied
from envs.hosting.child_process import (
    ChildProcess,
    end_fork_of,
    prepare_child,
    read_options,
)
from envs.hosting.pending import PendingOperations
from envs.logs import log_hint, write_log
from envs.options import Options
from envs.registry import program_class
from envs.validation import checked_outcome

# An idle program ends at once. A dying one closes its socket a moment before it has an exit code.
EXIT_TIMEOUT_S = 1.0
MAX_LINE_BYTES = 64 * 2**20  # of a task or an outcome
# with `python -m` all classes would exist twice
CHILD_CODE = "from envs.hosting.program_pool import main; main()"


class ProgramPool:
    """Run at most `processes` programs at once; further ones wait.

    A process starts when it is first needed. The output of programs, and the traceback of every
    error, goes to `log`.
    """

    def __init__(
        self, name: str, options: Mapping[str, object], *, processes: int, log: Path | None = None
    ) -> None:
        self.name = name
        self._options = options
        self.log = log
        self._free_processes = asyncio.Semaphore(processes)
        self._idle: list[_ProgramProcess] = []
        self._busy: set[_ProgramProcess] = set()
        self._pending = PendingOperations()

    async def run(self, task: Task, client: ClientSettings, *, deadline_s: float) -> Outcome:
        """Run the program on a task. The deadline begins when a process is free.

        Raises EnvironmentDied if the program raises, returns nonsense, dies or is late. If this
        call is cancelled, the program is killed.
        """
        running = f"program {self.name!r} on task {task.split}/{task.id}"
        request = {"task": task_to_json(task), "client": asdict(client)}
        async with self._free_processes:
            with self._process(running) as process:
                try:
                    async with asyncio.timeout(deadline_s):
                        answer = await process.ask(request)
                except TimeoutError:
                    place = process.end_hung()
                    raise self._died(
                        f"{running} had not ended after {deadline_s:g} s and was killed{place}",
                        process,
                    ) from None
                except (EOFError, ValueError) as error:
                    raise self._died(f"{running}: its process {error}", process) from None
        if "error" in answer:
            raise EnvironmentDied(
                f"{running} failed: {answer['error']}{log_hint(self.log)}", at_fault=True
            )
        try:  # again: the program may have written to the same socket
            return checked_outcome(Outcome(**answer["outcome"]))
        except (TypeError, ValueError, KeyError) as error:
            reason = describe_error(error, called=None)
            raise EnvironmentDied(f"{running} sent no outcome: {reason}", at_fault=True) from None

    def _died(self, reason: str, process: _ProgramProcess) -> EnvironmentDied:
        """Log the end of a process and return its error."""
        write_log(self.log, f"{reason}\n{process.child.dump()}")
        return EnvironmentDied(reason + log_hint(self.log), at_fault=True)

    def close(self) -> None:
        for process in self._busy:
            process.kill()
        for process in self._idle:  # all at once, so that they end side by side
            process.disconnect()
        for process in self._idle:
            process.child.end(patience_s=EXIT_TIMEOUT_S)

    def oldest(self) -> tuple[str, float] | None:
        """Return the program that has run longest and for how many seconds; None if none runs."""
        return self._pending.oldest()

    @contextmanager
    def _process(self, running: str) -> Iterator[_ProgramProcess]:
        """Lend an idle process or a new one. Kill it if the `with` block raises."""
        if self._idle:
            process = self._idle.pop()
        else:
            process = _ProgramProcess(self.name, self._options, log=self.log)
        self._busy.add(process)
        self._pending.begin(process, running)
        try:
            yield process
            self._idle.append(process)
        except BaseException:
            process.kill()
            raise
        finally:
            self._pending.end(process)
            self._busy.discard(process)


class _ProgramProcess:
    """Send a child one line of JSON with a task, and get one line with its outcome."""

    def __init__(self, name: str, options: Mapping[str, object], *, log: Path | None) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = ["-c", CHILD_CODE, str(theirs.fileno()), name]
            self.child = ChildProcess(arguments, options=options, channel=theirs, log=log)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._n_asked = 0

    async def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Send a task and return the answer.

        Raises EOFError with the exit code of a dead child, and ValueError for what is no answer to
        this task: what the program started has the socket too.
        """
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(
                sock=self._socket, limit=MAX_LINE_BYTES
            )
        reader, writer = self._streams
        self._n_asked += 1
        writer.write(json.dumps({**request, "number": self._n_asked}).encode() + b"\n")
        line = b""
        with suppress(ConnectionError):
            line = await reader.readline()
        if not line:
            code = self.child.end(patience_s=EXIT_TIMEOUT_S)
            raise EOFError(f"ended with {describe_exit(code)}{self.child.crash_place()}")
        try:
            answer = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            answer = {}
        if answer.get("number") != self._n_asked:
            raise ValueError("sent something else than an answer and was killed")
        return answer

    def disconnect(self) -> None:
        """Close the socket, at which an idle child ends."""
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    def kill(self) -> None:
        self.disconnect()
        self.child.end(patience_s=0.0)

    def end_hung(self) -> str:
        """Kill the child. Return ", at FILE:LINE in FUNCTION" of where it was, or ""."""
        self.child.end_hung()
        return self.child.crash_place()


def serve(stream: TextIO, name: str, options: Mapping[str, object]) -> None:
    """Run the program on each task, until the parent closes the stream: the child's loop."""
    program: Program | None = None
    pid = os.getpid()
    for line in stream:
        request = json.loads(line)
        task, client = Task(**request["task"]), ClientSettings(**request["client"])
        answer: dict[str, object]
        called: Callable[..., object] | None = None
        try:
            if program is None:
                make = program_class(name)
                called = make.__init__
                program = make(Options(options))
            called = program.run
            answer = {"outcome": asdict(_run(program, task, client))}
        except BaseException as error:  # noqa: BLE001 - a process border: the parent is told
            write_log(None, full_traceback(error))
            answer = {"error": describe_error(error, called=called)}
            program = None
        end_fork_of(pid)
        with suppress(BrokenPipeError):
            stream.write(json.dumps({**answer, "number": request["number"]}) + "\n")
            stream.flush()


def _run(program: Program, task: Task, client: ClientSettings) -> Outcome:
    os.environ.update(OPENAI_BASE_URL=client.base_url, OPENAI_API_KEY=client.api_key)
    outcome: Any = program.run(task, client)
    if inspect.iscoroutine(outcome):
        outcome = asyncio.run(outcome)
    return checked_outcome(outcome)


def main() -> None:
    """Run the child. Arguments: socket, program, and descriptors of options and dump."""
    descriptor, name, options, dump = sys.argv[1:5]
    prepare_child(dump)
    # The endpoint is on this machine. A proxy for other addresses does not reach it.
    for variable in ("NO_PROXY", "no_proxy"):
        os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), "127.0.0.1")))
    with suppress(ConnectionError):  # the parent may close the socket before it reads an answer
        serve(socket.socket(fileno=int(descriptor)).makefile("rw"), name, read_options(options))
