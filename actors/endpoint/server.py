"""An OpenAI-compatible HTTP endpoint that records what it serves: every chat completion of an
episode is one Step.

    endpoint = Endpoint(policy, tokenizer, settings)
    await endpoint.start()                              # on this event loop, on 127.0.0.1, on a free port
    with endpoint.episode(ids, rules) as recording:
        ...                                             # a client with recording.client: its base_url and api_key
        recording.steps()
    await endpoint.close()

POST /v1/chat/completions and GET /v1/models, by aiohttp, which vLLM brings: it serves on a loop
that is already there, and cancels a request whose client has gone, so that a reply nobody got is no
step. The API key says which episode it belongs to.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from jinja2 import TemplateError

from actors.endpoint.conversation import Conversation, PromptTooLong
from actors.endpoint.request import ChatRequest, RequestError, parse_request, refused
from actors.endpoint.response import Reply, chat_completion, chunks, cut_reply
from actors.policy import Completion, Policy, Prompt
from actors.prompting.chat_template import Tokenizer, longest_token
from actors.rollout.episode import (
    LONG_PROMPTS,
    SHORT_PROMPTS,
    EpisodeIds,
    EpisodeRules,
    PromptStuckError,
    completion_of,
    step_of,
)
from configs import Config
from envs import ClientSettings, Observation
from store import Step, now_us, uid_text

MAX_BODY_BYTES = 64 * 2**20  # of a request, whatever the model takes
LEAST_BODY_BYTES = 2**20
BYTES_PER_CHARACTER = 6  # of JSON, where a character is written as "\\u1234"
BODY_TIMEOUT_S = 60.0  # for a client to send all of a request
# of a connection on which no request is complete; else half-open ones would add up
IDLE_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 1.0  # for answers that are being written


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointSettings:
    model: str  # the name in /v1/models
    max_response_tokens: int
    max_model_tokens: int  # prompt and response together
    chat_variables: Mapping[str, object]  # for the chat template, e.g. enable_thinking

    @classmethod
    def of(cls, config: Config) -> EndpointSettings:
        thinking = config.prompt.thinking
        return cls(
            model=Path(config.run_dir).name,
            max_response_tokens=config.actors.max_response_tokens,
            max_model_tokens=config.actors.max_model_tokens,
            chat_variables={} if thinking is None else {"enable_thinking": thinking},
        )


class Recording:
    """One episode: what it may still ask for, and the steps it has made. Unblocked by the
    policy.
    """

    def __init__(
        self,
        ids: EpisodeIds,
        rules: EpisodeRules,
        conversation: Conversation,
        client: ClientSettings,
        *,
        of: str,
    ) -> None:
        self.ids, self.rules, self.conversation, self.client = ids, rules, conversation, client
        self.of = of  # for errors
        self.cut_off = ""  # why a request was refused that would have gone on for too long
        self.failure: Exception | None = None  # of the policy or the chat template
        self.is_over = False
        self.numbers = itertools.count()  # of completions, in the order they were asked for
        self.n_in_flight = 0
        self.recorded: dict[int, Step] = {}

    def steps(self) -> list[Step]:
        """In the order they were asked for, numbered without gaps. Without reward and the program's
        time.
        """
        return [
            replace(self.recorded[number], step_index=index)
            for index, number in enumerate(sorted(self.recorded))
        ]

    def refuse_beyond(self, n_more: int) -> None:
        """Raises RequestError if the episode is over, or would be longer than it may with `n_more`
        completions.
        """
        if self.is_over:
            raise RequestError(
                "this episode has ended; its API key is of no use",
                status=410,
                code="episode_over",
                param=None,
            )
        if len(self.recorded) + self.n_in_flight + n_more > self.rules.max_steps:
            raise self.cut(
                f"the episode has had the {self.rules.max_steps} chat completions that "
                "env.max_steps allows",
                status=410,
            )

    def cut(self, why: str, *, status: int, code: str = "episode_over") -> RequestError:
        """The episode is too long; if its program ends with this error, it was truncated and did
        not fail.
        """
        self.cut_off = why
        return RequestError(why, status=status, code=code, param=None)


class Endpoint:
    """`policy` may be replaced by another at any time."""

    def __init__(self, policy: Policy, tokenizer: Tokenizer, settings: EndpointSettings) -> None:
        self.policy, self.tokenizer, self.settings = policy, tokenizer, settings
        self.base_url = ""
        self._runner: web.AppRunner | None = None
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count()
        self._open: dict[int, Recording] = {}
        self._max_characters = settings.max_model_tokens * longest_token(tokenizer)
        longest = max(LEAST_BODY_BYTES, BYTES_PER_CHARACTER * self._max_characters)
        self._max_body_bytes = min(MAX_BODY_BYTES, longest)

    async def start(self) -> None:
        app = web.Application(middlewares=[_errors_as_json], client_max_size=self._max_body_bytes)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_TIMEOUT_S,
            keepalive_timeout=IDLE_TIMEOUT_S,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def episode(
        self, ids: EpisodeIds, rules: EpisodeRules, *, of: str = "an episode"
    ) -> Iterator[Recording]:
        """Record requests with its API key until the end of the `with` block; refuse later ones.
        `of` names it in errors.
        """
        number = next(self._numbers)
        client = ClientSettings(
            base_url=self.base_url, api_key=f"episode-{number}-{self._signature(number)}"
        )
        conversation = Conversation(
            self.tokenizer,
            chat_variables=self.settings.chat_variables,
            max_characters=self._max_characters,
        )
        recording = self._open[number] = Recording(ids, rules, conversation, client, of=of)
        try:
            yield recording
        finally:
            recording.is_over = True
            del self._open[number]

    def _signature(self, number: int) -> str:
        return hmac.new(self._secret, str(number).encode(), hashlib.sha256).hexdigest()[:32]

    def _recording(self, request: web.Request) -> Recording:
        """Raises RequestError: 401 for a key that is none of ours, 410 for one of an episode that
        has ended.
        """
        _, _, key = request.headers.get("Authorization", "").partition(" ")
        number = key.split("-")[1] if key.count("-") == 2 else ""
        is_ours = number.isascii() and number.isdigit() and len(number) < 20
        if not is_ours or not hmac.compare_digest(
            key.encode(errors="replace"),
            f"episode-{number}-{self._signature(int(number))}".encode(),
        ):
            message = (
                "this API key belongs to no episode; use the one that `run(task, client)` was given"
            )
            raise RequestError(message, status=401, code="invalid_api_key", param=None)
        if int(number) not in self._open:
            raise RequestError(
                "this episode has ended; its API key is of no use",
                status=410,
                code="episode_over",
                param=None,
            )
        return self._open[int(number)]

    async def _models(self, request: web.Request) -> web.Response:
        self._recording(request)
        model = {
            "id": self.settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "async-gigpo",
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        recording = self._recording(request)
        body_bytes = await self._body(request, recording)
        try:
            asked = parse_request(json.loads(body_bytes))
        except ValueError as error:  # not JSON, not UTF-8
            raise refused(f"the request is not JSON: {error}", None) from None
        except RecursionError:
            raise refused(
                "the request is not JSON that can be read: it is nested too deeply", None
            ) from None
        first, replies, n_prompt = await self._answer(recording, asked)
        body = chat_completion(
            replies,
            self.tokenizer,
            reply_id=f"chatcmpl-{uid_text(recording.ids.traj_uid)}-{first}",
            model=self.settings.model,
            n_prompt=n_prompt,
            logprobs=asked.logprobs,
        )
        if not asked.stream:
            return web.json_response(body)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for chunk in chunks(body, include_usage=asked.include_usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _body(self, request: web.Request, recording: Recording) -> bytes:
        """Read what the client sends. Raises RequestError for a body that is too long for the
        model, or too slow.
        """
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = self.settings.max_model_tokens
            size = f"the request has more than {self._max_body_bytes} bytes"
            why = f"{size}; the model takes {limit} tokens, prompt and reply together"
            raise recording.cut(why, status=400, code="context_length_exceeded") from None
        except TimeoutError:
            why = f"the request did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(why, status=408, code="request_timeout", param=None) from None

    async def _answer(
        self, recording: Recording, asked: ChatRequest
    ) -> tuple[int, list[Reply], int]:
        """Generates, cuts and records; returns the number of the first completion, all of them, and
        the prompt's length.
        """
        recording.refuse_beyond(asked.n)
        prompt_ids = await self._prompt_beside(recording, asked)
        recording.refuse_beyond(asked.n)  # others may have been asked for meanwhile
        room = self.settings.max_model_tokens - len(prompt_ids)
        max_tokens = min(asked.max_tokens or room, self.settings.max_response_tokens, room)
        numbers = [next(recording.numbers) for _ in range(asked.n)]
        started_us, started = now_us(), time.perf_counter()
        recording.n_in_flight += asked.n
        tasks = [
            asyncio.ensure_future(self._complete(recording, prompt_ids, number=number))
            for number in numbers
        ]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            recording.n_in_flight -= asked.n
            for task in tasks:
                task.cancel()
        gen_us = round((time.perf_counter() - started) * 1e6)
        recording.refuse_beyond(0)  # it may have ended meanwhile
        replies = []
        for number, completion in zip(numbers, completions, strict=True):
            reply = cut_reply(completion, self.tokenizer, max_tokens=max_tokens, stop=asked.stop)
            kept = replace(
                completion,
                token_ids=reply.token_ids,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
            )
            recording.recorded[number] = step_of(
                kept,
                number=number,
                prompt=Prompt(token_ids=prompt_ids, actions=None),
                observation=Observation(text=asked.observation, anchor=asked.anchor),
                action=reply.text,
                is_valid=reply.finish_reason == "stop",
                t_start_us=started_us,
                gen_us=gen_us,
            )
            recording.ids.progress.add(recording.recorded[number])
            recording.conversation.record(
                asked.messages,
                reply=reply.text,
                token_ids=prompt_ids + reply.token_ids,
                ended=reply.ended,
            )
            replies.append(reply)
        return numbers[0], replies, len(prompt_ids)

    async def _prompt_beside(self, recording: Recording, asked: ChatRequest) -> tuple[int, ...]:
        """Make a prompt beside the event loop, which has to say that the worker is alive."""
        thread = LONG_PROMPTS if asked.takes_long else SHORT_PROMPTS
        try:
            return await thread.make(
                lambda: self._prompt(recording, asked), tokenizer=self.tokenizer, of=recording.of
            )
        except PromptStuckError as error:
            recording.failure = error
            raise RequestError(str(error), status=500, code="prompt_failed", param=None) from error

    def _prompt(self, recording: Recording, asked: ChatRequest) -> tuple[int, ...]:
        try:
            prompt_ids = recording.conversation.prompt(asked.messages)
        except TemplateError as error:
            raise refused(
                f"the model's chat template does not take these messages: {error}", "messages"
            ) from None
        except PromptTooLong as error:
            limit = self.settings.max_model_tokens
            why = f"the prompt has {error.n_characters} characters; the model takes {limit} tokens, prompt and reply together"
            raise recording.cut(why, status=400, code="context_length_exceeded") from None
        if len(prompt_ids) >= self.settings.max_model_tokens:
            limit = self.settings.max_model_tokens
            why = f"the prompt has {len(prompt_ids)} tokens; the model takes {limit}, prompt and reply together"
            raise recording.cut(why, status=400, code="context_length_exceeded")
        return prompt_ids

    async def _complete(
        self, recording: Recording, prompt_ids: tuple[int, ...], *, number: int
    ) -> Completion:
        rules, prompt = recording.rules, Prompt(token_ids=prompt_ids, actions=None)
        try:
            return await completion_of(
                self.policy, prompt, number=number, episode=recording.ids, rules=rules
            )
        except TimeoutError:
            raise recording.cut(
                f"no reply within actors.turn_timeout_s={rules.turn_timeout_s:g}", status=410
            ) from None
        except Exception as error:  # a process border: whoever plays the episode raises it
            recording.failure = error
            message = f"the policy failed: {type(error).__name__}: {error}"
            raise RequestError(message, status=500, code="policy_failed", param=None) from error


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error in OpenAI's form. None is worth asking again for, which the header tells the
    client.
    """
    try:
        return await handler(request)
    except RequestError as error:
        status, message, code, param = error.status, str(error), error.code, error.param
    except web.HTTPException as error:
        status, code, param = error.status, "not_supported", None
        message = f"{request.method} {request.path}: {error.reason}"
        if status in (404, 405):
            message += "; there are POST /v1/chat/completions and GET /v1/models"
    except Exception as error:  # noqa: BLE001 - a process border: the program is told what it was
        traceback.print_exc()
        status, message, code, param = (
            500,
            f"{type(error).__name__}: {error}",
            "internal_error",
            None,
        )
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})
