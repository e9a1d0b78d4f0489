"""Agent programs: somebody's own agent, which calls a chat model itself, instead of an environment that is stepped.

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

A program may block, so each has a process to itself while it runs; the process and the object in it are used again for the next
task. It ends with all it started when it hangs, when its episode is given up, and when the worker is gone, also by force.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Protocol, TextIO, runtime_checkable

from envs.base import Task
from envs.child import end_child, end_with_parent, start_child
from envs.process import EnvironmentDied
from envs.registry import program_class
from envs.waits import Waits

CLOSE_TIMEOUT_S = 1.0  # an idle program ends at once; a dead one's socket closes a moment before it has an exit code
MAX_LINE_BYTES = 64 * 2**20  # of a task or an outcome
MAX_ERROR_CHARACTERS = 500
CHILD = "from envs.programs import main; main()"  # with -m all classes would exist twice


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSettings:
    """What a program gives to its client instead of OpenAI's own."""

    base_url: str  # e.g. http://127.0.0.1:40123/v1
    api_key: str  # tells the endpoint which episode a request belongs to; of no use once that has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an episode came to."""

    reward: float  # of the whole episode
    won: bool  # the task is solved
    task_score: float | None = None  # a graded score where the task has one


@runtime_checkable
class Program(Protocol):
    """Constructed as `ProgramClass(options)`, once per process; `options` is the config's `env.options` mapping."""

    def __init__(self, options: Mapping[str, object]) -> None: ...

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]: ...

    def run(self, task: Task, client: ClientSettings) -> Outcome:
        """Plays one task; may be a coroutine ("async def"). While it runs OPENAI_BASE_URL and OPENAI_API_KEY are set too."""
        ...


class ProgramPool:
    """At most `processes` programs at once; further ones wait for their turn. A process starts when it is first needed."""

    def __init__(self, name: str, options: Mapping[str, object], *, processes: int) -> None:
        self.name, self._options = name, options
        self._turns = asyncio.Semaphore(processes)
        self._idle: list[_ProgramProcess] = []
        self._busy: set[_ProgramProcess] = set()
        self._waits = Waits()

    async def run(self, task: Task, client: ClientSettings, *, deadline_s: float) -> Outcome:
        """Raises EnvironmentDied, which names program and task, if it raises, returns nonsense, dies or takes too long.

        The deadline begins when the program does. Cancelled, it kills the program.
        """
        what = f"program {self.name!r} on task {task.id!r}"
        async with self._turns:
            with self._process(what) as process:
                try:
                    async with asyncio.timeout(deadline_s):
                        answer = await process.ask({"task": asdict(task), "client": asdict(client)})
                except TimeoutError:
                    raise EnvironmentDied(
                        f"{what} had not ended after {deadline_s:g} s and was killed", at_fault=True
                    ) from None
                except EOFError as error:
                    raise EnvironmentDied(f"{what}: its process {error}", at_fault=True) from None
        if "error" in answer:
            raise EnvironmentDied(f"{what} failed: {answer['error']}", at_fault=True)
        return Outcome(**answer["outcome"])

    def close(self) -> None:
        for process in self._busy:
            process.kill()
        for process in self._idle:
            process.disconnect()
        for process in self._idle:
            process.close()

    def slowest(self) -> tuple[str, float] | None:
        """The program that has run longest ("program ... on task ..."), and for how many seconds; or None."""
        return self._waits.slowest()

    @contextmanager
    def _process(self, what: str) -> Iterator[_ProgramProcess]:
        """An idle process or a new one; one that was left in the middle of a task is killed."""
        process = self._idle.pop() if self._idle else _ProgramProcess(self.name, self._options)
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

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = ["-c", CHILD, str(theirs.fileno()), name, json.dumps(dict(options))]
            self._process = start_child(arguments, channel=theirs)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Raises EOFError, with the exit code, if the process has ended."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        reader, writer = self._streams
        writer.write(json.dumps(request).encode() + b"\n")
        line = b""
        with suppress(ConnectionError):
            line = await reader.readline()
        if not line:
            code = end_child(self._process, patience_s=CLOSE_TIMEOUT_S)
            raise EOFError(f"ended with exit code {code}; the worker's log may say why")
        return dict(json.loads(line))

    def disconnect(self) -> None:
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    def close(self) -> None:
        """Lets it end by itself, and kills it if it does not."""
        self.disconnect()
        end_child(self._process, patience_s=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        self.disconnect()
        end_child(self._process, patience_s=0.0)


def serve(stream: TextIO, name: str, options: Mapping[str, object]) -> None:
    """The child's loop: consumes tasks, produces outcomes, ends when the parent closes its end."""
    program: Program | None = None
    for line in stream:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            program = program or program_class(name)(options)
            answer = {"outcome": asdict(_run(program, Task(**request["task"]), ClientSettings(**request["client"])))}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a process border: the parent raises it in one line
            traceback.print_exc()  # for the worker's log
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR_CHARACTERS]}
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
        if (number is not None or key == "reward") and not (isinstance(number, Real) and math.isfinite(number)):
            raise ValueError(f"run returned {key}={number!r}; it must be a finite number")
    if outcome.won not in (True, False):
        raise TypeError(f"run returned won={outcome.won!r}; it must be True or False")
    score = outcome.task_score
    return Outcome(reward=float(outcome.reward), won=bool(outcome.won), task_score=None if score is None else float(score))


def main() -> None:
    """The child: descriptor of its socket, program, options as JSON."""
    descriptor, name, options = sys.argv[1:4]
    end_with_parent()
    for variable in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine, whatever proxy leads to the others
        os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), "127.0.0.1")))
    with suppress(ConnectionError):  # it was closed before an answer was read
        serve(socket.socket(fileno=int(descriptor)).makefile("rw"), name, json.loads(options))
