"""Play an environment over HTTP, served by `envs.hosting.http_server` or by your own server.

Options: `url`, and optionally `api_key_env`, the name of the environment variable with the API key
(ENV_SERVER_API_KEY). The key is sent as `Authorization: Bearer KEY`; without one nothing is sent.

Each request is a POST with a JSON object, and so is each answer (docs/adapters.md has examples):

    /tasks  {"split"}         {"tasks": [...]}, each with the fields of `Task`
    /create {}                {"id"}, a session for one episode at a time
    /reset  {"id", "task"}    the fields of `Observation`
    /step   {"id", "action"}  the fields of `Transition`
    /close  {"id"}            {}

Fields with a default in `envs/base.py` may be left out. An image is {"height": 2, "width": 1,
"pixels": "AAAA////"}: here a black pixel above a white one, in base64 of height * width * 3 bytes.

An error has another status than 200 and {"error": one line}. With status 503 or "at_fault": false
another session's request is to blame, and the episode is played again at no cost. With
"ended_process": true the other sessions have to begin again. Status 404 means that the id is
unknown, as after a restart of the server: the next episode creates another session.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bounded_json import TooManyValues, read_value
from envs.adapters.common import close_soon
from envs.base import Observation, Task, Transition, task_to_json
from envs.errors import EnvironmentDied
from envs.hosting.pending import run_in_thread
from envs.options import OptionsError, check_options
from printable import one_line
from url_secrets import public_url

if TYPE_CHECKING:
    import aiohttp

KEY_OPTION = "api_key_env"
KEY_VARIABLE = "ENV_SERVER_API_KEY"
UNKNOWN_ID = 404  # status for an episode that the server does not know
LIST_TIMEOUT_S = 600.0  # for the whole list: a server may create its games now
MAX_LIST_BYTES = 2**28  # of all tasks
MAX_LIST_VALUES = 2**22  # in them: those of 400,000 tasks with ten each
MAX_ANSWER_BYTES = 64 * 2**20  # of an observation, with its images
MAX_ANSWER_VALUES = 2**21  # twice the actions that an observation may have
MAX_ID_CHARACTERS = 200  # ours has 16
ERROR_CHARACTERS = 1000  # of a server's error
COLOURS = 3  # red, green, blue


class RemoteEnv:
    """An environment on a server. Its methods are coroutines, limited by `env.answer_timeout_s`."""

    def __init__(self, options: Mapping[str, object]) -> None:
        given = {KEY_OPTION: "", **options}
        check_options("remote", given, ("url", KEY_OPTION))
        self._url = _checked_url(str(given["url"]))
        self._headers = _key_header(str(given[KEY_OPTION] or ""))
        self._session: aiohttp.ClientSession | None = None  # created on its event loop
        self._id: str | None = None

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        env = cls(options)
        server = f"remote environment {public_url(env._url)}/tasks"
        try:
            status, answer = run_in_thread(
                lambda: asyncio.run(env._list(split)), name="remote tasks", timeout_s=None
            )
            if status == 200:
                listed = read_value(answer, max_values=MAX_LIST_VALUES)["tasks"]
                return [Task(**{**task, "env_name": "remote"}) for task in listed]
        except Exception as error:  # noqa: BLE001 - the border to somebody else's server
            reason = env._without_key(repr(error))
            if isinstance(error, TimeoutError):
                reason = f"no whole answer within {LIST_TIMEOUT_S:g} s"
            raise ValueError(f"{server} gives no tasks: {reason}; is it up?") from None
        raise ValueError(f"{server}: {env._error(status, answer)}")

    async def reset(self, task: Task) -> Observation:
        fields = task_to_json(task)
        status = UNKNOWN_ID
        answer = b""
        if self._id is not None:
            status, answer = await self._post("reset", task=fields)
        if status == UNKNOWN_ID:
            self._id = _checked_id(self._value(*await self._post("create"))["id"])
            status, answer = await self._post("reset", task=fields)
        return observation_from_json(self._value(status, answer))

    async def step(self, action: str) -> Transition:
        fields = self._value(*await self._post("step", action=action))
        return Transition(**{**fields, "observation": observation_from_json(fields["observation"])})

    def close(self) -> None:
        if self._session is not None:
            close_soon(self._end(self._session), name=f"the session at {public_url(self._url)}")
            self._session = None

    async def _list(self, split: str) -> tuple[int, bytes]:
        try:
            # limits all of it: a server may send one byte at a time
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return await self._post("tasks", max_bytes=MAX_LIST_BYTES, split=split)
        finally:
            if self._session is not None:
                await self._session.close()

    async def _post(
        self, verb: str, *, max_bytes: int = MAX_ANSWER_BYTES, **fields: Any
    ) -> tuple[int, bytes]:
        """Return status and body of the server's answer. Raises EnvironmentDied for a long body."""
        # imported here: whoever only checks options needs neither
        import aiohttp

        from envs.hosting.http_requests import read_bounded

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),  # another one grows with each answer
            )
        body = fields if self._id is None or verb == "create" else {"id": self._id, **fields}
        # A redirect would carry the key to another server.
        try:
            async with self._session.post(
                f"{self._url}/{verb}", json=body, allow_redirects=False
            ) as response:
                return response.status, await read_bounded(response, max_bytes=max_bytes)
        except aiohttp.ClientError as error:
            raise self._connection_error(error) from None
        except ValueError as error:
            raise EnvironmentDied(f"/{verb}: {error}", at_fault=True) from None

    async def _end(self, session: aiohttp.ClientSession) -> None:
        import aiohttp

        async with session:
            if self._id is not None:
                try:
                    await session.post(
                        f"{self._url}/close", json={"id": self._id}, allow_redirects=False
                    )
                except aiohttp.ClientError as error:
                    raise self._connection_error(error) from None

    def _connection_error(self, error: aiohttp.ClientError) -> ConnectionError:
        """Return the error without the URL's query and the key.

        aiohttp quotes the one, and of an answer that is no HTTP a piece, which may hold the other.
        """
        import aiohttp

        why = type(error).__name__
        if isinstance(error, aiohttp.ClientConnectionError):
            why += f": {one_line(error)[:ERROR_CHARACTERS]}"
        return ConnectionError(f"{public_url(self._url)} gave no answer ({self._without_key(why)})")

    def _value(self, status: int, answer: bytes) -> Any:
        """Return the value of an answer. Raises EnvironmentDied for an error or too many values."""
        if status != 200:
            fields = _json_object(answer)
            is_full = status == HTTPStatus.SERVICE_UNAVAILABLE  # others have what it can give
            raise EnvironmentDied(
                self._error(status, answer),
                at_fault=not is_full and fields.get("at_fault") is not False,
                ended_process=fields.get("ended_process") is True,
            )
        try:
            return read_value(answer, max_values=MAX_ANSWER_VALUES)
        except TooManyValues as error:
            raise EnvironmentDied(f"the server's answer: {error}", at_fault=True) from None

    def _error(self, status: int, answer: bytes) -> str:
        error = str(_json_object(answer).get("error", answer.decode(errors="replace")))
        reason = one_line(self._without_key(error)[:ERROR_CHARACTERS])
        message = f"the server answers {status}: {reason}"
        if status != 401:
            return message
        named = f"{KEY_VARIABLE}, or in the variable that env.options.{KEY_OPTION} names"
        return f"{message}; is the key in {named}?"

    def _without_key(self, text: str) -> str:
        """Hide the key in a text of the server, which may repeat the key that it was sent."""
        key = self._headers.get("Authorization", "").removeprefix("Bearer ")
        return text.replace(key, "***") if key else text


