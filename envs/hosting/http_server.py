"""Serves any environment over HTTP, for `env.name=remote` on another machine: python -m
envs.hosting.http_server NAME OPTIONS PORT

    export ENV_SERVER_API_KEY=...        # the same text here and where the run is started
    python -m envs.hosting.http_server textworld '{"cache_dir": "runs/games", "seed": 0, ...}' 8700 --host 0.0.0.0 --processes 4

Environments live in processes of their own, as beside a worker (`pool.py`), or on the loop where
they are coroutines. The requests are described in `remote.py`. A client names a task that this
server lists, and never says what is in it. Every request needs the API key. A process that does not
answer within `--answer-timeout-s` is ended. An episode that nobody asked anything of for 15 minutes
is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from aiohttp import web

from envs.adapters.http_client import KEY_VARIABLE, key_from
from envs.base import Task
from envs.errors import full, keep
from envs.hosting.environment_process import EnvironmentDied
from envs.hosting.http_requests import (
    MAX_BODY_BYTES,
    Handler,
    RequestRefused,
    guard,
    listen,
    read_json,
)
from envs.hosting.pool import EnvironmentPool, PooledEnvironment
from envs.images import observation_to_json
from envs.registry import is_program
from envs.validation import EnvironmentFailed, list_tasks
from printable import ArgumentParser, printable, protect_terminal

IDLE_S = 900.0  # longer than a turn of a slow model; a client that is gone says nothing
SWEEP_EVERY_S = 30.0
MAX_SESSIONS = 1024  # episodes at once; each holds an environment
ANSWER_TIMEOUT_S = 60.0  # as env.answer_timeout_s: who asked has given up by then
LISTENING = "listens on"
NO_KEY = (
    "no API key: export {0}=SECRET, here and where the run is started; "
    "python -c 'import secrets; print(secrets.token_hex(16))' makes a secret"
)
SHOWN_CHARACTERS = 200  # of a client's text in an error


@dataclass(kw_only=True, slots=True)
class _Place:
    environment: PooledEnvironment
    stack: AsyncExitStack  # gives the environment back to the pool
    used_at: float
    answers: asyncio.Lock  # held while it is asked something


class Server:
    """`await start()` on the event loop that serves; `await close()`."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        *,
        processes: int,
        answer_timeout_s: float,
        key: str,
        sessions: int,
    ) -> None:
        """`key`: the API key that requests need. `sessions`: episodes at once, at most."""
        self._tasks = list_tasks(name, options)
        self._key, self._sessions = key, sessions
        # The index and not the task: a sequence of tasks may make each when it is asked for.
        self._places_of = {
            task.id: (split, at)
            for split, tasks in self._tasks.items()
            for at, task in enumerate(tasks)
        }
        if is_program(name):
            raise EnvironmentFailed(
                f"{name} is an agent program, and only what has `reset` and `step` can be served"
            )
        self._pool = EnvironmentPool(
            name, options, processes=processes, answer_timeout_s=answer_timeout_s
        )
        self._places: dict[str, _Place] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """The port, which is a free one for port 0."""
        app = web.Application(
            middlewares=[_errors_as_json, guard(self._key)], client_max_size=MAX_BODY_BYTES
        )
        for verb in (self.tasks, self.create, self.reset, self.step, self.close_one):
            app.router.add_post("/" + verb.__name__.removesuffix("_one"), verb)
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
        split = (await _fields(request, split=str))["split"]
        if split not in self._tasks:
            raise RequestRefused(
                400, f"split {_short(split)!r} is not one of {sorted(self._tasks)}"
            )
        return web.json_response({"tasks": [asdict(task) for task in self._tasks[split]]})

    async def create(self, request: web.Request) -> web.Response:
        if len(self._places) + len(self._leaving) >= self._sessions:
            why = f"all {self._sessions} episodes that this server holds at once are taken; start it with a larger --sessions"
            raise RequestRefused(503, why)
        stack = AsyncExitStack()
        environment = await stack.enter_async_context(self._pool.environment())
        # not counted: after a restart, another client's old one must not be anybody's
        number = secrets.token_hex(8)
        self._places[number] = _Place(
            environment=environment, stack=stack, used_at=time.monotonic(), answers=asyncio.Lock()
        )
        return web.json_response({"id": number})

    async def reset(self, request: web.Request) -> web.Response:
        fields = await _fields(request, id=str, task=dict)
        task = self._task(fields["task"])
        place = self._place(fields["id"])
        async with place.answers:
            return web.json_response(observation_to_json(await place.environment.reset(task)))

    async def step(self, request: web.Request) -> web.Response:
        fields = await _fields(request, id=str, action=str)
        place = self._place(fields["id"])
        async with place.answers:
            transition = await place.environment.step(fields["action"])
        flat = {item.name: getattr(transition, item.name) for item in dataclass_fields(transition)}
        return web.json_response(
            {**flat, "observation": observation_to_json(transition.observation)}
        )

    async def close_one(self, request: web.Request) -> web.Response:
        number = (await _fields(request, id=str))["id"]
        self._place(number)
        self._leave(number)
        return web.json_response({})

    def _task(self, asked: Mapping[str, object]) -> Task:
        """Return the task of this server that a client names. The client's own `data` is not looked
        at.

        It would say which files to read, or which code to run. Raises RequestRefused.
        """
        split, at = self._places_of.get(str(asked.get("id")), ("", -1))
        if not split:
            why = f"this server lists no task {_short(asked.get('id'))!r}; list the tasks again, POST /tasks"
            raise RequestRefused(400, why)
        task = self._tasks[split][at]
        for name in ("split", "seed"):
            ours, theirs = getattr(task, name), asked.get(name, getattr(task, name))
            if theirs != ours:
                why = f"task {_short(task.id)!r} has {name}={ours!r} on this server, not {_short(theirs)!r}; list the tasks again"
                raise RequestRefused(400, why)
        return task

    def _place(self, number: str) -> _Place:
        if number not in self._places:
            why = f"id {_short(number)} is unknown, or was idle for {IDLE_S:g} s; POST /create gives another"
            raise RequestRefused(404, why)
        place = self._places[number]
        place.used_at = time.monotonic()
        return place

    async def give_up(self, *, idle_s: float) -> None:
        """Places that nobody has asked anything of for this long."""
        for number, place in list(self._places.items()):
            if time.monotonic() - place.used_at > idle_s:
                self._leave(number)

    def _leave(self, number: str) -> None:
        """Nobody gets the environment before it has answered: the next one to ask would wait for
        what hangs.
        """

        async def when_it_has_answered(place: _Place) -> None:
            async with place.answers:
                await place.stack.aclose()

        leaving = asyncio.create_task(when_it_has_answered(self._places.pop(number)))
        self._leaving.add(leaving)  # a loop forgets a task that nobody holds
        leaving.add_done_callback(self._leaving.discard)

    async def _sweep(self) -> None:
        """Waits for time to pass, gives up idle places; ends by being cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self.give_up(idle_s=IDLE_S)


async def _fields(request: web.Request, **types: type) -> dict[str, Any]:
    """Return the body of a request. Raises RequestRefused if a field is missing or of another
    type.
    """
    body = await read_json(request)
    for name, wanted in types.items():
        if not isinstance(body, dict) or not isinstance(body.get(name), wanted):
            why = f"{request.path} needs a JSON object with {', '.join(types)}; {name} is missing or of another type"
            raise RequestRefused(400, why)
    assert isinstance(body, dict), "at least one field is asked for"
    return body


def _short(value: object) -> str:
    """Return the beginning of a value for an error: a client may send megabytes."""
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error with one line. `at_fault` says whether the request of this episode is to
    blame.
    """
    more: dict[str, object] = {}
    try:
        return await handler(request)
    except RequestRefused as error:
        status, why = error.status, error.why
    except EnvironmentDied as error:
        status, why, more = (
            500,
            f"{error}; the server printed the traceback",
            {"at_fault": error.at_fault},
        )
    except web.HTTPException as error:  # no such path, no POST, or a body that is too large
        status, why = error.status, f"{request.method} {request.path}: {error.reason}"
    except Exception as error:  # noqa: BLE001 - a process border: the client is told what it was
        keep(None, full(error))
        status, why = 500, f"{type(error).__name__}: {error}; the server printed the traceback"
    return web.json_response({"error": " ".join(why.split()), **more}, status=status)


