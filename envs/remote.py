"""An environment over HTTP: a client of `python -m envs.server`, or of anything that answers the same five requests.

Options: `url`. Every request is a POST with a JSON object, and so is every answer (docs/adapters.md has an example of each):

    /tasks  {"split"}         {"tasks": [...]}, each with the fields of `Task`
    /create {}                {"id"}: a place for one episode at a time
    /reset  {"id", "task"}    the fields of `Observation`, images as `images.py` writes them
    /step   {"id", "action"}  the fields of `Transition`
    /close  {"id"}            {}

Fields that `envs/base.py` has defaults for may be left out. An error has another status than 200 and {"error": one line}, with
"at_fault": false where another episode's request is to blame, so that this one is played again at no cost;
status 404 means that the id is unknown, as after a restart of the server: the next episode asks for another.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envs.base import Observation, Task, Transition
from envs.closing import close_soon
from envs.images import observation_from_json
from envs.options import check_options
from envs.process import EnvironmentDied

if TYPE_CHECKING:
    import aiohttp

OPTIONS = ("url",)
UNKNOWN_ID = 404
LIST_TIMEOUT_S = 600.0  # a server may make its games now


class RemoteEnv:
    """It waits for somebody else, so `reset` and `step` are coroutines; `env.answer_timeout_s` bounds each."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._url = _url(options)
        self._session: aiohttp.ClientSession | None = None  # made where its event loop is
        self._id: str | None = None

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        body = json.dumps({"split": split}).encode()
        request = urllib.request.Request(f"{_url(options)}/tasks", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LIST_TIMEOUT_S) as answer:
                listed = json.load(answer)["tasks"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"remote environment {request.full_url}: {_error(error.code, error.read())}") from None
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"remote environment {request.full_url} gives no tasks: {error!r}; is it up?") from error
        return [Task(**{**task, "env_name": "remote"}) for task in listed]

    async def reset(self, task: Task) -> Observation:
        fields = {"id": task.id, "env_name": task.env_name, "split": task.split, "seed": task.seed, "data": dict(task.data)}
        status, answer = await self._post("reset", task=fields) if self._id is not None else (UNKNOWN_ID, b"")
        if status == UNKNOWN_ID:
            self._id = json.loads(_checked(*await self._post("create")))["id"]
            status, answer = await self._post("reset", task=fields)
        return observation_from_json(json.loads(_checked(status, answer)))

    async def step(self, action: str) -> Transition:
        fields = json.loads(_checked(*await self._post("step", action=action)))
        return Transition(**{**fields, "observation": observation_from_json(fields["observation"])})

    def close(self) -> None:
        if self._session is not None:
            close_soon(self._end(self._session), what=f"the place at {self._url}")
            self._session = None

    async def _post(self, verb: str, **fields: Any) -> tuple[int, bytes]:
        if self._session is None:
            import aiohttp  # here, because who only lists tasks needs none of it

            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        body = fields if self._id is None or verb == "create" else {"id": self._id, **fields}
        async with self._session.post(f"{self._url}/{verb}", json=body) as answer:
            return answer.status, await answer.read()

    async def _end(self, session: aiohttp.ClientSession) -> None:
        async with session:
            if self._id is not None:
                await session.post(f"{self._url}/close", json={"id": self._id})


def _url(options: Mapping[str, object]) -> str:
    return str(check_options("remote", options, OPTIONS)["url"]).rstrip("/")


def _checked(status: int, answer: bytes) -> bytes:
    if status != 200:
        raise EnvironmentDied(_error(status, answer), at_fault=_said(answer).get("at_fault") is not False)
    return answer


def _error(status: int, answer: bytes) -> str:
    return f"the server answers {status}: {_said(answer).get('error', answer[:200].decode(errors='replace'))}"


def _said(answer: bytes) -> dict[str, Any]:
    try:
        said = json.loads(answer)
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {}
