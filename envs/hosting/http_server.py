"""Serve any environment over HTTP, for `env.name=remote` on another machine.

    export ENV_SERVER_API_KEY=...  # the same text here and where the run is started
    python -P -m envs.hosting.http_server key_room '{}' 8700 --host 0.0.0.0 --processes 4

The options are those of `env.options`, in JSON. `envs/adapters/http_client.py` describes the
requests. Each needs the API key. A client names a task that this server lists, and cannot say what
is in it. A process that does not answer within `--answer-timeout-s` is killed. A session without
requests for 15 minutes is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from aiohttp import web

from envs.adapters.http_client import KEY_VARIABLE, key_from, observation_to_json
from envs.base import Task, task_to_json
from envs.error_texts import full_traceback
from envs.errors import EnvironmentDied, EnvironmentFailed
from envs.hosting.http_requests import (
    MAX_BODY_BYTES,
    AtOnce,
    Handler,
    RequestRefused,
    guard,
    listen,
    read_json,
)
from envs.hosting.pool import EnvironmentPool, PooledEnvironment
from envs.logs import write_log
from envs.registry import is_program
from envs.validation import list_tasks
from printable import ArgumentParser, fail, printable, protect_terminal

IDLE_S = 900.0  # longer than a slow model takes for one reply; a client that dies says nothing
SWEEP_EVERY_S = 30.0
MAX_SESSIONS = 1024  # each holds an environment
ANSWER_TIMEOUT_S = 60.0  # the default of env.answer_timeout_s: later, the client has given up
LISTENING = "listens on"
NO_KEY = (
    "no API key: export {0}=SECRET, here and where the run is started; "
    "python -c 'import secrets; print(secrets.token_hex(16))' makes a secret"
)
# Bounds of one action, and of those of an episode, which keeps its actions to repeat them. A reply
# has some thousands of characters.
MAX_ACTION_CHARACTERS = 1_000_000
MAX_EPISODE_CHARACTERS = 16_000_000
# Every episode may keep so many. What some keep beyond that is bounded for all together.
OWN_CHARACTERS = 250_000
MAX_SHARED_CHARACTERS = 256_000_000
CHARACTERS_OF_A_STEP = 500  # one takes as much memory as so many more, however short its action
# An episode of a deterministic environment keeps its answers too: repeated actions must have the
# same ones. Images make them large. The bound is that of all episodes together.
MAX_ANSWER_BYTES = 2**31
# Bound of the bodies of all requests together, which a client may send slowly.
MAX_BODIES_BYTES = 256 * 2**20
SHOWN_CHARACTERS = 200  # of a client's text in an error


@dataclass(kw_only=True, slots=True)
class _Session:
    environment: PooledEnvironment
    stack: AsyncExitStack  # gives the environment back to the pool
    used_at: float
    in_use: asyncio.Lock  # held while the environment works on a request
    n_kept: int = 0  # characters of the actions that the episode keeps
    n_held: int = 0  # the same, with the actions that wait for the environment
    has_begun: bool = False  # it was reset
    is_ended: bool = False


class Server:
    """Hold sessions, each with an environment of its own, and answer requests about them.

    Call `await start(...)` on the event loop that serves, and `await close()`.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        *,
        processes: int,
        answer_timeout_s: float,
        key: str,
        max_sessions: int,
    ) -> None:
        """List the tasks. Raises EnvironmentFailed for an environment that cannot be served."""
        self._tasks = list_tasks(name, options)
        if is_program(name):
            raise EnvironmentFailed(
                f"{name} is an agent program, and only what has `reset` and `step` can be served"
            )
        self._key, self._max_sessions = key, max_sessions
        # Indices and not tasks: a sequence of tasks may make each one when it is asked for.
        self._split_and_index = {
            task.id: (split, index)
            for split, tasks in self._tasks.items()
            for index, task in enumerate(tasks)
        }
        self._pool = EnvironmentPool(
            name, options, processes=processes, answer_timeout_s=answer_timeout_s
        )
        self._sessions: dict[str, _Session] = {}
        self._bodies, self._shared = AtOnce(MAX_BODIES_BYTES), AtOnce(MAX_SHARED_CHARACTERS)
        self._ending: set[asyncio.Task[None]] = set()  # an event loop keeps no reference itself
        self._sweeper: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Port 0 takes a free one."""
        app = web.Application(middlewares=[guard(self._key, error_field="error"), _errors_as_json])
        app.router.add_post("/tasks", self.tasks)
        app.router.add_post("/create", self.create)
        app.router.add_post("/reset", self.reset)
        app.router.add_post("/step", self.step)
        app.router.add_post("/close", self.close_session)
        self._runner = await listen(app, host, port)
        self._sweeper = asyncio.create_task(self._sweep())
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        self._pool.close()

    async def tasks(self, request: web.Request) -> web.Response:
        split = (await self._read_fields(request, split=str))["split"]
        if split not in self._tasks:
            raise RequestRefused(
                400, f"split {_shortened(split)!r} is not one of {sorted(self._tasks)}"
            )
        return web.json_response({"tasks": list(map(task_to_json, self._tasks[split]))})

    async def create(self, request: web.Request) -> web.Response:
        if len(self._sessions) + len(self._ending) >= self._max_sessions:
            raise RequestRefused(
                503,
                f"all {self._max_sessions} sessions of this server are taken; start it with a "
                "larger --sessions",
            )
        stack = AsyncExitStack()
        environment = await stack.enter_async_context(self._pool.environment())
        # Random, so that an id from before a restart is never another client's session.
        session_id = secrets.token_hex(8)
        self._sessions[session_id] = _Session(
            environment=environment, stack=stack, used_at=time.monotonic(), in_use=asyncio.Lock()
        )
        return web.json_response({"id": session_id})

    async def reset(self, request: web.Request) -> web.Response:
        fields = await self._read_fields(request, id=str, task=dict)
        task = self._named_task(fields["task"])
        session = self._session(fields["id"])
        del fields  # may be large, and the session may have to be waited for
        async with self._used(session):
            self._let_go(session.n_kept, session)
            session.n_kept, session.has_begun = 0, False
            observation = await session.environment.reset(task)
            session.has_begun = True
            return web.json_response(observation_to_json(observation))

    async def step(self, request: web.Request) -> web.Response:
        fields = await self._read_fields(request, id=str, action=str)
        action = fields["action"]
        if len(action) > MAX_ACTION_CHARACTERS:
            raise RequestRefused(
                400,
                f"the action has {len(action):,} characters; send at most "
                f"{MAX_ACTION_CHARACTERS:,}",
            )
        session = self._session(fields["id"])
        with self._held(len(action) + CHARACTERS_OF_A_STEP, session) as keep:
            async with self._used(session):
                if not session.has_begun:
                    raise RequestRefused(409, "the session has no episode yet; POST /reset first")
                if self._pool.n_held_bytes > MAX_ANSWER_BYTES:
                    raise RequestRefused(
                        503,
                        "the running episodes keep too many answers, such as images; begin another "
                        "one, POST /reset, or ask again later",
                    )
                keep()
                session.has_begun = False  # after an error there is no episode
                transition = await session.environment.step(action)
                session.has_begun = True
        flat = {
            field.name: getattr(transition, field.name) for field in dataclass_fields(transition)
        }
        return web.json_response(
            {**flat, "observation": observation_to_json(transition.observation)}
        )

    async def close_session(self, request: web.Request) -> web.Response:
        session_id = (await self._read_fields(request, id=str))["id"]
        self._session(session_id)
        self._end_session(session_id)
        return web.json_response({})

    async def end_idle_sessions(self, *, idle_s: float) -> None:
        """End the sessions that had no request for this long."""
        for session_id, session in list(self._sessions.items()):
            if time.monotonic() - session.used_at > idle_s:
                self._end_session(session_id)

    def _named_task(self, asked: Mapping[str, object]) -> Task:
        """Return the task of this server that a client names. Raises RequestRefused.

        The client's `data` is not looked at: it would say which files to read, or what to run.
        """
        split, index = self._split_and_index.get(str(asked.get("id")), ("", -1))
        if not split:
            raise RequestRefused(
                400,
                f"this server lists no task {_shortened(asked.get('id'))!r}; list the tasks "
                "again, POST /tasks",
            )
        task = self._tasks[split][index]
        for name in ("split", "seed"):
            ours, theirs = getattr(task, name), asked.get(name, getattr(task, name))
            if theirs != ours:
                raise RequestRefused(
                    400,
                    f"task {_shortened(task.id)!r} has {name}={ours!r} on this server, not "
                    f"{_shortened(theirs)!r}; list the tasks again",
                )
        return task

    def _session(self, session_id: str) -> _Session:
        if session_id not in self._sessions:
            raise RequestRefused(
                404,
                f"id {_shortened(session_id)} is unknown, or was idle for {IDLE_S:g} s; "
                "POST /create gives another",
            )
        session = self._sessions[session_id]
        session.used_at = time.monotonic()
        return session

    def _end_session(self, session_id: str) -> None:
        ending = asyncio.create_task(self._give_back(self._sessions.pop(session_id)))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _give_back(self, session: _Session) -> None:
        """Give the environment to the next session, once it has answered its last request.

        If it hangs, the next session would wait for it.
        """
        async with session.in_use:
            session.is_ended = True
            await session.stack.aclose()
            self._let_go(session.n_kept, session)

    @asynccontextmanager
    async def _used(self, session: _Session) -> AsyncIterator[None]:
        """Wait for the session's environment. Raises RequestRefused if it was ended meanwhile."""
        async with session.in_use:
            if session.is_ended:
                raise RequestRefused(404, "the session was closed; POST /create gives another")
            yield

    @contextmanager
    def _held(self, n_characters: int, session: _Session) -> Iterator[Callable[[], None]]:
        """Count the characters of an action during the block.

        It gives a function. Once that was called the episode keeps the action, and its characters
        count until the episode ends. Raises RequestRefused if an episode, or all of them together,
        would have too many.
        """
        n_held = session.n_held + n_characters
        if n_held > MAX_EPISODE_CHARACTERS:
            raise RequestRefused(
                400,
                f"the actions of the episode have more than {MAX_EPISODE_CHARACTERS:,} characters "
                f"together, with {CHARACTERS_OF_A_STEP} more for each; POST /reset begins another",
            )
        self._shared.take(_beyond_own(n_held) - _beyond_own(session.n_held))
        session.n_held = n_held
        is_kept = False

        def keep() -> None:
            nonlocal is_kept
            is_kept = True
            session.n_kept += n_characters

        try:
            yield keep
        finally:
            if not is_kept:
                self._let_go(n_characters, session)

    def _let_go(self, n_characters: int, session: _Session) -> None:
        n_held = session.n_held - n_characters
        self._shared.give_back(_beyond_own(session.n_held) - _beyond_own(n_held))
        session.n_held = n_held

    async def _read_fields(self, request: web.Request, **types: type) -> dict[str, Any]:
        """Return the body of a request. Raises RequestRefused for a missing or mistyped field."""
        body = await read_json(request, bodies=self._bodies, at_most_bytes=MAX_BODY_BYTES)
        for name, expected in types.items():
            if not isinstance(body, dict) or not isinstance(body.get(name), expected):
                raise RequestRefused(
                    400,
                    f"{request.path} needs a JSON object with {', '.join(types)}; {name} is "
                    "missing or of another type",
                )
        assert isinstance(body, dict), "at least one field is asked for"
        return body

    async def _sweep(self) -> None:
        """Wait for time to pass and end idle sessions, until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self.end_idle_sessions(idle_s=IDLE_S)


def _beyond_own(n_characters: int) -> int:
    return max(0, n_characters - OWN_CHARACTERS)


def _shortened(value: object) -> str:
    """Return the beginning of a client's value, which may have megabytes, for an error."""
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an error with one line.

    `at_fault` is false if another session's request is to blame. `ended_process` is true if other
    sessions have lost their environment too.
    """
    fields: dict[str, object] = {}
    try:
        return await handler(request)
    except RequestRefused:
        raise  # the guard answers
    except EnvironmentDied as error:
        status, reason = 500, f"{error}; the server printed the traceback"
        fields = {"at_fault": error.at_fault, "ended_process": error.ended_process}
    except web.HTTPException as error:  # no such path, or no POST
        status, reason = error.status, f"{request.method} {request.path}: {error.reason}"
    except Exception as error:  # noqa: BLE001 - a process border: the client is told
        write_log(None, full_traceback(error))
        status = 500
        reason = f"{type(error).__name__}: {error}; the server printed the traceback"
    return web.json_response({"error": " ".join(reason.split()), **fields}, status=status)


async def serve(server: Server, *, host: str, port: int) -> None:
    """Listen until it is cancelled."""
    try:
        print(printable(f"{LISTENING} http://{host}:{await server.start(host, port)}"), flush=True)
        await asyncio.Event().wait()
    finally:
        await server.close()


def _parse_options(text: str) -> dict[str, object]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"""{text!r} is no JSON object such as '{{"seed": 0}}'""")
    return options


def _parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments of the command line and the API key. Exits without a key."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", help="the environment, as in env.name")
    add("options", type=_parse_options, help="its env.options, in JSON")
    add("port", type=int, help="0 takes a free port and prints it")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--processes", type=int, default=1, help="environment processes (%(default)s)")
    add("--sessions", type=int, default=MAX_SESSIONS, help="at most so many (%(default)s)")
    add(
        "--api-key-env",
        default=KEY_VARIABLE,
        metavar="NAME",
        help="environment variable with the API key (%(default)s)",
    )
    add(
        "--answer-timeout-s",
        type=float,
        default=ANSWER_TIMEOUT_S,
        help="limit of a reset or step (%(default)g)",
    )
    arguments = parser.parse_args()
    key = key_from(arguments.api_key_env)
    if not key:
        parser.error(NO_KEY.format(arguments.api_key_env))
    return arguments, key


def main() -> None:
    arguments, key = _parse_arguments()
    try:
        server = Server(
            arguments.name,
            arguments.options,
            processes=arguments.processes,
            answer_timeout_s=arguments.answer_timeout_s,
            key=key,
            max_sessions=arguments.sessions,
        )
        asyncio.run(serve(server, host=arguments.host, port=arguments.port))
    except EnvironmentFailed as error:
        if error.__cause__ is not None:  # this process has no log but its output
            traceback = full_traceback(error.__cause__)
            print(printable(traceback, lines=True), end="", file=sys.stderr)
        fail(error)
    except (OSError, OverflowError) as error:
        where = f"{arguments.host}:{arguments.port}"
        fail(f"cannot listen on {where} ({error}); take another port, or 0 for a free one")
    except KeyboardInterrupt:
        print("stopped")
        return
    sys.exit(2)


if __name__ == "__main__":
    protect_terminal()
    main()