async def serve(server: Server, *, host: str, port: int) -> None:
    """Until it is cancelled."""
    try:
        print(printable(f"{LISTENING} http://{host}:{await server.start(host, port)}"), flush=True)
        await asyncio.Event().wait()
    finally:
        await server.close()


def _options(text: str) -> dict[str, object]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"""{text!r} is no JSON object such as '{{"seed": 0}}'""")
    return options


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="as env.name")
    parser.add_argument("options", type=_options, help="as env.options, in JSON")
    parser.add_argument("port", type=int, help="0: a free one, which it prints")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (%(default)s)")
    parser.add_argument(
        "--processes", type=int, default=1, help="environment processes (%(default)s)"
    )
    parser.add_argument(
        "--sessions", type=int, default=MAX_SESSIONS, help="episodes at once, at most (%(default)s)"
    )
    parser.add_argument(
        "--api-key-env",
        default=KEY_VARIABLE,
        metavar="NAME",
        help="environment variable with the API key (%(default)s)",
    )
    parser.add_argument(
        "--answer-timeout-s",
        type=float,
        default=ANSWER_TIMEOUT_S,
        help="of a reset or step (%(default)g)",
    )
    given = parser.parse_args()
    try:
        key = key_from(given.api_key_env)
        if not key:
            parser.error(NO_KEY.format(given.api_key_env))
        server = Server(
            given.name,
            given.options,
            processes=given.processes,
            answer_timeout_s=given.answer_timeout_s,
            key=key,
            sessions=given.sessions,
        )
        asyncio.run(serve(server, host=given.host, port=given.port))
    except EnvironmentFailed as error:
        if error.__cause__ is not None:  # this process has no log but what it prints
            print(printable(full(error.__cause__), lines=True), end="", file=sys.stderr)
        parser.exit(2, f"error: {error}\n")
    except (OSError, OverflowError) as error:
        parser.exit(
            2,
            f"error: cannot listen on {given.host}:{given.port} ({error}); take another port, or 0 "
            "for a free one\n",
        )
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    protect_terminal()
    main()
