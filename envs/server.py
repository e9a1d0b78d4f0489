"""Serves any environment over HTTP, for `env.name=remote` on another machine: python -m envs.server NAME OPTIONS PORT

    python -m envs.server textworld '{"cache_dir": "runs/games", "seed": 0, ...}' 8700 --host 0.0.0.0 --processes 4

Environments live in processes of their own, as beside a worker (`pool.py`), or on the loop where they are coroutines. What it
answers is in `remote.py`. It asks for no password: let it listen only where you trust everybody. A process that does not answer
within `--answer-timeout-s` is ended. An episode that nobody asked anything of for 15 minutes is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from aiohttp import web

from envs.base import Task
from envs.check import EnvironmentFailed, list_tasks
from envs.failures import full
from envs.images import observation_to_json
from envs.pool import EnvironmentPool, PooledEnvironment
from envs.process import EnvironmentDied
from envs.registry import is_program
from printable import ArgumentParser, printable, protect_terminal

IDLE_S = 900.0  # longer than a turn of a slow model; a client that is gone says nothing
SWEEP_EVERY_S = 30.0
ANSWER_TIMEOUT_S = 60.0  # as env.answer_timeout_s: who asked has given up by then
LISTENING = "listens on"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True, slots=True)
class _Place:
    environment: PooledEnvironment
    stack: AsyncExitStack  # gives the environment back to the pool
    used_at: float
    answers: asyncio.Lock  # held while it is asked something


class Server:
    """`await start()` on the event loop that serves; `await close()`."""

    def __init__(self, name: str, options: Mapping[str, object], *, processes: int, answer_timeout_s: float) -> None:
        self._tasks = list_tasks(name, options)
        if is_program(name):
            raise EnvironmentFailed(f"{name} is an agent program, and only what has `reset` and `step` can be served")
        self._pool = EnvironmentPool(name, options, processes=processes, answer_timeout_s=answer_timeout_s)
        self._name = name
        self._places: dict[str, _Place] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """The port, which is a free one for port 0."""
        app = web.Application(middlewares=[_errors_as_json])
        for verb in (self.tasks, self.create, self.reset, self.step, self.close_one):
            app.router.add_post("/" + verb.__name__.removesuffix("_one"), verb)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
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
            raise _refused(400, f"split {split!r} is not one of {sorted(self._tasks)}")
        return web.json_response({"tasks": [asdict(task) for task in self._tasks[split]]})

    async def create(self, request: web.Request) -> web.Response:
        stack = AsyncExitStack()
        environment = await stack.enter_async_context(self._pool.environment())
        number = secrets.token_hex(8)  # not counted: after a restart, another client's old one must not be anybody's
        self._places[number] = _Place(environment=environment, stack=stack, used_at=time.monotonic(), answers=asyncio.Lock())
        return web.json_response({"id": number})

    async def reset(self, request: web.Request) -> web.Response:
        fields = await _fields(request, id=str, task=dict)
        try:
            task = Task(**{**fields["task"], "env_name": self._name})
        except TypeError as error:
            raise _refused(400, f"/reset: {error}") from None
        place = self._place(fields["id"])
        async with place.answers:
            return web.json_response(observation_to_json(await place.environment.reset(task)))

    async def step(self, request: web.Request) -> web.Response:
        fields = await _fields(request, id=str, action=str)
        place = self._place(fields["id"])
        async with place.answers:
            transition = await place.environment.step(fields["action"])
        flat = {item.name: getattr(transition, item.name) for item in dataclass_fields(transition)}
        return web.json_response({**flat, "observation": observation_to_json(transition.observation)})

    async def close_one(self, request: web.Request) -> web.Response:
        number = (await _fields(request, id=str))["id"]
        self._place(number)
        self._leave(number)
        return web.json_response({})

    def _place(self, number: str) -> _Place:
        if number not in self._places:
            raise _refused(404, f"id {number} is unknown, or was idle for {IDLE_S:g} s; POST /create gives another")
        place = self._places[number]
        place.used_at = time.monotonic()
        return place

    async def give_up(self, *, idle_s: float) -> None:
        """Places that nobody has asked anything of for this long."""
        for number, place in list(self._places.items()):
            if time.monotonic() - place.used_at > idle_s:
                self._leave(number)

    def _leave(self, number: str) -> None:
        """Nobody gets the environment before it has answered: the next one to ask would wait for what hangs."""

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
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError:
        body = None
    for name, wanted in types.items():
        if not isinstance(body, dict) or not isinstance(body.get(name), wanted):
            raise _refused(
                400, f"{request.path} needs a JSON object with {', '.join(types)}; {name} is missing or of another type"
            )
    return body


def _refused(status: int, why: str, **more: object) -> web.HTTPException:
    refusal = {400: web.HTTPBadRequest, 404: web.HTTPNotFound, 500: web.HTTPInternalServerError}[status]
    return refusal(text=json.dumps({"error": " ".join(why.split()), **more}), content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EnvironmentDied as error:
        raise _refused(500, f"{error}; the server printed the traceback", at_fault=error.at_fault) from error


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
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="as env.name")
    parser.add_argument("options", type=_options, help="as env.options, in JSON")
    parser.add_argument("port", type=int, help="0: a free one, which it prints")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="environment processes (%(default)s)")
    parser.add_argument("--answer-timeout-s", type=float, default=ANSWER_TIMEOUT_S, help="of a reset or step (%(default)g)")
    given = parser.parse_args()
    try:
        server = Server(given.name, given.options, processes=given.processes, answer_timeout_s=given.answer_timeout_s)
        asyncio.run(serve(server, host=given.host, port=given.port))
    except EnvironmentFailed as error:
        if error.__cause__ is not None:  # this process has no log but what it prints
            print(printable(full(error.__cause__), lines=True), end="", file=sys.stderr)
        parser.exit(2, f"error: {error}\n")
    except (OSError, OverflowError) as error:
        parser.exit(2, f"error: cannot listen on {given.host}:{given.port} ({error}); take another port, or 0 for a free one\n")
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    protect_terminal()
    main()
