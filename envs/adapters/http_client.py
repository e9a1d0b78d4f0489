"""An environment over HTTP: a client of `python -m envs.hosting.http_server`, or of anything that
answers the same five requests.

Options: `url`; and `api_key_env`, which may be left out: the name of the environment variable that
holds the API key (ENV_SERVER_API_KEY). A key is sent as `Authorization: Bearer KEY`. Without one
nothing is sent, for servers that ask for none.

Every request is a POST with a JSON object, and so is every answer (docs/adapters.md has an example
of each):

    /tasks  {"split"}         {"tasks": [...]}, each with the fields of `Task`
    /create {}                {"id"}: a place for one episode at a time
    /reset  {"id", "task"}    the fields of `Observation`, images as `images.py` writes them
    /step   {"id", "action"}  the fields of `Transition`
    /close  {"id"}            {}

Fields that `envs/base.py` has defaults for may be left out. An error has another status than 200
and {"error": one line}, with "at_fault": false where another episode's request is to blame, so that
this one is played again at no cost; status 404 means that the id is unknown, as after a restart of
the server: the next episode asks for another.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from envs.base import Observation, Task, Transition
from envs.hosting.closing import close_soon
from envs.hosting.environment_process import EnvironmentDied
from envs.images import observation_from_json
from envs.options import OptionsError, check_options

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

OPTIONS = ("url",)
KEY_OPTION = "api_key_env"
KEY_VARIABLE = "ENV_SERVER_API_KEY"
UNKNOWN_ID = 404
LIST_TIMEOUT_S = 600.0  # a server may make its games now
MAX_LIST_BYTES = 2**30  # of all tasks
MAX_ANSWER_BYTES = 64 * 2**20  # of an observation, with its images
ERROR_CHARACTERS = 1000  # of a server's error


class RemoteEnv:
    """It waits for somebody else, so `reset` and `step` are coroutines; `env.answer_timeout_s`
    bounds each.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._url, self._headers = _url(options), _headers(options)
        self._session: aiohttp.ClientSession | None = None  # made where its event loop is
        self._id: str | None = None

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        env = cls(options)
        url = f"remote environment {env._url}/tasks"
        try:
            status, answer = _apart(lambda: asyncio.run(env._list(split)))
            if status == 200:
                return [
                    Task(**{**task, "env_name": "remote"}) for task in json.loads(answer)["tasks"]
                ]
        except Exception as error:  # noqa: BLE001 - the border to somebody else's server
            late = f"no whole answer within {LIST_TIMEOUT_S:g} s"
            why = late if isinstance(error, TimeoutError) else env._without_key(repr(error))
            raise ValueError(f"{url} gives no tasks: {why}; is it up?") from None
        raise ValueError(f"{url}: {env._error(status, answer)}")

    async def reset(self, task: Task) -> Observation:
        fields = {
            "id": task.id,
            "env_name": task.env_name,
            "split": task.split,
            "seed": task.seed,
            "data": dict(task.data),
        }
        status, answer = (
            await self._post("reset", task=fields) if self._id is not None else (UNKNOWN_ID, b"")
        )
        if status == UNKNOWN_ID:
            self._id = json.loads(self._checked(*await self._post("create")))["id"]
            status, answer = await self._post("reset", task=fields)
        return observation_from_json(json.loads(self._checked(status, answer)))

    async def step(self, action: str) -> Transition:
        fields = json.loads(self._checked(*await self._post("step", action=action)))
        return Transition(**{**fields, "observation": observation_from_json(fields["observation"])})

    def close(self) -> None:
        if self._session is not None:
            close_soon(self._end(self._session), what=f"the place at {self._url}")
            self._session = None

    async def _list(self, split: str) -> tuple[int, bytes]:
        try:
            # of all of it: a server may send a byte at a time
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return await self._post("tasks", most=MAX_LIST_BYTES, split=split)
        finally:
            if self._session is not None:
                await self._session.close()

    async def _post(
        self, verb: str, *, most: int = MAX_ANSWER_BYTES, **fields: Any
    ) -> tuple[int, bytes]:
        if self._session is None:
            import aiohttp  # here, because who only reads the options needs none of it

            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        body = fields if self._id is None or verb == "create" else {"id": self._id, **fields}
        # A redirect would carry the key to another server.
        async with self._session.post(
            f"{self._url}/{verb}", json=body, allow_redirects=False
        ) as answer:
            received = bytearray()
            async for piece in answer.content.iter_any():
                received += piece
                if len(received) > most:
                    raise EnvironmentDied(
                        f"the server's answer to /{verb} has more than {most} bytes", at_fault=True
                    )
            return answer.status, bytes(received)

    async def _end(self, session: aiohttp.ClientSession) -> None:
        async with session:
            if self._id is not None:
                await session.post(
                    f"{self._url}/close", json={"id": self._id}, allow_redirects=False
                )

    def _checked(self, status: int, answer: bytes) -> bytes:
        if status != 200:
            at_fault = _said(answer).get("at_fault") is not False
            raise EnvironmentDied(self._error(status, answer), at_fault=at_fault)
        return answer

    def _error(self, status: int, answer: bytes) -> str:
        said = self._without_key(str(_said(answer).get("error", answer.decode(errors="replace"))))
        named = f"{KEY_VARIABLE}, or in the variable that env.options.{KEY_OPTION} names"
        hint = f"; is the key in {named}?" if status == 401 else ""
        return f"the server answers {status}: {said[:ERROR_CHARACTERS]}{hint}"

    def _without_key(self, text: str) -> str:
        """Return a text of the server, which may repeat the key that it was sent."""
        key = self._headers.get("Authorization", "").removeprefix("Bearer ")
        return text.replace(key, "***") if key else text


def key_from(variable: str) -> str:
    """Return the API key that an environment variable holds; "" if it is not set."""
    return os.environ.get(variable, "").strip()


def _url(options: Mapping[str, object]) -> str:
    url = str(_checked_options(options)["url"]).rstrip("/")
    # a password would be written into the run directory
    if not url.startswith(("http://", "https://")) or "@" in url:
        raise OptionsError(
            f"remote option url={url!r} must be a URL like http://HOST:PORT, without a name or "
            "password"
        )
    return url


def _headers(options: Mapping[str, object]) -> dict[str, str]:
    """Return the header with the API key; none where no key is set. Raises OptionsError if the one
    that is named is not set.
    """
    variable = str(_checked_options(options).get(KEY_OPTION) or "")
    key = key_from(variable or KEY_VARIABLE)
    if variable and not key:
        raise OptionsError(
            f"remote option {KEY_OPTION}={variable} is not set in the environment; export it with "
            "the key"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def _checked_options(options: Mapping[str, object]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name != KEY_OPTION}
    return check_options("remote", given, OPTIONS) | {
        name: options[name] for name in (KEY_OPTION,) if name in options
    }


def _apart(work: Callable[[], T]) -> T:
    """Return `work()`, done in a thread of its own: the caller's may have an event loop.

    Ctrl-C does not wait for that thread.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            done.set_exception(error)

    threading.Thread(target=run, name="remote tasks", daemon=True).start()
    return done.result()


def _said(answer: bytes) -> dict[str, Any]:
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    return said if isinstance(said, dict) else {}
