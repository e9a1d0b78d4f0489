"""Agent programs: somebody's own agent, which calls a chat model itself, instead of an environment
that is stepped.

    class Agent:
        def __init__(self, options): ...
        @classmethod
        def tasks(cls, split, options): ...                    # as environments have it
        def run(self, task, client):                           # plays one task from beginning to end
            model = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
            ...
            return Outcome(reward=1.0, won=True)

    pool = ProgramPool("my_agent:Agent", options, processes=4)
    outcome = await pool.run(task, client, deadline_s=600.0)
    pool.close()

A program may block, so each has a process to itself while it runs; the process and the object in it
are used again for the next task. It ends with all it started when it hangs, when its episode is
given up, and when the worker is gone, also by force.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from envs.base import Task
from envs.errors import exit_text, full, keep, log_hint, one_line
from envs.hosting.child_process import Child, begin, given_options
from envs.hosting.environment_process import EnvironmentDied
from envs.hosting.pending import PendingOperations
from envs.options import Options
from envs.registry import program_class

# an idle program ends at once; a dead one's socket closes a moment before it has an exit code
CLOSE_TIMEOUT_S = 1.0
MAX_LINE_BYTES = 64 * 2**20  # of a task or an outcome
CHILD = (
    "from envs.hosting.program_pool import main; main()"  # with -m all classes would exist twice
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSettings:
    """What a program gives to its client instead of OpenAI's own."""

    base_url: str  # e.g. http://127.0.0.1:40123/v1
    # tells the endpoint which episode a request belongs to; of no use once that has ended
    api_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an episode came to."""

    reward: float  # of the whole episode
    won: bool  # the task is solved
    task_score: float | None = None  # a graded score where the task has one


@runtime_checkable
class Program(Protocol):
    """Constructed as `ProgramClass(options)`, once per process; `options` is the config's
    `env.options` mapping.
    """

    def __init__(self, options: Mapping[str, object]) -> None: ...

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]: ...

    def run(self, task: Task, client: ClientSettings) -> Outcome:
        """Plays one task; may be a coroutine ("async def"). While it runs OPENAI_BASE_URL and
        OPENAI_API_KEY are set too.
        """
        ...


class ProgramPool:
    """At most `processes` programs at once; further ones wait for their turn. A process starts when
    it is first needed.

    What programs print, and the traceback of every error, goes to `log`.
    """

    def __init__(
        self, name: str, options: Mapping[str, object], *, processes: int, log: Path | None = None
    ) -> None:
        self.name, self._options, self.log = name, options, log
        self._turns = asyncio.Semaphore(processes)
        self._idle: list[_ProgramProcess] = []
        self._busy: set[_ProgramProcess] = set()
        self._waits = PendingOperations()

    async def run(self, task: Task, client: ClientSettings, *, deadline_s: float) -> Outcome:
        """Raises EnvironmentDied, which names program and task, if it raises, returns nonsense,
        dies or takes too long.

        The deadline begins when the program does. Cancelled, it kills the program.
        """
        what = f"program {self.name!r} on task {task.split}/{task.id}"
        async with self._turns:
            with self._process(what) as process:
                try:
                    async with asyncio.timeout(deadline_s):
                        answer = await process.ask({"task": asdict(task), "client": asdict(client)})
                except TimeoutError:
                    where = process.end_hung()
                    raise self._died(
                        f"{what} had not ended after {deadline_s:g} s and was killed{where}",
                        process,
                    ) from None
                except EOFError as error:
                    raise self._died(f"{what}: its process {error}", process) from None
        if "error" in answer:
            raise EnvironmentDied(
                f"{what} failed: {answer['error']}{log_hint(self.log)}", at_fault=True
            )
        return Outcome(**answer["outcome"])

    def _died(self, why: str, process: _ProgramProcess) -> EnvironmentDied:
        """Return the error of a process that has ended, and write it to the log."""
        keep(self.log, f"{why}\n{process.dump()}")
        return EnvironmentDied(why + log_hint(self.log), at_fault=True)

    def close(self) -> None:
        for process in self._busy:
            process.kill()
        for process in self._idle:
            process.disconnect()
        for process in self._idle:
            process.close()

    def oldest(self) -> tuple[str, float] | None:
        """The program that has run longest ("program ... on task ..."), and for how many seconds;
        or None.
        """
        return self._waits.oldest()

    @contextmanager
    def _process(self, what: str) -> Iterator[_ProgramProcess]:
        """An idle process or a new one; one that was left in the middle of a task is killed."""
        process = (
            self._idle.pop()
            if self._idle
            else _ProgramProcess(self.name, self._options, log=self.log)
        )
        self._busy.add(process)
        self._waits.begin(process, what)
        try:
            yield process
            self._idle.append(process)
        except BaseException:
            process.kill()
            raise
        finally:
            self._waits.end(process)
            self._busy.discard(process)


class _ProgramProcess:
    """The parent's end: one line of JSON with a task, one with its outcome."""

    def __init__(self, name: str, options: Mapping[str, object], *, log: Path | None) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = ["-c", CHILD, str(theirs.fileno()), name]
            self._process = Child(arguments, options=options, channel=theirs, log=log)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Send a task, return the answer. Raises EOFError, with the exit code, if the process has
        ended.
        """
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(
                sock=self._socket, limit=MAX_LINE_BYTES
            )
        reader, writer = self._streams
        writer.write(json.dumps(request).encode() + b"\n")
        line = b""
        with suppress(ConnectionError):
            line = await reader.readline()
        if not line:
            code = self._process.end(patience_s=CLOSE_TIMEOUT_S)
            raise EOFError(f"ended with {exit_text(code)}{self._process.place()}")
        return dict(json.loads(line))

    def disconnect(self) -> None:
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    def close(self) -> None:
        """Lets it end by itself, and kills it if it does not."""
        self.disconnect()
        self._process.end(patience_s=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        self.disconnect()
        self._process.end(patience_s=0.0)

    def end_hung(self) -> str:
        """Kill it, and return where it was: ", at FILE:LINE in FUNCTION", or ""."""
        self._process.end_hung()
        return self._process.place()

    def dump(self) -> str:
        """Return the stacks that it wrote when it crashed or was killed; "" if it wrote none."""
        return self._process.dump()


def serve(stream: TextIO, name: str, options: Mapping[str, object]) -> None:
    """The child's loop: consumes tasks, produces outcomes, ends when the parent closes its end."""
    program: Program | None = None
    for line in stream:
        request = json.loads(line)
        answer: dict[str, object]
        called: Callable[..., object] | None = None
        try:
            if program is None:
                make = program_class(name)
                called = make.__init__
                program = make(Options(options))
            called = program.run
            answer = {
                "outcome": asdict(
                    _run(program, Task(**request["task"]), ClientSettings(**request["client"]))
                )
            }
        except BaseException as error:  # noqa: BLE001 - a process border: the parent raises it in one line
            keep(None, full(error))
            answer = {"error": one_line(error, called=called)}
            program = None
        with suppress(BrokenPipeError):
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


