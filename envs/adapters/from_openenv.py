"""Adapt environments on an OpenEnv server, through its WebSocket. A session is one environment.

Options:
    url
    action_field  field of the server's action that gets the text
    text_field    field of the server's observation that has the text
    objective
    win_at        an episode is won if its last reward is at least this
    train_seeds, heldout_seeds
                  given to the environment's `reset`; it must heed them, or the episodes of a group
                  play different tasks

The protocol is written out here, because the package openenv-core brings 40 others. It does not
tell whether an episode terminated or was truncated, nor whether an action was understood.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bounded_json import MAX_VALUES, read_value
from envs.adapters.common import SEEDS, adapter_options, close_soon, seeded_tasks
from envs.base import Observation, Task, Transition
from printable import REASON_CHARACTERS, one_line
from url_secrets import public_url

if TYPE_CHECKING:
    import aiohttp

MAX_PINGS = 1000  # while one answer is awaited; servers send one in some seconds
OPTIONS = ("url", "action_field", "text_field", "objective", "win_at", *SEEDS)


class OpenEnvEnv:
    """An environment on a server, so `reset` and `step` are coroutines."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = adapter_options("openenv", options, OPTIONS)
        self._session: aiohttp.ClientSession | None = None  # created on its event loop
        self._socket: aiohttp.ClientWebSocketResponse

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        given = adapter_options("openenv", options, OPTIONS)
        return seeded_tasks("openenv", split, given, name=public_url(str(given["url"])))

    async def reset(self, task: Task) -> Observation:
        if self._session is None:
            import aiohttp  # here: listing tasks does not need it

            # aiohttp's `ws_connect` has no option against redirects
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_refuse_redirect)
            self._session = aiohttp.ClientSession(
                trace_configs=[trace], cookie_jar=aiohttp.DummyCookieJar()
            )
            url = str(self._options["url"])
            try:
                # aiohttp answers pings without letting any other coroutine go on
                self._socket = await self._session.ws_connect(
                    f"{url.rstrip('/')}/ws", autoping=False
                )
            except (aiohttp.ClientError, ValueError) as error:
                # Not with its own text, which quotes the URL with a password and a query.
                if isinstance(error, aiohttp.WSServerHandshakeError):
                    why = f"it answered {error.status}"
                elif isinstance(error, aiohttp.ClientConnectorError):
                    why = one_line(error.os_error)
                else:
                    why = type(error).__name__
                raise ConnectionError(f"no OpenEnv server at {public_url(url)}: {why}") from None
        return self._observe(await self._ask("reset", {"seed": task.seed}))

    async def step(self, action: str) -> Transition:
        answer = await self._ask("step", {self._options["action_field"]: action})
        reward, done = float(answer["reward"] or 0.0), bool(answer["done"])
        return Transition(
            observation=self._observe(answer),
            reward=reward,
            terminated=done,
            truncated=False,
            won=done and reward >= self._options["win_at"],
        )

    def close(self) -> None:
        if self._session is not None:
            url = public_url(str(self._options["url"]))
            close_soon(self._session.close(), name=f"the session with {url}")
            self._session = None

    async def _ask(self, kind: str, data: Mapping[str, object]) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})
        answer = read_value((await self._receive()).encode(), max_values=MAX_VALUES)
        if answer["type"] == "error":
            reason = one_line(str(answer["data"]["message"])[:REASON_CHARACTERS])
            raise RuntimeError(f"the server says: {reason}")
        return answer["data"]

    async def _receive(self) -> str:
        """Return the next text of the server, and answer its pings until then."""
        import aiohttp

        for _ in range(MAX_PINGS):
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.PING:
                await self._socket.pong(message.data)
            elif message.type is aiohttp.WSMsgType.TEXT:
                return str(message.data)
            elif message.type is not aiohttp.WSMsgType.PONG:
                raise RuntimeError("the server ended the session")
            await asyncio.sleep(0)
        raise RuntimeError(f"the server sent {MAX_PINGS} pings and no answer")

    def _observe(self, answer: Mapping[str, Any]) -> Observation:
        field, seen = self._options["text_field"], answer["observation"]
        if field not in seen:
            raise ValueError(
                f"openenv option text_field={field!r} is none of the observation's: {sorted(seen)}"
            )
        return Observation(text=str(seen[field]), objective=self._options["objective"])


async def _refuse_redirect(session: object, context: object, params: Any) -> None:
    """Go nowhere else: it could be a machine that only this one can reach."""
    raise RuntimeError(
        "the server answers with a redirect, which is not followed; set url to its end"
    )