def key_from(variable: str) -> str:
    """Return the API key in an environment variable; "" if it is not set."""
    return os.environ.get(variable, "").strip()


def observation_to_json(observation: Observation) -> dict[str, Any]:
    """Return the fields of an Observation for JSON, without `images` if there are none."""
    fields = asdict(replace(observation, images=()))
    del fields["images"]  # older clients do not know it
    if observation.images:
        fields["images"] = [_image_to_json(image) for image in observation.images]
    return fields


def observation_from_json(fields: Mapping[str, Any]) -> Observation:
    """Return the Observation. Raises ValueError for a malformed image, else TypeError."""
    images = fields.get("images") or ()
    return Observation(**{**fields, "images": tuple(_image_from_json(image) for image in images)})


def _image_to_json(image: NDArray[np.uint8]) -> dict[str, Any]:
    height, width, _ = image.shape
    return {"height": height, "width": width, "pixels": base64.b64encode(image.tobytes()).decode()}


def _image_from_json(fields: Mapping[str, Any]) -> NDArray[np.uint8]:
    try:
        pixels = np.frombuffer(base64.b64decode(fields["pixels"], validate=True), np.uint8)
        return pixels.reshape(int(fields["height"]), int(fields["width"]), COLOURS)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError(
            "an image is no object of height, width and pixels, base64 of height * width * "
            f"{COLOURS} bytes: {error!r}"
        ) from None


def _checked_url(given: str) -> str:
    url = given.rstrip("/")
    # a password would be written into the run directory
    if not url.startswith(("http://", "https://")) or "@" in url:
        raise OptionsError(
            f"remote option url={public_url(url)!r} must be a URL like http://HOST:PORT, without a "
            "name or password"
        )
    return url


def _checked_id(given: object) -> str:
    """Return the id of a session, which each request repeats. Raises EnvironmentDied for others."""
    if not isinstance(given, str) or len(given) > MAX_ID_CHARACTERS:
        raise EnvironmentDied(
            f"/create: the server's id is no text of at most {MAX_ID_CHARACTERS} characters",
            at_fault=True,
        )
    return given


def _key_header(variable: str) -> dict[str, str]:
    """Return the header with the API key, if there is one.

    Raises OptionsError if the option names a variable that is not set.
    """
    key = key_from(variable or KEY_VARIABLE)
    if variable and not key:
        raise OptionsError(
            f"remote option {KEY_OPTION}={variable} is not set in the environment; export it with "
            "the key"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def _json_object(answer: bytes) -> dict[str, Any]:
    try:
        parsed = read_value(answer, max_values=MAX_ANSWER_VALUES)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {}