def _run(program: Program, task: Task, client: ClientSettings) -> Outcome:
    os.environ.update(OPENAI_BASE_URL=client.base_url, OPENAI_API_KEY=client.api_key)
    outcome: Any = program.run(task, client)
    if inspect.iscoroutine(outcome):
        outcome = asyncio.run(outcome)
    if not isinstance(outcome, Outcome):
        raise TypeError(f"run returned {type(outcome).__name__}; it must return an envs.Outcome")
    for key in ("reward", "task_score"):
        number = getattr(outcome, key)
        if (number is not None or key == "reward") and not (
            isinstance(number, Real) and math.isfinite(number)
        ):
            raise ValueError(f"run returned {key}={number!r}; it must be a finite number")
    if outcome.won not in (True, False):
        raise TypeError(f"run returned won={outcome.won!r}; it must be True or False")
    score = outcome.task_score
    return Outcome(
        reward=float(outcome.reward),
        won=bool(outcome.won),
        task_score=None if score is None else float(score),
    )


def main() -> None:
    """The child: descriptor of its socket, program, descriptor of its options, descriptor for the
    dump of a crash.
    """
    descriptor, name, options, dump = sys.argv[1:5]
    begin(dump)
    # the endpoint is on this machine, whatever proxy leads to the others
    for variable in ("NO_PROXY", "no_proxy"):
        os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), "127.0.0.1")))
    with suppress(ConnectionError):  # it was closed before an answer was read
        serve(socket.socket(fileno=int(descriptor)).makefile("rw"), name, given_options(options))
